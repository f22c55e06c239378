"""python -m benchmarks: the list, what runs and what is shown; tables in both of their forms."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.__main__ import main, questions
from benchmarks.lib.tables import Column, Table, markdown, show
from tests.benchmarks.support import ROOT, case_named
from tests.support.full import mostly

H200 = ROOT / "benchmarks/results/h200"


def test_every_benchmark_is_listed_with_its_question(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    printed = capsys.readouterr().out
    readme = (ROOT / "benchmarks/README.md").read_text()
    for name, question in questions().items():
        assert "?" in question and question in printed
        assert f"| `{name}" in readme, f"benchmarks/README.md does not name {name}"
        if name != "report":  # which needs pyarrow
            assert callable(case_named(name).main) and callable(case_named(name).tables)


def test_a_benchmark_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dance"]) == 2
    said = capsys.readouterr()
    assert "no benchmark 'dance'" in said.err and "depth" in said.out


def test_a_table_is_declared_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Details stay on the terminal. A column without any text is nowhere."""
    columns = [
        Column("case", lambda row: row["case"]),
        Column("ms", lambda row: f"{row['ms']:.1f}"),
        Column("GiB", lambda row: ""),
        Column("host us", lambda row: "17", is_detail=True),
    ]
    parts = ["somewhere", Table(columns, [{"case": "[a] tree", "ms": 1.25}])]
    assert markdown(parts) == ("somewhere\n\n| case | ms |\n| --- | --- |\n| [a] tree | 1.2 |")
    show(parts)
    first, head, line = capsys.readouterr().out.splitlines()
    assert first == "somewhere" and head.split() == ["case", "ms", "host", "us"]
    assert line.split() == ["[a]", "tree", "1.2", "17"]


@pytest.mark.parametrize(
    "name",
    mostly(
        ["attention", "depth", "flash_by_hand", "host", "memory", "tune"], ["attention", "depth"]
    ),
)
def test_what_was_measured_is_shown(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = H200 / f"{name}.json"
    assert main(["show", name, str(file), "--markdown"]) == 0
    page = capsys.readouterr().out
    assert main(["show", name, str(file)]) == 0
    printed = capsys.readouterr().out
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    assert len(lines) > 2 and "NVIDIA H200" in page and "NVIDIA H200" in printed
    if name == "depth":
        assert len(lines) == 2 + len(json.loads(file.read_text())["rows"])
        assert "depth 8" in printed and re.search(r"524,288 +130,560", printed)


def test_a_file_that_is_of_no_benchmark_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["show", "dance", str(tmp_path / "x.json")])
