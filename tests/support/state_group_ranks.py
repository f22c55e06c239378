"""One rank of test_states_in_groups.py: models with recurrent layers, or whose indexers choose
keys, on the ranks of a group."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from packaging import version
from transformers import CONFIG_MAPPING

import prefixtree as pt
from prefixtree.models.families import forward_inputs
from prefixtree.models.family_table import OLDEST_WITH_INDEXERS
from prefixtree.parallel.attention import PartMask
from prefixtree.parallel.ledger import Divided
from prefixtree.parallel.ranks import arrival, gather_rows
from prefixtree.parallel.states import part_mask
from prefixtree.planning import division
from prefixtree.planning.part_states import KEYS
from prefixtree.planning.parts import Parts
from prefixtree.scoring import in_groups
from tests.support.family_configs import INDEXED
from tests.support.float64 import Float64
from tests.support.full import asked_for, quick_ones_run
from tests.support.hooks import inner, own_gradients_alone, place
from tests.support.hybrid_cases import (
    in_float64,
    logprobs_of,
    long_packed,
    long_sequences,
)
from tests.support.hybrid_configs import HYBRIDS
from tests.support.models import (
    TRANSFORMERS,
    build,
    pack_sequences,
    ragged_objective,
    run_packed,
)
from tests.support.part_exchange import scattered
from tests.support.ties import LowestFirst


@dataclass(frozen=True)
class Case:
    """A model in float64 on a forest of long nodes.

    Attributes:
        family: of `models.build`.
        group_mode: as `sequence_logprobs` takes it.
        owner: a key of OWNERS.
        changes: of the model's configuration.
        is_above: whether ranks compute the tokens above their own again, and divide no heads.
    """

    family: str
    group_mode: str = "parts"
    owner: str = "single tokens"
    changes: tuple[tuple[str, Any], ...] = ()
    is_above: bool = False

    def model(self) -> Any:
        """A prepared one."""
        return pt.prepare(in_float64(self.family, **dict(self.changes)))


# how many tokens and ranks -> who owns each token
OWNERS: dict[str, Callable[[int, int], np.ndarray]] = {
    "runs": lambda T, n: np.arange(T) * n // T,
    "chunks": lambda T, n: np.random.default_rng(0).permutation(16)[np.arange(T) * 16 // T] % n,
    "single tokens": lambda T, n: np.random.default_rng(1).integers(0, n, T),
}
# queries whose best keys tie, in groups of heads or not
_TIES: dict[str, tuple[tuple[str, Any], ...]] = {
    "deepseek_v32": (("index_n_heads", 2),),
    "glm_moe_dsa": (("index_n_heads", 2),),
    "minimax_m3_vl_text": (("index_local_blocks", 4),),
}
WITH_INDEXERS = [
    family
    for family in INDEXED
    if version.parse(OLDEST_WITH_INDEXERS) <= TRANSFORMERS
    # compressed keys are refused
    and family != "deepseek_v4"
]
_ODD = (("linear_num_key_heads", 3), ("linear_num_value_heads", 6))
# on as many ranks
CASES: dict[int, dict[str, Case]] = {
    # every family in a mode, and both modes with all owners
    2: {
        f"{family}, {mode}, {owner}": Case(family, mode, owner)
        for number, family in enumerate(HYBRIDS)
        if family in CONFIG_MAPPING
        for mode, owner in [(("parts", "ulysses")[number % 2], [*OWNERS][number % len(OWNERS)])]
    }
    | {
        f"{family}, {mode}, {owner}": Case(family, mode, owner, _TIES.get(family, ()))
        for number, family in enumerate(WITH_INDEXERS)
        for mode, owner in [(("parts", "single tokens"), ("ulysses", "chunks"))[number % 2]]
    }
    | {
        # heads of every kind that a rank has two turns of
        "nemotron_h in turns": Case(
            "nemotron_h", "ulysses", changes=(("n_groups", 4), ("num_key_value_heads", 4))
        ),
    }
    | {
        f"{family} below others, {owner}": Case(family, owner=owner, is_above=True)
        for family, owner in zip(("qwen3_5", "nemotron_h", "kimi_linear"), OWNERS, strict=True)
    },
    # heads that three ranks divide, and none; a convolution alone has none to divide
    3: {
        "six heads": Case("qwen3_5", changes=_ODD),
        "four heads that three ranks do not divide": Case("qwen3_5", "parts", "runs", (), True),
        "a convolution alone": Case("lfm2", owner="chunks"),
    },
    # heads of keys, and groups, that are fewer than ranks
    4: {
        "two heads of keys": Case("qwen3_5"),
        "two groups": Case("nemotron_h", "ulysses", "chunks"),
    },
}
# of two, those that run every time: each kind of state and of indexer, mode, owner and way
QUICK = (
    *("bailing_hybrid, parts, runs", "kimi_linear, parts, chunks", "lfm3, parts, single tokens"),
    *("qwen3_5, ulysses, single tokens", "nemotron_h in turns", "nemotron_h below others, chunks"),
    *("axk2, parts, single tokens", "deepseek_v32, ulysses, chunks"),
    "minimax_m3_vl_text, ulysses, chunks",
)
# modes in which ranks choose among their own tokens
CHOICES, QUICK_CHOICES = ("parts", "ulysses"), ("parts",)
# in bfloat16, their gates in float32; groups that are several ranks'
HALF: dict[int, tuple[str, ...]] = {2: ("qwen3_5",), 3: (), 4: ("nemotron_h",)}


def weights() -> list[torch.Tensor]:
    """Of the log-probabilities of the long forest's sequences."""
    draw = torch.Generator().manual_seed(0)
    sizes = [len(s) - 1 for s in long_sequences()]
    return [torch.randn(n, dtype=torch.float64, generator=draw) for n in sizes]


def loss_of(logprobs: list[torch.Tensor]) -> torch.Tensor:
    """No sum over tokens of one weight: gradients of equal tokens differ."""
    terms = zip(logprobs, weights(), strict=True)
    return sum((p * w).sum() + p.square().sum() / 10 for p, w in terms)


def exact(case: Case, rank: int, group: Any) -> dict[str, Any]:
    """Log-probabilities of the sequences, and gradients averaged over the ranks."""
    packed, ranks = long_packed(), dist.get_world_size(group)
    most = patch.object(division, "MOST_ABOVE", 1e9 if case.is_above else -1.0)
    with Float64(), LowestFirst(), most:
        model = case.model()
        parts = Parts(packed, OWNERS[case.owner](packed.num_tokens, ranks), ranks)
        part = parts[rank]
        mask = part_mask(
            Divided.of_group(parts, rank, group).at_once(), by_heads=case.group_mode == "ulysses"
        )
        inputs = forward_inputs(packed, model)
        own = torch.from_numpy(part.own_tokens).long()
        for name in ("input_ids", "position_ids"):
            inputs[name] = inputs[name].index_select(-1, own)
        logits = model(**inputs | {"tree_mask": mask}).logits[0]
        edges = packed.edges()
        predictor = edges.predictor.numpy()
        which, at = (torch.from_numpy(x) for x in part.scored(predictor))
        target = packed.input_ids[edges.token[which].long()]
        row, counts = arrival(parts.owner[predictor], ranks)
        found = gather_rows(logprobs_of(logits[at], target)[:, None], counts, rank, group)[:, 0]
        of_tokens = found.new_zeros(packed.num_tokens).index_copy(
            0, edges.token.long(), found[torch.from_numpy(row)]
        )
        logprobs = [part[1:] for part in packed.unpack(of_tokens)]
        loss_of(logprobs).backward()
    return {"logprobs": [p.detach() for p in logprobs], "gradients": _averaged(model)}


def _averaged(model: Any) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        # experts that no token of a rank chose have none there
        grad = parameter.grad
        total = torch.zeros_like(parameter) if grad is None else grad.clone()
        dist.all_reduce(total)
        if grad is not None or total.any():
            found[name] = total / dist.get_world_size()
    return found


def freeze(model: Any) -> Any:
    """All but a layer, and a gate of another whose keys and values then need no gradient."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1." in name or "layers.0.linear_attn.dt_bias" in name)
    return model


def family_run(
    family: str,
    group: Any,
    mode: str,
    dtype: torch.dtype = torch.float32,
    changed: Callable[[Any], Any] = lambda model: model,
) -> dict[str, Any]:
    """Of `sequence_logprobs`, tokens scattered over the ranks."""
    model, objective = changed(build(family).to(dtype)), ragged_objective()
    packed = pack_sequences(objective.sequences)
    with patch.object(in_groups, "split_slots", scattered):
        run = run_packed(model, packed, objective, group=group, group_mode=mode)
    found = {"logprobs": run.logprobs, "entropy": run.entropy}
    return {**found, "gradients": _averaged(model)}


# ---- what goes wrong is seen ---------------------------------------------------------------------


def _not_of_rank_1(self: Any, parameter: Any, *turn: int) -> Any:
    mine = _OF_RANK(self, parameter, *turn)
    return mine if parameter is None or self.index == 0 else mine.detach()


def _first_turn_alone(self: Any, of_turns: Any) -> torch.Tensor:
    return _JOINED(self, [of_turns[0], *(x.detach() for x in of_turns[1:])])


def _first_copy_alone(x: torch.Tensor) -> torch.Tensor:
    return x[:, :, 0]


_OF_RANK = inner("a rank's A, D and dt_bias")
_JOINED = inner("joined heads")
MISTAKES: dict[str, tuple[Any, str, Any, str]] = {
    "gradients of tails": (*own_gradients_alone(lambda kind, _: kind != KEYS), "qwen3_5"),
    "gradients of tokens above": (
        # keys travel with their values
        *own_gradients_alone(lambda kind, count: kind == KEYS and count == 1),
        "kimi_linear",
    ),
    "A, D and dt_bias of a rank": (
        *place("a rank's A, D and dt_bias"),
        _not_of_rank_1,
        "nemotron_h",
    ),
    "heads of the second turn": (*place("joined heads"), _first_turn_alone, "olmo_hybrid"),
}
# where heads of keys or groups are fewer than ranks
WIDE_MISTAKES: dict[str, tuple[Any, str, Any, str]] = {
    "copies": (*place("sum of a state's copies"), _first_copy_alone, "nemotron_h"),
}


def _of_own_tokens_alone(self: PartMask, indexer: Any, own: torch.Tensor) -> torch.Tensor:
    joined = _KEYS(self, indexer, own)
    rows = torch.from_numpy(self.part.own_rows).long()
    return torch.zeros_like(joined).index_copy(0, rows, own)


_KEYS = PartMask.index_keys


def _tried(compute: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    try:
        return compute(*arguments, **options)
    except Exception:
        return traceback.format_exc()


def on_rank(rank: int, folder: Path) -> dict[Any, Any]:
    """Results, or tracebacks."""
    ranks, group = dist.get_world_size(), dist.group.WORLD
    results: dict[Any, Any] = {}
    for name in asked_for(CASES[ranks], QUICK if ranks == 2 else ()):
        results[name] = _tried(exact, CASES[ranks][name], rank, group)
    if ranks == 2 and WITH_INDEXERS:
        with patch.object(PartMask, "index_keys", _of_own_tokens_alone):
            for mode in asked_for(CHOICES, QUICK_CHOICES):
                results["choice", mode] = _tried(family_run, "glm_moe_dsa", group, mode)
    if ranks == 2 and not quick_ones_run():
        return results
    mistakes = MISTAKES if ranks == 2 else WIDE_MISTAKES if ranks == 4 else {}
    for name, (*mistake, family) in mistakes.items():
        most = patch.object(division, "MOST_ABOVE", 1e9 if "above" in name else -1.0)
        with patch.object(*mistake), most:
            results["mistake", name] = _tried(family_run, family, group, "parts")
    for family in HALF[ranks]:
        results["half", family] = _tried(family_run, family, group, "parts", torch.bfloat16)
    if ranks == 2:
        results["frozen"] = _tried(family_run, "qwen3_5", group, "parts", changed=freeze)
    if ranks == 3:
        results["odd"] = _tried(family_run, "qwen3_5", group, "parts")
    return results
