"""How much faster is an update with AdamW on agent rollouts, on one GPU and on several?

    python -m benchmarks update --rollouts FILE --out update.json
    torchrun --standalone --nproc-per-node 2 -m benchmarks update --fsdp --rollouts FILE
    python -m benchmarks update --device cpu --scale 0.02 --repeats 1 --rollouts FILE  # every path

The airline rollouts, one sample per turn, with seeded random advantages. Random weights in bf16,
gradient checkpointing. An update: the samples are split into micro-batches and packed, the old
log-probabilities of all are computed, then forward and backward of each with a clipped GRPO loss, a
mean over the tokens of the whole mini-batch, then AdamW. All of that is in the time. AdamW's
learning rate is 0, so that it does its work and every run has the same weights. With --fsdp layers
are sharded by FSDP2 with float32 weights, computed in bf16, gradients reduced in float32 after
every micro-batch; the time is that of the slowest rank.

Sides: fa2, every sequence by itself through FA2, in micro-batches of at most --max-tokens tokens as
verl's `rearrange_micro_batches` makes them; verl, the same micro-batches, each as a forest; packed,
`plan_micro_batches` with that many distinct tokens.

--shape and --layers name the model; --layers-by compile compiles its layers, and --recompute says
what they compute again in the backward, on every side.

Before anything is timed, --checked of the samples are computed in float32 by transformers' sdpa
attention, every sequence alone, without prefixtree or FSDP, with old log-probabilities that lie 1
nat below, at or above the new ones: the clip acts, and no rounding decides where. A side's errors
against that (log-probabilities; the gradient, whole and of every parameter) may be 1.5 times those
of fa2 in one process with weights in bf16, the worst log-probability 3 times; and on all samples
its log-probabilities may differ from fa2's by as much as two such errors together. Red has no time.
Under FSDP the check has empty micro-batches too.
"""

from __future__ import annotations

import argparse
import copy
import gc
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.lib.layers import checkpointed, faster_layers, model_of
from benchmarks.lib.plots import COLOURS, figure, save
from benchmarks.lib.policy import (
    SHAPES,
    Ranks,
    Samples,
    Update,
    cost_of,
    shape_of,
    sharded,
    token_losses,
)
from benchmarks.lib.runs import Report, Row, parse, parser
from benchmarks.lib.tables import (
    GIB,
    Column,
    Parts,
    Table,
    gib,
    machine,
    machines,
    number,
    times_cell,
    verdict,
)
from benchmarks.lib.timing import median_ms
from prefixtree import PrefixForest
from prefixtree.recompute.layers import MODES
from prefixtree.testing.compare import Meter, worst_difference

SIDES = {
    "fa2": "replicated, split by verl",
    "verl": "packed, split by verl",
    "packed": "packed, planned",
    "group": "packed, every forest by all ranks",
}
# a side's error over that of the replicated bf16 run; of the worst token, which is one number
FACTOR, WORST = 1.5, 3.0
# errors of a whole run; all others are a parameter's
OVERALL = ("log-probabilities", "worst log-probability", "gradient")
# limits of the replicated run's error: above them, the rule would allow anything. Of 28 layers on
# a CPU it is 0.06 nats and 13 % of the gradient; unrelated ones differ by 1.4 and 141 %
SANE = {"log-probabilities": 0.2, "gradient": 0.5}


# ---- the check -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """The results of the checked samples.

    Attributes:
        logprobs: float32 [n - 1] each, on the CPU, 0 where not scored.
        gradients: whole ones by parameter, float32.
        loss: of all ranks.
    """

    logprobs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    loss: float


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    """Whole ones by name, in float32; the model's are gone."""
    out = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, f"{name} has no gradient"
        if hasattr(gradient, "full_tensor"):
            gradient = gradient.full_tensor()
        out[name] = gradient.float()
        parameter.grad = None
    return out


def exact_outcome(model: Any, samples: Samples) -> Outcome:
    """In float32, every sequence alone through transformers: nothing of prefixtree."""
    exact = copy.deepcopy(model).float()
    exact.set_attn_implementation("sdpa")
    loss, logprobs = 0.0, []
    weight = 1 / samples.num_scored
    for tokens, mask, advantage, offset in zip(
        samples.sequences, samples.masks, samples.advantages, samples.offsets, strict=True
    ):
        rows = torch.from_numpy(np.flatnonzero(mask[1:])).to(exact.device)
        ids = torch.from_numpy(np.asarray(tokens, np.int64)).to(exact.device)
        logits = exact(input_ids=ids[None], use_cache=False, logits_to_keep=rows).logits[0]
        new = logits.log_softmax(-1).gather(-1, ids[rows + 1, None]).squeeze(-1)
        old = new.detach() + torch.from_numpy(offset).to(new)[rows]
        one = token_losses(new, old, torch.full_like(new, float(advantage))).sum() * weight
        one.backward()
        loss += float(one.detach())
        logprobs.append(torch.zeros(len(tokens) - 1).index_put((rows.cpu(),), new.detach().cpu()))
        del logits, new, one
    # not on the device, whose memory is measured
    gradients = {name: gradient.cpu() for name, gradient in gradients_of(exact).items()}
    return Outcome(logprobs, gradients, loss)


def outcome(update: Update, samples: Samples, exact: Outcome, ranks: Ranks) -> Outcome:
    """A side's, with the exact run's old log-probabilities."""
    olds = [
        (row + torch.from_numpy(offset * mask[1:])).to(update.model.device)
        for row, offset, mask in zip(exact.logprobs, samples.offsets, samples.masks, strict=True)
    ]
    loss = 0.0
    logprobs: dict[int, torch.Tensor] = {}
    for step in update.steps:
        old = [olds[i] for i in step.indices] or [olds[0][:0]]
        rows, share = update.learn(step, old)
        loss += float(share) / ranks.count
        logprobs |= dict(zip(step.indices, rows, strict=bool(step.indices)))
    every = ranks.joined(logprobs)
    (total,) = ranks.total(loss)
    return Outcome([every[i] for i in range(len(olds))], gradients_of(update.model), total)


def rms(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Of the differences of what is scored."""
    gap = torch.cat(list(found)).double() - torch.cat(list(expected)).double()
    scored = torch.cat(list(expected)) != 0
    return float(gap[scored].square().mean().sqrt())


def errors(found: Outcome, exact: Outcome) -> dict[str, float]:
    """Errors by name; those of parameters are relative to their norms."""
    gaps, norms = {}, {}
    for name, other in found.gradients.items():
        gradient = exact.gradients[name].to(other.device)
        gaps[name] = float(torch.linalg.vector_norm(other - gradient, dtype=torch.float64))
        norms[name] = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
    out = {
        "log-probabilities": rms(found.logprobs, exact.logprobs),
        "worst log-probability": worst_difference(found.logprobs, exact.logprobs),
        "gradient": math.hypot(*gaps.values()) / math.hypot(*norms.values()),
        **{name: gap / norms[name] for name, gap in gaps.items()},
    }
    return {name: finite(error) for name, error in out.items()}


def finite(value: float) -> float:
    """The number, or a large one for what JSON does not have."""
    return value if math.isfinite(value) else 1e9


class Check:
    """Some of the samples in float32, and what the replicated run in bf16 makes of them."""

    def __init__(
        self, model: Any, samples: Samples, max_tokens: int, options: argparse.Namespace
    ) -> None:
        count = min(options.checked, len(samples.masks))
        some = np.unique(np.linspace(0, len(samples.masks) - 1, count).round().astype(np.int64))
        self.samples = samples.take(some)
        # several micro-batches, and room for branches in each
        self.max_tokens = min(max_tokens, 2 * int(self.samples.lengths.max()))
        self._options = options
        self.exact = exact_outcome(model, self.samples)
        alone = Ranks(options.device)
        update = Update.of_samples("fa2", model, self.samples, self.max_tokens, alone, options)
        self.base = errors(outcome(update, self.samples, self.exact, alone), self.exact)

    def limits(self) -> dict[str, float]:
        """The limit of each error; in float32, where order decides, a hundred epsilons more."""
        is_exact = self._options.dtype == "float32"
        slack = 100 * torch.finfo(torch.float32).eps if is_exact else 0.0
        factors = dict.fromkeys(self.base, FACTOR) | {"worst log-probability": WORST}
        return {name: factors[name] * error + slack for name, error in self.base.items()}

    def judge(self, side: str, model: Any, ranks: Ranks) -> Row:
        """A side's errors, beside the replicated run's, and what is red."""
        update = Update.of_samples(
            side, model, self.samples, self.max_tokens, ranks, self._options, ranks.count > 1
        )
        update.recompute = self._options.recompute
        found = outcome(update, self.samples, self.exact, ranks)
        errs, limits = errors(found, self.exact), self.limits()
        red = [name for name, error in errs.items() if not error <= limits[name]]
        red += [f"replicated {name}" for name in SANE if not self.base[name] <= SANE[name]]
        share = {n: errs[n] / limits[n] for n in errs if n not in OVERALL}
        worst = max(share, key=lambda name: share[name])
        empty = ranks.total(sum(not step.indices for step in update.steps))[0]
        row = {
            "errors": {name: errs[name] for name in OVERALL},
            "worst_parameter": {"name": worst, "error": errs[worst], "of_limit": share[worst]},
            "loss": finite(found.loss),
            "checked_steps": len(update.steps),
            "checked_empty_steps": int(empty),
            "red": red,
        }
        return ranks.agree(row)

    def facts(self) -> Row:
        """For the report."""
        return {
            "sequences": len(self.samples.masks),
            "tokens": int(self.samples.lengths.sum()),
            "max_tokens": self.max_tokens,
            "loss": self.exact.loss,
            "replicated_errors": {name: self.base[name] for name in OVERALL},
            "factors": {"all": FACTOR, "worst log-probability": WORST},
        }


# ---- the run -------------------------------------------------------------------------------------


def run_side(
    side: str,
    model: Any,
    samples: Samples,
    max_tokens: int,
    check: Check,
    known: dict[str, Any],
    options: argparse.Namespace,
    ranks: Ranks,
) -> Row:
    """Checks and times one side; `known` keeps fa2's log-probabilities for the others."""
    row = check.judge(side, model, ranks)
    if row["red"]:
        return row
    device = torch.device(options.device)
    is_gpu = device.type == "cuda"
    optimizer = known.get("optimizer")
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=is_gpu)
        known["optimizer"] = optimizer
        # a first step makes its states, which every side's memory then holds
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()

    cost = cost_of(model)

    def whole() -> tuple[Update, dict[int, torch.Tensor]]:
        update = Update.of_samples(side, model, samples, max_tokens, ranks, options, cost=cost)
        update.recompute = options.recompute
        logprobs = update()
        optimizer.step()
        optimizer.zero_grad()
        return update, logprobs

    held = torch.cuda.memory_allocated() if is_gpu else 0
    first = Update.of_samples(side, model, samples, max_tokens, ranks, options, cost=cost)
    first.recompute = options.recompute
    predicted, plan = (None, None) if side == "group" else first.predicted()
    # AdamW's two, each as large as the weights
    states = sum(getattr(p, "_local_tensor", p).nbytes for p in model.parameters()) * 2
    del first
    with Meter(device) as meter:
        update, mine = whole()
        if is_gpu:
            torch.cuda.synchronize()
    found = ranks.joined(mine)
    logprobs = [found[i] for i in range(len(samples.masks))]
    reference = known.setdefault("logprobs", logprobs)
    row["drift"] = finite(rms(logprobs, reference))
    limits = check.limits()["log-probabilities"] + check.base["log-probabilities"]
    if not row["drift"] <= limits:
        row["red"] = [f"log-probabilities of all samples differ by {row['drift']:.3f} from fa2's"]
    row = ranks.agree(row)
    if row["red"]:
        return row
    computed, replicated, micro_batches = ranks.total(
        sum(step.num_tokens for step in update.steps),
        sum(samples.lengths[step.indices].sum() for step in update.steps),
        sum(bool(step.indices) for step in update.steps),
    )
    # of a group each rank has all samples, and computes its part
    shared = ranks.count if side == "group" else 1
    steps = len(update.steps)
    del update, mine, found
    every = []
    for _ in range(options.repeats):
        # all begin together, and the last one counts
        ranks.most(0.0)
        every += ranks.most(median_ms(whole, device, 1, 0)[1][0] / 1e3)
    seconds = float(np.median(every))
    peak = None if meter.peak_bytes is None else ranks.most(meter.peak_bytes + held)[0]
    return row | {
        "seconds": seconds,
        "all_seconds": every,
        "peak_bytes": peak,
        "predicted_bytes": None if predicted is None else ranks.most(predicted + states)[0],
        "modes": {mode: plan.modes.count(mode) for mode in MODES} if plan else {},
        "micro_batches": int(micro_batches) // shared,
        "steps": steps,
        "replicated": int(replicated) // shared,
        "computed": int(computed) // shared,
        "distinct": known["distinct"],
        "tokens_per_s": replicated / shared / seconds,
        "distinct_per_s": known["distinct"] / seconds,
    }


def run(options: argparse.Namespace, ranks: Ranks) -> int:
    """The exit code."""
    shape = shape_of(options)
    samples = Samples.read(options, shape.vocab_size)
    longest = int(samples.lengths.max())
    max_tokens = 2 * longest if options.is_tiny else options.max_tokens
    model = checkpointed(model_of(shape, options.device, options.dtype))
    parameters = sum(p.numel() for p in model.parameters())
    check = Check(model, samples, max_tokens, options)
    gc.collect()
    faster_layers(model, options.layers_by)
    if options.fsdp:
        model = sharded(model, options, ranks)
    if ranks.rank > 0:
        options.out = options.plot = None
    report = Report(
        options,
        parameters=parameters,
        shape=options.shape,
        layers=shape.num_hidden_layers,
        layers_by=options.layers_by,
        recompute=options.recompute,
        ranks=ranks.count,
        fsdp=options.fsdp,
        tasks=options.tasks,
        sequences=len(samples.masks),
        max_tokens=max_tokens,
        check=check.facts(),
        optimizer="AdamW, learning rate 0, in the time",
    )
    known: dict[str, Any] = {
        "distinct": PrefixForest.from_sequences(samples.sequences).num_tokens,
    }
    for side in options.sides:
        # layers that were compiled with one attention keep it
        torch._dynamo.reset()
        one = partial(run_side, side, model, samples, max_tokens, check, known, options, ranks)
        row = report.attempt({"side": side, "ranks": ranks.count}, one)
        got = verdict(row) or f"{row['seconds']:.3f} s"
        print(f"{side}, {ranks.count} ranks, rank {ranks.rank}: {got}", flush=True)
        if ranks.count > 1 and ("failed" in row or "out_of_memory" in row):
            # the others wait in a collective: torchrun ends them
            os._exit(1)
    base = report.rows[0].get("seconds")
    for row in report.rows:
        if base is not None and "seconds" in row:
            row["speedup"] = base / row["seconds"]
    return finish(report) if ranks.rank == 0 else 0


def gpus(line: Any) -> str:
    """Of a line's run."""
    run = line[0]
    return f"{run['ranks']}, FSDP2" if run["fsdp"] else "1"


def tables(*runs: Row) -> Parts:
    """A line per side; runs on other numbers of GPUs follow the first."""
    names = {
        "fa2": "replicated, FA2, verl's micro-batches",
        "verl": "packed, verl's micro-batches",
        "packed": "packed, `plan_micro_batches`",
        "group": "packed, `group=`",
    }

    def of_row(head: str, text: Callable[[Row], str]) -> Column:
        return Column(head, lambda line: text(line[1]) if "seconds" in line[1] else "")

    def batches(line: Any) -> str:
        row = line[1]
        if "seconds" in row:
            return str(row["micro_batches"])
        return "out of memory" if "out_of_memory" in row else "red" if row.get("red") else "failed"

    def error(name: str) -> Callable[[Any], str]:
        def cell(line: Any) -> str:
            run, row = line
            found = row.get("errors", {}).get(name)
            base = run["check"]["replicated_errors"][name]
            ratio = f" ({found / base:.2f}x)" if found is not None and base else ""
            return "" if found is None else f"{found:.3g}{ratio}"

        return cell

    data = runs[0]
    check = data["check"]
    yield (
        f"{machine(data['environment'], 'triton')}; "
        f"{data['sequences']} samples of {data['tasks']} tasks, micro-batches of at most "
        f"{data['max_tokens']:,} tokens. Errors and losses are those of {check['sequences']} "
        f"samples against float32 (loss {check['loss']:.6f}), in brackets over those of the "
        f"replicated run on one GPU."
    )
    yield Table(
        [
            Column("GPUs", gpus),
            Column("side", lambda line: names[line[1]["side"]]),
            Column("micro-batches", batches),
            of_row("tokens computed", lambda row: f"{row['computed']:,}"),
            of_row("s", lambda row: f"{row['seconds']:.2f}"),
            of_row("speed-up", lambda row: times_cell(row.get("speedup"))),
            of_row("tokens/s", lambda row: f"{row['tokens_per_s']:,.0f}"),
            of_row("distinct tokens/s", lambda row: f"{row['distinct_per_s']:,.0f}"),
            of_row("GiB", lambda row: gib(row["peak_bytes"] or None)),
            Column("log p error", error("log-probabilities")),
            Column("gradient error", error("gradient")),
            Column("loss", lambda line: number(line[1], "loss", ".6f")),
        ],
        [(run, row) for run in runs for row in run["rows"]],
    )


def settings(*runs: Row) -> Parts:
    """A line per run and side: defaults and best settings of a shape, on one GPU and on two."""
    if not runs:
        yield "Not measured yet."
        return

    def setting(run: Row) -> str:
        return f"{run['layers_by']}, {run['recompute'].replace('_', ' ')}"

    def key(line: Any, fsdp: bool) -> tuple[Any, ...]:
        run, row = line
        return run["shape"], run["layers"], run["tasks"], setting(run), row["side"], fsdp

    alone = {
        key((run, row), run["fsdp"]): row["seconds"]
        for run in runs
        for row in run["rows"]
        if run["ranks"] == 1 and "seconds" in row
    }

    def of_one(line: Any) -> str:
        run, row = line
        # under FSDP2 as well where that was measured: weights and states in float32 on both
        one = alone.get(key(line, True)) or alone.get(key(line, False))
        if run["ranks"] == 1 or "seconds" not in row or one is None:
            return ""
        return times_cell(one / row["seconds"])

    yield machines(runs, "transformers")
    yield Table(
        [
            Column("shape", lambda line: f"{line[0]['shape']}, {line[0]['layers']} layers"),
            Column("tasks", lambda line: str(line[0]["tasks"])),
            Column("GPUs", gpus),
            Column("side", lambda line: SIDES[line[1]["side"]]),
            Column("layers by, recomputed", lambda line: setting(line[0])),
            Column("s", lambda line: number(line[1], "seconds", ".3f") or verdict(line[1])[:40]),
            Column("of one GPU", of_one),
            Column("GiB", lambda line: gib(line[1].get("peak_bytes"))),
            Column("predicted", lambda line: gib(line[1].get("predicted_bytes"))),
        ],
        [(run, row) for run in runs for row in run["rows"]],
    )


def plot(report: Report) -> None:
    """Seconds and peak memory, one bar per side."""
    rows = [row for row in report.rows if "seconds" in row]
    labels = [SIDES[row["side"]].replace(", ", "\n") for row in rows]
    colours = [COLOURS.get(row["side"], "#41b6c4") for row in rows]
    where = report.where
    if report.facts["fsdp"]:
        where += f" x {report.facts['ranks']}, FSDP2"
    fig, axes = figure(2, f"a policy update, Qwen3-0.6B shapes, {where}")
    for axis, key, unit, text in (
        (axes[0], "seconds", 1.0, "seconds"),
        (axes[1], "peak_bytes", GIB, "peak memory of a rank, GiB"),
    ):
        axis.bar(range(len(rows)), [(row[key] or 0) / unit for row in rows], color=colours)
        axis.set_xticks(range(len(rows)), labels, fontsize=7)
        axis.set_ylabel(text, fontsize=9)
    save(fig, report.options.plot)


def finish(report: Report) -> int:
    """Draws, prints; the exit code."""
    if report.options.plot is not None and any("seconds" in row for row in report.rows):
        plot(report)
    return report.finish(tables)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every side was green."""
    what = parser(__doc__)
    what.set_defaults(repeats=3)
    what.add_argument("--rollouts", type=Path, help="JSONL; needed but for --read")
    what.add_argument("--tasks", type=int, default=2, help="the first of the file")
    what.add_argument("--max-tokens", type=int, default=32768, help="of a micro-batch")
    what.add_argument("--checked", type=int, default=12, help="samples computed in float32 too")
    what.add_argument("--shape", choices=SHAPES, default=SHAPES[0])
    what.add_argument("--layers", type=int, help="default: all 28 of qwen3-0.6b, 8 of qwen3-8b")
    what.add_argument(
        "--layers-by",
        choices=("transformers", "compile"),
        default="transformers",
    )
    what.add_argument("--recompute", choices=(*MODES, "auto"), default="all")
    sides = list(SIDES)
    what.add_argument(
        "--sides", nargs="+", choices=sides, default=sides[:-1], help="group: under torchrun"
    )
    what.add_argument("--fsdp", action="store_true", help="on the ranks of torchrun")
    what.add_argument(
        "--fsdp-unit",
        type=int,
        default=1,
        help="layers that FSDP2 gathers together; several stay whole until their backward",
    )
    options = parse(what, arguments)
    if options.read is not None:
        return finish(Report.read(options))
    if options.rollouts is None:
        what.error("give --rollouts")
    if options.fsdp and "RANK" not in os.environ:
        what.error("--fsdp goes with torchrun")
    if not options.fsdp:
        return run(options, Ranks(options.device))
    code = run(options, Ranks.of_torchrun(options))
    dist.destroy_process_group()
    return code
