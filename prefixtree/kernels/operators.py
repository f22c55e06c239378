"""Common to the registered torch operators: registration, autocast, counted calls and first calls.

They are registered by hand: `torch.library.custom_op` does more in every call than all here. A
model that runs something else in some layers ignores the mask there without an error, and only the
number of calls shows it. The first call of a kind (backend, direction, dtypes and heads) may
compile: a line says what is waited for, and its time is noted.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch

from prefixtree.packing.host_mask import HostMask

_NAMESPACE: Any = torch.ops.prefixtree
_NOTHING = contextlib.nullcontext()

# keeps Dynamo out of a function; the public name loads Dynamo at once, which takes seconds
uncompiled: Any = getattr(torch, "_disable_dynamo", torch.compiler.disable)


def new_library(name: str) -> torch.library.Library:
    """Makes a library of the namespace "prefixtree", and destroys an earlier one of this name."""
    # torch takes no operator twice, so it is kept where importlib.reload finds it
    if (earlier := getattr(_NAMESPACE, name, None)) is not None:
        earlier._destroy()
    library = torch.library.Library("prefixtree", "FRAGMENT")
    setattr(_NAMESPACE, name, library)
    return library


def register(
    library: torch.library.Library,
    name: str,
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
) -> Callable[..., Any]:
    """Registers an operator: `kernel` on every device, `fake` if only shapes are asked for."""
    library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"prefixtree::{name}", fake, lib=library)
    operator: Callable[..., Any] = getattr(_NAMESPACE, name).default
    return operator


def as_given(x: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Switches autocast off, which would turn float32 products into half precision."""
    device = x.device.type
    # entered only if it is on: entering costs more than all checks
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else _NOTHING


Kind = Literal["attention", "recurrence"]


class _Watch(threading.local):
    mask: HostMask | None = None

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()


# a forward runs in one thread, and other threads may run other models meanwhile
_watch = _Watch()


@contextmanager
def counted_calls(mask: HostMask) -> Iterator[Callable[[], tuple[int, int]]]:
    """Gives a function that counts this thread's calls over `mask`: attention, recurrence."""
    before = _watch.mask, _watch.calls
    try:
        _watch.mask, _watch.calls = mask, Counter()
        yield lambda: (_watch.calls["attention"], _watch.calls["recurrence"])
    finally:
        _watch.mask, _watch.calls = before


@contextmanager
def as_one_call(mask: HostMask, of: Kind) -> Iterator[None]:
    """Counts the calls within as one over `mask`: those of groups of heads, or of kinds of keys."""
    before = _watch.mask
    try:
        _watch.mask = None
        yield
    finally:
        _watch.mask = before
    note_call(mask, of)


def note_call(mask: HostMask, of: Kind) -> None:
    """Counts a forward call of an operator that computes."""
    # a mask with borders of states counts as the mask itself
    if _watch.mask is (mask.counts_as or mask):
        _watch.calls[of] += 1


# seconds until a line says what is waited for: a kernel that is found on disk takes less
PATIENCE = 3.0
_log = logging.getLogger("prefixtree")
_NOT_FIRST: AbstractContextManager[Any] = nullcontext()
# kinds that were called; the names and seconds of those that returned
_begun: set[Hashable] = set()
_took: dict[str, float] = {}


def first_call(*kind: Hashable) -> AbstractContextManager[Any]:
    """Makes a context for a call that may compile; `kind` tells kinds apart and makes the line."""
    # if the first of its kind takes longer than `PATIENCE` seconds, the logger "prefixtree" says
    # what is compiled, as a warning, and how long it took; a call waits for no GPU
    if kind in _begun:
        return _NOT_FIRST
    _begun.add(kind)
    return _noted(" ".join(map(str, kind)))


@contextmanager
def _noted(what: str) -> Iterator[None]:
    said = threading.Event()

    def say() -> None:
        said.set()
        _log.warning("compiling %s: the first call of its kind, please wait", what)

    timer = threading.Timer(PATIENCE, say)
    timer.daemon = True
    begin = time.perf_counter()
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        seconds = _took[what] = time.perf_counter() - begin
        if said.is_set():
            _log.warning("compiled %s in %.0f s", what, seconds)


def first_calls() -> dict[str, float]:
    """Lists the seconds that the first call of each kind took on the host, in their order."""
    return dict(_took)
