"""GRPO on real weights and text: the adapter's updates beside those of TRL's own trainer."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer

from prefixtree.integrations.trl import PrefixTreeGRPOTrainer
from tests.integrations.trl.runs import parameters, squared_distance, train, worst_metric
from tests.support.real import NEEDED, PROMPT, chats, folder

pytestmark = pytest.mark.skipif(folder() is None, reason=NEEDED)


def recorded(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """The chats, as if they had been sampled."""
    tokens, masks = chats().sequences, chats().loss_masks
    assert masks is not None and len(prompts) == len(tokens)
    return {
        "prompt_ids": [t[:PROMPT].tolist() for t in tokens],
        "completion_ids": [t[PROMPT:].tolist() for t in tokens],
        "env_mask": [m[PROMPT:].astype(int).tolist() for m in masks],
        "logprobs": None,
    }


def test_two_updates_are_trls(record_property: Callable[..., None]) -> None:
    path = folder()
    assert path is not None
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": 3,
        "num_generations": 3,
        "gradient_accumulation_steps": 1,
        "num_iterations": 1,
        "max_steps": 2,
        "beta": 0.0,
        "gradient_checkpointing": False,
        "optim": "sgd",
        "learning_rate": 0.1,
        "max_completion_length": 300,
        "options": {
            "rollout_func": recorded,
            "train_dataset": Dataset.from_dict({"prompt": ["-", "-"]}),
        },
    }
    ours = train(PrefixTreeGRPOTrainer, path, **arguments)
    theirs = train(GRPOTrainer, path, **arguments)
    assert type(theirs) is GRPOTrainer
    metric = worst_metric(ours, theirs)
    start = parameters(AutoModelForCausalLM.from_pretrained(path))
    found, wanted = parameters(ours.model), parameters(theirs.model)
    moved, apart = squared_distance(wanted, start) ** 0.5, squared_distance(found, wanted) ** 0.5
    record_property("updates", json.dumps({"metrics": metric[0], "parameters": apart / moved}))
    assert metric[0] < 1e-4, metric
    # most of it is the rounding of weights: 1e-4 here
    assert moved > 0.01 and apart < 5e-4 * moved
