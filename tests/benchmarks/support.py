"""Shared by tests of the benchmarks: small options and rollouts, a case by its name, a wrong
attention."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from prefixtree import TreeMask, tree_attention

ROOT = Path(__file__).parents[2]
TINY = ["--device", "cpu", "--scale", "0.02", "--repeats", "1"]
TINY_ATTENTION = "--device cpu --scale 0.002 --heads 4 2 --head-dim 32 --repeats 1 --warm-ups 0"
SMALL_ATTENTION = [*TINY_ATTENTION.split(), "--backend", "sdpa", "--scale", "0.01"]


def case_named(name: str) -> ModuleType:
    """A benchmark by its name."""
    return importlib.import_module(f"benchmarks.cases.{name}")


def agent_rollouts(folder: Path) -> Path:
    """Four rollouts of a task, in two turns each, as the airline cases read them."""
    rows = []
    for turn in range(1, 5):
        ids = [*range(2000), *range(10_000 * turn, 10_000 * turn + 1000)]
        mask = [0] * 2000 + [1] * 1000
        rows.append({"group": "a", "token_ids": ids, "loss_mask": mask, "turn_ends": [2500, 3000]})
    out = folder / "rollouts.jsonl"
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return out


def causal(q: Any, k: Any, v: Any, mask: TreeMask, **options: Any) -> Any:
    """Attention that sees every earlier token: what packing without a tree mask computes."""
    # of the host's mask: a trace has no numbers on a device
    if len(np.unique(mask.host.subtree_end)) > 1:
        mask = TreeMask(np.full(mask.num_tokens, mask.num_tokens))
    return tree_attention(q, k, v, mask, **options)
