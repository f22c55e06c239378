"""tools/mutate.py before it runs: which mutations a text has, where they are found again."""

from __future__ import annotations

import ast

import pytest

from tools.mutate import ordered
from tools.mutations import ROOMS, ROOT, Mutation, mutations, room_of, room_tests

TEXT = '''
def f(a: list[1], b=2):
    """Not -1."""
    assert a < 3
    if a <= b and not a:
        raise ValueError(f"{a + 1}" + "x")
    return min(a[b:]) + (a //
        5)
'''


def test_the_mutations_of_a_text() -> None:
    found = {(m.line, m.kind, m.after.strip()) for m in mutations("prefixtree/x.py", TEXT)}
    assert found == {
        (2, "off by one", "def f(a: list[1], b=3):"),
        (5, "comparison", "if a < b and not a:"),
        (5, "and/or", "if a <= b or not a:"),
        (5, "dropped term", "if (a <= b):"),
        (5, "negation", "if a <= b and (a):"),
        (7, "sign", "return min(a[b:]) - (a //"),
        (7, "dropped term", "return (min(a[b:])\n)"),
        (7, "min/max", "return max(a[b:]) + (a //"),
        (7, "off by one", "return min(a[(b + 1):]) + (a //"),
        (7, "rounded up", "return min(a[b:]) + ((-(-(a) // (5))\n))"),
        (8, "off by one", "6)"),
    }


@pytest.mark.parametrize("file", ["prefixtree/forest.py", "prefixtree/scoring/in_groups.py"])
def test_each_parses_and_no_line_moves(file: str) -> None:
    text = (ROOT / file).read_text()
    tree = ast.dump(ast.parse(text))
    for m in mutations(file, text):
        changed = m.mutated(text)
        assert changed is not None and changed.count("\n") == text.count("\n")
        assert ast.dump(ast.parse(changed)) != tree, m


def test_a_mutation_is_found_again_by_its_text() -> None:
    def at(text: str) -> str | None:
        return Mutation("prefixtree/x.py", 3, "sign", "a = -b", "a = (b)").mutated(text)

    assert at("0\n0\na = -b\n") == "0\n0\na = (b)\n"
    # the nearest of two, and none
    assert at("a = -b\n0\n0\na = -b\n") == "a = -b\n0\n0\na = (b)\n"
    assert at("a = - b\n") is None


def test_the_tests_that_reach_a_function_run() -> None:
    tests = {
        "t.py::slow": {"reached": {"x.py:3"}, "seconds": 2},
        "t.py::other": {"reached": set(), "seconds": 0},
        "t.py::quick": {"reached": {"x.py:3"}, "seconds": 1},
    }
    assert list(ordered(tests, "x.py", 3)) == ["t.py::quick", "t.py::slow"]
    # no test is seen there
    assert list(ordered(tests, "x.py", 9)) == ["t.py::other", "t.py::quick", "t.py::slow"]


def test_rooms_have_files_and_tests() -> None:
    files = [str(p.relative_to(ROOT)) for p in (ROOT / "prefixtree").rglob("*.py")]
    assert {room_of(file) for file in files} >= set(ROOMS)
    for _, globs in ROOMS.values():
        assert all(list(ROOT.glob(glob)) for glob in globs.split())
    # folders that no room has go by the layout of tests/
    assert room_of("prefixtree/sharing/groups.py") == "sharing"
    assert "tests/sharing/test_estimate.py" in room_tests("sharing", ROOT)
