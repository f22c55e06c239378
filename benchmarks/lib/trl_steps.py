"""GRPO steps in TRL: the sides, what they train on, and a trainer whose steps are timed.

A side is named by its trainer and what is set besides, joined by "+": `trl+static`,
`prefixtree+tree+auto+compiled`. TRL is imported where it is used.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    PrinterCallback,
    TrainerCallback,
)

from benchmarks.lib.policy import Ranks, config
from benchmarks.lib.runs import Row
from benchmarks.lib.sampling import model_of as random_model
from benchmarks.lib.tables import machine

#: Of a step's seconds.
PARTS = ("generate", "score", "update", "rest")
# what may be set besides the trainer's class
WORDS = {
    "trl": ("static", "continuous", "fa2", "kept"),
    "prefixtree": ("static", "continuous", "kept", "tree", "auto", "compiled"),
}
BEST = "prefixtree+tree+auto+compiled"
# of a check
FEW_SAMPLES, FEW_PROMPT, FEW_NEW = 4, 512, 128
# one token of so many ends a turn, where there are several
TURN = 64
REPLY = 32
#: Of a row's number and its completion so far, what the environment says; None ends the rollout.
Reply = Callable[[int, list[int]], list[int] | None]


@dataclass(frozen=True)
class Side:
    """A trainer and its settings.

    Attributes:
        name: as it is written. trainer: "trl" or "prefixtree". words: of WORDS.
    """

    name: str
    trainer: str
    words: tuple[str, ...]

    @classmethod
    def of(cls, name: str) -> Side:
        """Raises ValueError: an unknown trainer or word."""
        trainer, *words = name.split("+")
        if trainer not in WORDS or not set(words) <= set(WORDS[trainer]):
            known = "; ".join(f"{x} with {', '.join(some)}" for x, some in WORDS.items())
            raise ValueError(f"no side {name!r}: {known}, joined by +")
        return cls(name, trainer, tuple(words))

    @property
    def attention(self) -> str:
        if self.trainer == "prefixtree":
            return "prefixtree"
        return "flash_attention_2" if "fa2" in self.words else "sdpa"


@dataclass(frozen=True)
class Work:
    """What a step is made of.

    Attributes:
        prompts: per step, each with `samples` completions.
        prompt, new: tokens of a prompt; the most of a completion, replies included.
        rows, accumulation: per_device_train_batch_size and gradient_accumulation_steps. Of several
            ranks the first has the first prompts of a step, and so on.
        replies: of the environment per rollout; 0 is one turn.
        vocabulary: tokens of the model.
    """

    prompts: int
    samples: int
    prompt: int
    new: int
    rows: int
    accumulation: int
    replies: int
    vocabulary: int

    def __str__(self) -> str:
        turns = f", up to {self.replies} replies of {REPLY}" if self.replies else ""
        return (
            f"{self.prompts} prompts of {self.prompt:,} tokens x {self.samples} samples of "
            f"{self.new:,}{turns}"
        )

    def ends(self) -> list[int] | None:
        """Tokens that end a turn besides the tokenizer's. None: a rollout is one turn, and as long
        as it may be."""
        return list(range(0, self.vocabulary, TURN)) if self.replies else None

    def reply(self) -> Reply | None:
        """The environment: random words, as often as it answers."""
        if not self.replies:
            return None
        rng = np.random.default_rng(5)
        # none of them ends a turn
        words = rng.integers(1, self.vocabulary // TURN, (self.replies, REPLY)) * TURN - 1

        def answer(row: int, completion: list[int]) -> list[int] | None:
            turns = sum(token % TURN == 0 for token in completion)
            return words[turns - 1].tolist() if 0 < turns <= self.replies else None

        return answer

    def few(self, groups: int) -> Work:
        """The work of a check: so many short groups, a micro-batch each, of one turn."""
        return replace(
            self,
            prompts=groups,
            samples=FEW_SAMPLES,
            prompt=min(self.prompt, FEW_PROMPT),
            new=min(self.new, FEW_NEW),
            rows=FEW_SAMPLES,
            accumulation=2,
            replies=0,
        )

    def settings(self, model: Any, steps: int) -> dict[str, Any]:
        """What a trainer is given besides the model: data, rewards and tokenizer."""
        return {
            "train_dataset": self.data(steps),
            "reward_funcs": reward_of(model),
            "processing_class": tokenizer_of(self.vocabulary),
        }

    def data(self, steps: int) -> Any:
        """A dataset of so many steps: prompts of random words, one after another."""
        from datasets import Dataset

        size = (self.prompts * steps, self.prompt)
        ids = np.random.default_rng(1).integers(1, self.vocabulary - 1, size)
        return Dataset.from_list([{"prompt": " ".join(f"w{i}" for i in row)} for row in ids])


def tokenizer_of(vocabulary: int) -> PreTrainedTokenizerFast:
    """A word per token, w0 to the last, which ends a text."""
    words = {f"w{i}": i for i in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    end = f"w{vocabulary - 1}"
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, pad_token=end, padding_side="left"
    )


def reward_of(model: Any) -> Any:
    """A reward that twenty steps learn, whatever the vocabulary: the share of tokens whose
    embedding lies on one side of a random plane, about a half at first. Of random halves of a large
    vocabulary a step would see too few tokens."""
    weight = model.get_input_embeddings().weight.detach().float()
    plane = np.random.default_rng(11).standard_normal(weight.shape[1]).astype(np.float32)
    favoured = (weight @ torch.from_numpy(plane).to(weight.device) > 0).cpu().numpy()

    def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        return [float(favoured[np.asarray(ids)].mean()) for ids in completion_ids]

    return reward


# ---- rollouts ------------------------------------------------------------------------------------


def generate_rollouts(prompts: list[Any], trainer: Any, *, reply: Reply) -> dict[str, Any]:
    """A `rollout_func` with replies for any trainer: every turn is TRL's generation from the
    beginning of its row, as in TRL's own loop over tools."""
    prompt_ids, _, _ = trainer._tokenize_prompts(prompts)
    room = trainer.max_completion_length
    rows: list[list[int]] = [[] for _ in prompt_ids]
    masks: list[list[int]] = [[] for _ in prompt_ids]
    going = list(range(len(rows)))
    ends = set(trainer.eos_token_ids)
    while going:
        given = [list(prompt_ids[i]) + rows[i] for i in going]
        found, _ = trainer._generate_single_turn(given, None, {}, trainer.num_generations)
        following = []
        for i, new in zip(going, found, strict=True):
            new = new[: room - len(rows[i])]
            rows[i] += new
            masks[i] += [1] * len(new)
            left = room - len(rows[i])
            if left and rows[i][-1] in ends:
                answer = reply(i, list(rows[i]))
                if answer is not None and len(answer) < left:
                    rows[i] += answer
                    masks[i] += [0] * len(answer)
                    following.append(i)
        going = following
    logprobs = [[0.0] * len(row) for row in rows]
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": rows,
        "logprobs": logprobs,
        "env_mask": masks,
    }


def rollout_of(side: Side, work: Work) -> Any:
    """The side's `rollout_func`, or None: TRL generates."""
    reply = work.reply()
    if "tree" in side.words:
        from prefixtree.integrations.trl import tree_rollouts

        return partial(tree_rollouts, reply=reply) if reply else tree_rollouts
    return partial(generate_rollouts, reply=reply) if reply else None


# ---- trainers ------------------------------------------------------------------------------------


def model_of(side: Side, options: argparse.Namespace, dtype: str, ends: list[int] | None) -> Any:
    """Qwen3-0.6B's shape with the side's attention; random weights, the same for every side. Or the
    model in the folder --model."""
    if folder := getattr(options, "model", None):
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation=side.attention
        )
    settings = config(options.is_tiny)
    settings._attn_implementation = side.attention
    model = random_model(settings, options.layers, dtype, options.device)
    model.generation_config.eos_token_id = ends
    return model


def make_trainer(
    side: Side,
    work: Work,
    options: argparse.Namespace,
    model: Any,
    steps: int,
    folder: Path,
    rollout: Any,
    **changes: Any,
) -> Any:
    """The side's trainer.

    Args:
        model: of `model_of`. steps: optimizer steps.
        rollout: its rollout_func, or None.
        changes: of the GRPOConfig.
    """
    from trl import GRPOConfig, GRPOTrainer

    is_gpu = torch.device(options.device).type == "cuda"
    is_half = model.dtype == torch.bfloat16
    more: dict[str, Any] = {"cache_implementation": "static"} if "static" in side.words else {}
    if options.fsdp:
        more |= {"fsdp": True, "fsdp_config": {"version": 2}}
    if "continuous" in side.words:
        more["use_transformers_continuous_batching"] = True
    arguments = GRPOConfig(
        **{
            "output_dir": str(folder),
            "per_device_train_batch_size": work.rows,
            "gradient_accumulation_steps": work.accumulation,
            "num_generations": work.samples,
            "max_completion_length": work.new,
            "max_steps": steps,
            "learning_rate": options.lr,
            "lr_scheduler_type": "constant",
            "gradient_checkpointing": "kept" not in side.words,
            "bf16": is_half,
            "use_cpu": not is_gpu,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "seed": 3,
            **more,
            **changes,
        }
    )
    kind: Any = GRPOTrainer
    settings: dict[str, Any] = {}
    if side.trainer == "prefixtree":
        from prefixtree.integrations.trl import PrefixTreeGRPOTrainer

        kind = PrefixTreeGRPOTrainer
        settings = {"recompute": "auto"} if "auto" in side.words else {}
    trainer = kind(
        model=model,
        args=arguments,
        rollout_func=rollout,
        **work.settings(model, steps),
        **settings,
    )
    # what it would print is in the rows
    trainer.remove_callback(PrinterCallback)
    if "compiled" in side.words:
        from prefixtree import compile_layers

        compile_layers(trainer.model, **options.compile_options)
    return trainer


class Timed(TrainerCallback):
    """The seconds of a trainer's steps, split. The device is waited for at every border.

    generate is TRL's `_generate`; score what follows it until there are advantages (rewards, and
    old and reference log-probabilities where TRL needs them); update the forward, the backward and
    the optimizer; rest data, logs and all else.

    Attributes:
        steps: of each optimizer step its seconds, and their parts.
    """

    def __init__(self, trainer: Any, warm: int) -> None:
        self.steps: list[Row] = []
        self._trainer, self._warm = trainer, warm
        self._is_gpu = torch.cuda.is_available() and trainer.accelerator.device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._last = self._first_micro_step = 0.0
        for method in ("_generate", "_generate_and_score_completions", "training_step"):
            setattr(trainer, method, self._timed(method, getattr(trainer, method)))
        trainer.add_callback(self)

    def now(self) -> float:
        if self._is_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **options: Any) -> Any:
            begin = self.now()
            if name not in self._seconds and name == "training_step":
                self._first_micro_step = begin
            out = method(*given, **options)
            self._seconds[name] = self._seconds.get(name, 0.0) + self.now() - begin
            return out

        return timed

    def on_train_begin(self, *given: Any, **options: Any) -> None:
        self._last = self.now()

    def on_step_end(self, *given: Any, **options: Any) -> None:
        end = self.now()
        generate = self._seconds.get("_generate", 0.0)
        prepared = self._seconds.get("_generate_and_score_completions", 0.0)
        self.steps.append(
            {
                "seconds": end - self._last,
                "generate": generate,
                "score": prepared - generate,
                "update": end - self._first_micro_step - prepared,
                "rest": self._first_micro_step - self._last,
            }
        )
        self._last, self._seconds = end, {}
        if len(self.steps) == self._warm and self._is_gpu:
            torch.cuda.reset_peak_memory_stats()

    def slowest(self, ranks: Ranks) -> None:
        """Each step becomes that of the rank that took longest."""
        self.steps = [
            max(same, key=lambda step: float(step["seconds"]))
            for same in zip(*ranks.every(self.steps), strict=True)
        ]

    def medians(self) -> Row:
        """Of the steps behind the warm ones: the median one's seconds and its parts."""
        timed = self.steps[self._warm :]
        order = sorted(timed, key=lambda step: float(step["seconds"]))
        return order[len(order) // 2]


@contextmanager
def fresh() -> Iterator[None]:
    """Nothing of this trainer in what is measured after: its memory, the code compiled for it."""
    try:
        yield
    finally:
        gc.collect()
        torch._dynamo.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def logged(trainer: Any, name: str) -> list[float]:
    """A number of every step's log."""
    return [float(log[name]) for log in trainer.state.log_history if name in log]


def recorded(trainer: Any, times: Timed) -> Row:
    """What a trainer's run tells of its steps, for the report."""
    row: Row = {
        "red": [],
        **times.medians(),
        "steps": times.steps,
        "first_seconds": times.steps[0]["seconds"],
        "rewards": logged(trainer, "reward"),
        "losses": logged(trainer, "loss"),
        "lengths": logged(trainer, "completions/mean_length"),
    }
    for short in ("replication_ratio", "tokens_computed", "tokens_saved"):
        if values := logged(trainer, f"prefixtree/{short}"):
            row[short] = statistics.median(values)
    return row


def rows_problem(options: argparse.Namespace, total: int, ranks: int = 1) -> str | None:
    """Why --rows does not divide a step's completions into micro-batches of whole groups."""
    if total % (options.rows * ranks) == 0 and options.rows % options.samples == 0:
        return None
    return (
        f"--rows {options.rows} must be a multiple of --samples {options.samples} and divide "
        f"the {total} completions of a step, on each of {ranks} ranks alike"
    )


def fixed_rollouts(work: Work, seed: int = 7) -> Any:
    """A `rollout_func` whose completions are random words of random lengths, the same in every
    run: the n-th call of a rank gets its n-th ones."""
    calls = itertools.count()

    def rollout(prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        rng = np.random.default_rng((seed, trainer.accelerator.process_index, next(calls)))
        prompt_ids = trainer._tokenize_prompts(prompts)[0]
        lengths = rng.integers(2, work.new + 1, len(prompt_ids))
        rows = [rng.integers(1, work.vocabulary - 1, n).tolist() for n in lengths]
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": rows,
            "logprobs": [[0.0] * len(row) for row in rows],
        }

    return rollout


# ---- words of tables and pictures ----------------------------------------------------------------


def label(row: Row) -> str:
    """What a picture calls a side."""
    known = {"trl": "TRL", "prefixtree": "class replaced", BEST: "prefixtree"}
    return known.get(row["side"], row["side"])


def about(run: Row) -> str:
    """The machine and the model of a run."""
    return (
        f"{machine(run['environment'], 'triton', 'transformers')}, TRL {run['trl']}; "
        f"{run['shape']}, {run['layers']} layers, micro-batches of {run['rows_per_batch']} rows"
    )
