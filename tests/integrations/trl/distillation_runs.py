"""Runs of TRL's trainers for distillation and of the adapter's, from the same weights and seeds."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DistillationConfig, DistillationTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.gold import GOLDConfig, GOLDTrainer

from prefixtree.integrations.trl.distillation import (
    PrefixTreeDistillationTrainer,
    PrefixTreeGKDTrainer,
    PrefixTreeGOLDTrainer,
)
from prefixtree.integrations.trl.micro_batches import KeepsNeighbours
from tests.integrations.trl.runs import tiny_config
from tests.integrations.trl.sample_runs import SMALL, SYSTEM, Maker, letters, turns


class SameOrder(KeepsNeighbours, DistillationTrainer):
    """TRL's trainer behind the adapter's shuffle: the very same batches."""


def teacher(**changes: Any) -> Any:
    """Wider than the student, with another seed."""
    torch.manual_seed(7)
    config = tiny_config(hidden_size=96, num_hidden_layers=1, **changes)
    return AutoModelForCausalLM.from_config(config)


def chats(count: int = 4, each: int = 3) -> Dataset:
    """Neighbouring prompts begin alike; every one stands `each` times."""
    rows = []
    for chat in range(count):
        for again in range(each):
            text = letters(chat, 8, 20) + letters((chat, again // 2), 0, 3)
            rows.append({"prompt": [SYSTEM, {"role": "user", "content": text}]})
    return Dataset.from_list(rows)


def conversations(data: Dataset | None = None) -> Dataset:
    rows = turns() if data is None else data
    return Dataset.from_list([{"messages": r["prompt"] + r["completion"]} for r in rows])


def make_distillation(
    trainer: type[DistillationTrainer],
    folder: Path,
    *,
    model: Any = None,
    options: dict[str, Any] | None = None,
    **arguments: Any,
) -> Any:
    """Two steps of two micro-batches of six prompts each."""
    small = {
        "per_device_train_batch_size": 6,
        "max_steps": 2,
        "max_completion_length": 8,
        "shuffle_dataset": False,
        "output_dir": str(folder / "out"),
    }
    return trainer(
        model=AutoModelForCausalLM.from_pretrained(folder) if model is None else model,
        args=DistillationConfig(**{**SMALL, **small, **arguments}),
        **{
            "teacher_model": teacher(),
            "processing_class": AutoTokenizer.from_pretrained(folder, padding_side="left"),
            "train_dataset": chats(),
            **(options or {}),
        },
    )


def make_of_answers(
    config: type,
    small: dict[str, Any],
    trainer: type,
    folder: Path,
    *,
    model: Any = None,
    options: dict[str, Any] | None = None,
    **arguments: Any,
) -> Any:
    """Two steps of two batches, each of two conversations of three turns."""
    arguments = {"max_steps": 2, "output_dir": str(folder / "out"), **small, **arguments}
    return trainer(
        model=AutoModelForCausalLM.from_pretrained(folder) if model is None else model,
        args=config(**{**SMALL, "per_device_train_batch_size": 6, **arguments}),
        **{
            "teacher_model": teacher(),
            "processing_class": AutoTokenizer.from_pretrained(folder, pad_token="<|im_end|>"),
            "train_dataset": conversations(),
            **(options or {}),
        },
    )


# one batch in two is sampled
make_gkd = partial(
    make_of_answers, GKDConfig, {"max_new_tokens": 8, "train_sampling_strategy": "sequential"}
)
# two samples of each prompt
make_gold = partial(
    make_of_answers,
    GOLDConfig,
    {"max_completion_length": 8, "max_length": 512, "num_generations": 2, "lmbda": 1.0},
)
DISTILLATION = Maker(make_distillation, PrefixTreeDistillationTrainer, SameOrder, chats)
GKD = Maker(make_gkd, PrefixTreeGKDTrainer, GKDTrainer, conversations)
GOLD = Maker(make_gold, PrefixTreeGOLDTrainer, GOLDTrainer, conversations)
