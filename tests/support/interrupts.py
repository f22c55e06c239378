"""KeyboardInterrupt at each line of some functions, one after another, in real calls."""

from __future__ import annotations

import dis
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from functools import cache
from types import CodeType, FrameType
from typing import Any

# a line, and how often it has run in a call
Place = tuple[str, int, int]


class _Tracer:
    """Counts the lines that run in some functions, and raises at one of them."""

    def __init__(self, codes: Collection[CodeType], at: Place | None = None) -> None:
        self.times: Counter[tuple[str, int]] = Counter()
        self._codes, self._at = codes, at

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code in self._codes else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and frame.f_lasti not in _without_signals(frame.f_code):
            line = frame.f_code.co_filename, frame.f_lineno
            self.times[line] += 1
            if self._at == (*line, self.times[line]):
                raise KeyboardInterrupt
        return self._line


@cache
def _without_signals(code: CodeType) -> frozenset[int]:
    """Where Python delivers no signal: at a `try:`, and where a `with` calls its __exit__."""
    found = list(dis.get_instructions(code))
    places = {i.offset for i in found if i.opname == "NOP"}
    for n in range(len(found) - 3):
        nones = [i.opname == "LOAD_CONST" and i.argval is None for i in found[n : n + 3]]
        if all(nones) and found[n + 3].opname in ("PRECALL", "CALL"):
            places.add(found[n].offset)
            # with a result to return
            places |= {found[n - 1].offset} if found[n - 1].opname == "SWAP" else set()
    return frozenset(places)


def _traced(tracer: _Tracer, call: Callable[[], Any]) -> bool:
    """Runs a call; whether it was interrupted."""
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def codes_of(*functions: Callable[..., Any] | CodeType) -> set[CodeType]:
    """Of functions, and of those that they define inside."""
    left: list[CodeType] = [
        f if isinstance(f, CodeType) else inspect.unwrap(f).__code__ for f in functions
    ]
    found: set[CodeType] = set()
    while left:
        found.add(code := left.pop())
        left += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return found


def interrupted_at_each_line(
    call: Callable[[], Any], functions: Collection[Callable[..., Any] | CodeType]
) -> Iterator[str]:
    """Interrupts a call at every line of functions that it runs, the first time and the last.

    Yields:
        After each, where that was.
    """
    # what is cached is cached then
    call()
    tracer = _Tracer(codes_of(*functions))
    assert not _traced(tracer, call)
    for function in functions:
        codes = codes_of(function)
        lines = {(code.co_filename, line) for code in codes for *_, line in code.co_lines()}
        assert lines & tracer.times.keys(), f"{function} did not run"
    for (file, line), times in tracer.times.items():
        for time in {1, times}:
            at = _Tracer(codes_of(*functions), (file, line, time))
            assert _traced(at, call), f"{file}:{line} was not run"
            yield f"{file}:{line}, time {time}"
