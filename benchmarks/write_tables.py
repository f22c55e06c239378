"""Writes the tables of docs/performance.md from the JSON under results/.

python benchmarks/write_tables.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "performance.md"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _made(environment: dict[str, Any]) -> str:
    return (
        f"`{environment['command']}` at {environment['commit']}, {environment['processor']}, "
        f"{environment['cores']} cores, torch {environment['torch']}"
    )


def packing(data: dict[str, Any]) -> str:
    """Forest, packing and tables."""
    forests = [
        [
            row["case"],
            f"{row['replicated']:,}",
            f"{row['distinct']:,}",
            f"{row['ms']:.1f}",
            f"{row['ns_a_token']:.1f}",
            f"{row['memory_over_input']:.2f}x" if row.get("memory_over_input") else "",
        ]
        for row in data["forest"]
    ]
    shapes = list(dict.fromkeys(row["tiles"] for row in data["tables"]))
    cells: dict[str, dict[str, str]] = {}
    for row in data["tables"]:
        name = f"{row['workload']} ({row['tokens']:,} tokens)"
        share = f"{row['ms']:.1f} ms, {row['useful_share']:.3f}, {row['partial_share']:.0%}"
        cells.setdefault(name, {})[row["tiles"]] = share
    return "\n\n".join(
        [
            _made(data["environment"]),
            _table(
                ["`from_sequences`", "tokens", "distinct", "ms", "ns a token", "extra / input"],
                forests,
            ),
            _table(
                ["packed forest of the first row", "ms"],
                [[row["step"], f"{row['ms']:.1f}"] for row in data["packed"]],
            ),
            "Block tables: build time, useful share (visible pairs over the pairs that the tiles "
            "compute), share of partial tiles:",
            _table(
                ["workload", *shapes],
                [[name, *(found[s] for s in shapes)] for name, found in cells.items()],
            ),
        ]
    )


def sdpa_cpu(data: dict[str, Any]) -> str:
    """The sdpa backend against sequences one by one."""
    return (
        f"{_made(data['environment'])}\n\n"
        f"fp32, 8 heads of 64, {data['sequences']} sequences, {data['packed_tokens']:,} distinct "
        f"of {data['replicated_tokens']:,} tokens, forward and backward: "
        f"**{data['packed_s']:.2f} s packed, {data['replicated_s']:.1f} s** for every sequence "
        f"alone through torch's SDPA, **{data['speed_up']:.1f}x**; attention FLOPs alone bound it "
        f"at {data['attention_flop_ratio']:.1f}x (the replicated side also adds up the copies' "
        f"gradients). Largest relative difference {max(data['relative_difference'].values()):.1e}."
    )


def main() -> None:
    """Replaces what stands between the page's markers."""
    page = PAGE.read_text()
    for write in (packing, sdpa_cpu):
        name = write.__name__
        text = write(json.loads((HERE / "results" / f"{name}.json").read_text()))
        page, count = re.subn(
            rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)",
            lambda found, text=text: f"{found[1]}{text}\n{found[2]}",
            page,
            flags=re.DOTALL,
        )
        assert count == 1, f"{PAGE} has no markers for {name}"
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
