"""One rank of test_dropout.py: LoRA's dropout in a forest that two ranks divide, and sharded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import prefixtree as pt
from tests.models.test_dropout import SEED, shared
from tests.support.distributed_ranks import whole
from tests.support.models import Run, ragged_objective, ragged_packed, run_packed
from tests.support.spawn import results_of

_WAYS: dict[str, dict[str, Any]] = {
    "parts": {"recompute": "all"},
    "steps": {"max_step_tokens": 40},
    "heads": {"group_mode": "ulysses"},
}


def _in_group(options: dict[str, Any]) -> Run:
    group = dist.group.WORLD
    run = run_packed(shared(), ragged_packed(), ragged_objective(), group=group, **options)
    for gradient in run.gradients.values():
        dist.all_reduce(gradient)
    return replace(run, gradients={name: g / 2 for name, g in run.gradients.items()})


def _sharded() -> Run:
    model, mesh = shared(), init_device_mesh("cpu", (2,))
    for layer in model.get_base_model().get_decoder().layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    pt.share_dropout(model, SEED)
    run = run_packed(model, ragged_packed(), ragged_objective(), recompute="all")
    return replace(run, gradients={name: whole(g) for name, g in run.gradients.items()})


def on_rank(rank: int, folder: Path) -> dict[str, Any]:
    """The runs, and what is said where ranks draw from other seeds."""
    runs = results_of(
        {name: lambda of=of: _in_group(of) for name, of in _WAYS.items()} | {"FSDP2": _sharded}
    )
    try:
        pt.sequence_logprobs(shared(seed=SEED + rank), ragged_packed(), group=dist.group.WORLD)
        said = "nothing"
    except ValueError as problem:
        said = str(problem)
    return {"runs": runs, "refused": said}
