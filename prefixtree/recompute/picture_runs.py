"""The vision tower of one forward, which runs its pictures as layers are recomputed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from prefixtree.models.layers import most_of_all_ranks
from prefixtree.models.tower import TowerRuns
from prefixtree.recompute.layers import (
    Mode,
    checkpoint_of_tower,
    checkpoints_itself,
    keeping_in_tower,
)
from prefixtree.recompute.picture_work import RUN
from prefixtree.recompute.plan import RecomputePlan

if TYPE_CHECKING:
    from prefixtree.models.vision import EncodedPictures


@contextmanager
def entered(*contexts: AbstractContextManager[None]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def with_pictures(
    context: AbstractContextManager[None],
    model: nn.Module,
    shown: EncodedPictures | None,
    recompute: Mode | RecomputePlan | None,
) -> AbstractContextManager[None]:
    """A context, in which the tower runs as layers are recomputed too.

    Args:
        recompute: None where the layers are as the model is set.
    """
    if shown is None:
        return context
    patches: int | None = RUN
    mode: Mode = "all"
    kept = 0
    if isinstance(recompute, RecomputePlan):
        patches, kept = recompute.patches, recompute.kept or 0
    elif recompute is not None:
        mode = recompute
    elif not checkpoints_itself(shown.tower):
        mode = "nothing"
    around = None
    if torch.is_grad_enabled():
        around = checkpoint_of_tower(shown.tower, mode)
        if around is None:
            patches = None
    least = [shown.placed.least_runs, 0]
    if least[0]:
        # ranks agreed on runs that are computed again
        kept = 0
    elif any(isinstance(module, FSDPModule) for module in model.modules()):
        # every run gathers the tower's parameters, those that are computed again do so twice; other
        # ranks may have no graph, and so runs
        runs = [0, 1] if patches is None else shown.num_runs(patches, kept)
        least = most_of_all_ranks(model, runs, shown.placed.packed.device)
        if patches is None:
            kept = sys.maxsize
    if patches is None and sum(least) > 1:
        patches = sys.maxsize
    keeping = None if around is None else keeping_in_tower(shown.tower)
    tower_runs = TowerRuns(patches, around, least[0], kept, keeping, least[1])
    return entered(context, shown.encoded(tower_runs))
