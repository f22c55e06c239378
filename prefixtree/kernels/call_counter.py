"""Counts the calls of `tree_attention` and of recurrent operators over one mask, compiled ones
included.

A model that runs something else in some of its layers ignores the mask there without an error; the
number of calls is the one thing that shows it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from prefixtree.packing.host_mask import HostMask

Kind = Literal["attention", "recurrence"]


class _Watch(threading.local):
    mask: HostMask | None = None

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()


# a forward runs in one thread, and other threads may run other models meanwhile
_watch = _Watch()


@contextmanager
def counted_calls(mask: HostMask) -> Iterator[Callable[[], tuple[int, int]]]:
    """Gives a function that returns the number of forward calls over `mask` so far, in the thread
    that entered: of `tree_attention`, and of recurrent operators."""
    before = _watch.mask, _watch.calls
    try:
        _watch.mask, _watch.calls = mask, Counter()
        yield lambda: (_watch.calls["attention"], _watch.calls["recurrence"])
    finally:
        _watch.mask, _watch.calls = before


@contextmanager
def as_one_call(mask: HostMask, of: Kind) -> Iterator[None]:
    """Calls within count once, over `mask`: those of groups of heads, or of kinds of keys."""
    before = _watch.mask
    try:
        _watch.mask = None
        yield
    finally:
        _watch.mask = before
    note_call(mask, of)


def note_call(mask: HostMask, of: Kind) -> None:
    """Called by an operator where it computes, once per forward call. A mask with borders of
    states counts as the mask itself."""
    if _watch.mask is (mask.without_states or mask):
        _watch.calls[of] += 1
