"""Attention over one forest, packed, against the replicated batch through others' kernels.

The packed side is held against float64 first (`checks.py`), the others against the packed one; red
has no times. `bound` is the ratio of visible pairs, which are all that attention computes;
efficiency is a side's speed-up over it. It passes 1 where our kernels do a pair faster than the
side's: so the replicated batch also runs through our own backend ("own"), and efficiency over that
is what the tree costs the kernels.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from attention import size
from checks import NAMES, check
from replicated import missing, pairs, peer
from suite import Row, measure

from prefixtree import PrefixForest, TreeMask, tree_attention
from prefixtree.cli.bench import LIMITS, Attention, Replication, Setting, differences

# what runs over the forest itself, with none of our code
PACKED = ("flex",)


def sided(what: argparse.ArgumentParser, sides: Sequence[str]) -> None:
    """Adds the options that `compare` reads."""
    add = what.add_argument
    add("--heads", nargs=2, type=int, default=(32, 8), metavar=("H", "HK"))
    add("--head-dim", type=int, default=128)
    add("--check-heads", type=int, default=1, help="kv heads held against float64")
    add("--sides", nargs="+", default=list(sides))


def settle(options: argparse.Namespace) -> None:
    """Small heads for tiny runs; sides that cannot run here are skipped."""
    if options.is_tiny:
        options.heads, options.head_dim = (4, 2), 32
    options.skipped = [side for side in options.sides if missing(side, options.device)]
    options.sides = [side for side in options.sides if side not in options.skipped]


def compare(forest: PrefixForest, options: argparse.Namespace, known: dict[Any, Row]) -> Row:
    """Checks, then times, of one forest; `known` keeps what was measured of equal batches."""
    heads = (*options.heads, options.head_dim)
    sides = Replication(forest, Setting(options.device, options.dtype, *heads, options.backend))
    lengths = forest.sequence_lengths.tolist()
    bound = sum(n * (n + 1) // 2 for n in lengths) / pairs(forest)
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
    row["times"] = times = {"packed": measure(partial(attend_packed, sides, ours(sides)), options)}
    row["replicated_check"] = {}
    for side in options.sides:
        try:
            run = flex(sides.packed.mask) if side in PACKED else None
            if run is None:
                sides.pieces = pieces_of(side, sides, options)
                found = sides.check()
            else:
                found = differences(attend_packed(sides, run), attend_packed(sides, ours(sides)))
            row["replicated_check"][side] = found
            wrong = [name for name, gap in found.items() if not gap <= LIMITS[options.dtype]]
            row["red"] += [f"{side} {name}" for name in wrong]
            if wrong:
                continue
            if run is not None:
                times[side] = measure(partial(attend_packed, sides, run), options)
                continue
            # the depth sweep replicates to the same batch again and again
            key = (side, *lengths)
            if key not in known:
                known[key] = replicated_times(sides, options)
            times[side] = known[key]
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


def ours(sides: Replication) -> Attention:
    """`tree_attention` over the forest, by the setting's backend."""
    return partial(tree_attention, mask=sides.packed.mask, backend=sides.setting.backend)


def attend_packed(sides: Replication, attend: Attention) -> list[torch.Tensor]:
    """out, dq, dk and dv of the packed tokens."""
    inputs = [x.detach().requires_grad_() for x in sides.inputs]
    out = attend(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, sides.dout)]


def exactness(sides: Replication, forest: PrefixForest, options: argparse.Namespace) -> Row:
    """The packed side's errors against float64, and what is red."""
    inputs = [x.detach().requires_grad_() for x in sides.inputs]
    out, lse = ours(sides)(*inputs, return_lse=True)
    gradients = torch.autograd.grad(out, inputs, sides.dout)
    got = dict(zip(NAMES, (out.detach(), lse.detach(), *gradients), strict=True))
    with torch.no_grad():
        verdicts = check(*sides.inputs, sides.dout, got, forest, options.check_heads)
    found = {v.name: {"worst": v.worst, "mean": v.mean} for v in verdicts}
    return {"check": found, "red": [v.name for v in verdicts if v.is_red]}


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


def flex(mask: TreeMask) -> Attention:
    """FlexAttention over the forest, its block mask made from the tree's rule beforehand."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    end, tokens = mask.subtree_end, mask.num_tokens

    def visible(b: Any, h: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (query < end[key])

    # in eager it holds tokens x tokens
    make = torch.compile(create_block_mask)
    block_mask = make(visible, None, None, tokens, tokens, device=str(mask.device))
    run = torch.compile(flex_attention, dynamic=False)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows = [x.transpose(0, 1)[None] for x in (q, k, v)]
        out = run(*rows, block_mask=block_mask, enable_gqa=True)
        return out[0].transpose(0, 1)

    return attend
