"""How much faster is a PPO update under verl, its `TrainingWorker` with packed engines?

    python -m benchmarks verl_update --rollouts FILE --out verl.json
    torchrun --standalone --nproc-per-node 2 -m benchmarks verl_update --rollouts FILE

Needs verl, without Ray if it is not there: `tools/gpu_check.sh verl`. Both engines are verl's FSDP2
engine, made by its `TrainingWorker` from one checkpoint of random weights, with verl's defaults:
float32 weights computed in bf16, gradient checkpointing, AdamW, dynamic micro-batches. The samples
are the turns of the airline rollouts with seeded random advantages and reference log-probabilities;
there is no rollout engine. An update is what verl's trainer asks of a worker in one step:
`compute_log_prob` with entropies of all samples, then `update_actor` with them as one mini-batch
and a KL loss. The time is that of the slowest rank, from samples on the CPU to the metrics.

Sides: verl, its own engine without padding, with the FA2 of flash-attn or else of torch; verl_fa4,
the same with flash-attn-4's kernels; packed, ours. Samples go to the ranks as verl's trainer deals
them to its engine, and as `prefixtree_sync` does to ours.

Before anything is timed, --checked of the samples take four PPO updates (two mini-batches, two
epochs, SGD, KL and entropy in the loss) in float32 by verl's own engine with padding and
transformers' sdpa attention, by ours in float32, by verl's own engine in bf16 and by ours in bf16.
Compared are the log-probabilities, entropies, losses, gradient norms of every update, and how far
the parameters end from where the first run's do. The updates' old log-probabilities lie 1 nat
below, at or above those of the first run: the clip acts, and no rounding decides where. In float32
ours may differ by a thousandth. In bf16 our errors may be twice those of verl's own engine; those
of losses and norms, which are few numbers, three times, taken together. Then the log-probabilities
of all samples are compared with verl's. Red has no time.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.lib import layers, policy
from benchmarks.lib.environment import installed
from benchmarks.lib.policy import Ranks, turn_samples
from benchmarks.lib.runs import Report, Row, parse, parser
from benchmarks.lib.tables import (
    GIB,
    MISSING,
    Column,
    Parts,
    Table,
    gib,
    machine,
    number,
    times_cell,
    verdict,
)
from benchmarks.lib.verl_check import FACTOR, UPDATES, Check, check, let_go
from benchmarks.lib.verl_worker import (
    Setting,
    Turns,
    attention_kinds,
    cross_entropy,
    dealt,
    join,
    make_worker,
    micro_batches,
    policy_loss,
    scores,
    train,
)
from prefixtree import PrefixForest

SIDES = {
    "verl": "verl's engine, FA2",
    "verl_fa4": "verl's engine, flash-attn-4",
    "packed": "prefixtree's engine",
}
# ranks, and mini-batches of the check, divide the samples
MULTIPLE = 8


# ---- what is timed -------------------------------------------------------------------------------


def run_side(
    side: str,
    folder: Path,
    turns: Turns,
    checked: Check,
    known: dict[str, Any],
    options: argparse.Namespace,
    ranks: Ranks,
) -> Row:
    """Times one side; `known` keeps the log-probabilities of the first for the others."""
    row: Row = {"red": [x for x in checked.red if side == "packed"]}
    if row["red"]:
        return row
    engine = "prefixtree" if side == "packed" else "verl"
    setting = Setting(
        engine=engine,
        attention=options.attention.get(side, ""),
        dtype=options.dtype,
        max_tokens=options.max_tokens,
        is_gpu=options.is_gpu,
    )
    worker = make_worker(folder, setting)
    worker.set_loss_fn(policy_loss(entropy=0.0, kl=0.001))
    indices = dealt(turns, engine, ranks)[ranks.rank]
    mine = turns.take(indices)
    sizes = micro_batches(worker, mine, setting)

    def update() -> tuple[list[torch.Tensor], dict[str, Any], list[float]]:
        synchronize(options)
        begin = time.perf_counter()
        old = scores(worker, mine, 1.0)["log_probs"]
        synchronize(options)
        middle = time.perf_counter()
        metrics = train(worker, mine, old, mine.beside(old)[1], 1.0, len(turns))
        synchronize(options)
        return old, metrics, [middle - begin, time.perf_counter() - middle]

    # the first compiles, and makes the optimizer's states
    old, metrics, _ = update()
    found = ranks.joined(dict(zip(indices, old, strict=True)))
    logprobs = torch.cat(
        [found[i][turns.response_masks[i].bool()] for i in range(len(turns))]
    ).double()
    reference = known.setdefault("logprobs", logprobs)
    row |= {name: float(metrics[name][0]) for name in ("loss", "grad_norm", "kl_loss")}
    row["drift"] = float((logprobs - reference).square().mean().sqrt())
    limit = (1 + FACTOR) * checked.base["log_probs"]
    if not row["drift"] <= limit:
        row["red"] = [f"log-probabilities of all samples differ by {row['drift']:.3f} from verl's"]
    row = ranks.agree(row)
    if row["red"]:
        let_go(worker)
        return row
    if options.is_gpu:
        torch.cuda.reset_peak_memory_stats()
    every = []
    for _ in range(options.repeats):
        # all begin together, and the last one counts
        ranks.most(0.0)
        _, _, phases = update()
        every.append(ranks.most(sum(phases), *phases))
    peak = ranks.most(torch.cuda.max_memory_allocated())[0] if options.is_gpu else None
    let_go(worker)
    seconds, scoring, training = (float(x) for x in np.median(np.array(every), axis=0))
    computed, steps = ranks.total(sum(sizes), len(sizes))
    replicated = int(turns.lengths.sum())
    return row | {
        "seconds": seconds,
        "all_seconds": [one[0] for one in every],
        "log_prob_seconds": scoring,
        "update_seconds": training,
        "peak_bytes": peak,
        "micro_batches": int(steps),
        "replicated": replicated,
        "computed": int(computed),
        "distinct": known["distinct"],
        "tokens_per_s": replicated / seconds,
        "distinct_per_s": known["distinct"] / seconds,
    }


def synchronize(options: argparse.Namespace) -> None:
    """Waits for the GPU, where there is one."""
    if options.is_gpu:
        torch.cuda.synchronize()


# ---- the run -------------------------------------------------------------------------------------


def save(shape: Any, folder: Path, options: argparse.Namespace, ranks: Ranks) -> int:
    """A checkpoint of random weights in bf16, by the first rank; -> its number of parameters."""
    parameters = 0
    if ranks.rank == 0:
        model = layers.model_of(shape, options.device, "bfloat16", "sdpa")
        parameters = sum(p.numel() for p in model.parameters())
        model.save_pretrained(folder)
        del model
        gc.collect()
        if options.is_gpu:
            torch.cuda.empty_cache()
    return ranks.agree(parameters)


def run(options: argparse.Namespace, ranks: Ranks, folder: Path) -> int:
    """The exit code."""
    shape = policy.shape_of(options)
    turns = Turns.of(*turn_samples(options, shape.vocab_size))
    turns = turns.take(range(len(turns) // MULTIPLE * MULTIPLE))
    if options.is_tiny:
        options.max_tokens = 2 * int(turns.lengths.max())
    if options.check_lr is None:
        # no step so long that rounding decides what is clipped in the next
        options.check_lr = 0.003 if options.is_tiny else 0.03
    parameters = save(shape, folder, options, ranks)
    checked = check(folder, turns, options, ranks)
    if ranks.rank > 0:
        options.out = None
    report = Report(
        options,
        shape=options.shape,
        parameters=parameters,
        layers=shape.num_hidden_layers,
        ranks=ranks.count,
        tasks=options.tasks,
        sequences=len(turns),
        max_tokens=options.max_tokens,
        check=checked.facts,
        attention=options.attention,
        cross_entropy=cross_entropy(),
        packages={name: installed(name) for name in ("verl", "tensordict", "ray")},
        stand_ins=options.stand_ins,
    )
    known: dict[str, Any] = {
        "distinct": PrefixForest.from_sequences(turns.sequences).num_tokens,
    }
    for side in options.sides:
        one = partial(run_side, side, folder, turns, checked, known, options, ranks)
        row = report.attempt({"side": side, "ranks": ranks.count}, one)
        if ranks.rank == 0 or "failed" in row:
            got = verdict(row) or f"{row['seconds']:.3f} s {row['all_seconds']}"
            print(f"{side}, {ranks.count} ranks, rank {ranks.rank}: {got}", flush=True)
        if ranks.count > 1 and ("failed" in row or "out_of_memory" in row):
            # the others wait in a collective: torchrun ends them
            os._exit(1)
    base = report.rows[0].get("seconds")
    for row in report.rows:
        if base is not None and "seconds" in row:
            row["speedup"] = base / row["seconds"]
    return report.finish(tables) if ranks.rank == 0 else 0


# ---- tables --------------------------------------------------------------------------------------


def tables(*runs: Row) -> Parts:
    """A line per side of every run, and the errors of the check."""
    if not runs:
        yield MISSING
        return

    def of_row(head: str, text: Callable[[Row], str]) -> Column:
        return Column(head, lambda line: text(line[1]) if "seconds" in line[1] else "")

    def seconds(line: Any) -> str:
        return verdict(line[1])[:60] or f"{line[1]['seconds']:.2f}"

    yield _about(runs[0])
    yield Table(
        [
            Column("model", _model),
            Column("GPUs", lambda line: str(line[0]["ranks"])),
            Column("engine", lambda line: SIDES[line[1]["side"]]),
            of_row("micro-batches", lambda row: str(row["micro_batches"])),
            of_row("tokens computed", lambda row: f"{row['computed']:,}"),
            Column("update, s", seconds),
            of_row("of it log-probs, s", lambda row: f"{row['log_prob_seconds']:.2f}"),
            of_row("speed-up", lambda row: times_cell(row.get("speedup"))),
            of_row("tokens/s", lambda row: f"{row['tokens_per_s']:,.0f}"),
            of_row("GiB per GPU", lambda row: gib(row["peak_bytes"])),
            Column("loss", lambda line: number(line[1], "loss", ".6f"), is_detail=True),
            Column(
                "gradient norm", lambda line: number(line[1], "grad_norm", ".4f"), is_detail=True
            ),
        ],
        [(run, row) for run in runs for row in run["rows"]],
    )
    yield (
        "The check: the same PPO updates by both engines, against verl's engine in float32 with "
        "padding and sdpa attention. Log-probabilities and entropies: root mean square in nats. "
        "Losses and gradient norms: relative. Parameters: how far apart they end over how far they "
        "went."
    )
    names = ("log_probs", "entropy", "loss", "grad_norm", "kl_loss", "parameters")
    heads = ("log-probabilities", "entropies", "losses", "gradient norms", "KL", "parameters")
    engines = {"verl, bf16": "verl's, bf16", "packed, bf16": "prefixtree's, bf16"}
    engines |= {"packed, float32": "prefixtree's, float32"}
    yield Table(
        [
            Column("model", _model),
            Column("GPUs", lambda line: str(line[0]["ranks"])),
            Column("engine", lambda line: engines[line[1]]),
            *(Column(head, partial(_error, name)) for name, head in zip(names, heads, strict=True)),
        ],
        [(run, name) for run in runs for name in engines],
    )


def headline(*runs: Row) -> Parts:
    """A line per run: verl's own engine and ours."""
    if not runs:
        yield MISSING
        return
    yield _about(runs[0])
    lines = [
        (run, sides["verl"], sides["packed"])
        for run in runs
        for sides in [{row["side"]: row for row in run["rows"] if "seconds" in row}]
        if {"verl", "packed"} <= set(sides)
    ]
    yield Table(
        [
            Column("model", _model),
            Column("GPUs", lambda line: str(line[0]["ranks"])),
            Column("verl's engine", lambda line: f"{line[1]['seconds']:#.3g} s"),
            Column("prefixtree's", lambda line: f"{line[2]['seconds']:#.3g} s"),
            Column("speed-up", lambda line: f"{line[1]['seconds'] / line[2]['seconds']:.1f}x"),
            Column("tokens/s", lambda line: f"{line[2]['tokens_per_s']:,.0f}"),
            Column("verl's GiB per GPU", lambda line: gib(line[1]["peak_bytes"])),
            Column("prefixtree's", lambda line: gib(line[2]["peak_bytes"])),
        ],
        lines,
    )


def _about(run: Row) -> str:
    return (
        f"{machine(run['environment'], 'triton')}, verl {run['packages']['verl']}; "
        f"{run['sequences']} samples of {run['tasks']} tasks, micro-batches of at most "
        f"{run['max_tokens']:,} tokens. An update is `compute_log_prob` and `update_actor`."
    )


def _model(line: Any) -> str:
    run = line[0]
    return f"{run['shape']} shape, {run['layers']} layers"


def _error(name: str, line: Any) -> str:
    run, engine = line
    return f"{run['check']['errors'][engine][name]:.2g}"


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every side was green."""
    what = parser(__doc__)
    what.set_defaults(repeats=3)
    add = what.add_argument
    add("--rollouts", type=Path, help="JSONL; needed but for --read")
    add("--tasks", type=int, default=2, help="the first of the file")
    add("--shape", choices=policy.SHAPES, default=policy.SHAPES[0])
    add("--layers", type=int, help="default: all 28 of qwen3-0.6b, 8 of qwen3-8b")
    add("--max-tokens", type=int, default=32768, help="of a micro-batch")
    add("--checked", type=int, default=8, help="samples that are computed in float32 too")
    add("--check-lr", type=float, help="of the SGD of the check (default: 0.03; 0.003 if tiny)")
    add("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    add(
        "--folder",
        type=Path,
        help="for the checkpoint (default: a temporary one)",
    )
    options = parse(what, arguments)
    if options.read is not None:
        return Report.read(options).finish(tables)
    if options.rollouts is None:
        what.error("give --rollouts")
    if options.plot is not None:
        what.error("this benchmark draws nothing: leave out --plot")
    if options.backend != "auto" or options.dtype != "bfloat16":
        what.error("verl's engines choose backend and precision: leave out --backend and --dtype")
    is_own = not dist.is_initialized()
    ranks = join(options)
    options.is_gpu = torch.device(options.device).type == "cuda"
    options.attention = attention_kinds(options.device)
    options.skipped += [s for s in options.sides if s != "packed" and s not in options.attention]
    options.sides = [side for side in options.sides if side not in options.skipped]
    if options.checked % (UPDATES * ranks.count):
        what.error(f"--checked: expected a multiple of {UPDATES * ranks.count}")
    if MULTIPLE % ranks.count:
        what.error(f"{ranks.count} ranks: expected 1, 2, 4 or 8")
    place = ranks.agree(options.folder or new_folder())
    try:
        code = run(options, ranks, place)
        ranks.most(0.0)
    finally:
        if ranks.rank == 0 and options.folder is None:
            shutil.rmtree(place, ignore_errors=True)
    if is_own:
        dist.destroy_process_group()
    return code


def new_folder() -> Path:
    """An empty one, in memory where there is room for a large model."""
    memory = Path("/dev/shm")
    fits = memory.exists() and shutil.disk_usage(memory).free > 12 * GIB
    return Path(tempfile.mkdtemp(prefix="verl-update-", dir=memory if fits else None))
