"""benchmarks/cases/attention.py on the CPU and small: what it measures, refuses and prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.cases import (
    attention,
)
from benchmarks.lib import (
    shapes,
    timing,
    workloads,
)
from benchmarks.lib.shapes import Shape
from benchmarks.lib.tables import markdown
from prefixtree import PrefixForest, TreeMask, pack, tree_attention
from tests.benchmarks.support import (
    SMALL_ATTENTION,
)


@pytest.mark.full
def test_every_workload_and_variant_runs_on_the_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "attention.json"
    assert attention.main([*SMALL_ATTENTION, "--scale", "0.002", "--out", str(out)]) == 0
    data = json.loads(out.read_text())
    rows = data["rows"]
    names = [name for name in workloads.NAMES if "airline" not in name]
    assert list(dict.fromkeys(row["workload"] for row in rows)) == names
    assert data["environment"]["skipped"] == ["airline per turn"]
    assert torch.__version__.startswith(data["environment"]["torch"])
    shapes = [(r["heads"], r["kv_heads"], r["head_dim"]) for r in rows]
    assert shapes.count((4, 2, 32)) == 10
    assert [shapes.count(s) for s in ((4, 2, 16), (4, 2, 64), (4, 4, 32))] == [3, 3, 3]
    for row in rows:
        assert row["red"] == []
        assert row["forward_ms"] > 0 and row["backward_ms"] > 0
        assert all(0 < c["worst"] < 1 for c in row["check"].values())
    printed = capsys.readouterr().out
    assert "19 green, 0 red or failed" in printed
    assert "'airline per turn' was skipped" in printed


def test_head_shapes_run_on_the_cpu_and_make_a_table(tmp_path: Path) -> None:
    """With the rows of one backend under the names of two."""
    out, names = tmp_path / "shapes.json", ["qwen2.5-0.5b", "deepseek-v2-lite"]
    chosen = ["--shapes", *names, "--workloads", "documents 32 x 4K", "--out", str(out)]
    assert attention.main([*SMALL_ATTENTION, "--scale", "0.002", *chosen]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(r["heads"], r["kv_heads"], r["head_dim"], r["v_head_dim"]) for r in rows] == [
        (14, 2, 64, None),
        (16, 16, 192, 128),
    ]
    # 32 documents of 8 tokens: 36 pairs each
    for row, dims in zip(rows, (64 + 64, 192 + 128), strict=True):
        useful = 2 * dims * row["heads"] * 32 * 36
        assert row["forward_tflops"] == pytest.approx(useful / row["forward_ms"] / 1e9)
        assert all(0 < c["worst"] < 1 for c in row["check"].values())
    times = {"triton": (1.04, 2.0), "flash": (0.96, 1.0)}
    share = {"longest_share": 0.01}
    both = [
        row | {"backend": name, "forward_ms": f, "backward_ms": b, "flash_work": work, **share}
        for row, work in zip(rows, (1.4, 2.2), strict=True)
        for name, (f, b) in times.items()
    ]
    machine = {"gpu": "a GPU", "torch": "2", "triton": "3", "commit": "abc"}
    page = markdown(attention.head_shapes({"environment": machine, "rows": both}))
    first, _, *lines = page.splitlines()
    assert first == "a GPU, torch 2, triton 3, abc; ms, triton; flash"
    assert lines[0].split(" | ")[2:] == ["documents 32 x 4K (256)", "auto / best, at most |"]
    assert lines[2:] == [
        "| qwen2.5-0.5b | 14 / 2 x 64 | 1.0 + 2.0; **1.0 + 1.0** | 1.00 |",
        "| deepseek-v2-lite | 16 / 16 x 192/128 | **1.0 + 2.0**; 1.0 + 1.0 | 1.55 |",
    ]
    # a run that fills the caches of compilers checks and times nothing
    assert attention.main([*SMALL_ATTENTION, *chosen, "--only-compile"]) == 0
    assert all(row.keys().isdisjoint({"check", "forward_ms"}) for row in rows_of(out))


def rows_of(file: Path) -> list[dict[str, Any]]:
    return json.loads(file.read_text())["rows"]


def test_useful_work_and_memory_by_hand() -> None:
    options = attention.parse([*SMALL_ATTENTION, "--workloads", "documents 32 x 4K"])
    # two chains of 3 tokens: 2 x (1 + 2 + 3) pairs
    forest = PrefixForest.from_parents([-1, -1], [3, 3])
    row = attention.measure("two", forest, Shape(4, 2, 32), "sdpa", options)
    assert row["red"] == []
    useful = 4 * 32 * 4 * 12
    assert row["forward_tflops"] == pytest.approx(useful / row["forward_ms"] / 1e9)
    assert row["backward_tflops"] == pytest.approx(2.5 * useful / row["backward_ms"] / 1e9)
    assert row["memory_formula"] == {
        "out": 6 * 4 * 32 * 2,
        "lse": 6 * 4 * 4,
        "rows of the backward": 6 * 4 * 8,
        "gradients": 6 * (4 + 2 + 2) * 32 * 2,
        "accumulators": 0,
    }


def test_accumulators_of_cut_tiles_are_counted() -> None:
    from prefixtree import TileShape

    mask = pack(workloads.forest_of([(64, [(64, [])] * 8)])).mask
    count = attention.accumulator_bytes
    assert count(mask, 2, 48, False) == 0
    tables = mask.tables(TileShape(16, 32, piece_tiles=8))
    mask.tables(TileShape(16, 64))
    cut, partials = len(tables.slots), int((tables.pieces[:, 4] >= 0).sum())
    assert 0 < cut < partials
    assert count(mask, 2, 48, False) == 4 * cut * 32 * 2 * 48
    assert count(mask, 2, 48, True) == 4 * partials * 32 * 2 * 48


def test_cuda_is_timed_by_events_and_by_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The course on a GPU, on a CUDA of three functions: a clock and two counters."""
    clock, log = [0.0], []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = clock[0]

        def elapsed_time(self, end: Event) -> float:
            assert log[-1] == "synchronize"
            return end.at - self.at

    def step() -> None:
        log.append("run")
        clock[0] += len(log)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 30)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 100)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: log.append("reset"))
    median, times = timing.median_ms(step, torch.device("cuda"), repeats=3, warm_ups=2)
    assert (median, times) == (5.0, [3.0, 5.0, 7.0])
    log.clear()
    assert timing.peak_bytes(step) == 70
    assert log == ["synchronize", "reset", "run", "synchronize"]
    log.clear()
    assert timing.host_us(step, calls=2) > 0
    assert log == ["synchronize", "run", "run", "synchronize"]


@pytest.mark.gpu
def test_a_run_on_a_gpu(tmp_path: Path) -> None:
    """Small, so that a GPU run does not find out late: events, peaks, the float64 check there."""
    out = tmp_path / "attention.json"
    arguments = ["--quick", "--scale", "0.05", "--repeats", "2", "--out", str(out)]
    assert attention.main(arguments) == 0
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 3
    for row in rows:
        assert row["forward_ms"] > 0 and row["backward_ms"] > 0
        assert row["peak_bytes"] > 0 and row["forward_host_us"] > 0


@pytest.mark.parametrize("scale", [0.01, 0.5])
def test_scaled_keeps_the_tree(scale: float) -> None:
    forest = workloads.workload("caterpillar 12")
    small = workloads.scaled(forest, scale, "heaviest")
    assert small.num_nodes == forest.num_nodes
    assert small.num_sequences == forest.num_sequences
    assert small.num_tokens == pytest.approx(scale * forest.num_tokens, rel=0.1)


def test_red_prints_no_time_and_fails_the_run(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A causal kernel under a tree's mask: right on one workload only, the one without a tree."""

    def causal(q: Any, k: Any, v: Any, mask: TreeMask, **options: Any) -> Any:
        if mask.subtree_end.unique().numel() > 1:
            mask = TreeMask(np.full(mask.num_tokens, mask.num_tokens))
        return tree_attention(q, k, v, mask, **options)

    monkeypatch.setattr(attention, "tree_attention", causal)
    monkeypatch.setitem(workloads.TREES, "prompt 8K x 16 x 2K", lambda: [(4000, [])])
    out = tmp_path / "attention.json"
    chosen = ["--workloads", "prompt 512 x 64 x 1K", "prompt 8K x 16 x 2K", "--no-variants"]
    assert attention.main([*SMALL_ATTENTION, *chosen, "--out", str(out)]) == 1
    bad, good = json.loads(out.read_text())["rows"]
    assert "out" in bad["red"] and good["red"] == []
    assert not [key for key in bad if key.endswith(("_ms", "_tflops"))]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("RED prompt 512 x 64 x 1K") and " ms" not in lines[0]
    assert "RED" in next(line for line in lines[3:] if line.startswith("prompt 512"))
    assert lines[-1] == "1 green, 1 red or failed"


def test_a_backend_that_does_not_exist_fails_the_run_and_not_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    chosen = ["--workloads", "documents 32 x 4K", "--backend", "imaginary", "sdpa"]
    assert attention.main([*SMALL_ATTENTION, *chosen]) == 1
    printed = capsys.readouterr().out
    assert "FAILED documents 32 x 4K, 4/2 D32, imaginary: UnsupportedError" in printed
    assert "1 green, 1 red or failed" in printed


def test_options(capsys: pytest.CaptureFixture[str]) -> None:
    quick = attention.parse(["--quick"])
    assert (quick.workloads, quick.variants, quick.repeats) == (list(attention.QUICK), False, 3)
    assert attention.shapes_of("caterpillar 24", attention.parse([])) == [
        Shape(32, 8, 128),
        Shape(32, 8, 64),
        Shape(32, 8, 256),
        Shape(32, 32, 128),
    ]
    assert attention.parse(["--rollouts", "x"]).workloads == workloads.NAMES
    shaped = attention.parse(["--shapes", "qwen3.5-27b", "phi-3-mini"])
    assert shaped.workloads == list(attention.SHAPED)[1:] and shaped.skipped == ["airline per turn"]
    assert attention.shapes_of("caterpillar 24", shaped) == [
        Shape(24, 4, 256),
        Shape(32, 32, 96),
    ]
    every = attention.shapes_of("", attention.parse(["--shapes", "all"]))
    assert every == list(shapes.SHAPES.values()) and len(set(every)) == len(every)
    with pytest.raises(SystemExit):
        attention.parse(["--workloads", "airline per turn"])
    assert "give --rollouts" in capsys.readouterr().err
