"""What the suite rests on itself: cases that hold every pair, and what does not run here."""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.full import LeftOut, each_once
from tests.support.pairs import pairwise

AXES = ("abcd", (5, 6, 7), [False, True], ([], {}))


def held(cases: list[tuple[Any, ...]]) -> set[str]:
    return {repr((i, case[i], j, case[j])) for case in cases for i, j in combinations(range(4), 2)}


def test_every_pair_stands_in_a_case() -> None:
    cases = pairwise(*AXES)
    assert held(cases) == held(list(product(*AXES)))
    # of 48 in the product; 12 are the pairs of the two longest axes
    assert len(cases) <= 13 and cases == pairwise(*AXES)
    assert pairwise("ab", "cd") == [("a", "c"), ("a", "d"), ("b", "c"), ("b", "d")]


def test_pairs_that_do_not_fit_stand_in_no_case() -> None:
    def fits(a: Any, b: Any) -> bool:
        return (a, b) not in (("b", 6), (7, True))

    cases = pairwise(*AXES, fits=fits)
    gone = {repr((0, "b", 1, 6)), repr((1, 7, 2, True))}
    assert held(cases) == held(list(product(*AXES))) - gone
    with pytest.raises(ValueError, match=r"no level of \(5,\) fits \['a', 'c'\]"):
        pairwise("a", "c", [5], fits=lambda a, b: b != 5)


def test_each_value_runs_every_time_and_each_pair_with_full() -> None:
    marked = pytest.param("c", marks=pytest.mark.gpu)
    cases = each_once(["a", "b", marked], "xyzw", lambda *pair: pair != ("b", "y"))
    pairs = {"".join(case.values): [mark.name for mark in case.marks] for case in cases}
    assert pairs.keys() == {a + b for a, b in product("abc", "xyzw")} - {"by"}
    quick = [pair for pair, marks in pairs.items() if "full" not in marks]
    assert quick == ["ax", "aw", "bz", "cy"]
    assert all(("gpu" in marks) == ("c" in pair) for pair, marks in pairs.items())


def item(file: Path, *marks: pytest.Mark) -> Any:
    """What a plugin asks of a test."""
    of = {mark.name: mark for mark in marks}
    return SimpleNamespace(
        path=file, get_closest_marker=of.get, iter_markers=lambda: iter(of.values())
    )


@pytest.mark.parametrize("full", [False, True])
def test_what_does_not_run_here_is_left_out_and_counted(
    full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    file = tmp_path / "test_x.py"
    file.write_text("pytest.mark.full")
    mark: Any = pytest.mark
    others = [
        item(file, mark.gpu.mark),
        item(file, mark.skip(reason="not installed").mark),
        item(file, mark.skipif(True, reason="not installed").mark),
    ]
    stays, slow = item(file, mark.skipif(False, reason="x").mark), item(file, mark.full.mark)
    items, gone, said = [*others, slow, stays], [], []
    hook = SimpleNamespace(pytest_deselected=lambda items: gone.extend(items))
    config: Any = SimpleNamespace(hook=hook, get_verbosity=lambda: 1)
    left = LeftOut(full)
    left.pytest_collection_modifyitems(config, items)
    assert items == ([slow, stays] if full else [stays])
    assert gone == (others if full else [*others, slow])
    left.pytest_terminal_summary(SimpleNamespace(write_line=said.append), config)
    of_full = "" if full else "1 marked full (--full), "
    assert said == [
        f"left out: {of_full}1 need a GPU, 2 of another environment",
        "  2: not installed",
    ]
    # nothing else was asked for: as green as a test that is skipped
    session: Any = SimpleNamespace(config=config, exitstatus=None)
    left.pytest_sessionfinish(session, pytest.ExitCode.NO_TESTS_COLLECTED)
    assert session.exitstatus == pytest.ExitCode.OK
    # a worker of pytest-xdist tells the process that counts
    session.config.workeroutput = {}
    left.pytest_sessionfinish(session, pytest.ExitCode.OK)
    other = LeftOut(full)
    other.pytest_testnodedown(SimpleNamespace(workeroutput=session.config.workeroutput))
    assert other.reasons == left.reasons


def test_a_file_says_itself_that_it_marks_tests_full(tmp_path: Path) -> None:
    """tools/ci.py finds such files by their text."""
    file = tmp_path / "test_x.py"
    file.write_text("from elsewhere import marked")
    with pytest.raises(pytest.UsageError, match="marks no test full itself"):
        LeftOut(True).pytest_collection_modifyitems(
            SimpleNamespace(),
            [item(file, pytest.mark.full.mark)],
        )
