"""How much do recurrent layers (delta rule, Kimi, Mamba-2, convolution) cost along a tree?

    python -m benchmarks recurrence --rollouts ROLLOUTS --out recurrence.json   # on a GPU
    python -m benchmarks recurrence --device cpu --scale 0.01 --repeats 1       # every code path

Forward and backward of one layer's recurrence, bfloat16. Sides: tree, ours over the packed forest;
dense, the same kernels over as many tokens in sequences of 32K, which is the floor; replicated,
over every sequence of the batch, in micro-batches of at most 128K tokens. Dense and replicated are
fla's public functions; fla takes flash-qla for the delta rule where it is installed, unless
FLA_FLASH_QLA is 0. For Mamba-2 they are ours over sequences that share nothing, because fla refuses
its backward on Hopper with Triton 3.4 to 3.7.0. The convolution's floor is two and a half copies,
which is what a forward and a backward have to move.

Before a rule is timed it is held against float64 on a small forest, by the error of each sequence
alone (1.5x per tensor), and has to repeat to the bit.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.lib.replicated import copies
from benchmarks.lib.runs import Report, Row, measure, parse, parser
from benchmarks.lib.tables import (
    Column,
    Parts,
    Table,
    by_key,
    gib,
    machine,
    number,
    times_cell,
    verdict_column,
)
from benchmarks.lib.workloads import AIRLINE, NAMES, forest_of, scaled, skip_airline, workload
from prefixtree import PrefixForest, TreeMask, pack
from prefixtree.kernels.recurrence import tree_conv, tree_delta_rule, tree_ssd
from prefixtree.packing.segments import segments_of
from prefixtree.testing.attention import pieces

Tensors = list[torch.Tensor]
WORKLOADS = (
    AIRLINE,
    "caterpillar 24",
    "prompt 8K x 16 x 2K",
    "prompt 256 x 1024 x 256",
    "documents 32 x 4K",
)
SIDES = ("tree", "dense", "replicated")
# tokens of a dense sequence and of a replicated micro-batch
DENSE, MICRO_BATCH = 32_768, 131_072
# times fla's error on each sequence alone
MOST_ERROR = 1.5
# four nodes, of which one has two children and a sequence ends in another
SMALL = [(130, [(66, [(90, [])]), (40, [(164, []), (70, [])])])]


@dataclass(frozen=True)
class Rule:
    """A layer's recurrence with its sizes.

    Attributes:
        heads: key heads (or groups) and value heads; of the convolution channels and taps.
        dims: key and value head dims.
    """

    name: str
    heads: tuple[int, int]
    dims: tuple[int, int] = (0, 0)

    def draw(self, tokens: int, options: argparse.Namespace) -> Tensors:
        """Inputs that require gradients, and the gradient that arrives, last."""
        generator = torch.Generator(options.device).manual_seed(0)
        dtype = getattr(torch, options.dtype)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=options.device)

        def uniform(*shape: int) -> torch.Tensor:
            return torch.rand(*shape, generator=generator, device=options.device)

        (few, many), (key_dim, value_dim) = self.heads, self.dims
        if self.name == "convolution":
            found = [normal(tokens, few).to(dtype), normal(few, many).to(dtype)]
            upstream = normal(tokens, few)
        else:
            upstream = normal(tokens, many, value_dim)
            value = normal(tokens, many, value_dim).to(dtype)
        if self.name == "mamba-2":
            # x, dt, A, B, C
            found = [value, uniform(tokens, many), -uniform(many)]
            found += [normal(tokens, few, key_dim).to(dtype) for _ in range(2)]
        elif self.name != "convolution":
            gates = (tokens, many, key_dim) if self.name == "kimi" else (tokens, many)
            query, key = (F.normalize(normal(tokens, few, key_dim), dim=-1) for _ in range(2))
            found = [query.to(dtype), key.to(dtype), value, -0.3 * uniform(*gates)]
            found.append(uniform(tokens, many).to(dtype))
        return [x.requires_grad_() for x in found] + [upstream.to(dtype)]

    def tree(self, inputs: Tensors, mask: TreeMask, backend: str) -> torch.Tensor:
        """Along the tree."""
        if self.name == "convolution":
            return tree_conv(*inputs, None, mask, "silu", backend=backend)
        if self.name == "mamba-2":
            return tree_ssd(*inputs, mask, backend=backend)
        return tree_delta_rule(*inputs, mask, backend=backend)

    def theirs(self, inputs: Tensors, lengths: Sequence[int]) -> torch.Tensor:
        """fla's, over sequences one after another."""
        # int32, as ours: flash-qla compiles its kernels for either
        ends = torch.tensor([0, *lengths], device=inputs[0].device).cumsum(0, dtype=torch.int32)
        if self.name == "convolution":
            from fla.modules.causal_conv1d import causal_conv1d

            x, weight = inputs
            return causal_conv1d(x[None], weight, activation="silu", cu_seqlens=ends)[0][0]
        if self.name == "mamba-2":
            return self.tree(inputs, apart(tuple(lengths), inputs[0].device), "auto")
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.kda import chunk_kda

        call = chunk_kda if self.name == "kimi" else chunk_gated_delta_rule
        out, _ = call(*(x[None] for x in inputs), cu_seqlens=ends)
        return out[0]


RULES = {
    # Qwen3.5, Qwen3-Next and Kimi Linear: head dim 128
    "delta": Rule("delta", (32, 32), (128, 128)),
    # Qwen3-Next: two value heads share a key head
    "delta 16/32": Rule("delta 16/32", (16, 32), (128, 128)),
    "kimi": Rule("kimi", (32, 32), (128, 128)),
    # Nemotron-H 8B
    "mamba-2": Rule("mamba-2", (8, 128), (128, 64)),
    # Qwen3.5 9B: query, key and value of its delta rule
    "convolution": Rule("convolution", (8192, 4)),
}


@cache
def apart(lengths: tuple[int, ...], device: torch.device) -> TreeMask:
    """The mask of sequences that share nothing."""
    forest = PrefixForest.from_parents([-1] * len(lengths), lengths, order="input")
    return pack(forest).to(device).mask


def results(run: Callable[[Tensors], torch.Tensor], drawn: Tensors) -> Tensors:
    """out and the gradients of the inputs."""
    *inputs, upstream = drawn
    out = run(inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, upstream.to(out.dtype))]


def mask_of(forest: PrefixForest, device: str) -> TreeMask:
    return pack(forest).to(device).mask


def errors(rule: Rule, options: argparse.Namespace) -> Row:
    """||. - exact|| / ||exact|| of every tensor, ours and fla's, and what is red."""
    forest = forest_of(SMALL)
    packed = pack(forest).to(options.device)
    drawn = rule.draw(forest.num_tokens, options)
    exact = [x.detach().double().requires_grad_() for x in drawn]
    want = results(lambda x: rule.tree(x, packed.mask, "chunked"), exact)
    found = results(lambda x: rule.tree(x, packed.mask, options.backend), drawn)
    again = results(lambda x: rule.tree(x, packed.mask, options.backend), drawn)
    row: Row = {"red": [], "tree_errors": relative(found, want)}
    if not all(torch.equal(a, b) for a, b in zip(found, again, strict=True)):
        row["red"].append("two runs differ")
    row["alone_errors"] = relative(alone(rule, forest, drawn), want)
    limits = [MOST_ERROR * error for error in row["alone_errors"]]
    for i, (error, limit) in enumerate(zip(row["tree_errors"], limits, strict=True)):
        if not error <= limit:
            row["red"].append(f"tensor {i}: {error:.1e}, at most {limit:.1e}")
    return row


def relative(found: Tensors, want: Tensors) -> list[float]:
    return [
        float((a.double() - b).norm() / b.norm().clamp_min(1e-300))
        for a, b in zip(found, want, strict=True)
    ]


def alone(rule: Rule, forest: PrefixForest, drawn: Tensors) -> Tensors:
    """fla's results on each sequence alone: out per packed token, gradients summed in fp32."""
    *inputs, upstream = drawn
    tokens = forest.num_tokens
    index = copies(forest).to(upstream.device)
    # where a token's first copy is
    once = torch.zeros(len(index), dtype=torch.bool, device=index.device)
    once[torch.from_numpy(np.unique(index.cpu().numpy(), return_index=True)[1])] = True
    per_token = [x.ndim > 1 and len(x) == tokens for x in inputs]
    replicated = [
        (x.detach()[index] if by_token else x.detach()).requires_grad_()
        for x, by_token in zip(inputs, per_token, strict=True)
    ]
    out = rule.theirs(replicated, forest.sequence_lengths.tolist())
    # the gradient arrives at one copy of each token: the sum over copies is then the tree's
    arrives = upstream[index] * once.view(-1, *[1] * (upstream.ndim - 1))
    grads = torch.autograd.grad(out, replicated, arrives.to(out.dtype))
    whole = out.new_zeros(tokens, *out.shape[1:]).index_copy_(0, index[once], out.detach()[once])
    summed = [
        torch.zeros_like(x, dtype=torch.float32).index_add_(0, index, grad.float())
        if by_token
        else grad
        for x, grad, by_token in zip(inputs, grads, per_token, strict=True)
    ]
    return [whole, *summed]


def run_side(rule: Rule, side: str, forest: PrefixForest, options: argparse.Namespace) -> Row:
    """Times a side of a workload."""
    tokens = forest.num_tokens
    if side == "tree":
        drawn = rule.draw(tokens, options)
        mask = mask_of(forest, options.device)
        return measure(
            lambda: results(lambda x: rule.tree(x, mask, options.backend), drawn), options
        )
    if side == "dense" and rule.name == "convolution":
        # a forward reads and writes x's size, a backward reads two and writes one
        source = rule.draw(tokens, options)[0].detach()
        target = torch.empty_like(source)
        row = measure(lambda: target.copy_(source), options)
        return row | {"ms": 2.5 * row["ms"]}
    lengths = [min(DENSE, tokens - start) for start in range(0, tokens, DENSE)]
    if side == "dense":
        batches = [lengths]
    else:
        lengths = forest.sequence_lengths.tolist()
        batches = [[lengths[i] for i in some] for some in pieces(lengths, MICRO_BATCH)]
    drawn = rule.draw(max(map(sum, batches)), options)

    def run() -> None:
        for batch in batches:
            total = sum(batch)
            part = [x[:total] if x.ndim > 1 and len(x) >= total else x for x in drawn]
            inputs = [x.detach().requires_grad_() for x in part[:-1]]
            results(lambda x, batch=batch: rule.theirs(x, batch), [*inputs, part[-1]])

    return measure(run, options) | {"computed": sum(map(sum, batches))}


def tables(*runs: Row) -> Parts:
    """Errors by rule; then a line per rule and workload. Of a rule that several runs have, the
    last one's."""
    yield machine(runs[0]["environment"], "triton", "fla-core", "flash-qla")
    rows: dict[tuple[str, str], list[Row]] = {}
    for run in runs:
        found: dict[tuple[str, str], list[Row]] = {}
        for row in run["rows"]:
            found.setdefault((row["rule"], row["kernels"]), []).append(row)
        rows |= found
    checks = [row for some in rows.values() for row in some if row["side"] == "check"]
    yield Table(
        [
            Column("rule", lambda row: row["rule"]),
            Column("fla's kernels", lambda row: row["kernels"]),
            Column("worst error", lambda row: worst(row, "tree_errors")),
            Column("each sequence alone", lambda row: worst(row, "alone_errors")),
            verdict_column(),
        ],
        checks,
    )
    timed = [row for some in rows.values() for row in some if row["side"] != "check"]
    keyed = by_key(timed, lambda row: (row["rule"], row["workload"], row["kernels"]), "side")
    lines = [{"key": key, **sides} for key, sides in keyed.items()]
    yield Table(
        [
            Column("rule", lambda line: line["key"][0]),
            Column("workload", lambda line: line["key"][1]),
            Column("T", lambda line: f"{first_of(line)['tokens']:,}"),
            Column("R / T", lambda line: f"{first_of(line)['ratio']:.1f}"),
            Column("segments, levels", lambda line: first_of(line)["segments"]),
            Column("fla's kernels", lambda line: line["key"][2]),
            Column("floor ms", partial(cell, side="dense")),
            Column("replicated", partial(cell, side="replicated")),
            Column("tree", partial(cell, side="tree")),
            Column("over the floor", lambda line: over(line, "tree", "dense")),
            Column("speed-up", lambda line: over(line, "replicated", "tree")),
            Column("GiB: floor", lambda line: memory(line, "dense")),
            Column("tree", lambda line: memory(line, "tree")),
        ],
        lines,
    )


def worst(row: Row, key: str) -> str:
    return f"{max(row[key]):.1e}" if key in row else ""


def first_of(line: Row) -> Row:
    found: Row = next(row for name, row in line.items() if name != "key")
    return found


def cell(line: Row, side: str) -> str:
    return number(line.get(side, {}), "ms", ".2f")


def memory(line: Row, side: str) -> str:
    return gib(line.get(side, {}).get("peak_bytes"))


def over(line: Row, above: str, below: str) -> str:
    """How many times the one's milliseconds are the other's."""
    top, bottom = (line.get(side, {}).get("ms") for side in (above, below))
    return times_cell(top / bottom if top and bottom else None)


def kernels() -> str:
    """Whose kernels run fla's delta rule."""
    try:
        version("flash-qla")
    except PackageNotFoundError:
        return "fla"
    return "fla" if os.environ.get("FLA_FLASH_QLA") == "0" else "flash-qla"


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every rule was green."""
    what = parser(__doc__)
    what.add_argument("--rules", nargs="+", choices=list(RULES), default=list(RULES))
    what.add_argument("--workloads", nargs="+", choices=NAMES, default=list(WORKLOADS))
    what.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    what.add_argument("--rollouts", type=Path, help="JSONL.gz, for 'airline per turn'")
    options = parse(what, arguments)
    if options.read is not None:
        return Report.read(options).finish(tables)
    skip_airline(options)
    report = Report(options)
    for name in options.rules:
        rule = RULES[name]
        about = {"rule": name, "kernels": kernels() if name.startswith("delta") else ""}
        row = report.attempt({**about, "side": "check"}, partial(errors, rule, options))
        print(f"{name}: {row.get('red') or row.get('failed') or 'green'}", flush=True)
        if row.get("red", True):
            continue
        for workload_name in options.workloads:
            forest = scaled(workload(workload_name, options.rollouts), options.scale, "heaviest")
            segments = segments_of(mask_of(forest, "cpu").host)
            case = {
                **about,
                "workload": workload_name,
                "tokens": forest.num_tokens,
                "ratio": forest.replication_ratio,
                "segments": f"{segments.num_segments}, {segments.num_levels}",
            }
            for side in options.sides:
                if side == "replicated" and name == "convolution":
                    continue
                one = partial(run_side, rule, side, forest, options)
                row = report.attempt({**case, "side": side}, one)
                took = row.get("ms")
                print(f"{name}, {workload_name}, {side}: {took and round(took, 2)} ms", flush=True)
    return report.finish(tables)
