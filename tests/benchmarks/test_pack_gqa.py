"""benchmarks/cases/pack_gqa.py on the CPU: what it sets, checks and prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cases import (
    pack_gqa,
)
from benchmarks.lib.tables import markdown
from prefixtree import tree_attention
from prefixtree.kernels.attention.flash import launch


def rows_of(file: Path) -> list[dict[str, Any]]:
    return json.loads(file.read_text())["rows"]


def test_packed_heads_and_heads_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through sdpa, which knows neither: what the script sets, checks and prints."""
    out, rule = tmp_path / "pack_gqa.json", launch.packs_heads
    asked: list[bool] = []

    def attend(*inputs: Any, **options: Any) -> Any:
        asked.append(launch.packs_heads(6, 256))
        return tree_attention(*inputs, **options)

    monkeypatch.setattr(pack_gqa, "tree_attention", attend)
    arguments = "--device cpu --backend sdpa --scale 0.003 --repeats 1 --warm-ups 0 --dims 256"
    arguments = [*arguments.split(), "--workload", "documents 32 x 4K", "--out", str(out)]
    assert pack_gqa.main([*arguments, "--groups", "6", "4"]) == 0
    assert launch.packs_heads is rule
    first, second = rows_of(out)
    assert (first["rule"], second["rule"]) == ("apart", "packed")
    assert (first["heads"], first["kv_heads"], first["other_from_rule"]) == (24, 4, 0)
    # of the first row: by the rule, the other, each setting timed, the backward's forward
    assert asked[:5] == [False, True, True, False, False]
    parts = pack_gqa.tables(
        {"environment": dict.fromkeys(("gpu", "torch", "triton", "commit"), "x")}
        | {"rows": [row | {"packed_ms": 2.0, "apart_ms": 1.0} for row in (first, second)]}
    )
    assert markdown(parts).splitlines()[-1] == "| 256 | **2.00** / 1.00 | 2.00 / **1.00** |"

    def wrong(*inputs: Any, **options: Any) -> Any:
        out, lse = tree_attention(*inputs, **options)
        return (out * 1.1, lse) if launch.packs_heads(6, 256) else (out, lse)

    monkeypatch.setattr(pack_gqa, "tree_attention", wrong)
    assert pack_gqa.main([*arguments, "--groups", "6"]) == 1
    assert rows_of(out)[0]["red"] == ["other"] and "packed_ms" not in rows_of(out)[0]
