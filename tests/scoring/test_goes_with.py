"""docs/what-fits-where.md: "What goes with what" is that of the matrix and of tests that exist."""

from __future__ import annotations

import ast

import pytest

from tests.scoring import goes_with
from tests.scoring.goes_with import (
    NO_ROW,
    PAGE,
    ROOT,
    ROWS,
    Absent,
    Held,
    Refused,
    cells,
    of_ways,
    page,
    tables,
)
from tests.scoring.ways import AXES

REFUSALS = (ROOT / "docs/refusals.md").read_text()


def test_the_page_is_that_of_the_tables() -> None:
    assert PAGE.read_text() == page(), "write it: python -m tests.scoring.goes_with"
    assert "| |" not in tables().replace("| | one", "")


@pytest.mark.parametrize("of", dict.fromkeys(cells()), ids=str)
def test_a_cell_is_held_by_a_test_or_refused_in_these_words(of: object) -> None:
    if isinstance(of, Held):
        file, name = of.test.split("::")
        tree = ast.parse((ROOT / "tests" / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    elif isinstance(of, Refused):
        assert of.words in REFUSALS


def test_every_level_is_in_a_row() -> None:
    """But those that every row is asked with."""
    rows = {level for levels, _ in ROWS.values() for level in levels}
    plain = {levels[0] for levels in AXES.values()} | set(AXES["event"]) | set(AXES["way"])
    assert {x for levels in AXES.values() for x in levels} - rows == plain | NO_ROW


def test_cells_of_several_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {("a", "x"): None, ("a", "y"): Refused("no"), ("b", "x"): Absent(""), ("b", "y"): None}
    monkeypatch.setattr(goes_with, "cell", lambda *pair: said[pair])
    assert of_ways(("x",), ("a",)) == "yes" and of_ways(("y",), ("a",)) == "no"
    assert of_ways(("x",), ("b",)) == "-" and of_ways(("x", "y"), ("a",)) == "x"
    assert of_ways(("x",), ("a", "b")) == "yes" and of_ways(("y",), ("a", "b")) == "no"
