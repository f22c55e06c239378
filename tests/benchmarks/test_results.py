"""The measured numbers: the pages' tables, and the rules that rest on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import write_tables
from benchmarks.cases import (
    attention,
)
from benchmarks.lib import (
    shapes,
    workloads,
)
from prefixtree import pack
from prefixtree.kernels.attention.flash import launch
from prefixtree.kernels.attention.flash.block_lists import lists_of
from tests.benchmarks.support import (
    ROOT,
)


def test_the_tables_are_those_of_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = write_tables
    pages = {name: getattr(write, name) for name in ("PAGE", "README", "VERL", "MEGATRON")}
    for name, page in pages.items():
        monkeypatch.setattr(write, name, tmp_path / page.name)
        (tmp_path / page.name).write_text(page.read_text())
    write.main()
    for page in pages.values():
        assert (tmp_path / page.name).read_text() == page.read_text(), (
            f"{page.name}: run python -m benchmarks.write_tables"
        )


H200 = ROOT / "benchmarks/results/h200"
CPU = torch.device("cpu")


SHAPED = sorted(H200.glob("shapes_*.json"))


@pytest.fixture
def compared() -> dict[tuple[Any, ...], dict[str, Any]]:
    """Rows by backend: a dict a (file, workload, heads, kv heads, head dims)."""
    cases: dict[tuple[Any, ...], dict[str, Any]] = {}
    for file in (H200 / "backends.json", *SHAPED):
        for row in json.loads(file.read_text())["rows"]:
            dims = attention.head_dims(row)
            case = (file.stem, row["workload"], row["heads"], row["kv_heads"], dims)
            cases.setdefault(case, {})[row["backend"]] = row
    assert len(cases) >= 19
    return cases


def test_auto_is_never_far_from_the_best_backend(
    compared: dict[tuple[Any, ...], dict[str, Any]],
) -> None:
    """The rule against the measurements it rests on: at most 5 % slower than the faster backend."""
    taken, far = set(), {}
    for case, sides in compared.items():
        times = {name: row["forward_ms"] + row["backward_ms"] for name, row in sides.items()}
        chosen = attention.automatic(sides["triton"])
        taken.add(chosen)
        if times[chosen] > 1.05 * min(times.values()):
            far[case] = (chosen, times)
    assert not far
    assert taken == {"triton", "flash"}


def test_every_grouping_and_head_dim_that_flash_serves_was_measured(
    compared: dict[tuple[Any, ...], dict[str, Any]],
) -> None:
    served = {(*dims, False) for dims in launch.SERVED}
    served |= {(*dims, True) for dims in launch.SERVED if dims[0] == dims[1]}
    assert {(*dims, heads > kv_heads) for *_, heads, kv_heads, dims in compared} == served
    shaped = {(workload, *shape) for name, workload, *shape in compared if name != "backends"}
    assert shaped == {
        (workload, shape.heads, shape.kv_heads, (shape.head_dim, shape.dim_of_v))
        for workload in attention.SHAPED
        for shape in shapes.SHAPES.values()
    }


def test_heads_are_packed_where_that_is_no_slower() -> None:
    """In the forward of flash; at most 3 % from the better setting."""
    rows = json.loads((H200 / "pack_gqa.json").read_text())["rows"]
    dims = {d for d, d_v in launch.SERVED if d == d_v}
    assert {row["head_dim"] for row in rows} == dims
    assert {row["group"] for row in rows} == set(range(2, 9))
    for row in rows:
        times = {True: row["packed_ms"], False: row["apart_ms"]}
        taken = times[launch.packs_heads(row["group"], row["head_dim"])]
        assert taken <= 1.03 * min(times.values()), row


def test_tiles_of_head_dim_256_are_the_faster_ones() -> None:
    """Of the backward of flash: what its rule takes on every workload that needs no file."""
    rows = json.loads((H200 / "tiles.json").read_text())["rows"]
    rows = [row for row in rows if row["dim"] == 256 and row["workload"] != workloads.AIRLINE]
    times: dict[str, dict[int, float]] = {}
    for row in rows:
        if keys := {"shipped": 64, "64 x 48, two stages, turned": 48}.get(row["tiles"]):
            times.setdefault(row["workload"], {})[keys] = row["backward_ms"]
    dense, taken = launch.dense_tiles_for(256, 256), set()
    assert dense is not None and len(times) == 3
    for name, of in times.items():
        lists = lists_of(pack(workloads.workload(name, None)).mask.host, dense, 0, CPU)
        keys = 48 if lists.mean_list >= launch.DENSE_TILES_FROM else 64
        assert of[keys] == min(of.values()), name
        taken.add(keys)
    assert taken == {48, 64}
