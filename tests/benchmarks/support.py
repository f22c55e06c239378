"""Shared by tests of the benchmarks: small options, a case by its name, a wrong attention."""

from __future__ import annotations

import importlib
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


def causal(q: Any, k: Any, v: Any, mask: TreeMask, **options: Any) -> Any:
    """Attention that sees every earlier token: what packing without a tree mask computes."""
    # of the host's mask: a trace has no numbers on a device
    if len(np.unique(mask.host.subtree_end)) > 1:
        mask = TreeMask(np.full(mask.num_tokens, mask.num_tokens))
    return tree_attention(q, k, v, mask, **options)
