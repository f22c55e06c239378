"""What do chosen keys cost in tree attention, beside all keys? What does it cost to choose them?

    python -m benchmarks sparse --rollouts ROLLOUTS.jsonl.gz --out sparse.json
    python -m benchmarks sparse --device cpu --scale 0.02 --repeats 1     # every code path

Some heads of DeepSeek V3.2's attention (D 192, Dv 128) over airline turns, in Triton: all keys,
then k chosen at random on a query's path, a bit each. Both are held against float64 on one head
before they are timed (`lib/checks.py`). TF are useful TFLOP/s of visible pairs, chosen or not.

Then the indexer's part, all of its 64 heads of 128: the scores alone, and with the selection, as a
prepared model makes them from its projections. The keys chosen by some queries, of small integers
whose sums are exact and often equal, are held against a stable sort in float64. Without rollouts,
eight trees of a prompt with two levels of branches stand for them.

--replicated does chosen keys and selection for the replicated batch too, by the same kernels and
checks, in micro-batches of at most so many tokens, whose times are added up.

--chains measures one path of so many tokens in place of all this: `lib/latents.py`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.lib.checks import check, results_of
from benchmarks.lib.latents import GATHERED, MODELS, TILES, Chain
from benchmarks.lib.replicated import chains, pairs
from benchmarks.lib.runs import Report, Row, measure, parse, parser
from benchmarks.lib.shapes import Shape, draw
from benchmarks.lib.tables import Column, Parts, Table, machine, number, verdict, verdict_column
from benchmarks.lib.timing import times_of
from benchmarks.lib.workloads import AIRLINE, scaled, workload
from prefixtree import PrefixForest, TreeMask, pack, tree_attention
from prefixtree.kernels.chosen import from_bits, to_bits, words
from prefixtree.sparse import indexers

ALL, CHOSEN = "all keys", "chosen keys"
SCORES, SELECTION = "the indexer's scores", "scores and selection"
REPLICATED = ", replicated"
# the indexer's heads and head dim; queries that are checked
INDEXER, PICKED = (64, 128), 64
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
    bits = random_bits(mask, options.topk) if side.startswith(CHOSEN) else None
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


class Indexer:
    """The numbers that an indexer's projections give, and what follows in its forward."""

    def __init__(self, mask: TreeMask, options: argparse.Namespace) -> None:
        generator = torch.Generator(mask.device).manual_seed(2)
        (heads, d), tokens = INDEXER, mask.num_tokens
        dtype = getattr(torch, options.dtype)

        def draw(*size: int) -> torch.Tensor:
            return torch.randint(-1, 2, size, generator=generator, device=mask.device).to(dtype)

        self.mask, self.topk = mask, options.topk
        self.q, self.keys = draw(tokens, heads, d), draw(tokens, d)
        self.weights = draw(tokens, heads).float()

    def scores(self) -> None:
        """Without the selection."""
        from prefixtree.kernels import indexer_kernels

        for rows in indexers.Products(self.mask.host, indexer_kernels).spans(*INDEXER):
            given = self.q[rows], self.keys, self.weights[rows]
            indexer_kernels.index_scores(*given, self.mask.host, rows.start, 1.0)

    def select(self) -> torch.Tensor:
        """int32 [T, W], as transformers' indexer comes to it."""
        from prefixtree.kernels import indexer_kernels

        found = indexers.Products(self.mask.host, indexer_kernels)
        for rows in found.spans(*INDEXER):
            keys = found.update_indexer(self.keys[None, rows], 0)
            # a stand-in passes for a tensor here
            scores = F.relu(torch.matmul(self.q[None, rows].float(), keys) * 1.0)  # type: ignore[arg-type]
            weights = self.weights[None, rows].unsqueeze(-2)
            (torch.matmul(weights, scores) + found).topk(self.topk, dim=-1)  # type: ignore[call-overload]
        return found.bits

    def wrong(self, bits: torch.Tensor) -> list[str]:
        """What is red."""
        host, generator = self.mask.host, np.random.default_rng(0)
        count = min(PICKED, host.num_tokens)
        red = 0
        for row in generator.choice(host.num_tokens, count, replace=False).tolist():
            path = np.flatnonzero(host.subtree_end[: row + 1] > row)
            keys = self.keys[torch.as_tensor(path, device=bits.device)].double()
            scores = self.weights[row].double() @ (self.q[row].double() @ keys.T).relu()
            best = scores.sort(descending=True, stable=True).indices[: self.topk]
            want = torch.zeros(len(path), dtype=torch.bool, device=bits.device)
            want[best] = True
            red += not torch.equal(from_bits(bits[row, None], 0, len(path))[0], want)
        return [f"{red} of {count} queries choose other keys"] if red else []


def run_indexer(side: str, indexer: Indexer, options: argparse.Namespace) -> Row:
    """Checks, then times, the scores or the whole selection."""
    row: Row = {"red": indexer.wrong(indexer.select())}
    if row["red"]:
        return row
    run: Callable[[], object] = indexer.scores if side == SCORES else indexer.select
    row |= measure(run, options)
    row["forward_ms"] = row["ms"]
    flops = 2 * INDEXER[0] * INDEXER[1] * indexer.mask.host.visible_pairs(0)
    return row | {"forward_tflops": flops / row["ms"] / 1e9}


def micro_batches(forest: PrefixForest, most: int) -> list[PrefixForest]:
    """Its sequences in their order, each alone, of at most `most` tokens unless one has more."""
    groups: list[list[int]] = []
    for length in chains(forest).node_length.tolist():
        if not groups or sum(groups[-1]) + length > most:
            groups.append([])
        groups[-1].append(length)
    return [PrefixForest.from_parents([-1] * len(g), g, order="input") for g in groups]


def run_replicated(side: str, forest: PrefixForest, options: argparse.Namespace) -> Row:
    """What `run_side` or `run_indexer` gives, summed over micro-batches; or what is red."""
    total: Row = {"red": [], "micro_batches": 0, "tokens": 0}
    for part in micro_batches(forest, options.replicated):
        mask = pack(part).mask.to(options.device)
        if side.startswith(CHOSEN):
            row = run_side(side, part, mask, options)
        else:
            row = run_indexer(side, Indexer(mask, options), options)
        if row["red"]:
            return {"red": row["red"]}
        if "worst" in row:
            total["worst"] = max(total.get("worst", 0.0), row["worst"])
        for key in ("forward_ms", "backward_ms"):
            if key in row:
                total[key] = total.get(key, 0.0) + row[key]
        total["micro_batches"] += 1
        total["tokens"] += part.num_tokens
    return total


def _milliseconds(row: Row) -> float:
    return row.get("forward_ms", 0.0) + row.get("backward_ms", 0.0)


def _times_replicated(rows: Sequence[Row]) -> Iterator[str]:
    """How much longer the replicated batch takes: attention, selection, both."""
    by_side = {row["side"]: row for row in rows if _milliseconds(row)}
    pairs_of = [
        (by_side[side], by_side[side + REPLICATED])
        for side in (CHOSEN, SELECTION)
        if side in by_side and side + REPLICATED in by_side
    ]
    if not pairs_of:
        return
    ratios = [_milliseconds(r) / _milliseconds(p) for p, r in pairs_of]
    packed, replicated = (sum(map(_milliseconds, some)) for some in zip(*pairs_of, strict=True))
    yield (
        f"The replicated batch, {pairs_of[0][1]['tokens']:,} tokens, takes "
        + " and ".join(
            f"{x:.1f}x ({p['side']})" for x, (p, _) in zip(ratios, pairs_of, strict=True)
        )
        + f", together {replicated / packed:.1f}x."
    )


def run_chains(report: Report, options: argparse.Namespace) -> None:
    """Rows of both sides for each length."""
    for name in ("forward", "backward"):
        if (steps := getattr(options, f"{name}_steps")) is not None:
            from prefixtree.kernels.latents import launch

            setattr(launch, name.upper(), tuple(steps))
    for tokens in options.chains:
        chain = Chain(max(1, round(tokens * options.scale)), options)
        for side in (TILES, GATHERED):
            case = {"side": side, "tokens": chain.mask.num_tokens, "topk": options.topk}
            row = report.attempt(case | {"model": options.model}, partial(chain.run, side))
            ms = f"{_milliseconds(row):.2f} ms, {row.get('errors')}"
            print(f"{side}, {tokens}: {verdict(row) or ms}", flush=True)
        del chain


def chain_tables(data: Row) -> Parts:
    """A line per length and side, and how many times as fast gathering is."""
    rows = data["rows"]
    yield f"{machine(data['environment'], 'triton')}; chains, {rows[0]['topk']:,} keys of a query"
    yield Table(
        [
            Column("", lambda row: f"{row['model']}, {row['tokens']:,} tokens: {row['side']}"),
            Column("forward ms", lambda row: number(row, "forward_ms", ".1f")),
            Column("backward ms", lambda row: number(row, "backward_ms", ".1f")),
            Column("projection frozen", lambda row: number(row, "backward_frozen_ms", ".1f")),
            Column("TF forward", lambda row: number(row, "forward_tflops", ".0f")),
            Column("TF backward", lambda row: number(row, "backward_tflops", ".0f")),
            Column("error / limit", lambda row: number(row, "worst", ".2f"), is_detail=True),
            verdict_column(),
        ],
        rows,
    )
    for tiles, found in zip(rows[::2], rows[1::2], strict=False):
        if _milliseconds(tiles) and _milliseconds(found):
            times = _milliseconds(tiles) / _milliseconds(found)
            yield f"{tiles['tokens']:,} tokens: gathered latents are {times:.1f}x as fast."


def tables(data: Row) -> Parts:
    """A line per side."""
    if data["rows"] and "model" in data["rows"][0]:
        yield from chain_tables(data)
        return
    dense = next((row for row in data["rows"] if row["side"] == ALL), {})

    def over(key: str) -> Column:
        def ratio(row: Row) -> str:
            known = key in row and key in dense and row["side"] in (ALL, CHOSEN)
            return f"{row[key] / dense[key]:.2f}" if known else ""

        return Column("of all keys", ratio)

    yield f"{machine(data['environment'], 'triton')}; {data['workload']}, {data['tokens']:,} tokens"
    yield Table(
        [
            Column("", lambda row: row["side"]),
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
    yield from _times_replicated(data["rows"])


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every side was green."""
    what = parser(__doc__)
    add = what.add_argument
    add("--rollouts", type=Path, help=f"the file that {AIRLINE!r} reads")
    add("--tasks", type=int, default=8, help="the first so many groups of it")
    add("--heads", type=int, default=16, help="of 128")
    add("--topk", type=int, default=2048, help="keys of a query")
    add(
        "--replicated", type=int, metavar="TOKENS", help="also the replicated batch, so many a time"
    )
    add("--chains", type=int, nargs="+", metavar="TOKENS", help="gathered latents, nothing else")
    add("--model", default="deepseek-v3.2", choices=list(MODELS), help="the shape of chains")
    for name in ("forward", "backward"):
        add(f"--{name}-steps", type=int, nargs=2, help="keys and stages of gathered latents")
    options = parse(what, arguments)
    if options.read is not None:
        return Report.read(options).finish(tables)
    if options.backend == "auto":
        # on a CPU without the interpreter the code paths are those of sdpa
        is_here = torch.device(options.device).type == "cuda" or "TRITON_INTERPRET" in os.environ
        options.backend = "triton" if is_here else "sdpa"
    if options.is_tiny:
        options.topk = max(1, round(options.topk * options.scale))
    if options.chains:
        report = Report(options, workload="chains")
        run_chains(report, options)
        return report.finish(tables)
    name = AIRLINE if options.rollouts else WITHOUT_ROLLOUTS
    forest = scaled(
        workload(name, options.rollouts, tasks=options.tasks), options.scale, "heaviest"
    )
    mask = pack(forest).mask.to(options.device)
    report = Report(options, workload=name, tokens=forest.num_tokens, pairs=pairs(forest))
    attention, indexer = [ALL, CHOSEN], [SCORES, SELECTION]
    if options.replicated:
        attention.append(CHOSEN + REPLICATED)
        indexer.append(SELECTION + REPLICATED)
    if options.backend != "triton":
        options.skipped += indexer
        indexer = []
    for side in attention + indexer:
        case = {"side": side, "topk": options.topk}
        case["heads"] = options.heads if side in attention else INDEXER[0]
        if side.endswith(REPLICATED):
            run = partial(run_replicated, side, forest, options)
        elif side in attention:
            run = partial(run_side, side, forest, mask, options)
        else:
            run = partial(run_indexer, side, Indexer(mask, options), options)
        row = report.attempt(case, run)
        print(f"{side}: {verdict(row) or format(_milliseconds(row), '.2f') + ' ms'}", flush=True)
    return report.finish(tables)
