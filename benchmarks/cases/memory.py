"""How does a micro-batch's peak memory grow with prompt and responses, and by what law?

    python -m benchmarks memory --out memory.json --plot memory.png        # on a GPU
    python -m benchmarks memory --device cpu --scale 0.05 --layers 2       # every code path

Forward and backward of GRPO's loss (`Update.learn`) through a Qwen3-8B-shaped model with random
weights, bf16, gradient checkpointing; prompts of P tokens with N responses of R = 512. The law: M0
+ a P + b N R packed, M0 + a N P + b N R replicated, weights and gradients in M0, fitted by least
squares over the cases that fit; r^2 beside it. Of --layers a few do: a and b of more layers grow by
the checkpoints alone, 2 x hidden bytes per token and layer. The sides are checked as in the case
`model`; out of memory is a row. On a CPU the resident memory is sampled, which is no measurement at
tiny sizes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.lib.layers import check_sides, checkpointed, config, model_of, prompt_batch
from benchmarks.lib.plots import COLOURS, LABELS, figure, name, save
from benchmarks.lib.policy import Update
from benchmarks.lib.replicated import PEERS, skip_missing
from benchmarks.lib.runs import Report, Row, parse, parser
from benchmarks.lib.tables import GIB, Column, Parts, Table, by_key, gib, machine, verdict
from prefixtree.testing.compare import Meter

PROMPTS, COUNTS, RESPONSE = (2048, 4096, 8192, 16384, 32768), (4, 8, 16, 32), 512
TERMS = {"packed": "M0 + a P + b N R", "replicated": "M0 + a N P + b N R"}


def terms(side: str, row: Row) -> list[float]:
    """The factors of M0, a and b in the law."""
    prompts = row["prompt"] * (1 if side == "packed" else row["count"])
    return [1.0, float(prompts), float(row["count"] * row["response"])]


def fit(side: str, rows: Sequence[Row]) -> Row | None:
    """Least squares of the law of a side; None where there are too few cases."""
    if len(rows) < 4:
        return None
    x = np.array([terms(side, row) for row in rows])
    y = np.array([float(row["peak_with_held_bytes"]) for row in rows])
    # columns of very different sizes
    size = np.abs(x).max(axis=0)
    coefficients, *_ = np.linalg.lstsq(x / size, y, rcond=None)
    coefficients = coefficients / size
    left = float(((y - x @ coefficients) ** 2).sum())
    spread = float(((y - y.mean()) ** 2).sum())
    fitted = x @ coefficients
    return {
        "law": TERMS["packed" if side == "packed" else "replicated"],
        "M0": float(coefficients[0]),
        "a": float(coefficients[1]),
        "b": float(coefficients[2]),
        "r2": 1 - left / spread if spread > 0 else None,
        "largest_error": float(np.abs(fitted / y - 1).max()),
        "cases": len(rows),
    }


def run_case(side: str, model: Any, row: Row, options: argparse.Namespace) -> Row:
    """The peak of one forward and backward, weights and gradients counted."""
    vocabulary = model.config.vocab_size
    batch = prompt_batch(row["prompt"], [row["response"]] * row["count"], vocabulary)
    update = Update.of_batches(side, model, [batch], options)
    with torch.no_grad():
        # no forward of the old policy here: its log-probabilities are those of a uniform one
        shapes = [len(s) - 1 for s in batch.sequences]
        masks = [torch.from_numpy(m[1:]).to(model.device) for m in batch.masks]
        old = [
            torch.full((n,), -float(np.log(vocabulary)), device=model.device) * m
            for n, m in zip(shapes, masks, strict=True)
        ]
    is_gpu = model.device.type == "cuda"
    if is_gpu:
        torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated() if is_gpu else 0
    with Meter(model.device) as meter:
        update.learn(update.steps[0], old)
        if is_gpu:
            torch.cuda.synchronize()
    peak = meter.peak_bytes
    return {
        "red": [],
        "tokens": batch.forest.num_tokens
        if side == "packed"
        else batch.forest.num_replicated_tokens,
        "peak_bytes": peak,
        "peak_with_held_bytes": None if peak is None else peak + held,
    }


# ---- output --------------------------------------------------------------------------------------


def tables(data: Row) -> Parts:
    """A line per prompt and number of responses, GiB of every side; the laws below."""
    sides = list(dict.fromkeys(row["side"] for row in data["rows"]))

    def peak(side: str) -> Column:
        def cell(line: dict[str, Row]) -> str:
            # absent where the run was cut short
            row = line.get(side, {})
            return gib(row.get("peak_with_held_bytes"), ".2f") or verdict(row)[:20]

        return Column(f"{side} GiB", cell)

    def of_case(line: dict[str, Row], key: str) -> int:
        return next(iter(line.values()))[key]

    yield machine(data["environment"])
    yield Table(
        [
            Column("P", lambda line: f"{of_case(line, 'prompt'):,}"),
            Column("N", lambda line: str(of_case(line, "count"))),
            *(peak(side) for side in sides),
        ],
        list(by_key(data["rows"], lambda row: (row["prompt"], row["count"]), "side").values()),
    )
    for side, law in data["fits"].items():
        if law is not None:
            numbers = f"M0 {gib(law['M0'], '.2f')} GiB, a {law['a'] / 1024:.1f} KiB per token"
            r2 = "-" if law["r2"] is None else f"{law['r2']:.4f}"
            yield f"{side}: {law['law']}, {numbers}, b {law['b'] / 1024:.1f} KiB, r2 {r2}"


def plot(report: Report, sides: Sequence[str], fits: dict[str, Row | None]) -> None:
    """Measured dots on the fitted lines: over P for every N, one panel per side."""
    counts = report.values("count")
    fig, axes = figure(len(sides), f"peak memory of a micro-batch, {report.where}")
    for axis, side in zip(axes, sides, strict=True):
        rows = [r for r in report.rows if r["side"] == side and r.get("peak_with_held_bytes")]
        law = fits.get(side)
        for i, count in enumerate(counts):
            some = [row for row in rows if row["count"] == count]
            alpha = 0.35 + 0.65 * (i + 1) / len(counts)
            x = [row["prompt"] for row in some]
            style = {"color": COLOURS[side], "alpha": alpha}
            y = [row["peak_with_held_bytes"] / GIB for row in some]
            axis.plot(x, y, "o", markersize=4, label=f"N {count}", **style)
            if law is not None and some:
                weights = np.array([law["M0"], law["a"], law["b"]])
                axis.plot(x, [np.dot(terms(side, r), weights) / GIB for r in some], "-", **style)
        axis.set_ylim(bottom=0)
        name(axis, "prompt tokens", "GiB", LABELS[side])
    save(fig, report.options.plot)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every side was green."""
    what = parser(__doc__)
    what.add_argument("--layers", type=int, default=8)
    what.add_argument("--sides", nargs="+", choices=("packed", *PEERS), default=["packed", "fa2"])
    what.add_argument("--prompts", nargs="+", type=int, default=list(PROMPTS))
    what.add_argument("--counts", nargs="+", type=int, default=list(COUNTS))
    what.add_argument("--response", type=int, default=RESPONSE)
    options = parse(what, arguments)
    if options.read is not None:
        return finish(Report.read(options))
    skip_missing(options)
    sides = options.sides
    checks = check_sides(sides, options)
    report = Report(options, checks=checks, layers=options.layers)
    shape = config(options.layers, options.is_tiny)
    model = checkpointed(model_of(shape, options.device, options.dtype))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for side in sides:
        # what is compiled or allocated once is in no case; a side that cannot run says so in each
        if not checks[side]["red"]:
            run_case(side, model, {"prompt": 64, "count": 2, "response": 64}, options)
    for prompt in options.prompts:
        for count in options.counts:
            case = {
                "prompt": max(1, round(prompt * options.scale)),
                "count": count,
                "response": max(1, round(options.response * options.scale)),
            }
            for side in sides:

                def one(side: str = side, case: Row = case) -> Row:
                    if checks[side]["red"]:
                        return {"red": checks[side]["red"]}
                    return run_case(side, model, case, options)

                row = report.attempt({**case, "side": side}, one)
                peak = row.get("peak_with_held_bytes")
                text = verdict(row) if peak is None else f"{peak / GIB:.2f} GiB"
                print(f"P {prompt} x {count}, {side}: {text}", flush=True)
    return finish(report)


def finish(report: Report) -> int:
    """Fits, draws, prints; the exit code."""
    sides = report.values("side")
    fits = {}
    for side in sides:
        rows = [r for r in report.rows if r["side"] == side and r.get("peak_with_held_bytes")]
        fits[side] = fit(side, rows)
    report.facts["fits"] = fits
    if report.options.plot is not None:
        plot(report, sides, fits)
    return report.finish(tables)
