"""Counts the calls of `tree_attention` and of recurrent operators over one mask, compiled ones
included.

A model that runs something else in some of its layers ignores the mask there without an error; the
number of calls is the one thing that shows it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prefixtree.packing.host_mask import HostMask


class _Watch(threading.local):
    mask: HostMask | None = None
    calls: int = 0
    recurrent: int = 0


# a forward runs in one thread, and other threads may run other models meanwhile
_watch = _Watch()


@contextmanager
def counted_calls(mask: HostMask) -> Iterator[Callable[[], tuple[int, int]]]:
    """Gives a function that returns the number of forward calls over `mask` so far, in the thread
    that entered: of `tree_attention`, and of recurrent operators."""
    before = _watch.mask, _watch.calls, _watch.recurrent
    try:
        _watch.mask, _watch.calls, _watch.recurrent = mask, 0, 0
        yield lambda: (_watch.calls, _watch.recurrent)
    finally:
        _watch.mask, _watch.calls, _watch.recurrent = before


def note_call(mask: HostMask) -> None:
    """Called by `tree_attention` where it computes, once per forward call."""
    if _watch.mask is mask:
        _watch.calls += 1


def note_recurrence(mask: HostMask) -> None:
    """Called by recurrent operators likewise."""
    if _watch.mask is mask:
        _watch.recurrent += 1
