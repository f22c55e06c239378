"""How much faster is a policy update of a Qwen-shaped model, and what bounds it?

    python -m benchmarks model --layers 12 --rollouts FILE --out model.json --plot model.png
    python -m benchmarks model --device cpu --scale 0.02 --layers 2 --repeats 1    # every code path

Random weights, bf16, gradient checkpointing, weights and gradients but no optimizer state. An
update: old log-probabilities of every micro-batch, then forward and backward of each with a clipped
GRPO loss on `sequence_logprobs`. Cases: one prompt of 8K with 32 responses of 131 to 2,048 tokens,
in micro-batches of 4, 8 and 32; the airline rollouts, one sample per turn, in micro-batches of 32K
tokens: distinct ones for the packed side (`plan_micro_batches`), copies counted for the others; and
16 sequences that share nothing. Block tables and packing are made before; the case `planning` times
them.

Sides (`lib/replicated.py`): packed; fa2, fa4, own: the replicated batch through FA2, flash-attn-4
and our backend, everything else, the chunked head too, being the same. They are checked on a small
model first (`layers.check_sides`), and their old log-probabilities against each other; red has no
times. The bound is the time of `own` over the ratio of the FLOPs of the two batches; `of_bound` is
the bound over the packed time. MFU is the useful FLOPs over time and --peak: those of the distinct
tokens, nothing recomputed; `own_mfu` counts the tokens that a side computes. Out of memory is a
row; where the replicated sides are out of memory, the case runs again with the next smaller of
--layers. What the layers do besides attention takes a third of the time as transformers has it;
--layers-by compile or liger runs all sides as a trainer with torch.compile or Liger Kernel would,
--recompute gives a row each to what layers compute again in the backward. `best` puts a run with
defaults beside one with compiled layers and --recompute auto, which is the best setting of each
side (`tools/gpu_check.sh update_best`). --shape names the model; of hybrids (Qwen3.5, Qwen3-Next)
the sides are own, packed and fla: FA2 with fla's kernels, as transformers runs them. All sides of a
model with experts run transformers' grouped products, and FLOPs count the experts that a token
meets. --precision gives all sides layers of low precision (`lib/precision.py`): float8, torchao's
rowwise recipe; lora, adapters over frozen weights; qlora, the same over weights in 4 bits. The
check then holds log p and gradients against float32 without it, beside the stock forward of every
sequence alone in that precision: no side may be 1.5 times as far. With --profile rows have
milliseconds of one micro-batch by kind of work (`lib/kinds.py`).
"""

from __future__ import annotations

import argparse
import gc
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.lib.kinds import marked, ms_by_kind
from benchmarks.lib.layers import (
    CHECKPOINTED,
    FORWARD,
    HYBRIDS,
    SHAPES,
    UPDATE,
    Batch,
    Flops,
    check_sides,
    checkpointed,
    config,
    faster_layers,
    flops,
    model_of,
    prompt_batch,
    response_lengths,
)
from benchmarks.lib.plots import bars, figure, name, save
from benchmarks.lib.policy import Update, airline
from benchmarks.lib.precision import PRECISIONS, lowered, missing
from benchmarks.lib.replicated import (
    HYBRID_PEERS,
    PEERS,
    chains,
    noted_backends,
    pairs,
    skip_missing,
)
from benchmarks.lib.runs import Report, Row, measure, parse, parser
from benchmarks.lib.tables import (
    GIB,
    verdict,
)
from benchmarks.lib.timing import note_profile
from benchmarks.lib.update_tables import (
    best,
    case_of,
    experts,
    hybrids,
    layers_by,
    low_precision,
    recomputed,
    tables,
)
from prefixtree import pack
from prefixtree.planning.model_cost import model_cost
from prefixtree.recompute.layers import MODES

# what `show` draws of its files
__all__ = [
    "best",
    "experts",
    "hybrids",
    "layers_by",
    "low_precision",
    "main",
    "recomputed",
    "tables",
]

PROMPT, RESPONSES = 8192, 32
# mean difference of log-probabilities, in nats, that two sides in bf16 may have behind 36 random
# layers; unrelated logits of this model differ by 1.4. The small model is what proves a side right
DRIFT = 0.2
# of tokens that are rounded to float8, otherwise where bf16 differs: 0.14 behind 8 layers on a CPU
FLOAT8_DRIFT = 0.5


# ---- cases ---------------------------------------------------------------------------------------


def long_reason(micro_batch: int, options: argparse.Namespace) -> dict[str, list[Batch]]:
    """Micro-batches of so many responses; the same sequences on both sides."""
    lengths = response_lengths(RESPONSES, options.scale)
    vocabulary = config(1, options.is_tiny, shape=options.shape).vocab_size
    whole = prompt_batch(max(1, round(PROMPT * options.scale)), lengths, vocabulary)
    batches = [
        Batch.of(whole.sequences[at : at + micro_batch], whole.masks[at : at + micro_batch])
        for at in range(0, RESPONSES, micro_batch)
    ]
    return {"packed": batches, "replicated": batches}


def apart(options: argparse.Namespace) -> dict[str, list[Batch]]:
    """Prompts of 2K with one response each: nothing to share, where packing must cost nothing."""
    shape = config(1, options.is_tiny, shape=options.shape)
    rng = np.random.default_rng(0)
    # no two begin alike
    first = rng.permutation(shape.vocab_size)
    prompt = max(1, round(2048 * options.scale))
    whole = []
    for i, length in enumerate(response_lengths(16, options.scale)):
        sequence = rng.integers(0, shape.vocab_size, prompt + length)
        sequence[0] = first[i]
        whole.append((sequence, np.arange(prompt + length) >= prompt))
    batches = [Batch.of(*map(list, zip(*whole[at : at + 8], strict=True))) for at in (0, 8)]
    return {"packed": batches, "replicated": batches}


def work(side: str, batches: Sequence[Batch], shape: Any) -> Flops:
    """FLOPs of one forward over all micro-batches of a side."""
    total, cost = Flops(0, 0, 0), model_cost(shape)
    for batch in batches:
        if side == "packed":
            forest = batch.forest
            scored = len(pack(forest).edges(batch.masks).token)
        else:
            forest = chains(batch.forest)
            scored = sum(int(mask[1:].sum()) for mask in batch.masks)
        total += flops(cost, forest.num_tokens, pairs(forest), scored)
    return total


# ---- an update -----------------------------------------------------------------------------------


def by_sequence(batches: Sequence[Batch], values: Sequence[list[torch.Tensor]]) -> dict[bytes, Any]:
    """Per-sequence values by the sequence itself: sides may batch them differently."""
    return {
        sequence.tobytes() + mask.tobytes(): value
        for batch, some in zip(batches, values, strict=True)
        for sequence, mask, value in zip(batch.sequences, batch.masks, some, strict=True)
    }


def drift(mine: dict[bytes, torch.Tensor], theirs: dict[bytes, torch.Tensor]) -> float:
    """Mean absolute difference of scored log-probabilities."""
    gap = torch.cat([(mine[key] - theirs[key]).abs() for key in theirs])
    scored = torch.cat([theirs[key] != 0 for key in theirs])
    return float(gap[scored].mean())


def expected_backends(side: str, layers_by: str) -> set[str] | None:
    """Those of our operator while a side runs; None where any will do."""
    if side == "fa4":
        return {"flash"} if layers_by == "compile" else set()
    return set() if side == "fa2" else None


def run_side(
    side: str,
    recompute: str,
    model: Any,
    case: dict[str, list[Batch]],
    known: Row,
    options: argparse.Namespace,
) -> Row:
    """Times one side; `known` keeps the first side's log-probabilities for the others."""
    batches = case["packed" if side == "packed" else "replicated"]
    # gradients stand before, as after the first micro-batch of any step
    for parameter in model.parameters():
        if parameter.grad is None and parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    update = Update.of_batches(side, model, batches, options)
    update.recompute = recompute
    is_plain = options.precision == "plain"
    predicted: Row = {}
    if is_plain:
        # no memory is traced of layers that are quantised
        predicted_bytes, plan = update.predicted()
        predicted["predicted_bytes"] = predicted_bytes
        predicted["modes"] = {mode: plan.modes.count(mode) for mode in MODES}
    with noted_backends() as backends:
        olds = by_sequence(batches, [update.old(step) for step in update.steps])
    row: Row = {"red": [], "backends": sorted(backends)}
    expected = expected_backends(side, options.layers_by)
    if expected is not None and backends != expected:
        row["red"] = [f"our operator ran {sorted(backends)}, and not {sorted(expected)}"]
        return row
    if "logprobs" in known:
        row["drift"] = drift(olds, known["logprobs"])
        if not row["drift"] <= (FLOAT8_DRIFT if options.precision == "float8" else DRIFT):
            row["red"] = [f"log-probabilities differ by {row['drift']:.3f} from {known['side']}"]
            return row
    else:
        known |= {"logprobs": olds, "side": side}
    seconds = measure(update, options)
    shape = model.config
    mine, useful = work(side, batches, shape), work("packed", case["packed"], shape)
    time = seconds["ms"] / 1e3
    replicated = sum(b.forest.num_replicated_tokens for b in batches)
    peak = options.peak * 1e12
    whole = [x + y for x, y in zip(FORWARD, UPDATE, strict=True)]
    row |= {
        "seconds": time,
        "all_seconds": [ms / 1e3 for ms in seconds["all_ms"]],
        "peak_bytes": seconds["peak_with_held_bytes"],
        **predicted,
        "micro_batches": len(batches),
        "replicated": replicated,
        "computed": sum(
            b.forest.num_tokens if side == "packed" else b.forest.num_replicated_tokens
            for b in batches
        ),
        "tokens_per_s": replicated / time,
        "distinct_per_s": sum(b.forest.num_tokens for b in case["packed"]) / time,
        # what a backward computes again counts: all of it where every layer is recomputed
        "machine_flops": mine.total(*(x + y for x, y in zip(FORWARD, CHECKPOINTED, strict=True))),
    }
    if is_plain:
        # frozen weights have no products for gradients, and float8 has another peak
        row |= {
            "mfu": useful.total(*whole) / time / peak,
            "own_mfu": mine.total(*whole) / time / peak,
        }
    return row


def bounds(rows: list[Row]) -> None:
    """Adds to a case's packed row what it is compared with."""
    done = {row["side"]: row for row in rows if "seconds" in row}
    packed = done.get("packed")
    if packed is None:
        return
    packed["speedup"] = {
        side: row["seconds"] / packed["seconds"] for side, row in done.items() if side != "packed"
    }
    if "own" in done:
        packed["flop_ratio"] = done["own"]["machine_flops"] / packed["machine_flops"]
        packed["bound_seconds"] = done["own"]["seconds"] / packed["flop_ratio"]
        packed["of_bound"] = packed["bound_seconds"] / packed["seconds"]


def profile(update: Update, path: Path, title: str) -> dict[str, float]:
    """Appends the kernels that take the time of one micro-batch, old log-probabilities included;
    -> milliseconds by kind."""
    first = update.steps[0]

    def run() -> None:
        update.learn(first, update.old(first))

    run()
    with marked(update.model):
        seen = note_profile(run, path, title)
    return ms_by_kind(seen)


# ---- the run -------------------------------------------------------------------------------------


def cases_of(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, list[Batch]]]]:
    """Names and batches."""
    if "longreason" in options.cases:
        for size in options.micro_batches:
            yield f"8K, 32 x 131-2048, micro-batch {size}", long_reason(size, options)
    if "airline" in options.cases:
        yield f"airline per turn, {options.tasks} tasks, 32K tokens", airline(options)
    if "apart" in options.cases:
        yield "nothing shared, 16 x 2K + 131-2048, micro-batch 8", apart(options)


def run_layers(
    layers: int, cases: dict[str, dict[str, list[Batch]]], report: Report, checks: Row
) -> list[str]:
    """All cases with a model of so many layers; -> those whose replicated sides lacked memory."""
    options = report.options
    again = []
    model: Any = None
    for title, case in cases.items():
        known: Row = {}
        rows = []
        for side, recompute in itertools.product(options.sides, options.recompute):

            def one(
                side: str = side, recompute: str = recompute, case: Any = case, known: Row = known
            ) -> Row:
                nonlocal model
                if checks[side]["red"]:
                    return {"red": checks[side]["red"]}
                # layers that were compiled with one attention keep it
                torch._dynamo.reset()
                if model is None:
                    shape = config(layers, options.is_tiny, shape=options.shape)
                    model = model_of(shape, options.device, options.dtype)
                    model = checkpointed(lowered(model, options.precision))
                    faster_layers(model, options.layers_by)
                return run_side(side, recompute, model, case, known, options)

            about = {"case": title, "layers": layers, "side": side, "recompute": recompute}
            row = report.attempt(about, one)
            rows.append(row)
            got = verdict(row) or f"{row['seconds']:.3f} s"
            print(f"{title}, {layers} layers, {side}, recompute {recompute}: {got}", flush=True)
        for recompute in options.recompute:
            bounds([row for row in rows if row["recompute"] == recompute])
        if any("out_of_memory" in row for row in rows if row["side"] != "packed"):
            again.append(title)
        if options.profile is not None and model is not None:
            for side in ("packed", "fa2"):
                timed = [row for row in rows if row["side"] == side and "seconds" in row]
                if timed:
                    batches = case["packed" if side == "packed" else "replicated"]
                    update = Update.of_batches(side, model, batches, options)
                    update.recompute = timed[-1]["recompute"]
                    about = f"{title}, {layers} layers, {side}, recompute {update.recompute}"
                    timed[-1]["kinds_ms"] = profile(update, options.profile, about)
                    report.write()
    del model
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return again


def plot(report: Report) -> None:
    """Replicated tokens per second, and peak memory, one bar per side."""
    rows = [row for row in report.rows if "seconds" in row]
    groups = list(dict.fromkeys(map(case_of, rows)))
    sides = list(dict.fromkeys(row["side"] for row in rows))
    fig, axes = figure(2, f"a policy update, Qwen3-8B shapes, {report.where}")
    measured = {(*case_of(row), row["side"]): row for row in rows}
    for axis, key, unit in ((axes[0], "tokens_per_s", 1e3), (axes[1], "peak_bytes", GIB)):
        found = {s: [measured.get((*group, s), {}).get(key) for group in groups] for s in sides}
        bars(axis, {s: [None if y is None else y / unit for y in found[s]] for s in sides})
        labels = [f"{case.replace(', ', chr(10))}\n{layers} layers" for case, layers, _ in groups]
        axis.set_xticks(range(len(groups)), labels, fontsize=6)
    name(axes[0], "", "thousand replicated tokens / s")
    name(axes[1], "", "peak memory, GiB", legend=False)
    save(fig, report.options.plot)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every side was green."""
    what = parser(__doc__)
    what.add_argument("--layers", nargs="+", type=int, default=[36, 12, 4], help="descending")
    sides, cases = ["own", "fa2", "fa4", "fla", "packed"], ["longreason", "airline", "apart"]
    what.add_argument("--sides", nargs="+", choices=sides, default=sides)
    what.add_argument("--cases", nargs="+", choices=cases, default=[*cases])
    what.add_argument("--micro-batches", nargs="+", type=int, default=[4, 8, 32])
    what.add_argument("--rollouts", type=Path, help="for the airline case")
    what.add_argument("--tasks", type=int, default=2, help="of the airline case")
    what.add_argument(
        "--shape", choices=SHAPES, default=SHAPES[0], help="hybrids: packed, own, fla"
    )
    what.add_argument("--peak", type=float, default=989.0, help="TFLOP/s that MFU is of")
    what.add_argument(
        "--layers-by",
        choices=("transformers", "compile", "liger"),
        default="transformers",
        help="liger: needs liger-kernel",
    )
    what.add_argument("--precision", choices=PRECISIONS, default=PRECISIONS[0])
    what.add_argument(
        "--recompute",
        nargs="+",
        choices=(*MODES, "auto"),
        default=["all"],
        help="what layers compute again in the backward, one row each",
    )
    what.add_argument(
        "--profile", type=Path, help="top kernels, a text file; times by kind in the rows"
    )
    options = parse(what, arguments)
    if options.read is not None:
        return finish(Report.read(options))
    if options.rollouts is None and "airline" in options.cases:
        options.cases.remove("airline")
        options.skipped.append("airline")
        print("the airline case was skipped: give --rollouts")
    if options.layers_by == "liger" and options.shape != SHAPES[0]:
        what.error(f"--layers-by liger is for {SHAPES[0]}, and --shape is {options.shape}")
    if options.precision != "plain":
        if gone := missing(options.precision):
            what.error(f"--precision {options.precision} needs {' and '.join(gone)}")
        if "auto" in options.recompute or options.layers_by == "liger":
            what.error(f"--precision {options.precision} runs without --recompute auto and liger")
    # peers come in the place of our functions; fla's would be seen by compiled code already
    is_hybrid = options.shape in HYBRIDS
    served = HYBRID_PEERS if is_hybrid else PEERS
    if is_hybrid and options.layers_by == "compile":
        served = ("own",)
    skip_missing(options, {*PEERS, *HYBRID_PEERS} - {*served, "own"})
    if options.profile is not None:
        options.profile.write_text("")
    checks = check_sides(options.sides, options, options.layers_by)
    facts = {"peak_tflops": options.peak, "layers_by": options.layers_by, "shape": options.shape}
    facts["precision"] = options.precision
    report = Report(options, checks=checks, **facts)
    cases = dict(cases_of(options))
    for layers in options.layers:
        again = run_layers(layers, cases, report, checks)
        cases = {title: cases[title] for title in again}
        if not cases:
            break
    return finish(report)


def finish(report: Report) -> int:
    """Draws, prints; the exit code."""
    if report.options.plot is not None and any("seconds" in row for row in report.rows):
        plot(report)
    is_plain = report.facts.get("precision", "plain") == "plain"
    return report.finish(tables if is_plain else low_precision)
