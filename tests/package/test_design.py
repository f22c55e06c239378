"""docs/design.md: its picture of rooms, its files and names, and its length."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

import pytest

from tools.rooms import PICTURE, ROOMS, ROOT, room_of, shown
from tools.rooms import found as imports_of_today

found = cache(imports_of_today)

PACKAGE = ROOT / "prefixtree"
DESIGN, CHANGES = ROOT / "docs/design.md", ROOT / "docs/changes-elsewhere.md"
MOST_WORDS = 3500
# a room may grow by so much before its number in the picture is drawn anew
GROWS = 0.15


def section(page: str, title: str) -> str:
    _, _, rest = page.partition(f"\n## {title}\n")
    assert rest, f"{title} is no section"
    return rest.partition("\n## ")[0]


def rows(text: str) -> Iterator[list[str]]:
    """Cells of the rows of tables but their heads."""
    for table in re.findall(r"^\|[-|]+\|\n((?:\|.*\n?)+)", text, re.MULTILINE):
        for line in table.splitlines():
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def missing(cells: list[str]) -> list[str]:
    """What a row names, files first, that is not there."""
    paths = [PACKAGE / name for cell in cells[:-1] for name in quoted(cell)]
    absent = [str(path.relative_to(PACKAGE)) for path in paths if not path.exists()]
    files = [file for path in paths for file in (path, *path.rglob("*.py")) if file.is_file()]
    text = "\n".join(file.read_text() for file in files)
    for name in quoted(cells[-1]):
        for part in name.split("."):
            if not re.search(rf"^ *(?:def|class) {part}\b|^ *{part}\b.* = ", text, re.MULTILINE):
                absent.append(name)
    return absent


# ---- the picture ---------------------------------------------------------------------------------


def test_the_picture_shows_the_imports_of_today() -> None:
    """`python -m tools.rooms` draws it anew."""
    picture, today = shown(PICTURE.read_text()), found()
    assert picture["arrows"] == today["arrows"], "python -m tools.rooms"
    assert picture["lines"].keys() == today["lines"].keys(), "python -m tools.rooms"
    for room, lines in today["lines"].items():
        drawn = picture["lines"][room]
        assert abs(drawn - lines) <= 100 + GROWS * lines, f"{room}: python -m tools.rooms"


def test_rooms_are_found_by_their_longest_name() -> None:
    assert room_of("prefixtree.planning.micro_batch") == ("core", "costs")
    assert room_of("prefixtree.planning.micro_batches") == ("ways of running", "parts")
    assert room_of("prefixtree.packing.segments") == ("wings", "states")
    assert room_of("prefixtree.integrations.verl") == ("shells", "verl")
    assert room_of("prefixtree.errors") == room_of("prefixtree") == ("", "")
    today = found()
    assert set(today["lines"]) == {room for rooms in ROOMS.values() for room in rooms}
    # of a type alone (TYPE_CHECKING), and of a function
    assert ["scoring", "images"] not in today["arrows"]
    assert ["experts", "models"] in today["arrows"]


# ---- the page ------------------------------------------------------------------------------------


@pytest.mark.parametrize("title", ["Where to find it", "Where to add"])
def test_files_and_names_of_tables_exist(title: str) -> None:
    table = [*rows(section(DESIGN.read_text(), title))]
    assert len(table) > 6
    for cells in table:
        assert missing(cells[1:]) == [], cells[0]


def test_tests_that_hold_invariants_exist() -> None:
    table = [*rows(section(DESIGN.read_text(), "What may not break"))]
    assert len(table) > 6
    for invariant, held in table:
        assert quoted(held), invariant
        assert [name for name in quoted(held) if not (ROOT / name).is_file()] == []


def test_what_is_missing_is_noticed() -> None:
    assert missing(["`scoring/logprobs.py`", "`sequence_logprobs`"]) == []
    assert missing(["`scoring/nowhere.py`, `scoring/`", "`Teacher`"]) == ["scoring/nowhere.py"]
    assert missing(["`scoring/teacher.py`", "`sequence_logprob`"]) == ["sequence_logprob"]


def test_tests_that_notice_changes_elsewhere_exist() -> None:
    names = {name for cells in rows(CHANGES.read_text()) for name in quoted(cells[-1])}
    assert len(names) > 25
    there = [str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob("test_*.py")]
    assert [name for name in names if not any(t.endswith(f"/{name}") for t in there)] == []


def test_the_page_is_short() -> None:
    page = DESIGN.read_text()
    assert len(page.split()) <= MOST_WORDS
    assert len([*rows(section(page, "Glossary"))]) <= 30
