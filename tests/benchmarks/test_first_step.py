"""The benchmark of the first step, on a CPU and tiny."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cases import first_step
from tests.benchmarks.support import TINY
from tests.support.benchmark_runs import result

SMALL = [*TINY, "--dtype", "float32", "--models", "qwen3-0.6b", "--no-compiled"]


@pytest.mark.full
def test_cold_and_warm(tmp_path: Path) -> None:
    out = tmp_path / "first.json"
    assert first_step.main([*SMALL, "--out", str(out)]) == 0
    rows = result(out)["rows"]
    assert [row["caches"] for row in rows] == ["cold", "warm"]
    for row in rows:
        assert row["red"] == [] and row["layers"] == 2 and row["second"] > 0
        parts = row["import"] + row["model"] + row["first"]
        assert parts == pytest.approx(row["total"], abs=0.01)
        # on a CPU nothing of ours compiles
        assert row["operators"] == {} and row["torch_compile"] == 0
        assert row["losses"][1] < row["losses"][0]


def test_what_a_process_says_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho compiling, please wait >&2\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    with pytest.raises(RuntimeError, match="the cold process ended with 3"):
        first_step.run_cold_and_warm(lambda began: ["-c", "pass"])
    assert capfd.readouterr().err == "compiling, please wait\n"


def test_losses_that_differ_are_red() -> None:
    rows = [{"losses": [2.0, 1.0]}, {"losses": [2.001, 1.0]}]
    assert first_step.red(rows) == []
    assert first_step.red([rows[0], {"losses": [2.01, 1.0]}]) != []
    assert first_step.red([{"losses": [float("nan")]}, rows[0]]) != []


def test_operators_are_summed_by_backend() -> None:
    kinds = {
        "tree_attention's forward, backend 'flash', torch.bfloat16 32 heads": 20.0,
        "tree_attention's backward, backend 'flash', torch.bfloat16 32 heads": 30.5,
        "tree_delta_rule's forward, backend 'flash_qla', torch.bfloat16 sizes 4x8": 15.0,
        "9 kernels of flash-qla side by side, torch.bfloat16 sizes 4x8 and 4x8": 14.0,
    }
    row = {"model_name": "m", "caches": "cold", "operators": kinds}
    run = {"environment": {"torch": "2", "gpu": "a GPU", "commit": "c"}, "rows": [row]}
    _, table = first_step.tables(run)
    cells = [column.cell(row) for column in table.columns]
    assert "flash 50.5, flash_qla 15.0" in cells


def test_a_line_per_side() -> None:
    first = {"seconds": 60.0, "generate": 20.5, "update": 38.25}
    row = {"side": "trl", "caches": "cold", "first": first, "loops": 7.5, "later": None}
    run = {"environment": {"torch": "2", "gpu": "a GPU", "commit": "c"}, "rows": [row]}
    _, table = first_step.tables(run)
    cells = {column.head: column.cell(row) for column in table.columns}
    assert cells["trainer"] == "trl" and cells["generation in it"] == "20.5"
    assert cells["our loops, s"] == "7.5" and cells["later ones"] == ""
