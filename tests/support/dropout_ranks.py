"""A model that shares dropout, and one rank of test_dropout.py: two divide a forest, or shard the
model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import prefixtree as pt
from tests.support.distributed_ranks import whole
from tests.support.models import (
    Run,
    build,
    ragged_objective,
    ragged_packed,
    run_packed,
    with_random_lora,
)
from tests.support.spawn import results_of

SEED = 7
TARGETS = ("q_proj", "o_proj", "down_proj")


def shared(implementation: str = "prefixtree", seed: int = SEED, **options: Any) -> Any:
    """A tiny model whose adapters drop 3 of 10 features."""
    options = {"lora_dropout": 0.3, **options}
    model = with_random_lora(build("qwen3", implementation), *TARGETS, **options).train()
    return pt.share_dropout(model, seed)


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
