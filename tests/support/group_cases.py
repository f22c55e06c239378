"""Models and forests that the ranks of a group compute together, and how they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import prefixtree as pt
from prefixtree.recompute.layers import MODES
from prefixtree.recompute.plan import RecomputePlan
from tests.support import distributed_ranks
from tests.support.models import (
    Objective,
    build,
    enable_checkpointing,
    make_objective,
    ragged_sequences,
)
from tests.support.replay import drawn_routes


@dataclass(frozen=True)
class Case:
    """A model, and how it is run.

    Attributes:
        family: of `models.build`.
        wrapper: "ddp", "fsdp1", "fsdp2", or "" where gradients are averaged by hand.
        checkpointing: "not reentrant" for checkpointing of every layer.
        recompute: as `sequence_logprobs` takes it.
        lora, double, half: adapters, float64 parameters, FSDP2's mixed precision with bfloat16
            parameters.
        compiled: the backend of compiled layers, or "" where they are not compiled. One case
            with attention alone and one with states make graphs of the backward too, which takes
            seconds.
        forest: a key of FORESTS.
        group_mode: as `sequence_logprobs` takes it.
        measured: whether three quarters of each score come from a measure.
        balance: the coefficient of the load-balancing loss.
        replays: whether experts are recorded, `drawn_routes`.
        scattered: each token belongs to any rank, so that ranks import from one another.
        changes: of the model's configuration, dictionaries as pairs.
    """

    family: str = "qwen3"
    wrapper: str = ""
    checkpointing: str = ""
    recompute: str | RecomputePlan | None = None
    lora: bool = False
    double: bool = False
    half: bool = False
    compiled: str = ""
    forest: str = "ragged"
    group_mode: str = "parts"
    scattered: bool = False
    measured: bool = False
    balance: float = 0.0
    replays: bool = False
    changes: tuple[tuple[str, Any], ...] = ()

    def model(self) -> Any:
        """The model before it is wrapped."""
        changes = {n: dict(v) if isinstance(v, tuple) else v for n, v in self.changes}
        model = build(self.family, **changes)
        if self.lora:
            model = distributed_ranks.Case("", self.family, lora=True).model()
        if self.checkpointing:
            enable_checkpointing(model, False)
        return model.double() if self.double else model


TEMPERATURES = [(1.0, 0.7)[i % 2] for i in range(len(ragged_sequences()))]
# on two ranks
CASES: dict[str, Case] = {
    "windows, softcap, checkpointing": Case("gemma2", "ddp", "not reentrant"),
    "experts, their loss, routes": Case(
        "qwen3_moe", "ddp", recompute="all", scattered=True, balance=300.0, replays=True
    ),
    "scattered, heads": Case("gpt_oss", group_mode="ulysses", scattered=True),
    "FSDP2, a plan": Case("gemma2", "fsdp2", recompute=RecomputePlan(MODES, 0), measured=True),
    "FSDP1, checkpointing": Case("gpt_oss", "fsdp1", "not reentrant"),
    "shared keys": Case("gemma3n_text", "", "not reentrant"),
    "compiled layers": Case("gemma2", compiled="aot_eager", recompute="all"),
    "one scores nothing": Case(wrapper="ddp", forest="one scores nothing", measured=True),
    "one token": Case(wrapper="fsdp2", forest="one token", measured=True),
    # as all heads that a rank can halve, in two turns
    "heads, sinks, FSDP2": Case(
        "gpt_oss",
        "fsdp2",
        recompute="all",
        group_mode="ulysses",
        measured=True,
        changes=(("num_key_value_heads", 4),),
    ),
    # the largest position of a rank's tokens is not that of the forest
    "dynamic RoPE": Case(
        changes=(
            ("rope_parameters", (("rope_type", "dynamic"), ("factor", 2.0), ("rope_theta", 1e4))),
            ("max_position_embeddings", 41),
        ),
    ),
    "heads, one token": Case(forest="one token", group_mode="ulysses"),
    "trees apart": Case(forest="trees apart"),
    "states, DDP, checkpointing": Case("olmo_hybrid", "ddp", "not reentrant"),
    "states, FSDP2, heads": Case(
        "nemotron_h", "fsdp2", recompute="all_but_attention", group_mode="ulysses"
    ),
    "states, scattered, a plan": Case(
        "qwen3_5", recompute=RecomputePlan((*MODES, "all"), 0), scattered=True
    ),
    "states, adapters, FSDP2": Case("olmo_hybrid", "fsdp2", lora=True, recompute="all"),
    "states, compiled layers": Case("qwen3_next", compiled="aot_eager", recompute="all"),
    "states, one token": Case("qwen3_next", "fsdp2", forest="one token"),
    # each rank computes tokens above its own again, for all heads
    "states, odd heads": Case(
        "qwen3_5", changes=(("linear_num_key_heads", 3), ("linear_num_value_heads", 3))
    ),
}
# that run every time: each wrapper, forest and way to recompute once, nothing
# compiled, which the matrix has
QUICK = {
    *("windows, softcap, checkpointing", "experts, their loss, routes", "scattered, heads"),
    *("FSDP1, checkpointing", "shared keys", "one scores nothing", "one token"),
    *("heads, sinks, FSDP2", "dynamic RoPE", "trees apart", "states, FSDP2, heads"),
    *("states, scattered, a plan", "states, odd heads"),
}
BALANCED = Case("qwen3_moe", balance=300.0)
HALF = Case("gemma2", "fsdp2", "not reentrant", half=True)
# on four: one group, and two groups with forests of their own
WIDE_CASES: dict[str, Case] = {
    "float64": Case(double=True, recompute="all"),
    "more ranks than tokens": Case(wrapper="ddp", forest="one token"),
    # two kv heads: each is two ranks'
    "heads, float64": Case(double=True, recompute="all", group_mode="ulysses"),
    "heads, groups, FSDP2, experts": Case(
        "qwen3_moe", "fsdp2", "not reentrant", forest="groups", group_mode="ulysses", balance=300.0
    ),
    "groups, FSDP2": Case("gpt_oss", "fsdp2", "not reentrant", forest="groups", measured=True),
    "groups, DDP": Case("gemma2", "ddp", recompute="all", forest="groups"),
    # two groups of heads: each is two ranks'
    "states, heads, DDP": Case(
        "nemotron_h", "ddp", recompute="all", group_mode="ulysses", scattered=True
    ),
}
WIDE_QUICK = {
    *("more ranks than tokens", "heads, float64", "heads, groups, FSDP2, experts"),
    "states, heads, DDP",
}


def _ragged(seed: int) -> Objective:
    return make_objective(ragged_sequences(seed), seed)


def _masked(objective: Objective, first: int) -> Objective:
    """Nothing is scored after the first tokens of each sequence."""
    masks = [np.arange(len(s)) < first for s in objective.sequences]
    return replace(objective, loss_masks=masks)


def _apart() -> Objective:
    rng = np.random.default_rng(5)
    return make_objective([rng.integers(3, 90, 16) for _ in range(2)], plain=True)


# of the ranks with the same place along data parallelism
FORESTS: dict[str, Callable[[int], Objective]] = {
    "ragged": lambda place: _ragged(0),
    "groups": lambda place: _ragged(place + 1),
    # one rank has all of these
    "one scores nothing": lambda place: _masked(_ragged(0), 3),
    "one token": lambda place: make_objective([np.array([7])], plain=True),
    "trees apart": lambda place: _apart(),
}


def objective_of(case: Case, place: int = 0) -> Objective:
    """The objective of a group."""
    objective = FORESTS[case.forest](place)
    if case.double:
        objective = replace(objective, weights=[w.double() for w in objective.weights])
    return replace(objective, balance=case.balance)


def packed_of(case: Case, objective: Objective) -> pt.PackedForest:
    """The packed forest of a group."""
    routes = drawn_routes(objective.sequences) if case.replays else None
    return pt.pack(pt.PrefixForest.from_sequences(objective.sequences, routes=routes))


def num_groups(case: Case) -> int:
    """Groups with forests of their own."""
    return 2 if case.forest == "groups" else 1
