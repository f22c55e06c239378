"""Attention over one forest, packed, against the replicated batch through others' kernels.

The packed side is held against float64 first (`lib/checks.py`), the others against the packed one;
red has no times. `bound` is the ratio of visible pairs, which are all that attention computes;
efficiency is a side's speed-up divided by it. It passes 1 where our kernels take less time per pair
than those of the side. So the replicated batch also runs through our backend ("own"); the
efficiency over that shows what the tree costs the kernels.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.lib.checks import check, results_of
from benchmarks.lib.replicated import PEERS, pairs, peer, replicated_pairs, skip_missing
from benchmarks.lib.runs import Row, measure
from benchmarks.lib.timing import size
from prefixtree import PrefixForest, TreeMask, tree_attention
from prefixtree.testing.attention import LIMITS, Attention, Replication, Setting, differences

# what runs over the forest itself, with none of our code
PACKED = ("flex",)


def sided(what: argparse.ArgumentParser, sides: Sequence[str]) -> None:
    """Adds the options that `compare` reads."""
    add = what.add_argument
    add("--heads", nargs=2, type=int, default=(32, 8), metavar=("H", "HK"))
    add("--head-dim", type=int, default=128)
    add("--check-heads", type=int, default=1, help="kv heads held against float64")
    add("--sides", nargs="+", choices=(*PEERS, *PACKED), default=list(sides))


def settle(options: argparse.Namespace) -> None:
    """Small heads for tiny runs; sides that cannot run here are skipped."""
    if options.is_tiny:
        options.heads, options.head_dim = (4, 2), 32
    skip_missing(options)


def compare(forest: PrefixForest, options: argparse.Namespace, known: dict[Any, Row]) -> Row:
    """Checks, then times, of one forest; `known` keeps what was measured of equal batches."""
    heads = (*options.heads, options.head_dim)
    sides = Replication(forest, Setting(options.device, options.dtype, *heads, options.backend))
    bound = replicated_pairs(forest) / pairs(forest)
    row: Row = {
        "replicated": forest.num_replicated_tokens,
        "distinct": forest.num_tokens,
        "sequences": forest.num_sequences,
        "nodes": forest.num_nodes,
        "bound": bound,
        "replicated_by": sides.name,
    }
    row |= exactness(sides, forest, options)
    if row["red"]:
        return row
    row["held_bytes"] = size(*sides.inputs, sides.dout)
    row["times"] = times = {"packed": measure(sides.attend_packed, options)}
    row["replicated_check"] = {}
    for side in options.sides:
        try:
            if side in PACKED:
                found, time = over_forest(sides, options)
            else:
                found, time = over_copies(side, sides, options, known)
            row["replicated_check"][side] = found
            wrong = [name for name, gap in found.items() if not gap <= LIMITS[options.dtype]]
            row["red"] += [f"{side} {name}" for name in wrong]
            if not wrong:
                times[side] = time()
        except torch.OutOfMemoryError:
            raise
        except Exception as problem:
            # a peer that cannot run does not take the others with it
            row["red"].append(f"{side}: {type(problem).__name__}: {problem}"[:200])
    others = [side for side in options.sides if side in times]
    row["speedup"] = {side: times[side]["ms"] / times["packed"]["ms"] for side in others}
    replicated = [side for side in others if side not in PACKED]
    row["efficiency"] = {side: row["speedup"][side] / bound for side in replicated}
    return row


def exactness(sides: Replication, forest: PrefixForest, options: argparse.Namespace) -> Row:
    """The packed side's errors against float64, and what is red."""
    attend = partial(tree_attention, mask=sides.packed.mask, backend=options.backend)
    got = results_of(attend, [x.detach().requires_grad_() for x in sides.inputs], sides.dout)
    with torch.no_grad():
        verdicts = check(*sides.inputs, sides.dout, got, forest, options.check_heads)
    found = {v.name: {"worst": v.worst, "mean": v.mean} for v in verdicts}
    return {"check": found, "red": [v.name for v in verdicts if v.is_red]}


# how far a side is from the packed one, and what times it
Compared = tuple[dict[str, float], Callable[[], Row]]


def over_forest(sides: Replication, options: argparse.Namespace) -> Compared:
    """Of FlexAttention."""
    run = partial(sides.attend_packed, flex(sides.packed.mask))
    return differences(run(), sides.attend_packed()), partial(measure, run, options)


def over_copies(
    side: str, sides: Replication, options: argparse.Namespace, known: dict[Any, Row]
) -> Compared:
    """Of the replicated batch by a side's attention."""
    sides.pieces = pieces_of(side, sides, options)

    def time() -> Row:
        # the depth sweep replicates to the same batch again and again
        key = (side, *sides.packed.forest.sequence_lengths.tolist())
        if key not in known:
            known[key] = replicated_times(sides, options)
        return known[key]

    return sides.check(), time


def pieces_of(side: str, sides: Replication, options: argparse.Namespace) -> list[Any]:
    """`Replication.pieces` with another's attention."""
    lengths = iter(sides.packed.forest.sequence_lengths.tolist())
    out = []
    for rows, _ in sides.pieces:
        some: list[int] = []
        while sum(some) < len(rows):
            some.append(next(lengths))
        dtype = getattr(torch, options.dtype)
        out.append((rows, (side, peer(side, some, sides.device, dtype, options.backend))))
    return out


def replicated_times(sides: Replication, options: argparse.Namespace) -> Row:
    """Of all pieces, summed; the peak is the whole batch's: the pieces' inputs and results."""
    total: Row = {"ms": 0.0, "peak_bytes": 0, "held_bytes": 0}
    for rows, (_, attend) in sides.pieces:
        inputs = [x[rows].requires_grad_() for x in sides.inputs]
        dout = sides.upstream[rows]

        def run(attend: Any = attend, inputs: Any = inputs, dout: Any = dout) -> object:
            return torch.autograd.grad(attend(*inputs), inputs, dout)

        piece = measure(run, options)
        total["ms"] += piece["ms"]
        total["peak_bytes"] += piece["peak_bytes"] or 0
        total["held_bytes"] += size(*inputs, dout)
    return total


def block_mask(mask: TreeMask) -> Any:
    """FlexAttention's block lists of a forest, on its device."""
    from torch.nn.attention.flex_attention import create_block_mask

    end, tokens = mask.subtree_end, mask.num_tokens

    def visible(b: Any, h: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (query < end[key])

    # in eager it holds tokens x tokens, and past dynamo's limit of shapes it would be eager
    torch._dynamo.reset()
    make = torch.compile(create_block_mask)
    return make(visible, None, None, tokens, tokens, device=str(mask.device))


def flex(mask: TreeMask) -> Attention:
    """FlexAttention over the forest, its block mask made beforehand."""
    from torch.nn.attention.flex_attention import flex_attention

    blocks, run = block_mask(mask), torch.compile(flex_attention, dynamic=False)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows = [x.transpose(0, 1)[None] for x in (q, k, v)]
        return run(*rows, block_mask=blocks, enable_gqa=True)[0].transpose(0, 1)

    return attend
