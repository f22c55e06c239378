"""How fast is every workload beside all that attends to the same batch today?

    python -m benchmarks peers --rollouts FILE --out peers.json --plot peers.png   # on a GPU
    python -m benchmarks peers --device cpu --scale 0.01 --repeats 1               # every code path

Attention forward and backward, 32 query heads, 8 kv heads, head dim 128, bf16. Sides: packed, by
`--backend`; the replicated batch through FA2 ("fa2"), flash-attn-4 ("fa4") and our backend
("own"); the forest through FlexAttention ("flex"). Checks and the bound are those of
`lib/against.py`.

Ceilings: what kernels reach without any tree, dense causal attention of 4 sequences of 8,192 tokens
by flash-attn-4, cuDNN, FA2 and our backend, held against each other before they are timed, and
a product of bf16 matrices. TF are useful TFLOP/s, forward 4 D H x pairs, backward 2.5 times that.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.lib.against import compare, settle, sided
from benchmarks.lib.plots import LABELS, bars, figure, name, save
from benchmarks.lib.replicated import missing, out_of, pairs, peer
from benchmarks.lib.runs import Report, Row, parse, parser
from benchmarks.lib.shapes import Shape, draw
from benchmarks.lib.tables import (
    Column,
    Parts,
    Table,
    machine,
    number,
    times_cell,
    verdict,
    verdict_column,
)
from benchmarks.lib.timing import median_ms, times_of
from benchmarks.lib.workloads import AIRLINE, NAMES, scaled, skip_airline, workload
from prefixtree import PrefixForest
from prefixtree.testing.attention import LIMITS, Attention, differences

SEQUENCES, TOKENS = 4, 8192
CEILINGS = ("own", "fa4", "cudnn", "fa2")
SDPA = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}
MATRIX = 8192


def dense(side: str, count: int, tokens: int, options: argparse.Namespace) -> Attention:
    """Causal attention of `count` equal sequences, q, k and v [count x tokens, heads, head dim]."""
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    if side == "own":
        return peer(side, [tokens] * count, device, dtype, options.backend)
    if side == "fa4":
        from flash_attn.cute.interface import flash_attn_func

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return out_of(flash_attn_func(q, k, v, causal=True))

    else:

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            rows = (x.transpose(1, 2) for x in (q, k, v))
            with sdpa_kernel(SDPA[side]):
                out = F.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2)

    def attend(*inputs: torch.Tensor) -> torch.Tensor:
        return run(*(x.view(count, tokens, *x.shape[1:]) for x in inputs)).flatten(0, 1)

    return attend


def scaled_tokens(options: argparse.Namespace) -> int:
    """Of a sequence of the ceilings."""
    return max(16, round(TOKENS * options.scale))


def ceiling(side: str, known: dict[str, Any], options: argparse.Namespace) -> Row:
    """Checks against the first side that ran, then times, dense attention."""
    count, tokens = SEQUENCES, scaled_tokens(options)
    apart = PrefixForest.from_parents([-1] * count, [tokens] * count, order="input")
    shape, dtype = Shape(*options.heads, options.head_dim), getattr(torch, options.dtype)
    *inputs, dout = draw(apart, shape, dtype, torch.device(options.device))
    inputs = [x.requires_grad_() for x in inputs]
    attend = dense(side, count, tokens, options)
    out = attend(*inputs)
    results = [out.detach(), *torch.autograd.grad(out, inputs, dout)]
    del out
    row: Row = {"red": []}
    if "results" in known:
        row["check"] = differences(results, known["results"])
        limit = LIMITS[options.dtype]
        row["red"] = [key for key, gap in row["check"].items() if not gap <= limit]
        if row["red"]:
            return row
    else:
        known |= {"results": results, "side": side}
    return row | times_of(attend, inputs, dout, pairs(apart), options.repeats, 2)


def product(options: argparse.Namespace) -> Row:
    """A square product of matrices in the dtype."""
    n = max(16, round(MATRIX * options.scale))
    generator = torch.Generator(options.device).manual_seed(0)
    where: dict[str, Any] = {"generator": generator, "device": options.device}
    a, b = (torch.randn(n, n, **where).to(getattr(torch, options.dtype)) for _ in range(2))
    run: Callable[[], object] = partial(torch.matmul, a, b)
    ms, _ = median_ms(run, torch.device(options.device), options.repeats, 2)
    return {"red": [], "forward_ms": ms, "forward_tflops": 2.0 * n**3 / ms / 1e9}


# ---- output --------------------------------------------------------------------------------------


def tables(data: Row) -> Parts:
    """Every workload against what attends to the same batch today, and what dense kernels reach."""

    def over(side: str) -> Column:
        def cell(row: Row) -> str:
            if side not in row.get("speedup", {}):
                return ""
            return f"{row['times'][side]['ms']:.1f}, {row['speedup'][side]:.2f}x"

        return Column(LABELS[side], cell)

    def rate(part: str) -> Column:
        return Column(f"{part} TF", lambda row: number(row, f"{part}_tflops", ".0f"))

    yield f"{machine(data['environment'], 'triton')}; forward + backward"
    yield Table(
        [
            Column("workload", lambda row: row["case"]),
            Column("distinct", lambda row: number(row, "distinct", ",d")),
            Column("FLOPs alone", lambda row: times_cell(row.get("bound"))),
            Column(
                "packed ms", lambda row: number(row.get("times", {}).get("packed", {}), "ms", ".1f")
            ),
            *(over(side) for side in data["sides"]),
            verdict_column(),
        ],
        [row for row in data["rows"] if "side" not in row],
    )
    yield Table(
        [
            Column("ceiling", lambda row: row["case"]),
            Column("by", lambda row: row["side"]),
            rate("forward"),
            rate("backward"),
            verdict_column(),
        ],
        [row for row in data["rows"] if "side" in row],
    )


def plot(report: Report, sides: Sequence[str]) -> None:
    """Speed-up of packed over each side, one group of bars per workload."""
    rows = [row for row in report.rows if row.get("speedup")]
    fig, (axis,) = figure(1, f"packed attention over others', {report.where}")
    fig.set_size_inches(11, 4.4)
    bars(axis, {side: [row["speedup"].get(side) for row in rows] for side in sides})
    for x, row in enumerate(rows):
        label = LABELS["bound"] if x == 0 else None
        ends = (x - 0.42, x + 0.42)
        axis.plot(ends, [row["bound"]] * 2, "--", color="#222222", linewidth=1, label=label)
    axis.set_xticks(range(len(rows)), [row["case"] for row in rows], fontsize=7, rotation=20)
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    name(axis, "", "time over packed, forward + backward")
    save(fig, report.options.plot)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every case was green."""
    what = parser(__doc__)
    sided(what, ("fa2", "fa4", "own", "flex"))
    add = what.add_argument
    add("--workloads", nargs="*", choices=NAMES, metavar="NAME", default=list(NAMES))
    add("--rollouts", type=Path, help=f"the file that {AIRLINE!r} reads")
    add("--ceilings", nargs="*", choices=CEILINGS, default=list(CEILINGS))
    options = parse(what, arguments)
    if options.read is not None:
        return finish(Report.read(options))
    settle(options)
    skip_airline(options)
    report = Report(options, sides=options.sides)
    for title in options.workloads:
        forest = scaled(workload(title, options.rollouts), options.scale, "heaviest")
        row = report.attempt({"case": title}, partial(compare, forest, options, {}))
        over = ", ".join(f"{gain:.2f}x {side}" for side, gain in row.get("speedup", {}).items())
        print(f"{title}: {verdict(row) or over}", flush=True)
    known: dict[str, Any] = {}
    is_cpu = torch.device(options.device).type == "cpu"
    for side in options.ceilings:
        # torch's FA2 and cuDNN are those of GPUs
        if not (missing(side, options.device) or (is_cpu and side in SDPA)):
            case = {"case": f"dense causal, {SEQUENCES} x {scaled_tokens(options):,}", "side": side}
            report.attempt(case, partial(ceiling, side, known, options))
    if options.ceilings:
        case = {"case": "product of two square matrices", "side": options.dtype}
        report.attempt(case, partial(product, options))
    return finish(report)


def finish(report: Report) -> int:
    """Draws, prints; the exit code."""
    sides = report.facts["sides"]
    if report.options.plot is not None and any(row.get("speedup") for row in report.rows):
        plot(report, sides)
    return report.finish(tables)
