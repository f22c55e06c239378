"""Trunks that micro-batches share: whether a model keeps them, the bytes of their tokens, and one
vote of all ranks whether to keep them or to cut trees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from prefixtree.errors import ForestError, UnsupportedError
from prefixtree.forest import PrefixForest
from prefixtree.planning.costs import ImportCost
from prefixtree.planning.trunks import Trunks, plan_trunks
from prefixtree.recompute.choose import Recompute
from prefixtree.scoring.in_steps import import_cost
from prefixtree.scoring.kept_runs import check_kept

#: The sum of each number over all ranks that decide together.
Total = Callable[[list[int]], list[int]]


def is_kept(model: nn.Module) -> bool:
    """Whether kept trunks serve a model: a matter of settings, the same on all ranks."""
    try:
        check_kept(model)
    except UnsupportedError:
        return False
    return True


def token_cost(model: nn.Module, recompute: Recompute) -> ImportCost | None:
    """The bytes of a token of a model that trains; None where they cannot be read off."""
    try:
        # gradients count also where a trainer scores without them
        with torch.enable_grad():
            return import_cost(model, recompute)
    except UnsupportedError:
        return None


def planned(
    forest: PrefixForest,
    max_tokens: int,
    cost: ImportCost,
    micro_batches: Sequence[np.ndarray] | None = None,
) -> Trunks | None:
    """Plans trunks with `plan_trunks`; None where they do not fit."""
    try:
        return plan_trunks(forest, max_tokens, cost, micro_batches)
    except ForestError:
        return None


def all_keep(is_planned: bool, saved: int | None, total: Total) -> bool:
    """Whether every rank has a plan, and all together compute fewer tokens than with cut trees.

    Args:
        saved: the number of tokens that this rank saves. None, on all ranks: no trees can be cut.
    """
    failed, sum_saved = total([not is_planned, saved or 0])
    return not failed and (saved is None or sum_saved > 0)
