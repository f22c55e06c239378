"""Times tree attention, forward and backward apart, after holding every case against float64.

    python -m benchmarks attention --backend triton --rollouts ROLLOUTS.jsonl.gz --out OUT.json
    python -m benchmarks attention --device cpu --scale 0.01 --backend sdpa     # every code path
    python -m benchmarks attention --backend triton flash --tasks 3 --shapes qwen3.5-27b phi-3-mini

The ten workloads of `workloads.py` with 32 query heads, 8 kv heads, head dim 128, bf16; head dims
64 and 256 and as many kv heads as query heads on three of them. With `--shapes`, the head shapes of
models (`shapes.py`) on four workloads instead. A case is checked first, every row of some heads
(`checks.py`); red prints no time and makes the exit code 1, and so does a case that fails in
another way. Times are medians by CUDA events after warm-ups, without building tables. TF are useful
TFLOP/s, of visible pairs only: forward 2 (D + Dv) H x pairs, backward (6 D + 4 Dv) H x pairs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.lib.checks import NAMES as RESULTS
from benchmarks.lib.checks import check
from benchmarks.lib.environment import environment
from benchmarks.lib.shapes import SHAPES, Shape
from benchmarks.lib.workloads import AIRLINE, NAMES, workload
from prefixtree import PrefixForest, TreeMask, pack, tree_attention
from prefixtree.kernels.choice import flash_work, longest_share

# long nodes, one short level, many short nodes: where other head dims and MHA are measured too
VARIED = ("4K then 4-2-2-1 x 1K", "prompt 512 x 64 x 1K", "caterpillar 24")
QUICK = ("prompt 512 x 64 x 1K", "caterpillar 24", "documents 32 x 4K")
# where the head shapes of models are measured: `choice.MOST_WORK` is held to them
SHAPED = (AIRLINE, "caterpillar 24", "prompt 512 x 64 x 1K", "documents 32 x 4K")
Row = dict[str, Any]
# cycles, about 2 ms
_HEAD_START = 4_000_000


# ---- timing -------------------------------------------------------------------------------------


def median_ms(
    run: Callable[[], object], device: torch.device, repeats: int, warm_ups: int
) -> tuple[float, list[float]]:
    """Median and all milliseconds of `run`, by CUDA events where there is CUDA."""
    for _ in range(warm_ups):
        run()
    times = []
    for _ in range(repeats):
        if device.type != "cuda":
            start = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - start))
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # the GPU waits a moment, so that launches are queued before it begins: a host that is
        # slower than the kernels would be timed otherwise (its own time is a column of the table)
        torch.cuda._sleep(_HEAD_START)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times), times


def host_us(run: Callable[[], object], calls: int = 10) -> float:
    """Median microseconds until a call returns while the GPU still works: what the host pays."""
    times = []
    torch.cuda.synchronize()
    for _ in range(calls):
        start = time.perf_counter()
        run()
        times.append(1e6 * (time.perf_counter() - start))
    torch.cuda.synchronize()
    return statistics.median(times)


def peak_bytes(run: Callable[[], object]) -> int:
    """Most memory held during `run` beyond what was held before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


# ---- memory formula -----------------------------------------------------------------------------


def size(*tensors: torch.Tensor) -> int:
    """Bytes."""
    return sum(x.numel() * x.element_size() for x in tensors)


def accumulator_bytes(mask: TreeMask, kv_heads: int, dims: int, deterministic: bool) -> int:
    """fp32 sums of the cut key tiles: `tile_k x Hk x (D + Dv)` a cut tile, or, deterministic, a
    piece of one. Reads the tables that the backend has built for this mask."""
    count = 0
    for (shape, _, device), tables in mask.plan._tables.items():
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


# ---- what an attention gives, and takes ----------------------------------------------------------


def results_of(
    attend: Callable[..., Any], inputs: Sequence[torch.Tensor], dout: torch.Tensor
) -> dict[str, torch.Tensor]:
    """out, lse and the gradients, by the names of `checks.py`."""
    out, lse = attend(*inputs, return_lse=True)
    gradients = torch.autograd.grad(out, inputs, dout)
    return dict(zip(RESULTS, (out.detach(), lse.detach(), *gradients), strict=True))


def times_of(
    attend: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    dout: torch.Tensor,
    pairs: int,
    repeats: int,
    warm_ups: int,
) -> Row:
    """Medians of forward and backward apart, what the host pays, TF of so many visible pairs."""
    device, (_, heads, d), d_v = dout.device, inputs[0].shape, inputs[2].shape[2]

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return attend(*inputs)

    row: Row = {}
    timed = partial(median_ms, device=device, repeats=repeats, warm_ups=warm_ups)
    row["forward_ms"], row["forward_all_ms"] = timed(forward)
    backward = partial(torch.autograd.grad, attend(*inputs), inputs, dout, retain_graph=True)
    row["backward_ms"], row["backward_all_ms"] = timed(backward)
    if device.type == "cuda":
        row["forward_host_us"], row["backward_host_us"] = host_us(forward), host_us(backward)
    row["forward_tflops"] = 2.0 * (d + d_v) * heads * pairs / row["forward_ms"] / 1e9
    row["backward_tflops"] = (6.0 * d + 4.0 * d_v) * heads * pairs / row["backward_ms"] / 1e9
    return row


# ---- one case -----------------------------------------------------------------------------------


def scaled(forest: PrefixForest, scale: float, order: str) -> PrefixForest:
    """The same tree with every node `scale` as long, one token at least."""
    if scale == 1:
        return forest
    lengths = np.maximum(1, (forest.node_length * scale).astype(np.int64))
    return PrefixForest.from_parents(
        forest.node_parent, lengths, sequence_ends=forest.sequence_node, order=order
    )


def draw(
    forest: PrefixForest, shape: Shape, dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """q, k, v and dout, of the same numbers in every run on one kind of device."""
    generator = torch.Generator(device).manual_seed(0)
    h, hk, d, d_v = shape.heads, shape.kv_heads, shape.head_dim, shape.dim_of_v
    return [
        torch.randn(forest.num_tokens, *size, generator=generator, device=device, dtype=dtype)
        for size in ((h, d), (hk, d), (hk, d_v), (h, d_v))
    ]


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
    row["flash_work"] = flash_work(mask.plan, 0)
    row["longest_share"] = longest_share(mask.plan, 0)
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

    # a token sees itself and what is above it
    pairs = int((mask.position_ids.long() + 1).sum())
    row |= times_of(attend, inputs, dout, pairs, options.repeats, options.warm_ups)
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


# ---- the run ------------------------------------------------------------------------------------


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


def table(rows: Sequence[Row]) -> Table:
    """All cases, the errors as shares of their limits."""
    out = Table(box=None, pad_edge=False)
    for column in ("workload", "tokens", "shape", "backend"):
        out.add_column(column, no_wrap=True)
    for column in (
        "fwd ms",
        "bwd ms",
        "both",
        "TF fwd/bwd",
        "error/limit",
        "peak/formula",
        "host us",
    ):
        out.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        cells = [row["workload"], f"{row['tokens']:,}"]
        cells += [str(shape_of(row)), row["backend"]]
        if "failed" in row:
            out.add_row(*cells, "failed")
            continue
        if row["red"]:
            out.add_row(*cells, "RED", " ".join(row["red"]))
            continue
        if "forward_ms" not in row:
            out.add_row(*cells, "compiled")
            continue
        forward, backward = row["forward_ms"], row["backward_ms"]
        cells += [f"{forward:.2f}", f"{backward:.2f}", f"{forward + backward:.2f}"]
        cells.append(f"{row['forward_tflops']:.0f} / {row['backward_tflops']:.0f}")
        cells.append(f"{max(max(c['worst'], c['mean']) for c in row['check'].values()):.2f}")
        if "peak_bytes" in row:
            cells.append(f"{row['peak_bytes'] / 2**30:.2f} GiB / {row['peak_over_formula']:.2f}")
            cells.append(f"{row['forward_host_us']:.0f} / {row['backward_host_us']:.0f}")
        out.add_row(*cells)
    return out


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options, checked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--backend", nargs="+", default=["auto"], help="of tree_attention; several are compared")
    add("--workloads", nargs="+", choices=NAMES, metavar="NAME", help="all unless said")
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


def about(options: argparse.Namespace) -> Row:
    """The environment, with what a GPU result needs besides."""
    here = environment()
    # a copy of a checkout may have a git of its own, which knows another commit
    here["commit"] = options.commit or here["commit"]
    here["cuda"] = torch.version.cuda
    try:
        here["triton"] = version("triton")
    except PackageNotFoundError:
        here["triton"] = None
    return here | {"device": options.device, "scale": options.scale, "skipped": options.skipped}


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
                    result = {"environment": about(options), "rows": rows}
                    options.out.write_text(json.dumps(result, indent=1) + "\n")
    for name in options.skipped:
        print(f"{name!r} was skipped: give --rollouts")
    Console(width=150).print(table(rows))
    bad = [row for row in rows if row.get("red") or "failed" in row]
    print(f"{len(rows) - len(bad)} green, {len(bad)} red or failed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
