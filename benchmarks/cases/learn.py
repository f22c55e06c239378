"""How fast does a pretrained model learn a task by GRPO in TRL: rewards over steps and minutes?

    python -m benchmarks learn --model FOLDER --task sums --out learn.json       # on a GPU
    python -m benchmarks learn --model FOLDER --task coins --seeds 1 2 3 --out learn_coins.json
    python -m benchmarks learn --model FOLDER --device cpu --scale 0.02          # every code path

Needs TRL, and in FOLDER the model that `python -m prefixtree.demo.real FOLDER` writes
(SmolLM2-135M-Instruct). Every side takes the same questions in the same order, each once, so the
reward of a step is that of questions never seen. Weights are float32 and computed in bf16 (TRL's
`bf16=True`), as in bf16 alone AdamW steps this small are rounded away. Samples are drawn by each
side's own sampler, so curves agree in their spread and not point by point.

Sides, settings, the split of seconds and the check before anything is timed are those of
`python -m benchmarks run`, with real weights and the task's prompts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoTokenizer, TrainerCallback

from benchmarks.lib.environment import installed
from benchmarks.lib.plots import COLOURS, figure, name, save
from benchmarks.lib.policy import Ranks
from benchmarks.lib.runs import Report, Row, parse, parser
from benchmarks.lib.tables import MISSING, Column, Parts, Table, gib, verdict, verdict_column
from benchmarks.lib.trl_check import check
from benchmarks.lib.trl_steps import (
    BEST,
    PARTS,
    Side,
    Timed,
    Work,
    about,
    fresh,
    generate_rollouts,
    label,
    logged,
    make_trainer,
    model_of,
    recorded,
    reward_of,
    rows_problem,
)
from prefixtree.demo.tasks import TASKS, Dialogue, Question, Task, questions

SIDES = ("trl", "prefixtree", BEST)
CURVES = {"trl": COLOURS["fa2"], "prefixtree": COLOURS["own"], BEST: COLOURS["packed"]}
# steps whose mean a curve shows
WINDOW = 10


@dataclass(frozen=True)
class LearnWork(Work):
    """A task's questions in the place of random words.

    Attributes:
        task: of `prefixtree.demo.tasks`.
        model: the folder of its tokenizer.
        seed: of the questions.
        is_check: whether completions are random words, for which a task has no reward.
    """

    task: Task
    model: str
    seed: int
    is_check: bool = False

    def __str__(self) -> str:
        return (
            f"{type(self.task).__name__.lower()}: {self.prompts} prompts of about "
            f"{self.prompt:,} tokens x {self.samples} samples of up to {self.new}"
        )

    @cached_property
    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.model, padding_side="left")

    @cached_property
    def dialogue(self) -> Dialogue:
        return Dialogue(self.task, self.tokenizer)

    def asked(self, steps: int) -> list[Question]:
        return questions(self.task, self.prompts * steps, self.seed)

    def facts(self, steps: int) -> dict[str, Any]:
        """What the environment knows, by the text of the question."""
        return {question.text: question.facts for question in self.asked(steps)}

    def few(self, groups: int) -> Work:
        """With two worked examples, in one micro-batch: TRL's entropy is a mean of means, and rows
        of random lengths would lie in other micro-batches of ours."""
        # dataclass(frozen=True) classes of tasks have the field; the protocol need not
        few, task = super().few(groups), cast(Any, self.task)
        rows = few.prompts * few.samples
        task = replace(task, shots=2)
        return replace(few, rows=rows, accumulation=1, task=task, is_check=True)

    def settings(self, model: Any, steps: int) -> dict[str, Any]:
        from datasets import Dataset

        facts = self.facts(steps)

        def right(
            prompts: list[Any], completion_ids: list[list[int]], **columns: Any
        ) -> list[float]:
            return [
                float(self.dialogue.is_right(facts[prompt[-1]["content"]], ids))
                for prompt, ids in zip(prompts, completion_ids, strict=True)
            ]

        def reward(
            prompts: list[Any], completion_ids: list[list[int]], **columns: Any
        ) -> list[float]:
            return [
                self.dialogue.reward(facts[prompt[-1]["content"]], ids)
                for prompt, ids in zip(prompts, completion_ids, strict=True)
            ]

        return {
            "train_dataset": Dataset.from_list([{"prompt": q.prompt} for q in self.asked(steps)]),
            "reward_funcs": reward_of(model) if self.is_check else [right, reward],
            "processing_class": self.tokenizer,
        }

    def rollout(self, side: Side, steps: int) -> Any:
        """The side's `rollout_func`; None where TRL generates by itself."""
        if "tree" in side.words:
            from prefixtree.integrations.trl import tree_rollouts as sample
        else:
            sample = generate_rollouts
        if self.replies == 0:
            return sample if "tree" in side.words else None
        facts = self.facts(steps)

        def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
            of_rows = [facts[prompt[-1]["content"]] for prompt in prompts]
            return sample(
                prompts, trainer, reply=lambda row, ids: self.dialogue.play(of_rows[row], ids)[1]
            )

        return rollout


class StopsAt(TrainerCallback):
    """Ends a training after so many minutes."""

    def __init__(self, minutes: float) -> None:
        self._until = time.monotonic() + 60 * minutes

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        control.should_training_stop |= time.monotonic() > self._until


def run_side(
    side: Side, work: LearnWork, checked: Row, options: argparse.Namespace, folder: Path
) -> Row:
    """The steps of one side with one seed, or what is red."""
    if side.trainer == "prefixtree" and checked["red"]:
        return {"red": list(checked["red"])}
    is_gpu = torch.device(options.device).type == "cuda"
    with fresh():
        model = model_of(side, options, "float32", None)
        trainer = make_trainer(
            side,
            work,
            options,
            model,
            options.steps,
            folder,
            work.rollout(side, options.steps),
            bf16=True,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=5,
            beta=0.0,
            reward_weights=[0.0, 1.0],
            seed=work.seed,
        )
        times = Timed(trainer, min(WINDOW, options.steps - 1))
        trainer.add_callback(StopsAt(options.minutes))
        trainer.train()
        row = recorded(trainer, times) | {
            "peak_bytes": torch.cuda.max_memory_allocated() if is_gpu else None,
            "right": logged(trainer, "rewards/right/mean"),
            "entropies": logged(trainer, "entropy"),
        }
    if not len(row["rewards"]) == len(row["right"]) == len(times.steps):
        return {"red": [f"{len(row['rewards'])} rewards of {len(times.steps)} steps"]}
    return row


# ---- tables and picture --------------------------------------------------------------------------


def tables(*runs: Row) -> Parts:
    """A line per side and seed of every run."""
    if not runs:
        yield MISSING
        return
    yield about(runs[0])
    lines = [(run, row) for run in runs for row in run["rows"]]

    def of_row(head: str, text: Any) -> Column:
        return Column(head, lambda line: text(line[1]) if "seconds" in line[1] else "")

    yield Table(
        [
            Column("task", lambda line: task_of(line[0])),
            Column("trainer", lambda line: line[1]["side"]),
            Column("rows", lambda line: str(line[0]["rows_per_batch"])),
            Column("seed", lambda line: str(line[1]["seed"])),
            Column("step, s", lambda line: verdict(line[1])[:60] or f"{line[1]['seconds']:.2f}"),
            *(of_row(f"{of}, s", lambda row, of=of: f"{row[of]:.2f}") for of in PARTS),
            of_row("first step, s", lambda row: f"{row['first_seconds']:.1f}"),
            of_row(
                "steps in minutes", lambda row: f"{len(row['steps'])} in {minutes(row)[-1]:.1f}"
            ),
            of_row("right, first 10", lambda row: f"{statistics.mean(row['right'][:WINDOW]):.0%}"),
            of_row("right, last 10", lambda row: f"{statistics.mean(row['right'][-WINDOW:]):.0%}"),
            of_row("GiB", lambda row: gib(row["peak_bytes"])),
            Column("", lambda line: verdict_column().cell(line[1]), is_detail=True),
        ],
        lines,
    )


def task_of(run: Row) -> str:
    """The first word of a run's work."""
    return str(run["work"]).partition(":")[0]


def minutes(row: Row) -> list[float]:
    """Minutes since the training began, after each step."""
    return [seconds / 60 for seconds in itertools.accumulate(s["seconds"] for s in row["steps"])]


def smooth(values: Sequence[float]) -> list[float]:
    """Means of the last WINDOW values, of fewer at the beginning."""
    return [statistics.mean(values[max(0, at - WINDOW + 1) : at + 1]) for at in range(len(values))]


def curves(runs: Sequence[Row], path: Path) -> None:
    """Draws right answers by step and by minute: a row per task, a line per side and seed."""
    by_task: dict[str, list[Row]] = {}
    for run in runs:
        with_steps = [row for row in run["rows"] if row.get("rewards")]
        by_task.setdefault(task_of(run), []).extend(with_steps)
    fig, axes = figure(2, f"GRPO of {runs[0]['model']} in TRL", rows=len(by_task))
    pairs = zip(axes[::2], axes[1::2], strict=True)
    for (task, rows), (by_step, by_minute) in zip(by_task.items(), pairs, strict=True):
        labelled = set[str]()
        for row in rows:
            style = {"color": CURVES.get(row["side"]), "linewidth": 1.4}
            if row["side"] not in labelled:
                style["label"] = label(row)
            labelled.add(row["side"])
            share = [100 * value for value in smooth(row["right"])]
            by_step.plot(range(1, len(share) + 1), share, **style)
            by_minute.plot(minutes(row), share, **style)
        name(by_step, "optimizer step", "right answers, %", f"{task}, mean of {WINDOW} steps")
        name(by_minute, "minutes", "", f"{task}, the first step's compilation included")
    save(fig, path)


# ---- the run -------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every side was green."""
    what = parser(__doc__)
    add = what.add_argument
    add("--model", help="the folder of the pretrained model")
    add("--task", choices=list(TASKS), default="sums")
    add("--sides", nargs="+", default=list(SIDES), metavar="SIDE", help="as trl+static")
    add("--seeds", nargs="+", type=int, default=[1], help="of questions and samples")
    add("--steps", type=int, default=200)
    add("--minutes", type=float, default=9.0, help="after which a side's training ends")
    add("--prompts", type=int, default=8, help="per step")
    add("--samples", type=int, default=16, help="per prompt")
    add("--rows", type=int, default=128, help="per_device_train_batch_size")
    add("--lr", type=float, default=5e-6, help="of AdamW")
    add("--check-lr", type=float, default=1e-2, help="of the SGD of the check")
    add("--beside", nargs="+", type=Path, default=[], help="JSON of other runs, with --read")
    options = parse(what, arguments)
    if options.read is not None:
        report = Report.read(options)
        others = [json.loads(path.read_text()) for path in options.beside]
        if options.plot is not None:
            curves([report.result(), *others], options.plot)
        return report.finish(lambda run: tables(run, *others))
    if options.model is None:
        what.error("--model FOLDER is needed: python -m prefixtree.demo.real FOLDER writes one")
    sides = [Side.of(written) for written in options.sides]
    task: Any = TASKS[options.task]
    if options.is_tiny:
        options.prompts, options.samples, options.rows = 2, 4, 8
        options.steps = min(options.steps, 2)
        task = replace(task, shots=3)
    # what `make_trainer` reads
    options.fsdp, options.layers, options.compile_options = False, None, {}
    total = options.prompts * options.samples
    if problem := rows_problem(options, total):
        what.error(problem)
    first = questions(task, 1)[0]
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    prompt = tokenizer.apply_chat_template(
        first.prompt, add_generation_prompt=True, return_dict=False
    )
    work = LearnWork(
        options.prompts,
        options.samples,
        len(prompt),
        task.new_tokens,
        options.rows,
        total // options.rows,
        int(task.reply(first.facts, [task.solve(first.facts, [])]) is not None),
        len(tokenizer),
        task,
        options.model,
        options.seeds[0],
    )
    with tempfile.TemporaryDirectory() as folder:
        # TRL's trainer alone is what ours is checked against
        needed = any(side.trainer == "prefixtree" for side in sides)
        checked = check(work, options, Path(folder), Ranks(options.device)) if needed else {}
        report = Report(
            options,
            work=str(work),
            shape=Path(options.model).name,
            model=Path(options.model).name,
            layers=AutoConfig.from_pretrained(options.model).num_hidden_layers,
            rows_per_batch=options.rows,
            lr=options.lr,
            trl=installed("trl"),
            accelerate=installed("accelerate"),
            check=checked,
        )
        for seed, side in itertools.product(options.seeds, sides):
            of_seed = replace(work, seed=seed)
            run = partial(run_side, side, of_seed, checked, options, Path(folder))
            row = report.attempt({"side": side.name, "seed": seed}, run)
            print(f"{side.name}, seed {seed}: {verdict(row) or shown(row)}", flush=True)
    if options.plot is not None:
        curves([report.result()], options.plot)
    return report.finish(tables)


def shown(row: Row) -> str:
    return (
        f"{row['seconds']:.2f} s, first {row['first_seconds']:.1f} s, {len(row['steps'])} steps in "
        f"{minutes(row)[-1]:.1f} minutes, right {statistics.mean(row['right'][:WINDOW]):.0%} -> "
        f"{statistics.mean(row['right'][-WINDOW:]):.0%}"
    )
