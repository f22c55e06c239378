"""How much faster is one Qwen3-8B decoder layer, by prompt and number of responses?

    python -m benchmarks layer --out layer.json --plot layer.png           # on a GPU
    python -m benchmarks layer --device cpu --scale 0.01 --repeats 1       # every code path

The grid of DualKV's Table 2: prompts of 5K to 131K tokens, 1 to 32 responses of 131 to 2,048 (seed
fixed; n responses are the first n of the 32), bf16, gradients of the input and of every weight.
Sides: packed; fa2, fa4, own: the replicated batch (`lib/replicated.py`); grouper: the real package
prefix-grouper with FA2 (`lib/grouper.py`). Each is held first against float32, every sequence alone
with eager attention, on a small batch; on every case its output and its gradient are compared with
the first side that ran. Red has no times; out of memory is a row, not a skip.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

from benchmarks.lib.grouper import grouped_attention
from benchmarks.lib.layers import (
    attention_of,
    config,
    flops,
    over_limit,
    prompt_batch,
    response_lengths,
    sharpen,
)
from benchmarks.lib.plots import LABELS, figure, line, name, save, ticks
from benchmarks.lib.replicated import attending, chains, copies, missing, pairs, skip_missing
from benchmarks.lib.runs import Report, Row, measure, parse, parser
from benchmarks.lib.tables import (
    GIB,
    Column,
    Parts,
    Table,
    by_key,
    gib,
    machine,
    number,
    times_cell,
    verdict,
)
from prefixtree import PrefixForest, pack
from prefixtree.planning.model_cost import model_cost
from prefixtree.testing.compare import gradient_differences

PROMPTS = (5120, 8192, 16384, 32768, 65536, 131072)
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
SIDES = ("packed", "fa2", "fa4", "grouper", "own")
# ||side - first|| / ||first|| on a full case, both in the same dtype
AGREEMENT = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 5e-2}


class Layer:
    """The layer and its rotary embedding."""

    def __init__(self, options: argparse.Namespace, dtype: str, attention: str = "prefixtree"):
        # the second layer: the first checks positions, which waits for the device
        shape = config(2, options.is_tiny)
        shape._attn_implementation = attention
        self.shape = shape
        torch.manual_seed(0)
        with torch.device(options.device):
            self.module = Qwen3DecoderLayer(shape, 1)
            self.rotary = Qwen3RotaryEmbedding(shape)
        for weight in self.module.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        sharpen(self.module)
        # equal weights whatever the dtype of the run
        self.module.to(torch.bfloat16).to(getattr(torch, dtype)).train()
        self.weights = dict(self.module.named_parameters())

    def __call__(self, hidden: torch.Tensor, positions: torch.Tensor, **more: Any) -> torch.Tensor:
        """hidden [1, tokens, h], positions [1, tokens]."""
        embeddings = self.rotary(hidden, positions)
        return self.module(hidden, position_embeddings=embeddings, position_ids=positions, **more)


class Side:
    """One side's run of a forest, ready to be timed.

    Attributes:
        rows: int64, the packed token of each of its tokens; None for the packed side.
    """

    def __init__(
        self,
        side: str,
        layer: Layer,
        forest: PrefixForest,
        hidden: torch.Tensor,
        upstream: torch.Tensor,
        options: argparse.Namespace,
    ) -> None:
        self.layer = layer
        device = options.device
        packed = pack(forest)
        self.count = forest.num_tokens
        counts = packed.multiplicity[:, None].to(device, upstream.dtype)
        self.rows: torch.Tensor | None = None
        self.attend = None
        mask = packed.mask
        if side == "packed":
            dout = upstream * counts
        elif side == "grouper":
            rows, lengths = _grouped_rows(forest)
            self.rows = rows.to(device)
            dout = upstream[self.rows] * counts[self.rows]
            where, dtype = torch.device(device), getattr(torch, options.dtype)
            self.attend = grouped_attention(*lengths, where, dtype)
        else:
            self.rows = copies(forest).to(device)
            dout = upstream[self.rows]
            mask = pack(chains(forest)).mask
            self.attend = attention_of(side, forest, device, options.dtype)
        self.mask = mask.to(device)
        if options.backend != "auto":
            self.mask = self.mask.with_options(options.backend)
        positions = packed.position_ids.to(device)
        self.positions = (positions if self.rows is None else positions[self.rows])[None]
        mine = hidden if self.rows is None else hidden[self.rows]
        self.hidden = mine.detach().clone()[None].requires_grad_()
        self.dout = dout[None]

    def __call__(self) -> list[torch.Tensor]:
        """out, then the gradients of the input and of every weight."""
        inputs = [self.hidden, *self.layer.weights.values()]
        with attending(self.attend):
            out = self.layer(self.hidden, self.positions, tree_mask=self.mask)
            return [out.detach(), *torch.autograd.grad(out, inputs, self.dout)]

    def results(self) -> dict[str, torch.Tensor]:
        """By name, out and the input's gradient a packed token, without the residual's part."""
        out, gradient, *weights = self()
        out, gradient = out[0] - self.hidden[0].detach(), gradient[0] - self.dout[0]
        if self.rows is not None:
            wide = gradient.float()
            total = wide.new_zeros(self.count, wide.shape[1])
            gradient = total.index_add_(0, self.rows, wide)
            out = out.new_zeros(self.count, out.shape[1]).index_copy_(0, self.rows, out)
        found = dict(zip(self.layer.weights, weights, strict=True))
        return {"out": out, "hidden": gradient} | found


def _grouped_rows(forest: PrefixForest) -> tuple[torch.Tensor, tuple[int, list[int]]]:
    """Packed tokens as prompt, then responses in input order; and their lengths."""
    sequences = pack(forest).unpack(torch.arange(forest.num_tokens))
    # a single response makes one node with its prompt: the prompt's length is not in the forest
    prompt = int(forest.node_length[0])
    if forest.num_sequences == 1:
        prompt = max(1, prompt - 1)
    rows = torch.cat([sequences[0][:prompt], *(s[prompt:] for s in sequences)])
    return rows, (prompt, [len(s) - prompt for s in sequences])


def draw(forest: PrefixForest, layer: Layer, options: argparse.Namespace) -> list[torch.Tensor]:
    """The input and the upstream gradient of every packed token, [T, h]."""
    generator = torch.Generator(options.device).manual_seed(0)
    shape = (forest.num_tokens, layer.shape.hidden_size)
    dtype = getattr(torch, options.dtype)
    return [
        torch.randn(shape, generator=generator, device=options.device, dtype=dtype)
        for _ in range(2)
    ]


# ---- checks --------------------------------------------------------------------------------------


def eager_results(
    forest: PrefixForest, hidden: torch.Tensor, upstream: torch.Tensor, dtype: str, options: Any
) -> dict[str, torch.Tensor]:
    """Every sequence alone with eager attention in `dtype`; sums of copies in float32."""
    layer = Layer(options, dtype, "eager")
    hidden, upstream = (x.to(getattr(torch, dtype)) for x in (hidden, upstream))
    names = ("hidden", *layer.weights)
    total: dict[str, torch.Tensor] = {"out": torch.zeros_like(hidden, dtype=torch.float32)}
    total["hidden"] = torch.zeros_like(total["out"])
    for rows in pack(forest).unpack(torch.arange(forest.num_tokens)):
        rows = rows.to(options.device)
        n = len(rows)
        mine = hidden[rows][None].requires_grad_()
        causal = torch.full((n, n), -torch.inf, device=mine.device, dtype=mine.dtype).triu(1)
        out = layer(
            mine, torch.arange(n, device=mine.device)[None], attention_mask=causal[None, None]
        )
        dout = upstream[rows][None]
        gradients = torch.autograd.grad(out, [mine, *layer.weights.values()], dout)
        total["out"][rows] = (out[0] - mine[0]).detach().float()
        first, *rest = (g.float() for g in gradients)
        total["hidden"].index_add_(0, rows, first[0] - dout[0].float())
        for key, value in zip(names[1:], rest, strict=True):
            total[key] = total[key] + value if key in total else value
    return total


def check_sides(sides: Sequence[str], options: argparse.Namespace) -> dict[str, Row]:
    """Each side on a small ragged batch against float32; `over_limit` by side."""
    layer = Layer(options, options.dtype)
    forest = prompt_batch(150, [40, 1, 77, 130, 9], 4096).forest
    hidden, upstream = draw(forest, layer, options)
    exact = eager_results(forest, hidden, upstream, "float32", options)
    base = eager_results(forest, hidden, upstream, options.dtype, options)
    allowed = gradient_differences(base, exact)
    out: dict[str, Row] = {}
    for side in sides:
        try:
            found = Side(side, layer, forest, hidden, upstream, options).results()
        except Exception as problem:
            out[side] = {"red": [f"{type(problem).__name__}: {problem}"[:300]]}
            continue
        out[side] = over_limit(gradient_differences(found, exact), allowed, options.dtype)
    return out


# ---- cases ---------------------------------------------------------------------------------------


def run_case(
    side: str,
    layer: Layer,
    forest: PrefixForest,
    inputs: list[torch.Tensor],
    known: dict[str, Any],
    options: argparse.Namespace,
) -> Row:
    """Compares with the first side, then times."""
    run = Side(side, layer, forest, *inputs, options)
    found = run.results()
    row: Row = {"red": []}
    for key in ("out", "hidden"):
        if key not in known:
            # on the host: the device's memory is for what is measured
            known[key] = found[key].to("cpu", getattr(torch, options.dtype))
            continue
        first = known[key].to(options.device)
        gap = found[key].float() - first.float()
        row[f"{key}_difference"] = float(gap.norm() / first.float().norm())
        if not row[f"{key}_difference"] <= AGREEMENT[options.dtype]:
            row["red"].append(f"{key} differs by {row[f'{key}_difference']:.1e}")
        del first, gap
    del found
    if row["red"]:
        return row
    row |= measure(run, options)
    tokens = forest.num_tokens if side in ("packed", "grouper") else forest.num_replicated_tokens
    which = forest if side in ("packed", "grouper") else chains(forest)
    # one of the configuration's two layers
    work = flops(model_cost(layer.shape), tokens, pairs(which), 0).total(1.5, 1.75, 0)
    return row | {"tokens": tokens, "flops": work, "tflops": work / row["ms"] / 1e9}


def compare(rows: list[Row]) -> None:
    """Adds speed-ups and the bound to the packed row of a case."""
    done = {row["side"]: row for row in rows if "ms" in row}
    packed = done.get("packed")
    if packed is None:
        return
    packed["speedup"] = {s: r["ms"] / packed["ms"] for s, r in done.items() if s != "packed"}
    if "own" in done:
        ratio = done["own"]["flops"] / packed["flops"]
        packed["flop_ratio"] = ratio
        packed["of_bound"] = done["own"]["ms"] / ratio / packed["ms"]


def tables(data: Row) -> Parts:
    """A line per prompt and number of responses: ms and GiB of every side."""
    names = {
        "fa2": "FA2",
        "fa4": "flash-attn-4",
        "own": "own backend",
        "grouper": "prefix-grouper",
        "packed": "packed",
    }
    sides = [side for side in names if any(row["side"] == side for row in data["rows"])]

    def time(side: str, is_first: bool) -> Column:
        def cell(line: dict[str, Row]) -> str:
            row = line.get(side, {})
            peak = row.get("peak_with_held_bytes")
            text = number(row, "ms", ".1f") or verdict(row)
            return text if peak is None else f"{text} / {gib(peak)}"

        return Column(f"{names[side]} ms / GiB" if is_first else names[side], cell)

    def over(side: str) -> Column:
        return Column(
            f"over {names[side]}", lambda line: times_cell(packed(line, "speedup").get(side))
        )

    def packed(line: dict[str, Row], key: str) -> Any:
        return line.get("packed", {}).get(key) or {}

    def case(line: dict[str, Row]) -> str:
        row = next(iter(line.values()))
        return f"{row['prompt']:,} x {row['micro_batch']}"

    columns = [
        Column("prompt x responses", case),
        *(time(side, side == sides[0]) for side in sides),
        *(over(side) for side in sides if side not in ("own", "packed")),
        Column("of the bound", lambda line: number(line.get("packed", {}), "of_bound", ".2f")),
    ]
    cases = by_key(data["rows"], lambda row: (row["prompt"], row["micro_batch"]), "side")
    yield machine(data["environment"])
    yield Table(columns, list(cases.values()))


def plot(report: Report, sides: list[str]) -> None:
    """Speed-ups over the peers by micro-batch, one line per prompt; peak memory by prompt."""
    rows = [row for row in report.rows if "ms" in row]
    packed = [row for row in rows if row["side"] == "packed"]
    prompts = sorted({row["prompt"] for row in packed})
    labels = [f"{p / 1024:.3g}K" if p >= 1024 else str(p) for p in prompts]
    others = [s for s in sides if any(s in row.get("speedup", {}) for row in packed)]
    # our backend gives the bound and is no peer: shown where nothing else ran
    others = [s for s in others if s != "own"] or others
    fig, axes = figure(2, f"a Qwen3-8B layer, {report.where}", len(others) // 2 + 1)
    for empty in axes[len(others) + 1 :]:
        empty.set_visible(False)
    axes = axes[: len(others) + 1]
    for axis, side in zip(axes, others, strict=False):
        for i, prompt in enumerate(prompts):
            some = [r for r in packed if r["prompt"] == prompt and side in r.get("speedup", {})]
            x, y = [r["micro_batch"] for r in some], [r["speedup"][side] for r in some]
            shade = str(0.75 - 0.75 * i / max(1, len(prompts) - 1))
            line(axis, f"prompt {labels[i]}", x, y, color=shade)
        axis.axhline(1, color="#bbbbbb", linewidth=1)
        axis.set_xscale("log", base=2)
        ticks(axis, report.values("micro_batch"))
        axis.set_ylim(bottom=0)
        name(axis, "responses", "speed-up", f"over {LABELS[side]}")
    most = max(row["micro_batch"] for row in rows)
    for side in sides:
        some = [r for r in rows if r["side"] == side and r["micro_batch"] == most]
        peaks = [None if (p := r["peak_with_held_bytes"]) is None else p / GIB for r in some]
        line(axes[-1], side, [r["prompt"] for r in some], peaks)
    axes[-1].set_xscale("log", base=2)
    axes[-1].set_ylim(bottom=0)
    ticks(axes[-1], prompts, labels)
    name(axes[-1], "prompt tokens", "peak memory, GiB", f"{most} responses")
    save(fig, report.options.plot)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every side was green."""
    what = parser(__doc__)
    what.add_argument("--prompts", nargs="+", type=int, default=list(PROMPTS))
    what.add_argument("--micro-batches", nargs="+", type=int, default=list(MICRO_BATCHES))
    what.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    options = parse(what, arguments)
    if options.read is not None:
        return finish(Report.read(options))
    skip_missing(options)
    sides = options.sides
    for side in options.skipped:
        print(f"{side} was skipped: {missing(side, options.device)}")
    checks = check_sides(sides, options)
    report = Report(options, checks=checks)
    layer = Layer(options, options.dtype)
    everything = response_lengths(max(options.micro_batches), options.scale)
    for prompt in options.prompts:
        for count in options.micro_batches:
            length = max(2, round(prompt * options.scale))
            forest = prompt_batch(length, everything[:count], 1_000_000).forest
            inputs = draw(forest, layer, options)
            known: dict[str, Any] = {}
            rows = []
            for side in sides:

                def one(side: str = side, known: Any = known, rest: Any = (forest, inputs)) -> Row:
                    if checks[side]["red"]:
                        return {"red": checks[side]["red"]}
                    return run_case(side, layer, *rest, known, options)

                case = {"prompt": prompt, "micro_batch": count, "side": side}
                rows.append(report.attempt(case, one))
            compare(rows)
            told = [f"{r['side']} {number(r, 'ms', '.2f') or verdict(r)}" for r in rows]
            print(f"P {prompt} x {count}: {', '.join(told)}", flush=True)
    return finish(report)


def finish(report: Report) -> int:
    """Draws, prints; the exit code."""
    sides = report.values("side")
    if report.options.plot is not None and any("ms" in row for row in report.rows):
        plot(report, sides)
    return report.finish(tables)
