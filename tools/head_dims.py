"""Which tiles of flash-attn-4 are fastest over block lists at head dims 256 and 64?

    python tools/head_dims.py --rollouts ROLLOUTS --out head_dims.json      # 4 minutes on an H200

An experiment, not a benchmark: it replaces flash-attn-4's choice of tiles, which nothing else does.
At head dim 256 flash-attn-4's dense backward works in tiles of 64 x 48 with two stages of q and the
accumulators of dk and dv turned (366 TF); with block lists it falls back to 64 x 64 with one stage
(255 to 264 TF). The first candidate gives our lists key tiles of 48, so that the dense tiles serve.
At head dim 64 the forward falls back from 192 x 128 to 128 x 128. A candidate whose gradients are
not those of the shipped tiles is red and has no time; one that does not compile says why.

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
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.environment import environment
from benchmarks.lib.flash import MOST_ERROR, worst_error
from benchmarks.lib.replicated import pairs
from benchmarks.lib.runs import write
from benchmarks.lib.shapes import Shape, draw
from benchmarks.lib.timing import median_ms
from benchmarks.lib.workloads import AIRLINE, workload
from prefixtree import pack, tree_attention
from prefixtree.kernels.flash import launch
from prefixtree.kernels.flash.block_lists import Tiles

WORKLOADS = ("4K then 4-2-2-1 x 1K", "prompt 512 x 64 x 1K", "caterpillar 24", AIRLINE)


@dataclass(frozen=True)
class Candidate:
    """Tiles, and what of flash-attn-4's configurations they replace, by the names of its fields."""

    name: str
    tiles: Tiles
    forward: dict[str, Any] = field(default_factory=dict)
    backward: dict[str, Any] = field(default_factory=dict)


# dk and dv turned: the head dim lies along the products' rows, so any multiple of 16 keys serves
_TURNED = {"dKV_swapAB": True, "num_stages_Q": 2}
CANDIDATES = {
    256: [
        Candidate(
            "64 x 48, two stages, turned", Tiles(128, 80, 48), {}, {"n_block_size": 48, **_TURNED}
        ),
        Candidate(
            "64 x 32, two stages, turned", Tiles(128, 80, 32), {}, {"n_block_size": 32, **_TURNED}
        ),
        Candidate("64 x 64, one stage, turned", Tiles(128, 80, 64), {}, {"dKV_swapAB": True}),
        Candidate("forward 128 x 64", Tiles(128, 64, 64), {"n_block_size": 64}),
        Candidate("forward 128 x 96", Tiles(128, 96, 64), {"n_block_size": 96}),
    ],
    64: [
        Candidate("forward 192 x 128", Tiles(384, 128, 128), {"m_block_size": 192}),
        Candidate("forward 128 x 192", Tiles(128, 192, 128), {"n_block_size": 192}),
        Candidate("backward 128 x 64", Tiles(128, 128, 64), {}, {"n_block_size": 64}),
    ],
}


@contextlib.contextmanager
def using(candidate: Candidate | None) -> Iterator[None]:
    """Inside, flash-attn-4 takes a candidate's tiles; None: those that are shipped."""
    if candidate is None:
        yield
        return
    from flash_attn.cute import interface

    from prefixtree.kernels.flash import heads_first_backward

    # the copy of its backward has names of its own
    copied = heads_first_backward.flash_attn_bwd.__globals__
    names = ("_tile_size_fwd_sm90", "_tile_size_bwd_sm90")
    before, tiles_for = {name: getattr(interface, name) for name in names}, launch.tiles_for

    def changed(name: str, changes: dict[str, Any], *args: Any, **how: Any) -> Any:
        return replace(before[name](*args, **how), **changes)

    given = zip(names, (candidate.forward, candidate.backward), strict=True)
    after = {name: partial(changed, name, changes) for name, changes in given}
    launch.tiles_for = lambda d, d_v: candidate.tiles
    for of in (vars(interface), copied):
        of.update(after)
    try:
        yield
    finally:
        launch.tiles_for = tiles_for
        for of in (vars(interface), copied):
            of.update(before)


def measure(
    dim: int, name: str, candidate: Candidate | None, known: list[Any], options: Any
) -> Any:
    """A row: a candidate's times on a workload; `known` keeps the results of the shipped tiles."""
    forest = workload(name, options.rollouts)
    heads = Shape(32 if dim == 64 else 16, 8 if dim == 64 else 2, dim)
    row: dict[str, Any] = {"dim": dim, "workload": name, "tiles": "shipped"}
    if candidate is not None:
        row["tiles"] = candidate.name
    try:
        with using(candidate):
            mask = pack(forest).mask.to("cuda")
            *inputs, dout = draw(forest, heads, torch.bfloat16, torch.device("cuda"))
            inputs = [x.requires_grad_() for x in inputs]
            attend = partial(tree_attention, mask=mask, backend="flash")
            out = attend(*inputs)
            backward = partial(torch.autograd.grad, out, inputs, dout, retain_graph=True)
            got = [out.detach(), *backward()]
            known[:] = known or got
            row["error"] = worst_error(got, known)
            if not row["error"] < MOST_ERROR:
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


def main() -> None:
    """Prints a line per candidate and workload."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dims", nargs="+", type=int, default=list(CANDIDATES))
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS))
    parser.add_argument("--rollouts", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for dim in options.dims:
        for name in options.workloads:
            if name == AIRLINE and options.rollouts is None:
                continue
            known: list[torch.Tensor] = []
            for candidate in (None, *CANDIDATES[dim]):
                rows.append(measure(dim, name, candidate, known, options))
                torch.cuda.empty_cache()
                print(rows[-1], flush=True)
                write(options.out, {"environment": environment(), "rows": rows})


if __name__ == "__main__":
    main()
