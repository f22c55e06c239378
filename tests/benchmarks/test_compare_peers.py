"""Ratios over other kernels' times, and what cannot be compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cases import (
    compare_peers,
)
from benchmarks.lib import (
    workloads,
)

GPU = {"gpu": "NVIDIA H200", "torch": "2.11.0"}


def times(name: str, forward: float, backward: float, **more: Any) -> dict[str, Any]:
    return {"workload": name, "forward_ms": forward, "backward_ms": backward, **more}


def our_row(name: str, forward: float, backward: float, **more: Any) -> dict[str, Any]:
    shape = {"heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "order": "heaviest"}
    return times(name, forward, backward, backend="triton", **shape) | more


def compare(folder: Path, ours: Any, *peers: Any) -> Any:
    """Exit code and JSON of compare_peers."""
    paths = []
    for i, data in enumerate((ours, *peers)):
        paths.append(folder / f"{i}.json")
        paths[-1].write_text(json.dumps(data))
    out = folder / "out.json"
    arguments = ["--ours", paths[0], "--peers", *paths[1:], "--out", out]
    code = compare_peers.main([str(a) for a in arguments])
    return code, json.loads(out.read_text())


def all_peers() -> dict[str, Any]:
    rows = [
        times(name, 10.0, 20.0, peer=peer, order="heavy")
        for name in workloads.NAMES
        for peer in ("prototype", "flex", "fa4tree", "fa2", "fa4")
    ]
    return {"environment": GPU | {"red": {}}, "rows": rows}


@pytest.mark.parametrize(
    "forward, backward, missed",
    [
        (9.0, 18.0, set()),
        (9.1, 17.0, {"prototype forward"}),
        (8.0, 18.2, {"prototype backward"}),
        (8.0, 23.0, {"prototype backward", "flex backward", "fa2 backward", "fa4tree both"}),
        (14.2, 10.0, {"prototype forward", "flex forward", "fa2 forward", "fa4 forward"}),
    ],
)
def test_targets(
    tmp_path: Path,
    forward: float,
    backward: float,
    missed: set[str],
) -> None:
    rows = [our_row(name, forward, backward) for name in workloads.NAMES]
    ours = {"environment": GPU, "rows": rows}
    code, data = compare(tmp_path, ours, all_peers())
    assert code == (1 if missed else 0)
    assert data["notes"] == []
    got = {f"{t['peer']} {t['part']}" for t in data["targets"] if not t["is_met"]}
    assert got == missed
    # 4 a workload, one more on five of them, four more on the documents
    assert len(data["targets"]) == 4 * 10 + 5 + 4
    found = {t["workload"] for t in data["targets"] if t["peer"] == "fa4tree"}
    assert len(found) == 5 and "documents 32 x 4K" not in found


def test_what_is_missing_is_open_and_other_machines_are_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A red case of ours, a red peer, another shape and another order give no ratio."""
    name = "prompt 512 x 64 x 1K"
    red_row = our_row("caterpillar 12", 1, 1, red=["dk"])
    del red_row["forward_ms"], red_row["backward_ms"]
    rows = [our_row(name, 1, 1), red_row, our_row("caterpillar 24", 1, 1, head_dim=64)]
    ours = {"environment": GPU, "rows": rows}
    first = all_peers()
    first["rows"] = [r for r in first["rows"] if r["peer"] != "flex"]
    first["rows"] += [times(name, 1e-3, 1e-3, peer="flex", order="input")]
    other = {"gpu": "NVIDIA H100", "torch": "2.11.0+cu130", "red": {"flex": 0.5}}
    first["environment"] = GPU | other
    code, data = compare(tmp_path, ours, first)
    assert code == 2
    judged = {(t["workload"], t["peer"], t["part"]) for t in data["targets"] if t["is_met"]}
    assert judged == {(name, "prototype", p) for p in ("forward", "backward")} | {
        (name, "fa4tree", "both")
    }
    assert data["notes"] == [
        "gpu differs: ours NVIDIA H200, peers NVIDIA H100",
        "flex was red: 0.5",
    ]
    printed = capsys.readouterr().out
    assert "open: caterpillar 12, forward against prototype: not measured" in printed
    assert "targets: 3 met, 0 missed, 46 open" in printed


def test_what_cannot_be_compared_is_refused() -> None:
    ours_of = compare_peers.our_times
    rows = [our_row("caterpillar 12", 1, 1), our_row("caterpillar 12", 2, 2, backend="sdpa")]
    with pytest.raises(ValueError, match="choose one: triton, sdpa"):
        ours_of({"environment": GPU, "rows": rows}, None)
    assert ours_of({"environment": GPU, "rows": rows}, "sdpa")["caterpillar 12"]["both"] == 4
    with pytest.raises(ValueError, match="scaled-down"):
        ours_of({"environment": GPU | {"scale": 0.1}, "rows": rows}, "sdpa")
    peers = all_peers()
    with pytest.raises(ValueError, match="more than one file"):
        compare_peers.peer_times([peers, peers])
