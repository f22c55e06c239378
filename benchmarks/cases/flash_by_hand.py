"""Is the flash backend as fast as flash-attn-4 by hand, and in which order of blocks?

    python -m benchmarks flash_by_hand --rollouts ROLLOUTS.jsonl.gz --out OUT.json

Four variants of every workload, one after another in one process (bf16, 32 / 8 heads, D 128):

- ours: `tree_attention(backend="flash")`.
- by hand: flash-attn-4's public function, the mask in its plain form (two compares on a tensor)
  and block lists made by torch. What ours should be within 2 % of.
- tiles first, heads first: ours, with the backward in this order whatever the forest. In "ours" it
  is chosen by `launch.heads_first`.

A variant is red, and has no times, if its out or a gradient is not what ours is (by its norm; ours
is held against float64 by the case `attention`). Times are medians by CUDA events without making
the lists.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.against import block_mask
from benchmarks.lib.environment import about
from benchmarks.lib.flash import MOST_ERROR, order_of, worst_error
from benchmarks.lib.replicated import out_of
from benchmarks.lib.runs import described, write
from benchmarks.lib.shapes import Shape, draw
from benchmarks.lib.tables import Column, Parts, Table, machine, show
from benchmarks.lib.timing import median_ms
from benchmarks.lib.workloads import AIRLINE, NAMES, scaled, skip_airline, workload
from prefixtree import TreeMask, pack, tree_attention

DEFAULT = [
    "4K then 4-2-2-1 x 1K",
    "prompt 512 x 64 x 1K",
    "caterpillar 24",
    "prompt 256 x 1024 x 256",
    "documents 32 x 4K",
    AIRLINE,
]
VARIANTS = ("ours", "by hand", "tiles first", "heads first")


Row = dict[str, Any]
Attend = Callable[..., torch.Tensor]


# ---- variants ------------------------------------------------------------------------------------


def by_hand(mask: TreeMask) -> Attend:
    """flash-attn-4's public function, as its documentation has it."""
    import cutlass
    import cutlass.cute as cute
    from flash_attn.cute import utils
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
    from flash_attn.cute.interface import flash_attn_func

    @cute.jit
    def visible(batch, head, m_idx, n_idx, seqlen_info, aux_tensors):
        last = utils.scalar_to_ssa(aux_tensors[0][n_idx[0]], cutlass.Int32)
        return (n_idx <= m_idx) & (m_idx < last)

    blocks = block_mask(mask)

    def lists(*names: str) -> Any:
        parts = (getattr(blocks, name).contiguous() for name in names)
        return BlockSparseTensorsTorch(*parts, block_size=(128, 128))

    keys = lists("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    queries = lists("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = flash_attn_func(
            *(x[None] for x in (q, k, v)),
            mask_mod=visible,
            aux_tensors=[mask.subtree_end],
            block_sparse_tensors=keys,
            block_sparse_tensors_bwd=queries,
        )
        return out_of(out)[0]

    return attend


def ours(mask: TreeMask) -> Attend:
    return lambda *inputs: tree_attention(*inputs, mask, backend="flash")


# ---- one workload --------------------------------------------------------------------------------


def measure(
    name: str, mask: TreeMask, tensors: Sequence[torch.Tensor], options: argparse.Namespace
) -> list[Row]:
    """A row a variant."""
    *inputs, dout = tensors
    inputs = [x.requires_grad_() for x in inputs]
    want: list[torch.Tensor] = []
    rows = []
    timed = partial(
        median_ms, device=dout.device, repeats=options.repeats, warm_ups=options.warm_ups
    )
    for variant in options.variants:
        row: Row = {"workload": name, "variant": variant, "tokens": mask.num_tokens}
        rows.append(row)
        try:
            with order_of(variant):
                attend = by_hand(mask) if variant == "by hand" else ours(mask)
                out = attend(*inputs)
                got = [out.detach(), *torch.autograd.grad(out, inputs, dout, retain_graph=True)]
                want = want or got
                row["error"] = worst_error(got, want)
                del got
                if not row["error"] < MOST_ERROR:
                    row["failed"] = f"red: {row['error']:.1e} from ours"
                    continue

                def forward(attend: Attend = attend) -> torch.Tensor:
                    with torch.no_grad():
                        return attend(*inputs)

                backward = partial(torch.autograd.grad, out, inputs, dout, retain_graph=True)
                row["forward_ms"], row["forward_all_ms"] = timed(forward)
                row["backward_ms"], row["backward_all_ms"] = timed(backward)
                del out, backward
        except Exception as problem:
            row["failed"] = f"{type(problem).__name__}: {problem}"[:1000]
        torch.cuda.empty_cache()
    return rows


def tables(data: Row) -> Parts:
    """Milliseconds of every variant, and its time over ours."""
    first = {row["workload"]: row for row in reversed(data["rows"]) if "forward_ms" in row}
    parts = {
        "forward": lambda row: row["forward_ms"],
        "backward": lambda row: row["backward_ms"],
        "both": lambda row: row["forward_ms"] + row["backward_ms"],
    }

    def time(part: str) -> Column:
        return Column(
            f"{part} ms", lambda row: f"{parts[part](row):.3f}" if "forward_ms" in row else ""
        )

    def over(row: Row) -> str:
        if "forward_ms" not in row:
            return row["failed"][:60]
        base = first[row["workload"]]
        return " ".join(f"{ms(row) / ms(base):.3f}" for ms in parts.values())

    yield machine(data["environment"])
    yield Table(
        [
            Column("workload", lambda row: row["workload"]),
            Column("variant", lambda row: row["variant"]),
            *(time(part) for part in parts),
            Column("over ours", over),
        ],
        data["rows"],
    )


# ---- the run -------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = described(__doc__)
    add = parser.add_argument
    add("--workloads", nargs="+", choices=NAMES, metavar="NAME", default=DEFAULT)
    add("--variants", nargs="+", choices=VARIANTS, metavar="VARIANT", default=list(VARIANTS))
    add("--rollouts", type=Path, help=f"the file that {AIRLINE!r} reads")
    add("--order", choices=("heaviest", "input"), default="heaviest", help="of siblings")
    add("--heads", nargs=2, type=int, default=(32, 8), metavar=("H", "HK"))
    add("--head-dim", type=int, default=128)
    add("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    add("--scale", type=float, default=1.0, help="on the length of every node, for trying out")
    add("--repeats", type=int, default=9)
    add("--warm-ups", type=int, default=3)
    add("--commit", help="where the checkout cannot tell, on a machine without its .git")
    add("--out", type=Path, help="JSON, written after every workload")
    options = parser.parse_args(arguments)
    options.device, options.skipped = "cuda", []
    skip_airline(options)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every variant was right and timed."""
    options = parse(arguments)
    device = torch.device("cuda")
    shape = Shape(*options.heads, options.head_dim)
    rows: list[Row] = []
    for name in options.workloads:
        forest = scaled(
            workload(name, options.rollouts, options.order), options.scale, options.order
        )
        mask = pack(forest).mask.to(device)
        tensors = draw(forest, shape, getattr(torch, options.dtype), device)
        for row in measure(name, mask, tensors, options):
            rows.append(row)
            times = row.get("failed") or f"{row['forward_ms']:.3f} + {row['backward_ms']:.3f} ms"
            print(f"{name}, {row['variant']}: {times}", flush=True)
        write(options.out, {"environment": about(options), "rows": rows})
    show(tables({"environment": about(options), "rows": rows}))
    return 1 if any("failed" in row for row in rows) else 0
