"""Tests that take long and that few changes can break: marked `full`, they run with --full."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def add_option(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also what few changes can break")


def skip_without_it(item: pytest.Item) -> None:
    if item.get_closest_marker("full") and not item.config.getoption("--full"):
        pytest.skip("runs with --full")


def mostly(names: Iterable[str], quick: Collection[str]) -> list[Any]:
    """Parameters, those that are not quick marked `full`."""
    names = list(names)
    assert set(quick) < set(names), set(quick) - set(names)
    return [n if n in quick else pytest.param(n, marks=pytest.mark.full) for n in names]


def asked_for(
    request: pytest.FixtureRequest, names: Iterable[str], quick: Collection[str]
) -> list[str]:
    """The names of which the tests will run: what a fixture makes for all of them at once."""
    return [n for n in names if n in quick or request.config.getoption("--full")]
