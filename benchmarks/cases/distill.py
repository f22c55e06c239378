"""How much time and memory does KL to a teacher over the whole vocabulary take, and over its top k?

    python -m benchmarks distill --out distill.json                     # on a GPU
    python -m benchmarks distill --device cpu --scale 0.01 --repeats 1  # every code path

The heads alone, forward and backward: hidden states of student and teacher for as many edges as a
large micro-batch has. Sides: logp, no teacher, for comparison; measure, `measure=` with the
teacher's head in chunks; compiled, the same behind torch.compile; fused, the same in the kernels
of log p, as `pt.Teacher` gives it; top64, with its 64 largest log p,
computed before; checkpoint, what a trainer writes without a measure: torch's checkpointing by
chunks, whose weight gradients are summed in the weight's dtype; eager, all logits at once. Of
others: trl, the kernels of TRL's DistillationTrainer, which make the entropy too; liger_chunks,
`LigerFusedLinearJSDLoss`, which gives a mean and makes its gradients in the forward already. Values
and gradients of all but logp and top64 are held against float32, chunk by chunk, from logits that
are rounded where a side rounds them: trl does not. liger_chunks rounds log p as well, and has wider
limits. Values are also compared with those of logits that nobody rounded. Red has no times; out of
memory is a row.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.lib.runs import Report, Row, measure, parse, parser
from benchmarks.lib.tables import Column, Parts, Table, gib, machine, number, verdict
from benchmarks.lib.tables import verdict_column as verdicts
from prefixtree.kernels.lm_head.eager import LogitRule
from prefixtree.kernels.lm_head.logprobs import ScoreOptions, linear_logprobs
from prefixtree.kernels.lm_head.measures import Divergence, MeasuredEdges

SIDES = (
    *("logp", "measure", "compiled", "fused", "top64", "checkpoint", "eager"),
    *("trl", "liger_chunks"),
)
# of another package
PACKAGES = {"trl": "trl", "liger_chunks": "liger_kernel"}
# edges, vocabulary, hidden sizes of student and teacher: Qwen3-8B and Qwen3-32B
SHAPE = (16384, 151_936, 4096, 5120)
K, CHUNK = 64, 512
RULE = LogitRule()
# ||side - reference|| / ||reference||: of values; of gradients, products of half precision
LIMITS = {"value": 1e-3, "hidden": 1e-2, "weight": 1e-2}
# products of half precision whose sums, the logits, stay in float32
UNROUNDED = ("trl",)
# so many times those, of what rounds log p
ROUNDED = {"liger_chunks": 30.0}


@dataclass
class Case:
    """Both heads, and the gradient that arrives at the divergences [U, 1]."""

    hidden: torch.Tensor
    weight: torch.Tensor
    of_teacher: torch.Tensor
    head_of_teacher: torch.Tensor
    target: torch.Tensor
    upstream: torch.Tensor
    best: torch.Tensor | None = None

    @classmethod
    def of(cls, options: argparse.Namespace) -> Case:
        edges, vocabulary, student, teacher = (max(64, round(n * options.scale)) for n in SHAPE)
        generator = torch.Generator(options.device).manual_seed(0)
        where: dict[str, Any] = {"generator": generator, "device": options.device}

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, **where).to(getattr(torch, options.dtype))

        # logits of a standard deviation of 3, so that probabilities differ
        return cls(
            randn(edges, student).requires_grad_(),
            (randn(vocabulary, student) * (3 / student**0.5)).requires_grad_(),
            randn(edges, teacher),
            randn(vocabulary, teacher) * (3 / teacher**0.5),
            torch.randint(vocabulary, (edges,), **where),
            torch.rand(edges, 1, **where) / edges,
        )

    @torch.no_grad()
    def logits_of_teacher(self, which: Any) -> torch.Tensor:
        """At some edges, [r, V]."""
        return F.linear(self.of_teacher[which], self.head_of_teacher)

    def teacher(self, which: Any) -> torch.Tensor:
        """log p of the teacher at some edges, [r, V]."""
        return self.logits_of_teacher(which).float().log_softmax(-1)

    def kl(self, logits: torch.Tensor, edges: MeasuredEdges) -> torch.Tensor:
        return _kl(self.teacher(edges.edge), logits.log_softmax(-1))

    def top_k_kl(self, logits: torch.Tensor, edges: MeasuredEdges) -> torch.Tensor:
        assert self.best is not None
        log_t, ids = self.best[edges.edge].chunk(2, -1)
        return _kl(log_t, logits.log_softmax(-1).gather(1, ids.long()))

    def largest(self, logits: torch.Tensor, edges: MeasuredEdges) -> torch.Tensor:
        best = logits.log_softmax(-1).topk(K)
        return torch.cat([best.values, best.indices.float()], -1)

    def linear(self, hidden: torch.Tensor, weight: torch.Tensor, of: Any) -> torch.Tensor:
        """The columns of a measure; without one, log p."""
        one = self.upstream.new_ones(()).expand(len(self.target))
        found = linear_logprobs(hidden, weight, None, self.target, one, ScoreOptions(measure=of))
        return found if of is None else found[:, 1:]

    def score(self, side: str) -> torch.Tensor:
        """[U, 1]"""
        if side in ("logp", "measure", "compiled", "fused", "top64"):
            of = {"logp": None, "measure": self.kl, "top64": self.top_k_kl}
            of["fused"] = Divergence(0.0, lambda edges: self.logits_of_teacher(edges.edge), RULE)
            # torch keeps what it compiled of a function
            of["compiled"] = torch.compile(self.kl)
            return self.linear(self.hidden, self.weight, of[side])

        if side in PACKAGES:
            return self._of_others(side)

        def chunk(hidden: torch.Tensor, which: slice) -> torch.Tensor:
            return _kl(self.teacher(which), F.linear(hidden, self.weight).float().log_softmax(-1))

        if side == "eager":
            return chunk(self.hidden, slice(None))
        parts = [slice(at, at + CHUNK) for at in range(0, len(self.hidden), CHUNK)]
        return torch.cat(
            [checkpoint(chunk, self.hidden[part], part, use_reentrant=False) for part in parts]
        )

    def _of_others(self, side: str) -> torch.Tensor:
        """[U, 1]; Liger's mean, []."""
        student, teacher = (self.hidden, self.weight), (self.of_teacher, self.head_of_teacher)
        if side == "trl":
            from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

            # 0.0: of the teacher from the student; beside it, the entropy
            out = ChunkedDivergenceFunction.apply(*student, None, *teacher, None, 0.0)[0]
            return out[:, None]
        from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

        is_compiled = self.hidden.device.type != "cpu"
        chunks = LigerFusedLinearJSDLoss(0.0, 1.0, beta=0.0, compiled=is_compiled, chunk_size=CHUNK)
        return chunks(*student, *teacher, self.target)

    def results(self, side: str) -> list[torch.Tensor]:
        """Values, and the gradients of the hidden states and of the weight."""
        out = self.score(side)
        upstream = self.upstream if out.ndim else torch.ones_like(out)
        inputs = (self.hidden, self.weight)
        return [out.detach(), *torch.autograd.grad(out, inputs, upstream)]

    def averaged(self) -> Case:
        """With the gradient that arrives from a mean."""
        return replace(self, upstream=torch.full_like(self.upstream, 1 / len(self.upstream)))

    @torch.no_grad()
    def reference(self, is_rounded: bool) -> list[torch.Tensor]:
        """The results in float32, from rounded logits on or from the start: d KL / d logits = p_s -
        p_t."""
        if not is_rounded:
            names = ("hidden", "weight", "of_teacher", "head_of_teacher")
            wide = replace(self, **{name: getattr(self, name).float() for name in names})
            return wide.reference(True)
        values, hidden = [], []
        total = torch.zeros_like(self.weight, dtype=torch.float32)
        for at in range(0, len(self.hidden), CHUNK):
            part = slice(at, at + CHUNK)
            log_t = self.teacher(part)
            log_s = F.linear(self.hidden[part], self.weight).float().log_softmax(-1)
            values.append(_kl(log_t, log_s))
            dz = (log_s.exp() - log_t.exp()) * self.upstream[part]
            hidden.append(dz @ self.weight.float())
            total += dz.t() @ self.hidden[part].float()
        return [torch.cat(values), torch.cat(hidden), total]


def _kl(log_t: torch.Tensor, log_s: torch.Tensor) -> torch.Tensor:
    return (log_t.exp() * (log_t - log_s)).sum(-1, keepdim=True)


def _missing(side: str) -> bool:
    """Whether a side's package is not here."""
    return side in PACKAGES and find_spec(PACKAGES[side]) is None


def _error(found: torch.Tensor, want: torch.Tensor) -> float:
    return float((found.float() - want).norm() / want.norm())


def run_side(side: str, case: Case, exact: torch.Tensor, options: Any) -> Row:
    """Checks, then times, a side; exact: values of logits in float32, [U, 1]."""
    row: Row = {"red": []}
    if side == "top64":
        with torch.no_grad():
            case.best = case.linear(case.of_teacher, case.head_of_teacher, case.largest)
    if side not in ("logp", "top64"):
        is_mean = side == "liger_chunks"
        known = (case.averaged() if is_mean else case).reference(side not in UNROUNDED)
        if is_mean:
            known[0], exact = known[0].mean(), exact.mean()
        got = case.results(side)
        row["exact error"] = _error(got[0], exact)
        for (name, limit), mine, want in zip(LIMITS.items(), got, known, strict=True):
            limit *= ROUNDED.get(side, 1.0)
            row[f"{name} error"] = error = _error(mine, want)
            if not error <= limit:
                row["red"].append(f"{name} is {error:.1e} from float32, at most {limit:.0e}")
        if row["red"]:
            return row
    with torch.no_grad():
        row["forward_ms"] = measure(lambda: case.score(side), options)["ms"]
    return row | measure(lambda: case.results(side), options)


def tables(*runs: Row) -> Parts:
    """A line per side of each run."""
    for data in runs:
        yield from _table(data)


def _table(data: Row) -> Parts:
    yield machine(data["environment"], "trl", "liger-kernel")
    yield Table(
        [
            Column("16,384 edges", lambda row: row["side"]),
            Column("forward ms", lambda row: number(row, "forward_ms", ".1f")),
            Column("with backward", lambda row: number(row, "ms", ".1f")),
            Column("GiB", lambda row: gib(row.get("peak_bytes"))),
            *(
                Column(name, lambda row, key=f"{name} error": number(row, key, ".1e"))
                for name in LIMITS
            ),
            Column("value, exact logits", lambda row: number(row, "exact error", ".1e")),
            verdicts(),
        ],
        data["rows"],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every side was green."""
    what = parser(__doc__)
    what.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    options = parse(what, arguments)
    if options.read is not None:
        return Report.read(options).finish(tables)
    gone = [side for side in options.sides if _missing(side)]
    options.skipped += gone
    options.sides = [side for side in options.sides if side not in gone]
    report = Report(options)
    case = Case.of(options)
    exact = case.reference(False)[0]
    for side in options.sides:
        row = report.attempt({"side": side}, partial(run_side, side, case, exact, options))
        print(f"{side}: {verdict(row) or format(row['ms'], '.2f') + ' ms'}", flush=True)
    return report.finish(tables)
