"""One rank of test_dropout.py: LoRA's dropout in a forest that two ranks divide."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

import prefixtree as pt
from tests.models.test_dropout import SEED, shared
from tests.support.models import Run, ragged_objective, ragged_packed, run_packed
from tests.support.spawn import results_of

_WAYS: dict[str, dict[str, Any]] = {
    "parts": {"recompute": "all"},
    "steps": {"max_step_tokens": 40},
    "heads": {"group_mode": "ulysses"},
}


def _run(options: dict[str, Any]) -> Run:
    group = dist.group.WORLD
    run = run_packed(shared(), ragged_packed(), ragged_objective(), group=group, **options)
    for gradient in run.gradients.values():
        dist.all_reduce(gradient)
    averaged = {name: g / dist.get_world_size() for name, g in run.gradients.items()}
    return replace(run, gradients=averaged)


def on_rank(rank: int, folder: Path) -> dict[str, Any]:
    """The runs, and what is said where ranks draw from other seeds."""
    runs = results_of({name: lambda of=of: _run(of) for name, of in _WAYS.items()})
    try:
        pt.sequence_logprobs(shared(seed=SEED + rank), ragged_packed(), group=dist.group.WORLD)
        said = "nothing"
    except ValueError as problem:
        said = str(problem)
    return {"runs": runs, "refused": said}
