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


def compiled(data: dict[str, Any]) -> str:
    """What the machine code of the Triton kernels says."""
    rows = []
    for row in data["rows"]:
        # of what was not chosen, the main head dim tells enough
        if not row["chosen"] and row["dims"] != "128x128":
            continue
        c, loops = row["config"], row["loops"]
        limit = f", {c['registers']} registers at most" if c["registers"] else ""
        shape = f"{c['rows']} x {c['keys']}, {c['warps']} warps, {c['stages']} stages{limit}"
        steps = [f"{x['issued']} / {x['tensor']}, {x['spills']}" for x in loops]
        rows.append(
            [
                f"**{row['kernel']}**" if row["chosen"] else row["kernel"],
                row["dims"].replace("x", " / "),
                shape,
                str(row["registers"]),
                f"{row['shared'] / 1024:.0f}",
                str(row["programs"]),
                *steps,
            ]
        )
    head = ["kernel", "D / Dv", "rows x keys", "registers", "shared KiB", "programs"]
    return (
        f"sm_{data['capability']}, triton {data['triton']}, {data['dtype']}, "
        f"{data['heads'][0]} / {data['heads'][1]} heads\n\n"
        + _table([*head, "full tile", "partial tile"], rows)
    )


def attention(data: dict[str, Any]) -> str:
    """The Triton kernels on a GPU, beside what was timed around them."""
    peers: dict[tuple[str, str], float] = {}
    for file in sorted((HERE / "results" / "h200").glob("peers_*.json")):
        for row in json.loads(file.read_text())["rows"]:
            peers[row["workload"], row["peer"]] = row["forward_ms"] + row["backward_ms"]
    rows = []
    for row in data["rows"]:
        shape = f"{row['heads']} / {row['kv_heads']} x {row['head_dim']}"
        both = row["forward_ms"] + row["backward_ms"]
        ratios = []
        for peer in ("prototype", "flex", "fa4tree", "fa2", "fa4"):
            known = peers.get((row["workload"], peer)) if shape == "32 / 8 x 128" else None
            ratios.append(f"{both / known:.2f}" if known else "")
        worst = max(max(x["worst"], x["mean"]) for x in row["check"].values())
        rows.append(
            [
                row["workload"],
                shape,
                f"{row['forward_ms']:.2f}",
                f"{row['backward_ms']:.2f}",
                f"{row['forward_tflops']:.0f} / {row['backward_tflops']:.0f}",
                f"{worst:.2f}",
                *ratios,
            ]
        )
    made = data["environment"]
    head = ["workload", "heads", "forward ms", "backward ms", "TF", "error / limit", "prototype"]
    head += ["FlexAttention", "flash-attn-4 tree", "torch FA2", "flash-attn-4 varlen"]
    line = f"{made['gpu']}, torch {made['torch']}, triton {made['triton']}, {made['commit']}"
    return f"{line}\n\n{_table(head, rows)}"


def micro_batches(data: dict[str, Any]) -> str:
    """Plans, their bound and what others would compute."""
    rows = [
        [
            row["workload"],
            f"{row['budget']:,}",
            str(row["steps"]),
            f"{row['tokens']:,}",
            f"{row['bound']:,}",
            f"{row['over_bound']:.3f}",
            f"{row['balance']:.3f}",
            f"{row['naive_over_plan']:.2f}x",
            f"{row['verl_replicated_over_plan']:.2f}x",
            f"{row['verl_packed_over_plan']:.2f}x",
        ]
        for row in data["plans"]
    ]
    head = ["workload", "budget", "steps", "tokens", "bound", "tokens / bound", "heaviest / mean"]
    head += ["filled in order", "verl's plan", "verl's plan, packed"]
    return (
        f"{_made(data['environment'])}; {data['plans'][0]['ranks']} ranks\n\n{_table(head, rows)}"
    )


def verl_balance(data: dict[str, Any]) -> str:
    """veRL's balancing and ours."""
    rows = [
        [
            f"{row['max_tokens']:,}",
            row["balancing"],
            f"{row['tokens']:,}",
            f"{row['ratio']:.2f}x",
            f"{min(row['micro_batches'])} to {max(row['micro_batches'])}",
            f"{row['heaviest_over_mean']:.2f}",
        ]
        for row in data["rows"]
    ]
    head = ["budget", "balancing", "tokens", "replicated / computed", "micro-batches a rank"]
    return (
        f"{_made(data['environment'])}; {data['sequences']} samples, "
        f"{data['replicated_tokens']:,} tokens, {data['ranks']} ranks\n\n"
        + _table([*head, "heaviest / mean rank"], rows)
    )


def main() -> None:
    """Replaces what stands between the page's markers."""
    page = PAGE.read_text()
    for write in (packing, sdpa_cpu, attention, compiled, micro_batches, verl_balance):
        name = write.__name__
        folder = "h200/" if write is attention else ""
        text = write(json.loads((HERE / "results" / f"{folder}{name}.json").read_text()))
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
