"""Tests that do not run here: marked `full`, without --full; of a GPU, without one; of another
environment. They are deselected, and the last line says how many and what runs them."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.marks import MARKS_FULL

# how ranks, which are processes of their own, hear of the option
_ASKED = "PREFIXTREE_TESTS_FULL"

_FULL = "marked full (--full)"
_GPU = "need a GPU"


def add_option(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also what few changes can break")


def set_up(config: pytest.Config) -> None:
    tell_ranks(config)
    config.pluginmanager.register(LeftOut(config.getoption("--full")), "left out")


def tell_ranks(config: pytest.Config) -> None:
    full = config.getoption("--full")
    alone = full and config.getoption("markexpr") == "full"
    os.environ[_ASKED] = "the rest" if alone else "all" if full else "quick"


class LeftOut:
    """Deselects what does not run here, and says so at the end."""

    def __init__(self, full: bool) -> None:
        self.full = full
        self.reasons: Counter[str] = Counter()

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        # where tools/ci.py looks for them; it collects no other file
        for path in {item.path for item in items if item.get_closest_marker("full")}:
            if not _marks_some(path):
                raise pytest.UsageError(f"{path} marks no test full itself")
        why = [self._why(item) for item in items]
        self.reasons.update(reason for reason in why if reason is not None)
        out = [item for item, reason in zip(items, why, strict=True) if reason is not None]
        if out:
            config.hook.pytest_deselected(items=out)
            items[:] = [item for item, reason in zip(items, why, strict=True) if reason is None]

    def _why(self, item: pytest.Item) -> str | None:
        if item.get_closest_marker("full") and not self.full:
            return _FULL
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            return _GPU
        for mark in item.iter_markers():
            if mark.name == "skip" or (mark.name == "skipif" and any(mark.args)):
                return str(mark.kwargs.get("reason", "another environment"))
        return None

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        # a worker of pytest-xdist; all workers collect the same
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["left out"] = dict(self.reasons)
        elif self.reasons and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.reasons = Counter(getattr(node, "workeroutput", {}).get("left out", self.reasons))

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        reasons = dict(self.reasons)
        parts = [f"{reasons.pop(known)} {known}" for known in (_FULL, _GPU) if known in reasons]
        if reasons:
            parts.append(f"{sum(reasons.values())} of another environment")
        if parts:
            terminalreporter.write_line(f"left out: {', '.join(parts)}")
        if config.get_verbosity() > 0:
            for reason, count in sorted(reasons.items()):
                terminalreporter.write_line(f"  {count}: {reason}")


def _marks_some(path: Path) -> bool:
    return re.search(MARKS_FULL, path.read_text()) is not None


def mostly(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Parameters, those that are not quick marked `full`.

    Args:
        values: of one parameter, tuples of several, or what pytest.param gives, which counts as its
            first value. CI gives --full when the files that decide the result changed (tools/ci.py,
            test-full).
        quick: the values that run every time.
    """
    found = []
    for value in values:
        is_param = hasattr(value, "marks")
        name = value.values[0] if is_param else value
        given = value.values if is_param else value if isinstance(value, tuple) else (value,)
        marks = [*(value.marks if is_param else ()), *([] if name in quick else [pytest.mark.full])]
        found.append((name, pytest.param(*given, marks=marks, id=getattr(value, "id", None))))
    names = [name for name, _ in found]
    assert any(name in quick for name in names) and any(name not in quick for name in names)
    return [param for _, param in found]


def each_once(
    one: Iterable[Any], other: Iterable[Any], fits: Callable[[Any, Any], bool] = lambda a, b: True
) -> list[Any]:
    """Pairs of values of two parameters, those marked `full` but one for each value of either.

    Args:
        one, other: plain values, or what pytest.param gives.
        fits: whether a pair is a case at all.
    """
    ones, others = (
        [x if hasattr(x, "marks") else pytest.param(x) for x in y] for y in (one, other)
    )
    pairs = [(a, b) for a in ones for b in others if fits(a.values[0], b.values[0])]
    quick: list[Any] = []
    for a in ones:
        beside = [pair for pair in pairs if pair[0] is a]
        # what has run least so far
        quick += sorted(beside, key=lambda pair: sum(b is pair[1] for _, b in quick))[:1]
    missing = [b for b in others if all(b is not held for _, held in quick)]
    quick += [next(pair for pair in pairs if pair[1] is b) for b in missing]
    found = []
    for pair in pairs:
        marks = [mark for part in pair for mark in part.marks]
        marks += [] if any(pair is held for held in quick) else [pytest.mark.full]
        found.append(pytest.param(*(part.values[0] for part in pair), marks=marks))
    return found


def in_turn(one: Iterable[Any], other: Sequence[Any]) -> list[Any]:
    """Each value of a parameter, with its marks, beside the next of another's."""
    found = []
    for at, value in enumerate(one):
        param = value if hasattr(value, "marks") else pytest.param(value)
        beside = other[at % len(other)]
        found.append(pytest.param(*param.values, beside, marks=param.marks, id=param.id))
    return found


def quick_ones_run() -> bool:
    """False where the tests marked `full` run alone (`--full -m full`)."""
    return os.environ.get(_ASKED) != "the rest"


def asked_for(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """The values of which the tests will run: what a fixture makes for all of them at once."""
    others_run = os.environ.get(_ASKED) in ("all", "the rest")
    return [value for value in values if (quick_ones_run() if value in quick else others_run)]
