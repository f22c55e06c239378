"""One rank of the cases of groups in test_ways.py."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.scoring.ways import GROUPS, cases, label, quick_cases, refused_cases
from tests.scoring.ways_runs import Found, run
from tests.support.full import asked_for, quick_ones_run


def on_rank(rank: int, folder: Path) -> dict[str, Any]:
    """What this rank finds, gradients averaged over ranks; the traceback where a case raises."""
    found: dict[str, Any] = {}
    refused = [case for case, _ in refused_cases()] if quick_ones_run() else []
    for case in (*asked_for(cases(), quick_cases()), *refused):
        if case["way"] not in GROUPS:
            continue
        try:
            found[label(case)] = _averaged(run(case, dist.group.WORLD))
        except Exception:
            found[label(case)] = traceback.format_exc()
    return found


def _averaged(found: Found) -> Found:
    """Gradients as DDP gives them; a parameter that one rank alone uses has zeros on the other."""
    shapes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shapes, {name: g.shape for name, g in found.gradients.items()})
    total = {}
    for name, shape in {n: s for of in shapes for n, s in of.items()}.items():
        gradient = found.gradients.get(name, torch.zeros(shape, dtype=torch.float64))
        dist.all_reduce(gradient)
        total[name] = gradient / dist.get_world_size()
    return Found(found.rows, total, found.balance)
