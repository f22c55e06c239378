"""How much faster is a whole GRPO step in TRL: rollouts, scores and the update?

    python -m benchmarks run --prompt 2048 --out run.json          # on a GPU
    python -m benchmarks run --replies 3 --out run_turns.json      # an environment that replies
    python -m benchmarks run --prompt 256 --new 128 --repeats 19 --out run_curves.json
    torchrun --standalone --nproc-per-node 2 -m benchmarks run --fsdp --out run_2gpu.json
    python -m benchmarks run --device cpu --scale 0.02             # every code path

Needs TRL: `tools/gpu_check.sh run` brings it. Qwen3-0.6B's shape with random weights in bf16,
prompts of random words, AdamW, and a reward that can be learnt: the share of tokens whose embedding
lies on one side of a plane. Every side starts from the same weights and gets the same prompts.

    trl            TRL's GRPOTrainer with its defaults, sdpa attention
    trl+static     with cache_implementation="static", which TRL does not compile
    trl+continuous with use_transformers_continuous_batching
    trl+fa2        with flash-attn, where it is installed
    +kept          without gradient checkpointing
    prefixtree     `PrefixTreeGRPOTrainer`: the class is replaced, nothing else
    +tree          `rollout_func=tree_rollouts`
    +auto          `recompute="auto"`
    +compiled      `compile_layers`

The seconds of a step are split: generate (TRL's `_generate`, or the rollout_func), score (rewards,
and log-probabilities of other policies where TRL needs them), update (forward, backward, optimizer)
and rest (data, logs). The first steps warm up; the first one's seconds are in the table. With
--replies an environment answers when a turn ends, and TRL's side generates each turn from the
beginning of its row, as TRL's loop over tools does.

With --fsdp the ranks of torchrun train by TRL's FSDP2, from float32 weights that are computed in
--dtype. The prompts of a step are divided among them, the first ones to rank 0, and `tree` samples
from whole copies. A step's seconds are those of its slowest rank, memory is the largest.

Before anything is timed, both trainers take four updates on the same samples, in float32 and in
bf16: losses, gradient norms, entropies and parameters are compared with TRL's in float32. Ours may
differ by a thousandth in float32. In bf16 our error may be twice TRL's, and thrice for the few
numbers of the losses and norms. Sides with `tree` are checked too: greedy tokens beside `generate`,
log-probabilities beside `sequence_logprobs`, in float32. Red has no time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.lib import sampling
from benchmarks.lib.environment import installed
from benchmarks.lib.plots import figure, name, save, ticks
from benchmarks.lib.policy import Ranks, config, sharded
from benchmarks.lib.runs import Report, Row, parse, parser
from benchmarks.lib.tables import (
    MISSING,
    Column,
    Parts,
    Table,
    gib,
    number,
    times_cell,
    verdict,
    verdict_column,
)
from benchmarks.lib.trl_check import check
from benchmarks.lib.trl_steps import (
    BEST,
    PARTS,
    Side,
    Timed,
    Work,
    about,
    fresh,
    label,
    make_trainer,
    model_of,
    recorded,
    rollout_of,
    rows_problem,
)
from prefixtree.sampling.whole_copy import whole_copy

# the quick ones first: a run that is cut short has them
SIDES = ("trl", BEST, "prefixtree", "trl+static", "trl+fa2")


def run_side(
    written: str,
    work: Work,
    checked: Row,
    options: argparse.Namespace,
    folder: Path,
    ranks: Ranks,
) -> Row:
    """The times of one side's steps, or what is red."""
    side = Side.of(written)
    red = list(checked["red"]) if side.trainer == "prefixtree" else []
    if "tree" in side.words and not red:
        red = [text for some in ranks.every(wrong_samples(side, options, ranks)) for text in some]
    if red:
        return {"red": red}
    with fresh():
        model = model_of(side, options, options.dtype, work.ends())
        steps = options.warm + options.repeats
        trainer = make_trainer(side, work, options, model, steps, folder, rollout_of(side, work))
        times = Timed(trainer, options.warm)
        trainer.train()
        times.slowest(ranks)
        is_gpu = torch.device(options.device).type == "cuda"
        peak = ranks.most(torch.cuda.max_memory_allocated())[0] if is_gpu else None
        row = recorded(trainer, times) | {"peak_bytes": peak}
    # the first rank logs
    row = ranks.agree(row)
    count = len(row["rewards"])
    if not count == len(row["losses"]) == len(times.steps) == steps:
        return {"red": [f"{count} rewards of {steps} steps"]}
    sampled = statistics.median(row["lengths"]) * work.prompts * work.samples
    return row | {
        "sampled_per_s": sampled / row["seconds"],
        "tokens_per_s": (work.prompts * work.samples * work.prompt + sampled) / row["seconds"],
    }


def wrong_samples(side: Side, options: argparse.Namespace, ranks: Ranks) -> list[str]:
    """The errors of the sampler, in float32 with two layers; under FSDP2 from a whole copy."""
    kind = "tree-compiled" if "compiled" in side.words else "tree"
    if options.device == "cpu":
        # a CPU compiles minutes, and captures nothing
        kind = "tree"
    with fresh():
        model = sampling.model_of(config(options.is_tiny), 2, "float32", options.device)
        if not options.fsdp:
            return sampling.wrong(kind, model)
        exact = {name: p.detach().clone() for name, p in model.named_parameters()}
        with whole_copy(sharded(model, options, ranks)) as copied:
            same = all(torch.equal(p, exact[name]) for name, p in copied.named_parameters())
            return sampling.wrong(kind, copied) + ([] if same else ["a copy's parameters"])


# ---- tables --------------------------------------------------------------------------------------


def tables(*runs: Row) -> Parts:
    """A line per side of every run, and the errors of the checks."""
    if not runs:
        yield MISSING
        return
    yield about(runs[0])
    lines = [(run, row) for run in runs for row in run["rows"]]

    def of_row(head: str, text: Callable[[Row], str], is_detail: bool = False) -> Column:
        return Column(
            head, lambda line: text(line[1]) if "seconds" in line[1] else "", is_detail=is_detail
        )

    def part(of: str) -> Column:
        return of_row(f"{of}, s", lambda row: f"{row[of]:.2f}")

    yield Table(
        [
            Column("work", lambda line: work_of(line[0], runs)),
            Column("trainer", lambda line: line[1]["side"]),
            Column("step, s", lambda line: seconds(line[1])),
            *(part(of) for of in PARTS),
            of_row("speed-up", lambda row: times_cell(row.get("speedup"))),
            of_row("first step, s", lambda row: f"{row['first_seconds']:.1f}"),
            of_row("sampled tokens/s", lambda row: f"{row['sampled_per_s']:,.0f}"),
            of_row("GiB", lambda row: gib(row["peak_bytes"])),
            of_row("replication ratio", lambda row: number(row, "replication_ratio", ".1f")),
            of_row("reward at first, at last", lambda row: rewards(row), is_detail=True),
            Column("", lambda line: verdict_column().cell(line[1]), is_detail=True),
        ],
        lines,
    )
    yield (
        "The check: the same samples trained on by both trainers, against TRL's in float32. "
        "Losses, gradient norms and entropies: relative. Parameters: how far apart they end over "
        "how far they went."
    )
    trainers = {
        "trl, bf16": "TRL's, bf16",
        "prefixtree, bf16": "prefixtree's, bf16",
        "prefixtree, float32": "prefixtree's, float32",
    }
    heads = {"loss": "losses", "grad_norm": "gradient norms", "entropy": "entropies"}
    heads["parameters"] = "parameters"
    yield Table(
        [
            Column("before", lambda line: work_of(line[0], runs)),
            Column("work of the check", lambda line: line[0]["check"]["work"]),
            Column("trainer", lambda line: trainers[line[1]]),
            *(Column(head, partial(_error, of)) for of, head in heads.items()),
        ],
        [(run, which) for run in runs for which in trainers],
    )


def curves(runs: Sequence[Row], path: Path) -> None:
    """Draws the rewards of every side by step, and where the seconds of a step go."""
    fig, axes = figure(2, "GRPO in TRL, from the same weights on one GPU")
    lines = [(run, row) for run in runs for row in run["rows"] if "seconds" in row]
    longest = max(lines, key=lambda line: len(line[1]["rewards"]))[0]
    for row in longest["rows"]:
        if "rewards" in row:
            axes[0].plot(range(1, len(row["rewards"]) + 1), row["rewards"], label=label(row))
    name(axes[0], "optimizer step", "reward", longest["work"])
    for at, (_, row) in enumerate(lines):
        bottom = 0.0
        for part, colour in zip(PARTS, ("#225ea8", "#7fcdbb", "#fdae61", "#777777"), strict=True):
            shown_as = part if at == 0 else None
            axes[1].bar(at, row[part], bottom=bottom, color=colour, label=shown_as)
            bottom += row[part]
    labels = [f"{label(row)}\n{run['work'].split(' x ')[0]}" for run, row in lines]
    ticks(axes[1], range(len(lines)), labels)
    axes[1].tick_params(axis="x", labelsize=6)
    name(axes[1], "", "seconds of a step")
    save(fig, path)


def work_of(run: Row, runs: Sequence[Row]) -> str:
    """The work of a run, its ranks, and its GPU where that is not the first run's."""
    gpu, first = (r["environment"]["gpu"] for r in (run, runs[0]))
    notes = [] if gpu == first else [gpu.split()[1]]
    if run.get("ranks", 1) > 1:
        notes.append(f"{run['ranks']} GPUs, FSDP2")
    return f"{run['work']} ({'; '.join(notes)})" if notes else str(run["work"])


def seconds(row: Row) -> str:
    return verdict(row)[:60] or f"{row['seconds']:.2f}"


def rewards(row: Row) -> str:
    return f"{row['rewards'][0]:.2f}, {row['rewards'][-1]:.2f}"


def _error(of: str, line: Any) -> str:
    run, which = line
    errors = run["check"]["errors"]
    return f"{errors[which][of]:.2g}" if which in errors else ""


# ---- the run -------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every side was green."""
    what = parser(__doc__)
    what.set_defaults(repeats=2)
    add = what.add_argument
    add("--sides", nargs="+", default=list(SIDES), metavar="SIDE", help="as trl+static")
    add("--prompts", type=int, default=8, help="per step")
    add("--samples", type=int, default=16, help="per prompt")
    add("--prompt", type=int, default=2048, help="tokens per prompt")
    add("--new", type=int, default=256, help="tokens per completion, at most")
    add("--rows", type=int, default=32, help="per_device_train_batch_size")
    add("--replies", type=int, default=0, help="of an environment, per rollout at most")
    add("--warm", type=int, default=1, help="steps before those that are timed")
    add("--layers", type=int, help="default: 28")
    add("--lr", type=float, default=3e-4, help="of AdamW")
    add("--check-lr", type=float, default=0.1, help="of the SGD of the check")
    add("--compile-backend", default="inductor", help="of compiled layers")
    add("--fsdp", action="store_true", help="on the ranks of torchrun")
    options = parse(what, arguments)
    if options.read is not None:
        report = Report.read(options)
        if options.plot is not None:
            curves([report.result()], options.plot)
        return report.finish(tables)
    if options.fsdp and "RANK" not in os.environ:
        what.error("--fsdp goes with torchrun")
    if find_spec("trl") is None:
        what.error("TRL is not installed: pip install trl, or bash tools/gpu_check.sh run")
    try:
        every = [Side.of(written) for written in options.sides]
    except ValueError as problem:
        what.error(str(problem))
    if find_spec("flash_attn") is None:
        options.skipped = [side.name for side in every if "fa2" in side.words]
        options.sides = [side.name for side in every if "fa2" not in side.words]
    options.compile_options = {"backend": options.compile_backend}
    if options.is_tiny:
        options.prompts, options.samples, options.rows = 4, 4, 8
        options.prompt = max(4, round(options.prompt * options.scale))
        options.new = max(8, round(options.new * options.scale))
    total = options.prompts * options.samples
    count = int(os.environ["WORLD_SIZE"]) if options.fsdp else 1
    if problem := rows_problem(options, total, count):
        what.error(problem)
    ranks = Ranks.of_torchrun(options) if options.fsdp else Ranks(options.device)
    if ranks.rank > 0:
        options.out = options.plot = None
    shape = config(options.is_tiny)
    work = Work(
        options.prompts,
        options.samples,
        options.prompt,
        options.new,
        options.rows,
        total // options.rows // count,
        options.replies,
        shape.vocab_size,
    )
    with tempfile.TemporaryDirectory() as folder:
        checked = check(work, options, Path(folder), ranks)
        report = Report(
            options,
            work=str(work),
            shape="tiny" if options.is_tiny else "qwen3-0.6b",
            layers=options.layers or shape.num_hidden_layers,
            rows_per_batch=options.rows,
            ranks=ranks.count,
            trl=installed("trl"),
            accelerate=installed("accelerate"),
            check=checked,
        )
        for side in options.sides:
            run = partial(run_side, side, work, checked, options, Path(folder), ranks)
            row = report.attempt({"side": side}, run)
            broke = "failed" in row or "out_of_memory" in row
            if ranks.rank == 0 or broke:
                print(f"{side}: {verdict(row) or shown(row)}", flush=True)
            if ranks.count > 1 and broke:
                # the others wait in a collective: torchrun ends them
                os._exit(1)
    base = next((row["seconds"] for row in report.rows if "seconds" in row), None)
    for row in report.rows:
        if base is not None and "seconds" in row:
            row["speedup"] = base / row["seconds"]
    if options.plot is not None:
        curves([report.result()], options.plot)
    if options.fsdp:
        dist.destroy_process_group()
    return report.finish(tables) if ranks.rank == 0 else 0


def shown(row: Row) -> str:
    parts = ", ".join(f"{of} {row[of]:.2f}" for of in PARTS)
    return f"{row['seconds']:.2f} s ({parts}), first {row['first_seconds']:.1f} s"
