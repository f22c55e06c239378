"""How fast is tree attention, forward and backward apart, by workload, backend and heads?

    python -m benchmarks attention --backend triton --rollouts ROLLOUTS.jsonl.gz --out OUT.json
    python -m benchmarks attention --device cpu --scale 0.01 --backend sdpa     # every code path
    python -m benchmarks attention --backend triton flash --tasks 3 --shapes qwen3.5-27b phi-3-mini

The eleven workloads of `lib/workloads.py` with 32 query heads, 8 kv heads, head dim 128, bf16; head
dims 64 and 256 and as many kv heads as query heads on three of them. With `--shapes`, the head
shapes of models (`lib/shapes.py`) on four workloads instead. A case is checked first, every row of
some heads (`lib/checks.py`); red prints no time and makes the exit code 1, and so does a case that
fails in another way. Times are medians by CUDA events after warm-ups, without building tables. TF
are useful TFLOP/s, of visible pairs only: forward 2 (D + Dv) H x pairs, backward (6 D + 4 Dv) H x
pairs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.checks import check, results_of
from benchmarks.lib.environment import about
from benchmarks.lib.replicated import pairs
from benchmarks.lib.runs import described, write
from benchmarks.lib.shapes import SHAPES, Shape, draw
from benchmarks.lib.tables import Column, Parts, Table, by_key, gib, machine, show
from benchmarks.lib.timing import peak_bytes, size, times_of
from benchmarks.lib.workloads import AIRLINE, NAMES, scaled, workload
from prefixtree import PrefixForest, TreeMask, pack, tree_attention
from prefixtree.kernels.attention.choice import (
    flash_work,
    longest_key_tile_share,
    most_work,
    with_tail,
)

# long nodes, one short level, many short nodes: where other head dims and MHA are measured too
VARIED = ("4K then 4-2-2-1 x 1K", "prompt 512 x 64 x 1K", "caterpillar 24")
QUICK = ("prompt 512 x 64 x 1K", "caterpillar 24", "documents 32 x 4K")
# where the head shapes of models are measured: `choice.MOST_WORK` is held to them
SHAPED = (AIRLINE, "caterpillar 24", "prompt 512 x 64 x 1K", "documents 32 x 4K")
Row = dict[str, Any]


# ---- memory formula ------------------------------------------------------------------------------


def accumulator_bytes(mask: TreeMask, kv_heads: int, dims: int, deterministic: bool) -> int:
    """fp32 sums of the cut key tiles: `tile_k x Hk x (D + Dv)` a cut tile, or, deterministic, a
    piece of one. Reads the tables that the backend has built for this mask."""
    count = 0
    for (shape, _, device), tables in mask.host._tables.items():
        if device == mask.device and shape.piece_tiles:
            partials = int((tables.slots[:, 2] - tables.slots[:, 1]).sum())
            count += (partials if deterministic else len(tables.slots)) * shape.tile_k
    return 4 * count * kv_heads * dims


def memory_formula(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    mask: TreeMask,
    deterministic: bool = False,
) -> dict[str, int]:
    """Bytes that forward + backward should need at their peak, part by part; inputs, tables and
    dout stand before they begin and are not counted.

    out like dout; lse, and the two float32 rows of the backward's preprocess, [H, T] each; the
    gradients of q, k, v; the accumulators of cut key tiles.
    """
    return {
        "out": size(dout),
        "lse": 4 * q.shape[0] * q.shape[1],
        "rows of the backward": 8 * q.shape[0] * q.shape[1],
        "gradients": size(q, k, v),
        "accumulators": accumulator_bytes(mask, k.shape[1], q.shape[2] + v.shape[2], deterministic),
    }


# ---- one case ------------------------------------------------------------------------------------


def measure(
    name: str, forest: PrefixForest, shape: Shape, backend: str, options: argparse.Namespace
) -> Row:
    """Checks one case and, if it is green, times it."""
    device = torch.device(options.device)
    row: Row = {
        "workload": name,
        "order": options.order,
        "backend": backend,
        **asdict(shape),
        "dtype": options.dtype,
        "tokens": forest.num_tokens,
        "replicated": forest.num_replicated_tokens,
    }
    mask = pack(forest).mask.to(device)
    q, k, v, dout = draw(forest, shape, getattr(torch, options.dtype), device)
    row["flash_work"] = flash_work(mask.host, 0)
    row["longest_share"] = longest_key_tile_share(mask.host, 0)
    attend = partial(
        tree_attention, mask=mask, backend=backend, deterministic=options.deterministic
    )
    inputs = [x.requires_grad_() for x in (q, k, v)]

    start = time.perf_counter()
    got = results_of(attend, inputs, dout)
    row["first_call_s"] = time.perf_counter() - start
    if options.only_compile:
        return row | {"red": []}
    start = time.perf_counter()
    with torch.no_grad():
        verdicts = check(q, k, v, dout, got, forest, options.check_heads)
    row["check_s"] = time.perf_counter() - start
    row["check"] = {v.name: {"worst": v.worst, "mean": v.mean, "error": v.error} for v in verdicts}
    row["red"] = [v.name for v in verdicts if v.is_red]
    del got
    if row["red"]:
        return row

    row |= times_of(attend, inputs, dout, pairs(forest), options.repeats, options.warm_ups)
    formula = memory_formula(q, k, v, dout, mask, options.deterministic)
    row["memory_formula"] = formula
    if device.type == "cuda":
        row["peak_bytes"] = peak_bytes(lambda: torch.autograd.grad(attend(*inputs), inputs, dout))
        row["peak_over_formula"] = row["peak_bytes"] / sum(formula.values())
    return row


def guarded(
    name: str, forest: PrefixForest, shape: Shape, backend: str, options: argparse.Namespace
) -> Row:
    """`measure`, where a case that fails is a row with its error and not the end of the run."""
    try:
        return measure(name, forest, shape, backend, options)
    except Exception as problem:
        text = f"{type(problem).__name__}: {problem}"
        row = {"workload": name, "order": options.order, "backend": backend, **asdict(shape)}
        return row | {"tokens": forest.num_tokens, "failed": text[:1000]}
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


# ---- the run -------------------------------------------------------------------------------------


def shapes_of(name: str, options: argparse.Namespace) -> list[Shape]:
    """Those asked for by name; else the main shape, and on three workloads half and twice its head
    dim and MHA."""
    if options.shapes:
        return [SHAPES[shape] for shape in options.shapes]
    main = Shape(*options.heads, options.head_dim)
    if name not in VARIED or not options.variants:
        return [main]
    h, hk, d = main.heads, main.kv_heads, main.head_dim
    return [main, Shape(h, hk, d // 2), Shape(h, hk, 2 * d), Shape(h, h, d)]


def shape_of(row: Row) -> Shape:
    """Of a row; those of earlier files have one head dim."""
    return Shape(row["heads"], row["kv_heads"], row["head_dim"], row.get("v_head_dim"))


def headline(row: Row) -> str:
    """One line for a finished case."""
    what = f"{row['workload']}, {shape_of(row)}, {row['backend']}"
    if "failed" in row:
        return f"FAILED {what}: {row['failed'][:300]}"
    if row["red"]:
        worst = {n: round(max(c["worst"], c["mean"]), 2) for n, c in row["check"].items()}
        return f"RED {what}: error over its limit {worst}"
    if "forward_ms" not in row:
        return f"compiled {what}: {row['first_call_s']:.1f} s"
    return (
        f"{what}: forward {row['forward_ms']:.2f} backward {row['backward_ms']:.2f} "
        f"both {row['forward_ms'] + row['backward_ms']:.2f} ms"
    )


def tables(data: Row, *peers: Row) -> Parts:
    """A line per case; `peers` are files of others' times on the same cases."""
    times = {
        (row["workload"], row["peer"]): row["forward_ms"] + row["backward_ms"]
        for file in peers
        for row in file["rows"]
    }

    def timed(head: str, text: Callable[[Row], str], is_detail: bool = False) -> Column:
        return Column(head, lambda row: text(row) if "forward_ms" in row else "", is_detail)

    def over(peer: str, title: str) -> Column:
        def ratio(row: Row) -> str:
            known = times.get((row["workload"], peer)) if heads(row) == "32 / 8 x 128" else None
            return f"{(row['forward_ms'] + row['backward_ms']) / known:.2f}" if known else ""

        return timed(title, ratio)

    def memory(row: Row) -> str:
        if "peak_bytes" not in row:
            return ""
        return f"{gib(row['peak_bytes'], '.2f')} / {row['peak_over_formula']:.2f}"

    def host(row: Row) -> str:
        if "forward_host_us" not in row:
            return ""
        return f"{row['forward_host_us']:.0f} / {row['backward_host_us']:.0f}"

    def problem(row: Row) -> str:
        if row.get("red"):
            return f"RED {' '.join(row['red'])}"
        return "failed" if "failed" in row else "" if "forward_ms" in row else "compiled"

    yield machine(data["environment"], "triton")
    yield Table(
        [
            Column("workload", lambda row: row["workload"]),
            Column("heads", heads),
            Column("tokens", lambda row: f"{row['tokens']:,}", is_detail=True),
            Column("backend", lambda row: row["backend"], is_detail=True),
            timed("forward ms", lambda row: f"{row['forward_ms']:.2f}"),
            timed("backward ms", lambda row: f"{row['backward_ms']:.2f}"),
            timed("TF", lambda row: f"{row['forward_tflops']:.0f} / {row['backward_tflops']:.0f}"),
            timed("error / limit", lambda row: f"{worst_share(row):.2f}"),
            over("prototype", "prototype"),
            over("flex", "FlexAttention"),
            over("fa4tree", "flash-attn-4 tree"),
            over("fa2", "torch FA2"),
            over("fa4", "flash-attn-4 varlen"),
            timed("peak GiB / formula", memory, is_detail=True),
            timed("host us", host, is_detail=True),
            Column("", problem, is_detail=True),
        ],
        data["rows"],
    )


def heads(row: Row) -> str:
    """Query heads, kv heads and head dims."""
    dims = "/".join(str(dim) for dim in dict.fromkeys(head_dims(row)))
    return f"{row['heads']} / {row['kv_heads']} x {dims}"


def worst_share(row: Row) -> float:
    """The worst error of a case over its limit."""
    return max(max(found["worst"], found["mean"]) for found in row["check"].values())


def head_dims(row: Row) -> tuple[int, int]:
    """Of q and of v; rows of earlier files have one for both."""
    return row["head_dim"], row.get("v_head_dim") or row["head_dim"]


def automatic(row: Row) -> str:
    """The backend that `"auto"` takes for the case of a row, on an H200 (132 multiprocessors)."""
    work = with_tail(row["flash_work"], row["longest_share"], row["heads"], 132)
    most = most_work(row["head_dim"], row["heads"] // row["kv_heads"])
    return "flash" if work <= most else "triton"


def total_ms(sides: dict[str, Row]) -> dict[str, float]:
    """Forward + backward by backend."""
    return {name: row["forward_ms"] + row["backward_ms"] for name, row in sides.items()}


def auto_over_best(sides: dict[str, Row]) -> float:
    """The time of what `auto` takes over that of the faster backend."""
    times = total_ms(sides)
    return times[automatic(sides["triton"])] / min(times.values())


def backends(data: Row) -> Parts:
    """The two GPU backends beside one another, and what `auto` takes."""

    def of_side(name: str) -> list[Column]:
        def ms(sides: dict[str, Row]) -> str:
            return f"{sides[name]['forward_ms']:.2f} + {sides[name]['backward_ms']:.2f}"

        def rate(sides: dict[str, Row]) -> str:
            return f"{sides[name]['forward_tflops']:.0f} / {sides[name]['backward_tflops']:.0f}"

        def memory(sides: dict[str, Row]) -> str:
            return gib(sides[name]["peak_bytes"], ".2f")

        return [Column(f"{name} ms", ms), Column("TF", rate), Column("GiB", memory)]

    def ratio(sides: dict[str, Row]) -> str:
        times = total_ms(sides)
        return f"{times['triton'] / times['flash']:.2f}"

    cases = by_key(data["rows"], lambda row: (row["workload"], heads(row)), "backend")
    yield f"{machine(data['environment'], 'triton')}; forward + backward"
    yield Table(
        [
            Column("workload", lambda sides: sides["triton"]["workload"]),
            Column("heads", lambda sides: heads(sides["triton"])),
            *of_side("triton"),
            *of_side("flash"),
            Column("triton / flash", ratio),
            Column("auto", lambda sides: automatic(sides["triton"])),
            Column("auto / best", lambda sides: f"{auto_over_best(sides):.2f}"),
        ],
        list(cases.values()),
    )


def head_shapes(*runs: Row) -> Parts:
    """The two backends with the heads of models; what `auto` takes is in bold."""
    rows = [row for run in runs for row in run["rows"]]
    known = {shape: name for name, shape in SHAPES.items()}
    order = list(SHAPES.values())
    shapes: dict[Shape, dict[str, dict[str, Row]]] = {}
    for row in rows:
        shapes.setdefault(shape_of(row), {}).setdefault(row["workload"], {})[row["backend"]] = row
    tokens = {row["workload"]: row["tokens"] for row in rows}

    def of_workload(name: str) -> Column:
        def cell(line: Any) -> str:
            sides = line[1][name]
            taken = automatic(sides["triton"])
            texts = {
                x: f"{sides[x]['forward_ms']:.1f} + {sides[x]['backward_ms']:.1f}"
                for x in ("triton", "flash")
            }
            return "; ".join(f"**{text}**" if x == taken else text for x, text in texts.items())

        return Column(f"{name} ({tokens[name]:,})", cell)

    def most(line: Any) -> str:
        return f"{max(auto_over_best(sides) for sides in line[1].values()):.2f}"

    yield f"{machine(runs[0]['environment'], 'triton')}; ms, triton; flash"
    yield Table(
        [
            Column("heads of", lambda line: known[line[0]]),
            Column("q / kv x D", lambda line: heads(next(iter(line[1].values()))["triton"])),
            *(of_workload(name) for name in tokens),
            Column("auto / best, at most", most),
        ],
        sorted(shapes.items(), key=lambda item: order.index(item[0])),
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options, checked."""
    parser = described(__doc__)
    add = parser.add_argument
    add("--backend", nargs="+", default=["auto"], help="of tree_attention; several are compared")
    add("--workloads", nargs="+", choices=NAMES, metavar="NAME", help="default: all")
    add("--rollouts", type=Path, help=f"the file that {AIRLINE!r} reads")
    add("--tasks", type=int, default=8, help=f"of {AIRLINE!r}: the first so many groups")
    add("--order", choices=("heaviest", "input"), default="heaviest", help="of siblings")
    add("--heads", nargs=2, type=int, default=(32, 8), metavar=("H", "HK"))
    add("--head-dim", type=int, default=128)
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    add("--shapes", nargs="+", choices=["all", *SHAPES], metavar="SHAPE", help="of models, or all")
    add("--variants", action=argparse.BooleanOptionalAction, default=True, help="D / 2, 2 D, MHA")
    add("--deterministic", action="store_true")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--scale", type=float, default=1.0, help="on the length of every node, for trying out")
    add("--check-heads", type=int, default=2, help="kv heads held against float64")
    add("--repeats", type=int, default=7)
    add("--warm-ups", type=int, default=3)
    add(
        "--only-compile",
        action="store_true",
        help="run every case once, unchecked, for the caches that compilers keep on disk",
    )
    add("--quick", action="store_true", help="three workloads without variants, 3 repeats")
    add("--commit", help="in place of what git says, on a machine with a copy")
    add("--out", type=Path, help="JSON")
    options = parser.parse_args(arguments)
    if options.quick:
        options.variants, options.repeats = False, min(3, options.repeats)
        options.workloads = options.workloads or list(QUICK)
    if options.shapes and "all" in options.shapes:
        options.shapes = list(SHAPES)
    options.skipped = []
    if options.workloads is None:
        options.workloads = list(SHAPED if options.shapes else NAMES)
        if options.rollouts is None:
            options.workloads.remove(AIRLINE)
            options.skipped.append(AIRLINE)
    elif AIRLINE in options.workloads and options.rollouts is None:
        parser.error(f"{AIRLINE!r} reads a file of rollouts: give --rollouts")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every case was green and timed."""
    options = parse(arguments)
    # the eager baseline's float32 sums are float32
    torch.set_float32_matmul_precision("highest")
    rows: list[Row] = []
    for name in options.workloads:
        forest = workload(name, options.rollouts, options.order, options.tasks)
        forest = scaled(forest, options.scale, options.order)
        for shape in shapes_of(name, options):
            for backend in options.backend:
                rows.append(guarded(name, forest, shape, backend, options))
                print(headline(rows[-1]), flush=True)
                if options.out is not None:
                    # after every case, so that a run cut short leaves what it has
                    write(options.out, {"environment": about(options), "rows": rows})
    for name in options.skipped:
        print(f"{name!r} was skipped: give --rollouts")
    show(tables({"environment": about(options), "rows": rows}))
    bad = [row for row in rows if row.get("red") or "failed" in row]
    print(f"{len(rows) - len(bad)} green, {len(bad)} red or failed")
    return 1 if bad else 0
