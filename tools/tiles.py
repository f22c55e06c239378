"""Which tiles of flash-attn-4 are faster over block lists?

    python tools/tiles.py --rollouts ROLLOUTS --out tiles.json     # 3 minutes on an H200

An experiment, not a benchmark: it takes the choice of tiles from `launch`.

- Head dim 256: the backward in tiles of 64 x 48 and of 64 x 64, beside what the rule
  (`launch.DENSE_TILES_FROM`) takes.
- Head dim 64: the forward in tiles of 192 x 128, which flash-attn-4 takes where lists are over 192
  queries, beside 128 x 128. The lists of the backward stay over 128.

A candidate whose gradients are not those of the shipped tiles is red and has no time; one that does
not compile says why.
"""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.lib.environment import environment
from benchmarks.lib.flash import MOST_ERROR, worst_error
from benchmarks.lib.replicated import pairs
from benchmarks.lib.runs import write
from benchmarks.lib.shapes import Shape, draw
from benchmarks.lib.timing import median_ms
from benchmarks.lib.workloads import AIRLINE, NAMES, workload
from prefixtree import PrefixForest, pack, tree_attention
from prefixtree.kernels.attention.flash import launch
from prefixtree.kernels.attention.flash.block_lists import Tiles, lists_of
from prefixtree.kernels.attention.protocol import AttentionCall

WORKLOADS = ("4K then 4-2-2-1 x 1K", "prompt 512 x 64 x 1K", "caterpillar 24", AIRLINE)
SHIPPED = "shipped"


@dataclass(frozen=True)
class Candidate:
    """Names of `launch` and what stands in their place.

    Attributes:
        forward: the tiles of the forward, where its lists are others than the backward's.
    """

    name: str
    instead: dict[str, Any]
    forward: Tiles | None = None


CANDIDATES = {
    256: [
        Candidate("64 x 48", {"DENSE_TILES_FROM": 0}),
        Candidate("64 x 64", {"DENSE_TILES_FROM": math.inf}),
    ],
    64: [Candidate("forward 192 x 128", {}, Tiles(192, 128, 128))],
}

# 64 rows of a head hold fewer numbers, of dq at the end of a chain small ones
MOST_TILE_ERROR = 5e-2


@contextlib.contextmanager
def using(candidate: Candidate | None) -> Iterator[None]:
    """Inside, calls take a candidate's tiles; None: those that are shipped."""
    instead = {} if candidate is None else dict(candidate.instead)
    if candidate is not None and (tiles := candidate.forward) is not None:
        given_of = launch._given

        def given(call: AttentionCall) -> Any:
            made = given_of(call)
            lists = lists_of(call.mask, tiles, call.window, call.q.device)
            forward, _ = launch._arguments_of(lists, tiles)
            return launch._Given(forward, made.backward, made.lists)

        instead["_given"] = given
    before = {name: getattr(launch, name) for name in instead}
    vars(launch).update(instead)
    try:
        yield
    finally:
        vars(launch).update(before)


def tile_error(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    """Greatest distance over the norm, of 64 rows of a head: a tile that was left out shows."""
    worst = 0.0
    for a, b in zip(got, want, strict=True):
        room = (0, 0, 0, -len(a) % 64)
        off, norm = (
            F.pad(x.float().square().sum(2), room).view(-1, 64, a.shape[1]).sum(1)
            for x in (a.float() - b.float(), b)
        )
        found = float((off / norm.clamp(min=1e-12)).max().sqrt())
        worst = max(worst, found if found == found else float("inf"))
    return worst


@cache
def forest_of(name: str, rollouts: Path | None) -> PrefixForest:
    return workload(name, rollouts)


def measure(
    heads: Shape, name: str, candidate: Candidate | None, known: list[Any], rollouts: Path | None
) -> Any:
    """A row: a candidate's times on a workload; `known` keeps the results of the shipped tiles."""
    forest = forest_of(name, rollouts)
    dim = heads.head_dim
    row: dict[str, Any] = {"heads": heads.heads, "kv_heads": heads.kv_heads, "dim": dim}
    row |= {"workload": name, "tiles": SHIPPED if candidate is None else candidate.name}
    try:
        with using(candidate):
            mask = pack(forest).mask.to("cuda")
            q, k, v, dout = draw(forest, heads, torch.bfloat16, torch.device("cuda"))
            inputs = [x.requires_grad_() for x in (q, k, v)]
            attend = partial(tree_attention, mask=mask, backend="flash")
            out = attend(*inputs)
            backward = partial(torch.autograd.grad, out, inputs, dout, retain_graph=True)
            got = [out.detach(), *backward()]
            known[:] = known or got
            row["error"], row["tile_error"] = worst_error(got, known), tile_error(got, known)
            if not (row["error"] < MOST_ERROR and row["tile_error"] < MOST_TILE_ERROR):
                return row | {"red": ["gradients"]}
            call = AttentionCall(q, k, v, None, mask.host, 1.0, 0, 0.0, False)
            lists, tiles = launch.lists_and_tiles(call)
            row |= {"keys": tiles.backward_keys, "mean_list": lists.mean_list}

            def forward() -> None:
                with torch.no_grad():
                    attend(*inputs)

            row["forward_ms"], _ = median_ms(forward, dout.device, 7, 2)
            row["backward_ms"], _ = median_ms(backward, dout.device, 7, 2)
    except Exception as problem:  # what does not compile or fit is a finding
        return row | {"failed": f"{type(problem).__name__}: {problem}"[:300]}
    useful = 4.0 * dim * heads.heads * pairs(forest) / 1e9
    row["forward_tflops"] = useful / row["forward_ms"]
    return row | {"backward_tflops": 2.5 * useful / row["backward_ms"]}


def line(row: dict[str, Any]) -> str:
    """A row in short."""
    of = f"{row['heads']}/{row['kv_heads']} x {row['dim']}"
    name = f"{of:10} {row['workload']:24} {row['tiles']:18}"
    if "failed" in row:
        return f"{name} failed: {row['failed']}"
    if "red" in row:
        return f"{name} red: {row['red']}, error {row['error']:.1e}, {row['tile_error']:.1e}"
    return (
        f"{name} forward {row['forward_ms']:7.3f} ms {row['forward_tflops']:4.0f}   "
        f"backward {row['backward_ms']:7.3f} ms {row['backward_tflops']:4.0f}   "
        f"{row['keys']} keys, lists of {row['mean_list']:.0f}   "
        f"error {row['error']:.1e}, {row['tile_error']:.1e}"
    )


def main() -> None:
    """Prints a line per candidate and workload."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dims", nargs="+", type=int, default=list(CANDIDATES))
    parser.add_argument("--heads", nargs=2, type=int, default=(32, 8), help="of q, of k and v")
    parser.add_argument("--workloads", nargs="+", choices=NAMES, default=WORKLOADS)
    parser.add_argument("--rollouts", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows, where = [], environment()
    for dim in options.dims:
        for name in options.workloads:
            if name == AIRLINE and options.rollouts is None:
                continue
            known: list[torch.Tensor] = []
            for candidate in (None, *CANDIDATES[dim]):
                heads = Shape(options.heads[0], options.heads[1], dim)
                rows.append(measure(heads, name, candidate, known, options.rollouts))
                torch.cuda.empty_cache()
                print(line(rows[-1]), flush=True)
                write(options.out, {"environment": where, "rows": rows})


if __name__ == "__main__":
    main()
