"""tools/ci.py: what runs side by side, what is left out, and what is too expensive."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.full import asked_for, quick_ones_run, tell_ranks
from tools import ci

REPORT = """<testsuites><testsuite>
<testcase file="tests/a.py" time="2.5"/><testcase file="tests/a.py" time="1"/>
<testcase file="tests/b.py" time="9"/></testsuite></testsuites>"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Costs, table and logs of a test."""
    monkeypatch.setattr(ci, "LOGS", tmp_path)
    monkeypatch.setattr(ci, "COSTS", tmp_path / "costs.json")
    monkeypatch.setattr(ci, "README", tmp_path / "README.md")
    ci.README.write_text(f"before\n{ci._BEGIN}old\n{ci._END}behind\n")
    return tmp_path


def ended(name: str, processor: float = 100.0, status: int = 0) -> Any:
    return ci.Run(ci.Target(name), None, 0.0, 60.0, processor, status)


def test_targets_are_those_of_the_makefile_and_their_files_exist() -> None:
    rules = set(re.findall(r"^([\w-]+):", (ci.ROOT / "Makefile").read_text(), re.MULTILINE))
    found = ci.targets()
    assert {target.name.split()[0] for target in found} <= rules
    left = {"demo", "real", "families", "fields", "images", "clean", "test-newest"}
    assert rules - left == {target.name.split()[0] for target in found}
    sources = ci.Sources(ci.ROOT)
    for target in found:
        for pattern in target.tests:
            assert ci.matching(pattern, sources.files), (target, pattern)
        files, none = ci.files_of(target, sources)
        assert bool(files) == bool(target.tests) and bool(none) == target.full


def test_growth_is_red(folder: Path) -> None:
    ci.COSTS.write_text(json.dumps({"test": {"loops": 50.0}}))
    costs = ci.Costs(loop_seconds=2.0)
    # 100 s are what it was
    assert costs.problem(ended("test", 190.0)) == ""
    # twice as much, but what an empty cache costs
    assert costs.problem(ended("test", 210.0)) == ""
    assert "costs 2.3 times" in costs.problem(ended("test", 230.0))
    assert costs.problem(ended("test", 100.0, status=2)) == "exit status 2"
    # a slower machine, whose loop takes longer too
    assert ci.Costs(loop_seconds=4.0).problem(ended("test", 390.0)) == ""
    assert costs.problem(ended("new", 1e4)) == ""


def test_a_process_that_outlives_its_parent_is_waited_for() -> None:
    """Its processor time is that of the target."""
    burn = "import time\nwhile time.process_time() < 0.4: pass"
    command = f"{sys.executable} -c '{burn}' & exit 3"
    run = subprocess.Popen([sys.executable, "-c", ci._REAPER, "sh", "-c", command])
    _, status, used = os.wait4(run.pid, 0)
    run.returncode = os.waitstatus_to_exitcode(status)
    assert run.returncode == 3
    assert used.ru_utime + used.ru_stime > 0.4


def test_a_run_with_more_tests_is_no_growth_and_no_record(folder: Path) -> None:
    ci.COSTS.write_text(json.dumps({"test-trl": {"loops": 50.0, "minutes": 1.0}}))
    costs, run = ci.Costs(loop_seconds=1.0), ended("test-trl", 400.0)
    assert "costs 8.0 times" in costs.problem(run)
    run.full = True
    assert costs.problem(run) == ""
    costs.record([run])
    assert costs.recorded["test-trl"]["loops"] == 50.0


def test_what_is_recorded(folder: Path) -> None:
    (folder / "test.xml").write_text(REPORT)
    costs = ci.Costs(loop_seconds=2.0)
    costs.record([ended("test"), ended(".venv/.ready")])
    assert json.loads(ci.COSTS.read_text()) == {
        "test": {"loops": 50.0, "minutes": 1.0, "tests": 3, "most": [["b.py", 9], ["a.py", 4]]}
    }
    before, row, behind = (ci.README.read_text().splitlines()[i] for i in (0, 4, -1))
    assert (before, behind) == ("before", "behind")
    assert row == "| `test` | 3 | 1.0 | 50.0 | `b.py` 9, `a.py` 4 |"


def test_files_are_left_out_while_what_they_reach_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, now = ci.Target("t", tests=("tests/test_*.py",)), {"a": "1", "b": "1"}
    monkeypatch.setattr(ci, "fingerprints", lambda target, sources: dict(now))
    costs = ci.Costs(1.0)
    assert costs.to_run(target, False) == target
    costs.record([ended("t")])
    assert costs.to_run(target, False) is None and costs.to_run(target, True) == target
    now["b"] = now["c"] = "2"
    part = costs.to_run(target, False)
    assert part.left == ("a",)
    assert costs.to_run(ci.replace(target, whole=True), False).left == ()
    # a part says nothing of what all cost; files may change while they are tested
    now["a"] = "3"
    costs.record([ci.replace(ended("t", 1.0), target=part)])
    assert costs.recorded["t"]["loops"] == 100.0
    assert costs.to_run(target, False).left == ("b", "c")
    assert costs.to_run(ci.Target("test"), False) == ci.Target("test")
    # of a red run, the files of which every test was green
    now["b"], now["c"] = "4", "4"
    part = costs.to_run(target, False)
    cases = '<testcase file="b"/><testcase file="c"><failure/></testcase><testcase file="c"/>'
    (folder / "t.xml").write_text(f"<testsuite>{cases}</testsuite>")
    # of one that pytest ended early, none
    (folder / "t.log").write_text("b .\n!!!!!! KeyboardInterrupt !!!!!!\n")
    costs.record([ci.replace(ended("t", status=1), target=part)])
    assert costs.to_run(target, False).left == ()
    (folder / "t.log").write_text("b . c F.\n1 failed, 2 passed in 0.1s\n")
    costs.record([ci.replace(ended("t", status=1), target=part)])
    assert costs.to_run(target, False).left == ("b",)
    # a target whose first run was red has no cost yet
    other = ci.replace(target, name="other")
    costs.to_run(other, False)
    ci.log_of(other).with_suffix(".xml").write_text(f"<testsuite>{cases}</testsuite>")
    ci.log_of(other).write_text("1 failed, 2 passed in 0.1s\n")
    costs.record([ci.replace(ended("other", status=1), target=other)])
    assert costs.problem(ended("other")) == "" and "`other`" not in ci.README.read_text()
    assert costs.recorded["other"]["files"] == {"b": "4"}


@pytest.mark.parametrize(
    "options, made",
    [
        ({"--full": False, "markexpr": ""}, ["a"]),
        ({"--full": True, "markexpr": ""}, ["a", "b"]),
        # as test-full runs them
        ({"--full": True, "markexpr": "full"}, ["b"]),
    ],
)
def test_ranks_run_what_tests_read(
    options: dict[str, Any], made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    tell_ranks(SimpleNamespace(getoption=options.get))  # type: ignore[arg-type]
    assert asked_for(["a", "b"], {"a"}) == made
    assert quick_ones_run() == ("a" in made)


def test_side_by_side(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Two at a time, environments first, one that keeps all cores busy alone, and none without its
    environment."""
    beside: dict[str, set[str]] = {}
    schedule = ci.Schedule(
        [
            ci.Target("whole", all_cores=True),
            *(ci.Target(name) for name in ("a", "b")),
            ci.Target("of env", (".venvs/x",)),
            ci.Target("of bad", (".venvs/bad",)),
            ci.Target(".venvs/x"),
            ci.Target(".venvs/bad"),
        ],
        cores=2,
    )

    def start(target: ci.Target, full: bool) -> ci.Run:
        running = {run.target.name for run in schedule.runs if run.status is None}
        beside[target.name] = running
        command = "exit 3" if target.name == ".venvs/bad" else "sleep 0.05"
        ci.log_of(target).write_text("=== 4 passed, 1 skipped in 2s ===\n")
        return ci.Run(target, subprocess.Popen(["sh", "-c", command]), 0.0)

    monkeypatch.setattr(ci, "start", start)
    lost = schedule.run(ci.Costs(1.0))
    assert [target.name for target in lost] == ["of bad"]
    assert set(beside) == {"whole", "a", "b", "of env", ".venvs/x", ".venvs/bad"}
    assert list(beside)[:2] == [".venvs/x", ".venvs/bad"]
    assert beside["whole"] == set() and all(len(names) < 2 for names in beside.values())
    assert any(beside.values()) and not any("whole" in names for names in beside.values())
    assert {run.target.name for run in schedule.runs if run.problem} == {".venvs/bad"}
    assert not ci.summary(schedule.runs, lost, 1.0)
    assert "red: .venvs/bad, of bad" in capsys.readouterr().out
