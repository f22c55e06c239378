"""One rank of tests/scoring/test_dummies.py, and the ways of running that its tests go through.

Rank 0 has all the work and rank 1 a dummy, so the mean over both is half of rank 0's gradient, by
the bit.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import prefixtree as pt
from prefixtree.models.layers import groups_of
from prefixtree.models.rows_alone import is_sharded
from tests.support.full import asked_for
from tests.support.models import build, ragged_sequences, reward_model
from tests.support.step_ranks import LIGHT

_SEQUENCES = [s.tolist() for s in ragged_sequences()[:6]]


def plan_of(ranks: int, trunks: bool = False) -> Any:
    """All sequences are of rank 0, in several micro-batches; the steps of other ranks are empty."""
    options: dict[str, Any] = {"trunks": True, "import_cost": LIGHT} if trunks else {}
    return pt.plan_micro_batches(_SEQUENCES, 48, ranks, ["a"] * len(_SEQUENCES), **options)


def mixture() -> nn.Module:
    """A mixture of experts."""
    model: nn.Module = build("qwen3_moe")
    return model


def critic() -> nn.Module:
    """A model of values."""
    model: nn.Module = reward_model("qwen3")
    return model


def loss_of(scores: Any, packed: pt.PackedForest) -> torch.Tensor:
    """All that scores have, and a z loss as docs/experts.md writes it."""
    terms = [*scores.logprobs, *scores.entropy, *(3 * m for m in scores.measured)]
    loss: torch.Tensor = sum((x.exp().sum() for x in terms), torch.zeros(()))
    if scores.aux_loss is None:
        return loss
    copies = packed.multiplicity / packed.multiplicity.sum().clamp(min=1)
    z_loss = sum((copies * x.logsumexp(-1) ** 2).sum() for x in scores.router_logits)
    return loss + 5 * scores.aux_loss + 7 * z_loss


def measure(logits: torch.Tensor, edges: Any) -> torch.Tensor:
    """One that has a gradient."""
    return logits.logsumexp(-1, keepdim=True)


_SCORED: dict[str, Any] = {
    "return_entropy": True,
    "return_statistics": ("mean_logits",),
    "measure": measure,
}


def _scored(model: nn.Module, batches: Sequence[Any], **options: Any) -> None:
    for batch in batches:
        scores = pt.sequence_logprobs(
            model, batch.packed, **_SCORED, output_router_logits=True, **options
        )
        loss_of(scores, batch.packed).backward()


def _padded(model: nn.Module, batches: Sequence[Any], **options: Any) -> None:
    for batch in batches:
        rows = [torch.tensor(s) for s in batch.take(_SEQUENCES)]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
        mask = (ids >= 0) & (not batch.is_empty)
        options |= {"attention_mask": mask, "output_router_logits": True}
        scores = pt.batch_logprobs(model, ids.clamp(min=0), **options, **_SCORED)
        loss_of(scores, scores.packed).backward()


def _valued(model: nn.Module, batches: Sequence[Any], **options: Any) -> None:
    for batch in batches:
        values = pt.sequence_values(model, batch.packed, **options)
        torch.stack([((v - 1) ** 2).sum() for v in values]).sum().backward()


def _kept(model: nn.Module, batches: Sequence[Any]) -> None:
    with pt.kept_trunks(model, batches, **_SCORED) as scored:
        for batch, scores in scored:
            loss_of(scores, batch.packed).backward()


def _kept_values(model: nn.Module, batches: Sequence[Any]) -> None:
    with pt.kept_values(model, batches) as scored:
        for _, values in scored:
            torch.stack([((v - 1) ** 2).sum() for v in values]).sum().backward()


#: name -> (makes the model, runs micro-batches forward and backward, whether their plan has trunks)
WAYS: dict[str, tuple[Callable[[], nn.Module], Callable[..., None], bool]] = {
    "one forward": (mixture, _scored, False),
    "recomputed": (mixture, lambda *of: _scored(*of, recompute="all"), False),
    "steps": (mixture, lambda *of: _scored(*of, max_step_tokens=20, import_cost=LIGHT), False),
    "batch_logprobs": (mixture, _padded, False),
    "sequence_values": (critic, _valued, False),
    "values in steps": (
        critic,
        lambda *of: _valued(*of, max_step_tokens=20, import_cost=LIGHT),
        False,
    ),
    "kept_trunks": (mixture, _kept, True),
    "kept_values": (critic, _kept_values, True),
}
#: the way of each wrapper: every way once, and one forward of both
OF_WRAPPERS = [
    *(("one forward", "ddp"), ("one forward", "fsdp2")),
    *(("recomputed", "fsdp2"), ("steps", "fsdp2"), ("batch_logprobs", "ddp")),
    *(("sequence_values", "fsdp2"), ("values in steps", "ddp")),
    *(("kept_trunks", "fsdp2"), ("kept_values", "ddp")),
]
#: name -> the same, where both ranks compute each micro-batch together
IN_GROUPS: dict[str, tuple[Callable[[], nn.Module], Callable[..., None]]] = {
    "group": (mixture, lambda *of: _scored(*of, group=dist.group.WORLD)),
    "group, heads": (
        mixture,
        lambda *of: _scored(*of, group=dist.group.WORLD, group_mode="ulysses"),
    ),
    "group, batch_logprobs": (mixture, lambda *of: _padded(*of, group=dist.group.WORLD)),
    "group, values": (critic, lambda *of: _valued(*of, group=dist.group.WORLD)),
}


#: what a rank runs
CASES = [*(f"{way}, {wrapper}" for way, wrapper in OF_WRAPPERS), *IN_GROUPS, "between forwards"]
QUICK = ("one forward, ddp", "steps, fsdp2", "kept_trunks, fsdp2", "group", "between forwards")


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Those of all parameters that have one."""
    found = {n.removeprefix("module."): p.grad for n, p in model.named_parameters()}
    return {
        name: grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()
        for name, grad in found.items()
        if grad is not None
    }


def differing(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """The parameters whose gradients are not the same numbers."""
    names = got.keys() | expected.keys()
    return sorted(
        n for n in names if n not in got or n not in expected or not got[n].equal(expected[n])
    )


def _beside_a_dummy(way: str, wrapper: str, rank: int) -> list[str]:
    make, run, trunks = WAYS[way]
    plan = plan_of(2, trunks)
    assert all(batch.is_empty for batch in plan[1]) and len(plan[1]) > 1
    # DDP averages the sum of several again, which rounds; trunks synchronise once
    of_ranks = plan if trunks or wrapper == "fsdp2" else [batches[:1] for batches in plan]
    alone = make()
    run(alone, of_ranks[0])
    expected = {name: grad / 2 for name, grad in gradients(alone).items()}
    model = make()
    if wrapper == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    # DDP builds its buckets anew after the first update
    for _ in range(2 if wrapper == "ddp" else 1):
        model.zero_grad(set_to_none=True)
        run(model, of_ranks[rank])
    return differing(gradients(model), expected)


def _between_forwards() -> list[str]:
    """What loses sight of ranks once a forward has left parameters whole."""
    model = mixture()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    with torch.no_grad():
        pt.sequence_logprobs(model, plan_of(2)[0][0].packed)
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    seen = {"is_sharded": is_sharded(model), "groups_of": bool(groups_of(model))}
    return [name for name, sees in seen.items() if not sees]


def _together(way: str) -> list[str]:
    make, run = IN_GROUPS[way]
    real, empty = plan_of(2)
    model = make()
    run(model, real[:1])
    expected = gradients(model)
    run(model, empty[:1])
    return differing(gradients(model), expected)


def on_rank(rank: int, folder: Path) -> dict[str, Any]:
    """What differs, by way of running."""
    runs: dict[str, Callable[[], Any]] = {
        f"{way}, {wrapper}": lambda way=way, wrapper=wrapper: _beside_a_dummy(way, wrapper, rank)
        for way, wrapper in OF_WRAPPERS
    }
    runs |= {way: lambda way=way: _together(way) for way in IN_GROUPS}
    runs["between forwards"] = _between_forwards
    results: dict[str, Any] = {}
    assert [*runs] == CASES
    for name in asked_for(CASES, QUICK):
        try:
            results[name] = runs[name]()
        except Exception:
            results[name] = traceback.format_exc()
    return results
