"""tools/mutations.py before it runs: where the recorded mutations stand."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tools.mutations import ROOT, mutated, place, recorded


def test_lines_are_found_where_they_moved(tmp_path: Path) -> None:
    (tmp_path / "prefixtree").mkdir()
    for name, text in (("a", "x = 1\n"), ("b", "y = 1\nz = 2\n"), ("c", "z = 2\n")):
        (tmp_path / f"prefixtree/{name}.py").write_text(text)
    assert place("prefixtree/a.py", "x = 1", tmp_path) == "prefixtree/a.py"
    assert place("prefixtree/gone.py", "x = 1", tmp_path) == "prefixtree/a.py"
    # whole lines, and one place
    assert place("prefixtree/a.py", "x =", tmp_path) is None
    assert place("prefixtree/a.py", "z = 2", tmp_path) is None
    assert mutated("x = 1\ny = 2\n", "y = 2", "y = 3") == "x = 1\ny = 3\n"


@pytest.mark.full
def test_recorded_ones_change_what_runs() -> None:
    rows = recorded()
    assert len({row[:3] for row in rows}) == len(rows)
    as_it_is = cache(lambda text: ast.dump(ast.parse(text)))
    for file, before, after, _ in rows:
        at = place(file, before)
        assert at is not None, f"lines gone: {file}: {before}"
        text = (ROOT / at).read_text()
        changed = ast.parse(mutated(text, before, after))
        assert ast.dump(changed) != as_it_is(text), (at, before)
