"""tools/mutate.py before it runs: which mutations a text has, where they are found again."""

from __future__ import annotations

import ast
import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.mutate import ordered, swap_code
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


def test_a_function_that_is_there_is_changed(tmp_path: Path) -> None:
    """Although tests/conftest.py has frozen what the collector sees."""
    file = tmp_path / "m.py"
    file.write_text("def f(x):\n    return x + 1\n\n\ndef g(x):\n    return x\n")
    made: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec", dont_inherit=True), made)
    gc.freeze()
    text = file.read_text()
    assert swap_code(str(file), text, text.replace("x + 1", "x - 1")) and made["f"](1) == 0
    assert not swap_code(str(tmp_path / "other.py"), text, text.replace("x + 1", "x - 1"))


def test_tests_are_named_from_the_root(tmp_path: Path) -> None:
    """Those of a folder with a pytest.ini of its own, too."""
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "inner" / "test_x.py").write_text("def test_x() -> None:\n    assert 0\n")
    code = "from tools.mutate import *; import sys; w = Watch(''); "
    code += "pytest_main([], ['inner/test_x.py'], w); print('failed', w.failed)"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.endswith("failed inner/test_x.py::test_x\n"), done.stderr


def test_rooms_have_files_and_tests() -> None:
    files = [str(p.relative_to(ROOT)) for p in (ROOT / "prefixtree").rglob("*.py")]
    assert {room_of(file) for file in files} >= set(ROOMS)
    for _, globs in ROOMS.values():
        assert all(list(ROOT.glob(glob)) for glob in globs.split())
    # folders that no room has go by the layout of tests/
    assert room_of("prefixtree/sharing/measure.py") == "sharing"
    assert "tests/sharing/test_estimate.py" in room_tests("sharing", ROOT)
