"""How long does an update by distillation take, both models and the divergence?

    python -m benchmarks distill_models --rollouts FILE --out distill_models.json   # on a GPU
    python -m benchmarks distill_models --device cpu --scale 0.01 --repeats 1 --rollouts FILE

A student of Qwen3-8B's layers and a teacher of Qwen3-32B's, both with random weights, --layers of
each. An update: for each micro-batch of the airline rollouts, one sample per turn, the teacher's
forward, the student's forward with every layer checkpointed, KL(teacher || student) over the whole
vocabulary at every scored token, and its backward. Sides: packed, `Teacher` and `measure=` over the
forest; own, the same over the replicated batch; trl, every sequence alone through sdpa, the
divergence by the kernels of TRL's DistillationTrainer.

First small models, of full width with few tokens in the vocabulary, are held against float32: no
side's divergences and gradient may be 1.5 times as far from it as those of every sequence alone
with all its logits. The models' divergences must be near each other too. Red has no times.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.layers import Batch, checkpointed, config, model_of, prompt_batch
from benchmarks.lib.policy import airline
from benchmarks.lib.precision import FARTHER
from benchmarks.lib.runs import Report, Row, measure, parse, parser
from benchmarks.lib.tables import Column, Parts, Table, gib, machine, number, verdict
from benchmarks.lib.tables import verdict_column as verdicts
from prefixtree import Teacher, sequence_logprobs

SIDES = ("packed", "own", "trl")
# mean difference of divergences over their mean, between sides in bf16
DRIFT = 0.1


@dataclass
class Models:
    """A student that trains and a frozen teacher."""

    student: Any
    teacher: Any

    @classmethod
    def of(cls, layers: int, options: argparse.Namespace, vocabulary: int | None = None) -> Models:
        """With so many layers each, and as many tokens at most."""
        both = []
        for seed, shape in enumerate(("qwen3-8b", "qwen3-32b")):
            sizes = config(layers, options.is_tiny, vocabulary, shape)
            both.append(model_of(sizes, options.device, options.dtype, seed=seed))
        return cls(checkpointed(both[0]), both[1].eval().requires_grad_(False))

    def attend_by(self, name: str) -> None:
        """Sets the attention of both."""
        for model in (self.student, self.teacher):
            model.set_attn_implementation(name)

    def float(self) -> Models:
        """Both in float32, in place."""
        return Models(self.student.float(), self.teacher.float())


# ---- sides ---------------------------------------------------------------------------------------


def by_measure(side: str, models: Models, batch: Batch) -> Iterator[list[torch.Tensor]]:
    """The divergences of a micro-batch, float32 [n - 1] per sequence, 0 where not scored."""
    packed = batch.packed(side, str(models.student.device))
    kl = Teacher(models.teacher, packed, batch.masks).divergence()
    scores = sequence_logprobs(models.student, packed, loss_mask=batch.masks, measure=kl)
    assert scores.measured is not None
    yield [values[:, 0] for values in scores.measured]


def alone(side: str, models: Models, batch: Batch) -> Iterator[list[torch.Tensor]]:
    """The same, a sequence at a time; side: trl, or plain, with all logits."""
    student, teacher = models.student, models.teacher
    for tokens, mask in zip(batch.sequences, batch.masks, strict=True):
        rows = torch.from_numpy(mask[1:].nonzero()[0]).to(student.device)
        ids = {"input_ids": torch.from_numpy(tokens)[None].to(student.device), "use_cache": False}
        with torch.no_grad():
            of_teacher = teacher.model(**ids).last_hidden_state[0, rows]
        hidden = student.model(**ids).last_hidden_state[0, rows]
        heads = (student.lm_head.weight, teacher.lm_head.weight)
        if side == "trl":
            from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

            given = (hidden, heads[0], None, of_teacher, heads[1], None, 0.0)
            found = ChunkedDivergenceFunction.apply(*given)[0]
        else:
            log_t = (of_teacher @ heads[1].t()).float().log_softmax(-1)
            found = _kl(log_t, (hidden @ heads[0].t()).float().log_softmax(-1))
        yield [found.new_zeros(len(tokens) - 1).index_put((rows,), found)]


def _kl(log_t: torch.Tensor, log_s: torch.Tensor) -> torch.Tensor:
    return (log_t.exp() * (log_t - log_s)).sum(-1)


def update(side: str, models: Models, batches: Sequence[Batch]) -> list[torch.Tensor]:
    """Adds the gradient of the mean over scored tokens; -> divergences, in order of sequences."""
    scored = sum(int(mask[1:].sum()) for batch in batches for mask in batch.masks)
    run = by_measure if side in ("packed", "own") else alone
    out = []
    for batch in batches:
        for values in run(side, models, batch):
            (torch.cat(values).sum() / scored).backward()
            out += [value.detach() for value in values]
    return out


# ---- checks --------------------------------------------------------------------------------------


def results(side: str, models: Models, batch: Batch) -> dict[str, torch.Tensor]:
    """Divergences and the student's gradient, flat and on the CPU."""
    models.attend_by("prefixtree" if side in ("packed", "own") else "sdpa")
    models.student.zero_grad(set_to_none=True)
    values = torch.cat(update(side, models, [batch]))
    gradients = [p.grad.float().flatten() for p in models.student.parameters()]
    models.student.zero_grad(set_to_none=True)
    return {"value": values.float().cpu(), "gradient": torch.cat(gradients).cpu()}


def check(options: argparse.Namespace) -> dict[str, Row]:
    """By side: distances from float32, and what is red."""
    models = Models.of(2, options, vocabulary=4096)
    vocabulary = models.student.config.vocab_size
    batch = prompt_batch(150, [40, 1, 77, 130, 9], vocabulary)
    found: dict[str, dict[str, torch.Tensor]] = {}
    out: dict[str, Row] = {}
    for side in ("plain", *options.sides):
        try:
            found[side] = results(side, models, batch)
        except Exception as problem:
            # a peer that cannot run is red, with the reason, and the others go on
            out[side] = {"red": [f"{type(problem).__name__}: {problem}"[:300]]}
    exact = results("plain", models.float(), batch)
    for side in found:
        row: Row = {"red": []}
        for name, want in exact.items():
            off, allowed = (float((found[x][name] - want).norm()) for x in (side, "plain"))
            row[f"{name} error"] = off / float(want.norm())
            # in float32 alone nothing is rounded further
            limit = FARTHER * allowed / float(want.norm()) + 1e-6
            if not row[f"{name} error"] <= limit:
                row["red"].append(f"{name} is {row[f'{name} error']:.1e}, at most {limit:.1e}")
        out[side] = row
    return out


# ---- the run -------------------------------------------------------------------------------------


def run_side(
    side: str,
    models: Models,
    batches: Sequence[Batch],
    known: dict[bytes, torch.Tensor],
    checks: dict[str, Row],
    options: argparse.Namespace,
) -> Row:
    """Times a side; `known` keeps the first one's divergences by sequence."""
    if checks[side]["red"]:
        return {"red": checks[side]["red"]}
    models.attend_by("prefixtree" if side in ("packed", "own") else "sdpa")
    # gradients stand before, as after the first micro-batch of any step
    for parameter in models.student.parameters():
        parameter.grad = torch.zeros_like(parameter)
    row: Row = {"tokens": sum(len(s) for batch in batches for s in batch.sequences)}
    keys = [
        tokens.tobytes() + mask.tobytes()
        for batch in batches
        for tokens, mask in zip(batch.sequences, batch.masks, strict=True)
    ]
    found = dict(zip(keys, update(side, models, batches), strict=True))
    known.update({key: value for key, value in found.items() if key not in known})
    gaps = torch.cat([(found[key] - known[key]).abs() for key in found])
    row["drift"] = float(gaps.sum() / torch.cat([known[key] for key in found]).sum())
    if not row["drift"] <= DRIFT:
        return row | {"red": [f"divergences differ by {row['drift']:.3f} of their mean"]}
    time = measure(lambda: update(side, models, batches), options)
    return row | time | {"red": [], "seconds": time["ms"] / 1e3}


def tables(data: Row) -> Parts:
    """A line per side."""
    yield machine(data["environment"], "transformers", "trl")
    yield Table(
        [
            Column(f"{data['layers']} layers each", lambda row: row["side"]),
            Column("s", lambda row: number(row, "seconds", ".2f")),
            Column("GiB", lambda row: gib(row.get("peak_with_held_bytes"))),
            *(
                Column(
                    name,
                    lambda row, key=f"{name} error": number(
                        data["checks"][row["side"]], key, ".1e"
                    ),
                )
                for name in ("value", "gradient")
            ),
            verdicts(),
        ],
        data["rows"],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every side was green."""
    what = parser(__doc__)
    what.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    what.add_argument("--layers", type=int, default=4, help="of each model")
    what.add_argument("--rollouts", type=Path)
    what.add_argument("--tasks", type=int, default=2)
    options = parse(what, arguments)
    if options.read is not None:
        return Report.read(options).finish(tables)
    if options.rollouts is None:
        what.error("distill_models needs --rollouts")
    if find_spec("trl") is None and "trl" in options.sides:
        options.sides.remove("trl")
        options.skipped.append("trl")
    options.shape = "qwen3-8b"
    checks = check(options)
    report = Report(options, checks=checks, layers=options.layers)
    case = airline(options)
    known: dict[bytes, torch.Tensor] = {}
    models = Models.of(options.layers, options)
    for side in options.sides:
        batches = case["packed" if side == "packed" else "replicated"]
        run = partial(run_side, side, models, batches, known, checks, options)
        row = report.attempt({"side": side}, run)
        print(f"{side}: {verdict(row) or format(row['seconds'], '.3f') + ' s'}", flush=True)
    return report.finish(tables)
