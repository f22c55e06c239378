"""Should a tile of flash's forward hold the query heads of a group, or one head?

    python -m benchmarks pack_gqa --rollouts ROLLOUTS.jsonl.gz --out OUT.json

What `launch.packs_heads` rests on: every head dim that flash serves with grouped heads, groups of 2
to 8, 4 kv heads, bf16. Forward and backward as the rule has them are held against float64 (all rows
of some heads, `lib/checks.py`), and out and lse of the forward's other setting against those, in
every head; a red case has no times. The backward knows one setting only and is timed once, its key
tiles before its heads (`launch.heads_first`). Times are medians by CUDA events.

Kernels that flash-attn-4 has on disk (FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1) are not compiled
again: `--only-compile` puts them there, and may run for several head dims and groups at once.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.checks import check, results_of
from benchmarks.lib.environment import about
from benchmarks.lib.flash import MOST_ERROR, heads_in_tiles, order_of, worst_error
from benchmarks.lib.replicated import pairs
from benchmarks.lib.runs import described, write
from benchmarks.lib.shapes import Shape, draw
from benchmarks.lib.tables import Column, Parts, Table, by_key, machine, show, verdict
from benchmarks.lib.timing import median_ms
from benchmarks.lib.workloads import AIRLINE, NAMES, scaled, workload
from prefixtree import PrefixForest, pack, tree_attention
from prefixtree.kernels.attention.flash import launch

# those that spill first, so that a run cut short has them
DIMS = (256, 192, 128, 64, 96)
GROUPS = (6, 3, 5, 7, 4, 2, 8)
SETTINGS = {"packed": True, "apart": False}
Row = dict[str, Any]


def measure(shape: Shape, forest: PrefixForest, options: argparse.Namespace) -> Row:
    """Both settings of one shape."""
    group = shape.heads // shape.kv_heads
    rule = launch.packs_heads(group, shape.head_dim)
    row: Row = {"workload": options.workload, "group": group, **asdict(shape)}
    row |= {"tokens": forest.num_tokens, "rule": "packed" if rule else "apart", "red": []}
    device = torch.device(options.device)
    mask = pack(forest).mask.to(device)
    *inputs, dout = draw(forest, shape, torch.bfloat16, device)
    inputs = [x.requires_grad_() for x in inputs]
    attend = partial(tree_attention, mask=mask, backend=options.backend)

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            return attend(*inputs, return_lse=True)

    start = time.perf_counter()
    got = results_of(attend, inputs, dout)
    row["first_call_s"] = time.perf_counter() - start
    with heads_in_tiles(not rule):
        start = time.perf_counter()
        other = forward()
        row["other_first_call_s"] = time.perf_counter() - start
    if options.only_compile:
        return row
    with torch.no_grad():
        verdicts = check(*(x.detach() for x in inputs), dout, got, forest, options.check_heads)
    row["check"] = {v.name: {"worst": v.worst, "mean": v.mean, "error": v.error} for v in verdicts}
    row["red"] = [v.name for v in verdicts if v.is_red]
    row["other_from_rule"] = worst_error(other, (got["out"], got["lse"]))
    if not row["other_from_rule"] < MOST_ERROR:
        row["red"].append("other")
    del got, other
    if row["red"]:
        return row
    timed = partial(median_ms, device=device, repeats=options.repeats, warm_ups=options.warm_ups)
    for name, packed in SETTINGS.items():
        with heads_in_tiles(packed):
            row[f"{name}_ms"], row[f"{name}_all_ms"] = timed(forward)
    backward = partial(torch.autograd.grad, attend(*inputs), inputs, dout, retain_graph=True)
    row["backward_ms"], row["backward_all_ms"] = timed(backward)
    useful = 4.0 * shape.head_dim * shape.heads * pairs(forest) / 1e9
    row |= {f"{name}_tflops": useful / row[f"{name}_ms"] for name in SETTINGS}
    row["backward_tflops"] = 2.5 * useful / row["backward_ms"]
    return row


def tables(data: Row) -> Parts:
    """The forward with the heads of a group in one tile and a head per tile, by head dim and group;
    what the rule takes is in bold."""

    def of_group(group: int) -> Column:
        def cell(line: dict[int, Row]) -> str:
            row = line.get(group, {})
            if "packed_ms" not in row:
                return verdict(row) or "compiled" if row else ""
            times = {name: f"{row[f'{name}_ms']:.2f}" for name in SETTINGS}
            taken = "packed" if launch.packs_heads(group, row["head_dim"]) else "apart"
            times[taken] = f"**{times[taken]}**"
            return f"{times['packed']} / {times['apart']}"

        return Column(f"group of {group}", cell)

    first = data["rows"][0]
    about = f"{first['workload']}, {first['tokens']:,} tokens, {first['kv_heads']} kv heads"
    yield f"{machine(data['environment'], 'triton')}; {about}; forward ms, packed / apart"
    lines = by_key(data["rows"], lambda row: row["head_dim"], "group")
    groups = sorted({row["group"] for row in data["rows"]})
    yield Table(
        [
            Column("D", lambda line: str(next(iter(line.values()))["head_dim"])),
            *(of_group(group) for group in groups),
        ],
        [lines[dim] for dim in sorted(lines)],
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = described(__doc__)
    add = parser.add_argument
    add("--dims", nargs="+", type=int, default=list(DIMS), help="head dims")
    add("--groups", nargs="+", type=int, default=list(GROUPS), help="query heads a kv head")
    add("--kv-heads", type=int, default=4)
    add("--workload", choices=NAMES, metavar="NAME", default=AIRLINE)
    add("--rollouts", type=Path, help=f"the file that {AIRLINE!r} reads")
    add("--tasks", type=int, default=3, help=f"of {AIRLINE!r}: the first so many groups")
    add("--order", choices=("heaviest", "input"), default="heaviest", help="of siblings")
    add("--backend", default="flash", help="another one, to try the code out")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--scale", type=float, default=1.0, help="on the length of every node, for trying out")
    add("--check-heads", type=int, default=2, help="kv heads held against float64")
    add("--repeats", type=int, default=9)
    add("--warm-ups", type=int, default=3)
    add("--only-compile", action="store_true", help="run every case once, unchecked")
    add("--commit", help="where the checkout cannot tell, on a machine without its .git")
    add("--out", type=Path, help="JSON, written after every row")
    options = parser.parse_args(arguments)
    if options.workload == AIRLINE and options.rollouts is None:
        parser.error(f"{AIRLINE!r} reads a file of rollouts: give --rollouts")
    options.skipped = []
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every setting was right and timed."""
    options = parse(arguments)
    torch.set_float32_matmul_precision("highest")
    forest = workload(options.workload, options.rollouts, options.order, options.tasks)
    forest = scaled(forest, options.scale, options.order)
    rows: list[Row] = []
    for dim, group in itertools.product(options.dims, options.groups):
        shape = Shape(group * options.kv_heads, options.kv_heads, dim)
        try:
            with order_of("tiles first"):
                rows.append(measure(shape, forest, options))
        except Exception as problem:
            failed = f"{type(problem).__name__}: {problem}"[:1000]
            known = {"workload": options.workload, "tokens": forest.num_tokens}
            rows.append({**known, **asdict(shape), "group": group, "red": [], "failed": failed})
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        row = rows[-1]
        print(f"{shape}: {row.get('failed') or row.get('red') or 'done'}", flush=True)
        result = {"environment": about(options), "rows": rows}
        write(options.out, result)
    show(tables(result))
    return 1 if any(row["red"] or "failed" in row for row in rows) else 0
