"""One rank of the runs of tests/scoring/test_steps_in_groups.py.

On two ranks one group computes a forest in steps; on four, two groups compute forests of different
numbers of steps, below one wrapper. The reference is each forest in one forward, alone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import prefixtree as pt
from prefixtree.planning import division
from prefixtree.planning.part_states import KEYS, STATES
from prefixtree.scoring import in_groups
from tests.support.full import asked_for
from tests.support.hooks import forget_all_but, own_gradients_alone
from tests.support.models import build, counted, enable_checkpointing, pack_sequences, reward_model
from tests.support.part_exchange import scattered
from tests.support.spawn import results_of
from tests.support.step_ranks import (
    FORESTS,
    LIGHT,
    MAX_STEP_TOKENS,
    backward,
    distance,
    gradients_of,
)


@dataclass(frozen=True)
class Case:
    """A model and a wrapper.

    Attributes:
        mode: of the group. scattered: whether tokens of a step go to any rank.
        is_above: whether ranks compute the tokens above their own again.
        lost: changes what must be seen.
    """

    model_type: str = "qwen3"
    wrapper: str = ""
    mode: str = "parts"
    checkpointing: bool = False
    scattered: bool = False
    is_above: bool = False
    lost: Callable[[ExitStack], None] | None = None


def _lose_waiting(kind: int, stack: ExitStack) -> None:
    """Gradients of rows of a kind that wait for their exporter."""
    patches = stack.enter_context(pytest.MonkeyPatch.context())
    forget_all_but(patches, KEYS if kind == STATES else STATES)


def _lose_travelling(stack: ExitStack) -> None:
    """Gradients of keys that other ranks return."""
    stack.enter_context(patch.object(*own_gradients_alone(lambda kind, _: kind == KEYS)))


CASES = {
    "scattered": Case(scattered=True),
    "experts, checkpointing": Case("qwen3_moe", checkpointing=True, scattered=True),
    "delta rule below others": Case("qwen3_5", scattered=True, is_above=True),
    "Mamba-2 below others": Case("nemotron_h", is_above=True),
    "delta rule by heads": Case("qwen3_5", mode="ulysses", scattered=True, checkpointing=True),
}
WIDE_CASES = {
    "ddp": Case(wrapper="ddp"),
    "fsdp2, checkpointing": Case(wrapper="fsdp2", checkpointing=True, scattered=True),
    "fsdp2, recurrent, heads": Case("qwen3_5", wrapper="fsdp2", mode="ulysses"),
    "fsdp1": Case(wrapper="fsdp1", scattered=True),
    # two ranks for each kv head
    "heads": Case("llama", mode="ulysses", wrapper="ddp"),
}
# more kinds of layers are in the matrix
QUICK = ("scattered", "delta rule below others")
WIDE_QUICK = ("fsdp2, checkpointing", "heads")
MISTAKES = {
    "keys that wait": Case(lost=partial(_lose_waiting, KEYS)),
    "keys that travel": Case(lost=_lose_travelling),
    "states that wait": Case("qwen3_5", lost=partial(_lose_waiting, STATES)),
}


def _wrapped(model: nn.Module, wrapper: str) -> nn.Module:
    if wrapper == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if wrapper == "fsdp1":
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    if wrapper == "fsdp2":
        for layer in model.get_decoder().layers:
            fully_shard(layer)
        fully_shard(model)
    return model


def _average(gradients: dict[str, torch.Tensor]) -> None:
    """As wrappers do, over all ranks."""
    for gradient in gradients.values():
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()


def run(case: Case, rank: int, group: Any) -> dict[str, Any]:
    """How far the rank's scores and all gradients are off; how often it ran the model."""
    num_groups = dist.get_world_size() // dist.get_world_size(group)
    mine = rank // dist.get_world_size(group)
    alone = build(case.model_type)
    references = [backward(alone, FORESTS[place][0]) for place in range(num_groups)]
    expected = {name: g / num_groups for name, g in gradients_of(alone).items()}
    model = build(case.model_type)
    if case.checkpointing:
        enable_checkpointing(model, use_reentrant=False)
    model = _wrapped(model, case.wrapper)
    with ExitStack() as stack:
        if case.scattered:
            stack.enter_context(patch.object(in_groups, "split_slots", scattered))
        if case.is_above:
            stack.enter_context(patch.object(division, "MOST_ABOVE", 1e9))
        if case.lost is not None:
            case.lost(stack)
        forwards = stack.enter_context(counted([model]))
        where = {"group": group, "group_mode": case.mode, "max_step_tokens": MAX_STEP_TOKENS}
        logprobs = backward(model, FORESTS[mine][0], import_cost=LIGHT, **where)
        count = forwards()
    got = gradients_of(model)
    if not case.wrapper:
        _average(got)
    return {
        "logprobs": float((logprobs - references[mine]).abs().max()),
        "gradients": distance(got, expected),
        "forwards": count,
    }


def values(rank: int, group: Any) -> dict[str, float]:
    """The same of a reward model's values."""

    def of(**options: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model = reward_model("gemma2")
        packed = pack_sequences(FORESTS[0][0].sequences)
        found = torch.cat(pt.sequence_values(model, packed, **options))
        (found * torch.linspace(-1, 1, found.numel()).view_as(found)).sum().backward()
        return found.detach(), gradients_of(model)

    expected, whole = of()
    found, got = of(group=group, max_step_tokens=MAX_STEP_TOKENS, import_cost=LIGHT)
    _average(got)
    return {"logprobs": float((found - expected).abs().max()), "gradients": distance(got, whole)}


def told(rank: int, group: Any, **options: Any) -> str:
    """The error of a call that may differ by rank."""
    packed = pack_sequences(FORESTS[0][0].sequences)
    try:
        pt.sequence_logprobs(build("qwen3"), packed, group=group, **options)
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    return "scores"


def on_rank(rank: int, folder: Path) -> dict[str, Any]:
    """Results, or tracebacks."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "cp"))
    group = mesh["cp"].get_group()
    every = CASES if ranks == 2 else WIDE_CASES
    cases = {name: every[name] for name in asked_for(every, (*QUICK, *WIDE_QUICK))}
    cases |= MISTAKES if ranks == 2 else {}
    runs: dict[str, Callable[[], Any]] = {
        name: partial(run, case, rank, group) for name, case in cases.items()
    }
    if ranks == 2:
        steps = {"max_step_tokens": MAX_STEP_TOKENS, "import_cost": LIGHT}
        heavy = replace(LIGHT, token_bytes=1e4)
        runs |= {
            "values": partial(values, rank, group),
            "other steps": partial(told, rank, group, **steps | {"max_step_tokens": 20 + rank}),
            "too small": partial(told, rank, group, max_step_tokens=2, import_cost=heavy),
            "auto": partial(told, rank, group, **steps, recompute="auto"),
            "fits": partial(told, rank, group, max_step_tokens=1000),
        }
    return results_of(runs)
