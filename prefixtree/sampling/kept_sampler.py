"""`sampler_of`: one sampler for all calls of an owner, whose captured steps serve the next ones."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn

from prefixtree.recompute.choose import available_bytes
from prefixtree.sampling.forest_cache import roomy
from prefixtree.sampling.sampler import TreeSampler

# of the free memory
_MOST = 1 / 16


class _Kept(NamedTuple):
    sampler: TreeSampler
    model: nn.Module
    max_keys: int
    max_rows: int


_kept: weakref.WeakKeyDictionary[Any, _Kept] = weakref.WeakKeyDictionary()


@contextmanager
def sampler_of(owner: Any, model: nn.Module, max_keys: int, max_rows: int) -> Iterator[TreeSampler]:
    """The sampler of the owner's last call, if it has so much room; else a new one.

    To capture a step takes as long as a dozen of its replays, and a step is captured for every
    number of rows. The sampler stays if its keys take less than a sixteenth of the free memory.

    Args:
        owner: what the sampler lives as long as. None keeps none.
    """
    # nobody else has it meanwhile
    kept = None if owner is None else _kept.pop(owner, None)
    if not kept or kept.model is not model or max_keys > kept.max_keys or max_rows > kept.max_rows:
        # the old keys are free before there are new ones, which have room for longer prompts
        kept, max_keys = None, roomy(max_keys)
        kept = _Kept(TreeSampler(model, max_keys, max_rows), model, max_keys, max_rows)
    yield kept.sampler
    device = next(model.parameters()).device
    if owner is not None and kept.sampler.num_bytes < _MOST * available_bytes(device):
        _kept[owner] = kept
