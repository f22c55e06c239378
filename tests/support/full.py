"""Tests that take long and that few changes can break: marked `full`, they run with --full."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable
from typing import Any

import pytest

from tests.support.marks import MARKS_FULL

# how ranks, which are processes of their own, hear of the option
_ASKED = "PREFIXTREE_TESTS_FULL"


def add_option(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also what few changes can break")


def tell_ranks(config: pytest.Config) -> None:
    full = config.getoption("--full")
    alone = full and config.getoption("markexpr") == "full"
    os.environ[_ASKED] = "the rest" if alone else "all" if full else "quick"


def skip_without_it(item: pytest.Item) -> None:
    if not item.get_closest_marker("full"):
        return
    # where tools/ci.py looks for them; it collects no other file
    assert re.search(MARKS_FULL, item.path.read_text()), f"{item.path} marks none itself"
    if not item.config.getoption("--full"):
        pytest.skip("runs with --full")


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


def quick_ones_run() -> bool:
    """False where the tests marked `full` run alone (`--full -m full`)."""
    return os.environ.get(_ASKED) != "the rest"


def asked_for(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """The values of which the tests will run: what a fixture makes for all of them at once."""
    others_run = os.environ.get(_ASKED) in ("all", "the rest")
    return [value for value in values if (quick_ones_run() if value in quick else others_run)]
