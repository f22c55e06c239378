"""What do chosen keys cost in tree attention, beside all keys? What does choosing them cost?

    python -m benchmarks sparse --rollouts ROLLOUTS.jsonl.gz --out sparse.json
    python -m benchmarks sparse --device cpu --scale 0.02 --repeats 1     # every code path

Some heads of DeepSeek V3.2's attention (D 192, Dv 128) over airline turns, in Triton: all keys,
then k chosen at random on a query's path, a bit each. Both are held against float64 on one head
before they are timed (`lib/checks.py`). TF are useful TFLOP/s of visible pairs, chosen or not.
Without rollouts, eight trees of a prompt with two levels of branches stand for them.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.lib.checks import check, results_of
from benchmarks.lib.replicated import pairs
from benchmarks.lib.runs import Report, Row, parse, parser
from benchmarks.lib.shapes import Shape, draw
from benchmarks.lib.tables import Column, Parts, Table, machine, number, verdict, verdict_column
from benchmarks.lib.timing import times_of
from benchmarks.lib.workloads import AIRLINE, scaled, workload
from prefixtree import PrefixForest, TreeMask, pack, tree_attention
from prefixtree.kernels.chosen import to_bits, words

ALL, CHOSEN = "all keys", "chosen keys"
WITHOUT_ROLLOUTS = "8 x (2K, 8 x 512, 2 x 512)"


def random_bits(mask: TreeMask, count: int, rows: int = 4096) -> torch.Tensor:
    """int32 [T, W]: of each query's path about `count` keys at random, its own among them, or all
    of a shorter path."""
    generator = torch.Generator(mask.device).manual_seed(1)
    position, deepest = mask.position_ids.long(), mask.host.deepest
    parts = []
    for own in position.split(rows):
        share = count / (own + 1)
        drawn = torch.rand(len(own), deepest, generator=generator, device=mask.device)
        is_chosen = drawn < share[:, None]
        is_chosen[torch.arange(len(own), device=mask.device), own] = True
        parts.append(to_bits(is_chosen, words(deepest)))
    return torch.cat(parts)


def run_side(side: str, forest: PrefixForest, mask: TreeMask, options: argparse.Namespace) -> Row:
    """Checks, then times, one side."""
    shape = Shape(options.heads, options.heads, 192, 128)
    dtype = getattr(torch, options.dtype)
    q, k, v, dout = draw(forest, shape, dtype, mask.device)
    bits = random_bits(mask, options.topk) if side == CHOSEN else None
    attend = partial(tree_attention, mask=mask, chosen=bits, backend=options.backend)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    got = results_of(attend, inputs, dout)
    chosen = None if bits is None else (bits, mask.position_ids.long())
    with torch.no_grad():
        verdicts = check(q, k, v, dout, got, forest, 1, chosen=chosen)
    row: Row = {"red": [found.name for found in verdicts if found.is_red]}
    row["worst"] = max(max(found.worst, found.mean) for found in verdicts)
    if row["red"]:
        return row
    del got
    return row | times_of(attend, inputs, dout, pairs(forest), options.repeats, 1)


def tables(data: Row) -> Parts:
    """A line per side."""
    dense = next((row for row in data["rows"] if row["side"] == ALL), {})

    def over(key: str) -> Column:
        def ratio(row: Row) -> str:
            return f"{row[key] / dense[key]:.2f}" if key in row and key in dense else ""

        return Column("of all keys", ratio)

    yield f"{machine(data['environment'], 'triton')}; {data['workload']}, {data['tokens']:,} tokens"
    yield Table(
        [
            Column("attention to", lambda row: row["side"]),
            Column("heads", lambda row: str(row["heads"])),
            Column("forward ms", lambda row: number(row, "forward_ms", ".2f")),
            over("forward_ms"),
            Column("backward ms", lambda row: number(row, "backward_ms", ".2f")),
            over("backward_ms"),
            Column("TF forward", lambda row: number(row, "forward_tflops", ".0f")),
            Column("TF backward", lambda row: number(row, "backward_tflops", ".0f")),
            Column("error / limit", lambda row: number(row, "worst", ".2f"), is_detail=True),
            verdict_column(),
        ],
        data["rows"],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every side was green."""
    what = parser(__doc__)
    add = what.add_argument
    add("--rollouts", type=Path, help=f"the file that {AIRLINE!r} reads")
    add("--tasks", type=int, default=8, help="the first so many groups of it")
    add("--heads", type=int, default=16, help="of 128")
    add("--topk", type=int, default=2048, help="keys of a query")
    options = parse(what, arguments)
    if options.read is not None:
        return Report.read(options).finish(tables)
    if options.backend == "auto":
        # on a CPU without the interpreter the code paths are those of sdpa
        is_here = torch.device(options.device).type == "cuda" or "TRITON_INTERPRET" in os.environ
        options.backend = "triton" if is_here else "sdpa"
    name = AIRLINE if options.rollouts else WITHOUT_ROLLOUTS
    if options.is_tiny:
        options.topk = max(1, round(options.topk * options.scale))
    forest = scaled(
        workload(name, options.rollouts, tasks=options.tasks), options.scale, "heaviest"
    )
    mask = pack(forest).mask.to(options.device)
    report = Report(options, workload=name, tokens=forest.num_tokens, pairs=pairs(forest))
    for side in (ALL, CHOSEN):
        case = {"side": side, "heads": options.heads, "topk": options.topk}
        row = report.attempt(case, partial(run_side, side, forest, mask, options))
        times = "{forward_ms:.2f} + {backward_ms:.2f} ms"
        print(f"{side}: {verdict(row) or times.format(**row)}", flush=True)
    return report.finish(tables)
