"""Which tiles of flash-attn-4 are fastest over block lists, and which sharing out of them?

    python tools/tiles.py --dims 128 --rollouts ROLLOUTS --out tiles_128.json     # on an H200
    python tools/tiles.py --dims 256 64 --rollouts ROLLOUTS --out tiles_256.json

An experiment, not a benchmark: it replaces flash-attn-4's choice of tiles, which nothing else does.

- Head dim 128, short nodes. Most of what they lose is the start and end of a block of threads, one
  per key tile and query head, and the longest list, so lists are shared out as work items
  (`prefixtree.kernels.flash.work_items`); with `stored`, items that have all of a key tile store dk
  and dv, and do not add them up in float32.
- Head dim 256. flash-attn-4's dense backward works in tiles of 64 x 48 with two stages of q and the
  accumulators of dk and dv turned (366 TF); with block lists it falls back to 64 x 64 with one
  stage (255 to 264 TF). Candidates give our lists key tiles of 48, so that the dense tiles serve.
- Head dim 64. The forward falls back from 192 x 128 to 128 x 128.

A candidate whose gradients are not those of the shipped tiles is red and has no time; one that does
not compile says why.

The Triton kernels at these head dims, 4 minutes more:

    python -m benchmarks tune --dim 256 --workloads "4K then 4-2-2-1 x 1K" "airline per turn" \
        --kernels keys queries --rollouts ROLLOUTS --out tune_256.json \
        --shapes 32,64,4,3 32,128,8,2 64,64,8,2 64,64,8,1 64,32,4,3 128,64,8,1 128,32,8,3 32,64,8,3
    python -m benchmarks tune --dim 64 --workloads "caterpillar 24" "airline per turn" \
        --rollouts ROLLOUTS --out tune_64.json \
        --shapes 128,64,8,3 128,128,8,2 64,128,4,3 64,64,4,4 128,64,4,3 256,64,8,2
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
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
from prefixtree.kernels import device_info
from prefixtree.kernels.flash import launch, work_items
from prefixtree.kernels.flash.block_lists import ForestLists, Tiles
from prefixtree.packing.transfers import move

WORKLOADS = {
    64: ("4K then 4-2-2-1 x 1K", "prompt 512 x 64 x 1K", "caterpillar 24", AIRLINE),
    128: ("prompt 512 x 64 x 1K", "prompt 256 x 1024 x 256", "caterpillar 24", AIRLINE),
    256: ("4K then 4-2-2-1 x 1K", "prompt 512 x 64 x 1K", "caterpillar 24", AIRLINE),
}


@dataclass(frozen=True)
class Candidate:
    """Tiles, and what of flash-attn-4's configurations they replace, by the names of its fields.

    Attributes:
        shared: how the backward is shared out: "" one block of threads per key tile and head;
            "out" by work items, one kv head after the other; "beside" with an item's kv heads
            beside one another; "stored" by work items that store dk and dv where they have all.
        parts: of `work_items.PARTS`; 0 for the package's.
    """

    name: str
    tiles: Tiles
    forward: dict[str, Any] = field(default_factory=dict)
    backward: dict[str, Any] = field(default_factory=dict)
    shared: str = ""
    parts: int = 0


def _small(queries: int, keys: int, **more: Any) -> dict[str, Any]:
    """Fewer keys, so that p goes through shared memory."""
    return {"m_block_size": queries, "n_block_size": keys, "AtomLayoutMSdP": 2} | {
        "AtomLayoutNdKV": 1,
        "dQ_swapAB": queries % 64 != 0,
        **more,
    }


# 64 rows of a head hold fewer numbers, of dq at the end of a chain small ones
MOST_TILE_ERROR = 5e-2

# dk and dv turned: the head dim lies along the products' rows, so any multiple of 16 keys serves
_TURNED = {"dKV_swapAB": True, "num_stages_Q": 2}
CANDIDATES = {
    128: [
        Candidate("lists of 64 queries", Tiles(128, 128, 128, 64)),
        Candidate("shared out", Tiles(128, 128, 128, 64), shared="out"),
        Candidate("shared out, 8 parts", Tiles(128, 128, 128, 64), shared="out", parts=8),
        Candidate("shared out, 64 parts", Tiles(128, 128, 128, 64), shared="out", parts=64),
        Candidate("shared out, kv heads beside", Tiles(128, 128, 128, 64), shared="beside"),
        Candidate("shared out, dk and dv stored", Tiles(128, 128, 128, 64), shared="stored"),
        Candidate(
            "shared out, 80 queries",
            Tiles(128, 128, 128, 80),
            {},
            {"m_block_size": 80, "dQ_swapAB": True},
            shared="out",
        ),
        Candidate(
            "stored, 80 queries",
            Tiles(128, 128, 128, 80),
            {},
            {"m_block_size": 80, "dQ_swapAB": True},
            shared="stored",
        ),
        Candidate(
            "shared out, dq by one warpgroup",
            Tiles(128, 128, 128, 64),
            {},
            {"dQ_single_wg": True},
            shared="out",
        ),
        Candidate("shared out, 64 x 64", Tiles(128, 128, 64, 64), {}, _small(64, 64), shared="out"),
        Candidate("shared out, 96 x 64", Tiles(128, 128, 64, 96), {}, _small(96, 64), shared="out"),
    ],
    256: [
        Candidate("shared out", Tiles(128, 80, 64, 64), shared="out"),
        Candidate(
            "64 x 48, two stages, turned",
            Tiles(128, 80, 48, 64),
            {},
            {"n_block_size": 48, **_TURNED},
        ),
        Candidate(
            "shared out, 64 x 48, two stages, turned",
            Tiles(128, 80, 48, 64),
            {},
            {"n_block_size": 48, **_TURNED},
            shared="out",
        ),
        Candidate(
            "shared out, 64 x 64, one stage, turned",
            Tiles(128, 80, 64, 64),
            {},
            {"dKV_swapAB": True},
            shared="out",
        ),
        Candidate(
            "stored, 64 x 48, two stages, turned",
            Tiles(128, 80, 48, 64),
            {},
            {"n_block_size": 48, **_TURNED},
            shared="stored",
        ),
        Candidate("forward 128 x 64", Tiles(128, 64, 64), {"n_block_size": 64}),
        Candidate("forward 128 x 96", Tiles(128, 96, 64), {"n_block_size": 96}),
    ],
    64: [
        Candidate("shared out", Tiles(128, 128, 128), shared="out"),
        Candidate("shared out, dk and dv stored", Tiles(128, 128, 128), shared="stored"),
        Candidate("forward 192 x 128", Tiles(384, 128, 128), {"m_block_size": 192}),
        Candidate(
            "forward 192 x 128, lists of 192", Tiles(192, 128, 128, 128), {"m_block_size": 192}
        ),
        Candidate("forward 128 x 192", Tiles(128, 192, 128), {"n_block_size": 192}),
        Candidate(
            "shared out, 64 queries",
            Tiles(128, 128, 128, 64),
            {},
            {"m_block_size": 64, "AtomLayoutMdQ": 1},
            shared="out",
        ),
    ],
}


def _shared_out(lists: ForestLists, heads: Shape, candidate: Candidate, tokens: int) -> Any:
    """The items of a backward, as flash-attn-4's field for a table takes them; and the slots."""
    from prefixtree.kernels.flash.shared_out_backward import Slots

    before = work_items.PARTS
    work_items.PARTS = candidate.parts or before
    try:
        made, split = work_items.work_items(
            lists.partial_visits,
            lists.full_visits,
            heads.heads // heads.kv_heads,
            heads.kv_heads,
            device_info.processors(lists.spans.device),
        )
    finally:
        work_items.PARTS = before
    device, keys = lists.spans.device, candidate.tiles.backward_keys
    rows = (split[:, None] * keys + np.arange(keys)).reshape(-1)
    places = np.flatnonzero(rows < tokens)
    moved = [move(torch.from_numpy(x), device) for x in (rows[places], places)]
    return move(torch.from_numpy(made).flatten(), device), Slots(len(split), *moved)


@contextlib.contextmanager
def using(candidate: Candidate | None, heads: Shape, tokens: int) -> Iterator[None]:
    """Inside, flash-attn-4 takes a candidate's tiles; None: those that are shipped."""
    if candidate is None:
        yield
        return
    from flash_attn.cute import interface

    from prefixtree.kernels.flash import heads_first_backward, shared_out_backward

    calls = {
        "out": shared_out_backward.flash_attn_bwd,
        "beside": shared_out_backward.turned_flash_attn_bwd,
        "stored": shared_out_backward.storing_flash_attn_bwd,
    }
    # the copies of its backward have names of their own
    copies = [
        heads_first_backward.flash_attn_bwd.__globals__,
        shared_out_backward.flash_attn_bwd.__globals__,
        shared_out_backward.turned_flash_attn_bwd.__globals__,
        shared_out_backward.storing_globals,
    ]
    names = ("_tile_size_fwd_sm90", "_tile_size_bwd_sm90")
    before, tiles_for = {name: getattr(interface, name) for name in names}, launch.tiles_for
    backward_call, arguments_of = launch._backward_call, launch._arguments_of
    kept: dict[int, Any] = {}

    def arguments(lists: ForestLists, tiles: Tiles) -> Any:
        if id(lists) not in kept:
            forward, backward = arguments_of(lists, tiles)
            items, slots = _shared_out(lists, heads, candidate, tokens)
            sparse = backward["block_sparse_tensors"]._replace(cu_total_m_blocks=items)
            changed = {"block_sparse_tensors": sparse}
            changed |= {"slots": slots} if candidate.shared == "stored" else {}
            kept[id(lists)] = lists, (forward, backward | changed)
        return kept[id(lists)][1]

    def changed(name: str, changes: dict[str, Any], *args: Any, **how: Any) -> Any:
        return replace(before[name](*args, **how), **changes)

    given = zip(names, (candidate.forward, candidate.backward), strict=True)
    after = {name: partial(changed, name, changes) for name, changes in given}
    launch.tiles_for = lambda d, d_v: candidate.tiles
    if candidate.shared:
        launch._backward_call = lambda heads_first, wide: calls[candidate.shared]
        launch._arguments_of = arguments
    for of in (vars(interface), *copies):
        of.update(after)
    try:
        yield
    finally:
        launch.tiles_for = tiles_for
        launch._backward_call, launch._arguments_of = backward_call, arguments_of
        for of in (vars(interface), *copies):
            of.update(before)


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
    dim: int, name: str, candidate: Candidate | None, known: list[Any], options: Any
) -> Any:
    """A row: a candidate's times on a workload; `known` keeps the results of the shipped tiles."""
    forest = forest_of(name, options.rollouts)
    heads = Shape(32, 8, dim)
    row: dict[str, Any] = {"dim": dim, "workload": name, "tiles": "shipped"}
    if candidate is not None:
        row["tiles"] = candidate.name
    try:
        with using(candidate, heads, int(forest.node_length.sum())):
            mask = pack(forest).mask.to("cuda")
            *inputs, dout = draw(forest, heads, torch.bfloat16, torch.device("cuda"))
            inputs = [x.requires_grad_() for x in inputs]
            attend = partial(tree_attention, mask=mask, backend="flash")
            out = attend(*inputs)
            backward = partial(torch.autograd.grad, out, inputs, dout, retain_graph=True)
            got = [out.detach(), *backward()]
            known[:] = known or got
            row["error"], row["tile_error"] = worst_error(got, known), tile_error(got, known)
            if not (row["error"] < MOST_ERROR and row["tile_error"] < MOST_TILE_ERROR):
                return row | {"red": ["gradients"]}

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
    name = f"{row['dim']:3} {row['workload']:24} {row['tiles']:40}"
    if "failed" in row:
        return f"{name} failed: {row['failed']}"
    if "red" in row:
        return f"{name} red: {row['red']}, error {row['error']:.1e}, {row['tile_error']:.1e}"
    return (
        f"{name} forward {row['forward_ms']:7.3f} ms {row['forward_tflops']:4.0f}   "
        f"backward {row['backward_ms']:7.3f} ms {row['backward_tflops']:4.0f}   "
        f"error {row['error']:.1e}, {row['tile_error']:.1e}   {row['seconds']:.0f} s"
    )


def main() -> None:
    """Prints a line per candidate and workload."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dims", nargs="+", type=int, default=list(CANDIDATES))
    parser.add_argument("--workloads", nargs="+", choices=NAMES)
    parser.add_argument("--only", nargs="+", help="names of candidates, beside the shipped tiles")
    parser.add_argument("--rollouts", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows, where = [], environment()
    for dim in options.dims:
        for name in options.workloads or WORKLOADS[dim]:
            if name == AIRLINE and options.rollouts is None:
                continue
            known: list[torch.Tensor] = []
            for candidate in (None, *CANDIDATES[dim]):
                if options.only and candidate is not None and candidate.name not in options.only:
                    continue
                start = time.monotonic()
                row = measure(dim, name, candidate, known, options)
                rows.append(row | {"seconds": time.monotonic() - start})
                torch.cuda.empty_cache()
                print(line(rows[-1]), flush=True)
                write(options.out, {"environment": where, "rows": rows})


if __name__ == "__main__":
    main()
