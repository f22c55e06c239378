"""The first call of a kind compiles its kernels: what is waited for is said, and its time noted.

A kind is what selects other kernels: the backend, the direction, dtypes and heads. Later calls of
it cost one look-up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

# seconds until a line says what is waited for: a kernel that is found on disk takes less
PATIENCE = 3.0
_log = logging.getLogger("prefixtree")
_NOT_FIRST: AbstractContextManager[Any] = nullcontext()
# kinds that were called; of those that returned, what they were and the seconds they took
_begun: set[Hashable] = set()
_took: dict[str, float] = {}


def first_call(*kind: Hashable) -> AbstractContextManager[Any]:
    """Around a call that may compile.

    If the first of its kind takes longer than `PATIENCE` seconds, the logger "prefixtree" says what
    is compiled, as a warning, and how long it took. A call waits for no GPU.

    Args:
        kind: what tells one kind from another, and what the line is made of.
    """
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
    """The seconds that the first call of each kind took on the host, in the order of the calls."""
    return dict(_took)
