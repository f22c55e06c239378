"""How much time and memory does the language model's head take, forward and backward?

    python -m benchmarks head --out head.json                        # on a GPU
    python -m benchmarks head --device cpu --scale 0.01 --repeats 1  # every code path

Packing cannot shrink this cost: responses are scored once, packed or replicated. Sides: triton and
torch, `linear_logprobs` with the Triton kernels and with torch's operations on a chunk's logits;
eager, what a trainer does without either: all logits at once, in float32 from there on. On rows
picked at random log p and the gradient of the hidden states are held against float64, by eager's
error on the same rows (2x, and 2 eps of the largest); the weight's gradient, a sum over all rows,
against eager's. Red has no times; out of memory is a row.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

from benchmarks.lib.runs import Report, Row, measure, parse, parser
from benchmarks.lib.tables import (
    Column,
    Parts,
    Table,
    gib,
    machine,
    number,
    verdict,
    verdict_column,
)
from prefixtree.kernels.lm_head import eager as lm_head
from prefixtree.kernels.lm_head import logprobs
from prefixtree.kernels.lm_head.eager import LogitRule
from prefixtree.kernels.lm_head.logprobs import ScoreOptions

SIDES = ("triton", "torch", "eager")
# rows scored, vocabulary, hidden size
SHAPES = {
    "Qwen3-8B": (8192, 151_936, 4096),
    "Qwen3-0.6B": (8192, 151_936, 1024),
    "Llama-3-8B": (8192, 128_256, 4096),
    "Gemma-2-9B, softcap 30": (8192, 256_000, 3584),
}
PICKED = 48
# ||side - eager|| / ||eager|| of the weight's gradient, both sums of products in half precision
AGREEMENT = 1e-2


@dataclass
class Case:
    """Inputs of a head, and the gradient that arrives at its log-probabilities."""

    hidden: torch.Tensor
    weight: torch.Tensor
    target: torch.Tensor
    upstream: torch.Tensor
    rule: LogitRule

    @classmethod
    def of(cls, shape: str, options: argparse.Namespace) -> Case:
        rows, vocabulary, size = (max(64, round(n * options.scale)) for n in SHAPES[shape])
        generator = torch.Generator(options.device).manual_seed(0)
        where: dict[str, Any] = {"generator": generator, "device": options.device}
        dtype = getattr(torch, options.dtype)
        # logits of a standard deviation of 3, so that probabilities differ
        weight = (torch.randn(vocabulary, size, **where) * 3 / size**0.5).to(dtype)
        return cls(
            torch.randn(rows, size, **where).to(dtype).requires_grad_(),
            weight.requires_grad_(),
            torch.randint(vocabulary, (rows,), **where),
            torch.randn(rows, 1, **where) / rows,
            LogitRule(softcap=30.0 if "softcap" in shape else 0.0),
        )

    def score(self, side: str) -> torch.Tensor:
        """Log-probabilities, [rows, 1]."""
        if side == "eager":
            return textbook(self.hidden, self.weight, self.target, self.rule, torch.float32)
        temperature = self.upstream.new_ones(()).expand(len(self.target))
        rest = (self.target, temperature, ScoreOptions(rule=self.rule))
        return logprobs.linear_logprobs(self.hidden, self.weight, None, *rest)

    def results(self, side: str) -> list[torch.Tensor]:
        """log p, and the gradients of the hidden states and the weight."""
        out = self.score(side)
        inputs = (self.hidden, self.weight)
        return [out.detach(), *torch.autograd.grad(out, inputs, self.upstream)]


def textbook(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    rule: LogitRule,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Logits in the head's dtype, all of them; everything after in `dtype`. [rows, 1]"""
    logits = rule.apply(F.linear(hidden, weight).to(dtype))
    return logits.log_softmax(-1).gather(1, target[:, None])


def kernels_of(side: str) -> Callable[[torch.Tensor], Any]:
    """The kernels that `linear_logprobs` must use for a side, in place of its choice."""
    if side == "triton":
        from prefixtree.kernels.lm_head import kernels as fused

        return lambda hidden: fused
    return lambda hidden: lm_head


@dataclass
class Reference:
    """The results that every side of a case is held against.

    Attributes:
        rows: int64, picked. exact: log p of those rows and the gradient of their hidden states, in
            float64. eager: its results, of all rows.
    """

    rows: torch.Tensor
    exact: list[torch.Tensor]
    eager: list[torch.Tensor]

    @classmethod
    def of(cls, case: Case) -> Reference:
        generator = torch.Generator().manual_seed(1)
        rows = torch.randperm(len(case.target), generator=generator)[:PICKED].to(case.target.device)
        return cls(rows, exact(case, rows), case.results("eager"))


def exact(case: Case, rows: torch.Tensor) -> list[torch.Tensor]:
    """log p of those rows, and the gradient of their hidden states, in float64."""
    hidden = case.hidden[rows].detach().double().requires_grad_()
    out = textbook(
        hidden, case.weight.detach().double(), case.target[rows], case.rule, hidden.dtype
    )
    (dhidden,) = torch.autograd.grad(out, hidden, case.upstream[rows].double())
    return [out.detach(), dhidden]


def check(found: list[torch.Tensor], known: Reference) -> Row:
    """The worst errors over their limits, and what is red."""
    row: Row = {"red": []}
    eager = known.eager
    eps = torch.finfo(eager[1].dtype).eps
    names = ("log p", "hidden")
    for key, got, base, want in zip(names, found, eager, known.exact, strict=False):
        error, plain = ((x[known.rows].double() - want).abs().max() for x in (got, base))
        row[f"{key} error"] = float(error / (2 * plain + 2 * eps * want.abs().max()))
        if not row[f"{key} error"] <= 1:
            row["red"].append(f"{key} is {row[f'{key} error']:.2f} times its limit from float64")
    gap = (found[2].float() - eager[2].float()).norm() / eager[2].float().norm()
    row["weight difference"] = float(gap)
    if not row["weight difference"] <= AGREEMENT:
        row["red"].append(f"the weight's gradient differs by {float(gap):.1e}")
    return row


def run_side(side: str, case: Case, known: Reference, options: argparse.Namespace) -> Row:
    """Checks, then times, a side of a case."""
    with patch.object(logprobs, "_kernels_for", kernels_of(side)):
        row = check(case.results(side), known)
        if row["red"]:
            return row
        with torch.no_grad():
            row["forward_ms"] = measure(lambda: case.score(side), options)["ms"]
        return row | measure(lambda: case.results(side), options)


def tables(data: Row) -> Parts:
    """A line per side of a shape."""
    yield machine(data["environment"])
    yield Table(
        [
            Column("head, 8,192 rows", lambda row: row["head"]),
            Column("by", lambda row: row["side"]),
            Column("forward ms", lambda row: number(row, "forward_ms", ".1f")),
            Column("with backward", lambda row: number(row, "ms", ".1f")),
            Column("GiB", lambda row: gib(row.get("peak_bytes"))),
            Column("log p error", lambda row: number(row, "log p error", ".2f"), is_detail=True),
            Column("dhidden error", lambda row: number(row, "hidden error", ".2f"), is_detail=True),
            Column("dweight", lambda row: number(row, "weight difference", ".1e"), is_detail=True),
            verdict_column(),
        ],
        data["rows"],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every side was green."""
    what = parser(__doc__)
    what.add_argument("--heads", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    what.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    options = parse(what, arguments)
    if options.read is not None:
        report = Report.read(options)
        return report.finish(tables)
    if torch.device(options.device).type == "cpu" and "TRITON_INTERPRET" not in os.environ:
        options.skipped = [side for side in options.sides if side == "triton"]
        options.sides = [side for side in options.sides if side != "triton"]
    report = Report(options)
    for shape in options.heads:
        case = Case.of(shape, options)
        known = Reference.of(case)
        for side in options.sides:
            one = partial(run_side, side, case, known, options)
            row = report.attempt({"head": shape, "side": side}, one)
            print(
                f"{shape}, {side}: {verdict(row) or format(row['ms'], '.2f') + ' ms'}", flush=True
            )
    return report.finish(tables)
