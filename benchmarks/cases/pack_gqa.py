"""The flash backend's forward with the query heads of a kv head side by side in a tile, and apart.

    python -m benchmarks pack_gqa --rollouts ROLLOUTS.jsonl.gz --out OUT.json

What `launch.packs_heads` rests on: every head dim that flash serves with grouped heads, groups of
2 to 8, 4 kv heads, bf16. Forward and backward as the rule has them are held against float64 (all
rows of some heads, `checks.py`), and out and lse of the forward's other setting against those, in
every head; a red case has no times. The backward knows one setting only and is timed once, its key
tiles before its heads (`launch.heads_first`). Times are medians by CUDA events.

Kernels that flash-attn-4 has on disk (FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1) are not compiled
again: `--only-compile` puts them there, and may run for several head dims and groups at once.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.cases.attention import about, draw, median_ms, results_of, scaled
from benchmarks.cases.flash_by_hand import MOST_ERROR, order_of, worst_error
from benchmarks.lib.checks import check
from benchmarks.lib.shapes import Shape
from benchmarks.lib.workloads import AIRLINE, NAMES, workload
from prefixtree import PrefixForest, pack, tree_attention
from prefixtree.kernels.flash import launch

# those that spill first, so that a run cut short has them
DIMS = (256, 192, 128, 64, 96)
GROUPS = (6, 3, 5, 7, 4, 2, 8)
SETTINGS = {"packed": True, "apart": False}
Row = dict[str, Any]


@contextlib.contextmanager
def heads_in_tiles(packed: bool) -> Iterator[None]:
    """Inside, the forward's tiles hold the heads of a group side by side, or one head."""
    rule = launch.packs_heads
    launch.packs_heads = lambda group, d: packed
    try:
        yield
    finally:
        launch.packs_heads = rule


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
    # a token sees itself and what is above it
    pairs = int((mask.position_ids.long() + 1).sum())
    useful = 4.0 * shape.head_dim * shape.heads * pairs / 1e9
    row |= {f"{name}_tflops": useful / row[f"{name}_ms"] for name in SETTINGS}
    row["backward_tflops"] = 2.5 * useful / row["backward_ms"]
    return row


def table(rows: Sequence[Row]) -> Table:
    """Milliseconds and TF of both settings."""
    out = Table(box=None, pad_edge=False)
    names = ["heads", "packed ms", "apart ms", "ratio", "TF", "rule", "rule/best", "bwd ms", "TF"]
    for column in (*names, "error/limit", "other-rule"):
        out.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        cells = [f"{row['heads']}/{row['kv_heads']} D{row['head_dim']}"]
        if "packed_ms" not in row:
            out.add_row(*cells, row.get("failed", " ".join(row["red"]) or "compiled")[:60])
            continue
        packed, apart = row["packed_ms"], row["apart_ms"]
        cells += [f"{packed:.3f}", f"{apart:.3f}", f"{packed / apart:.3f}"]
        cells += [f"{row['packed_tflops']:.0f} / {row['apart_tflops']:.0f}", row["rule"]]
        cells.append(f"{row[row['rule'] + '_ms'] / min(packed, apart):.3f}")
        cells += [f"{row['backward_ms']:.2f}", f"{row['backward_tflops']:.0f}"]
        cells.append(f"{max(max(c['worst'], c['mean']) for c in row['check'].values()):.2f}")
        out.add_row(*cells, f"{row['other_from_rule']:.1e}")
    return out


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--dims", nargs="+", type=int, default=list(DIMS), help="head dims")
    add("--groups", nargs="+", type=int, default=list(GROUPS), help="query heads a kv head")
    add("--kv-heads", type=int, default=4)
    add("--workload", choices=NAMES, metavar="NAME", default=AIRLINE)
    add("--rollouts", type=Path, help=f"the file that {AIRLINE!r} reads")
    add("--tasks", type=int, default=3, help=f"of {AIRLINE!r}: the first so many groups")
    add("--order", choices=("heaviest", "input"), default="heaviest", help="of siblings")
    add("--backend", default="flash", help="another one, to try this script out")
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
            rows.append({**asdict(shape), "group": group, "red": [], "failed": failed})
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        row = rows[-1]
        print(f"{shape}: {row.get('failed') or row.get('red') or 'done'}", flush=True)
        if options.out is not None:
            result = {"environment": about(options), "rows": rows}
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    Console(width=150).print(table(rows))
    return 1 if any(row["red"] or "failed" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
