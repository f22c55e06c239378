"""What SkyRL writes of its rollouts, by its own code, read by `read_rollouts`."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from prefixtree.rollouts import ChatTokenizer, read_rollouts
from tests.support.chat_tokenizer import CHATML, save_tokenizer

PROMPTS = [[1, 2, 3], [1, 2, 3], [4]]
RESPONSES = [[5, 6], [7, 8, 9, 5], [6]]
# a tool's reply
MASKS = [[1, 1], [1, 0, 0, 1], [1]]


@pytest.mark.parametrize("padding", [0, 2])
def test_a_training_batch(tmp_path: Path, padding: int) -> None:
    make = importlib.import_module("skyrl.train.dataset.preprocess")
    batches = importlib.import_module("skyrl.backends.skyrl_train.training_batch")
    rewards: Any = [[1.0] * len(response) for response in RESPONSES]
    made = make.convert_prompts_responses_to_batch_tensors(
        SimpleNamespace(pad_token_id=0), PROMPTS, RESPONSES, rewards, MASKS
    )
    names = ("sequences", "attention_mask", "response_mask", "rewards", "loss_mask")
    batch = batches.TrainingInputBatch(dict(zip(names, made[:5], strict=True)))
    batch.metadata = {"uids": ["a", "a", "b"]}
    batch = batches.pad_training_input_batch(batch, padding)
    batch.save(str(tmp_path / "global_step_1_training_input.pkl"))
    rollouts = read_rollouts(tmp_path / "global_step_1_training_input.pkl", strict=True)
    assert [tokens.tolist() for tokens in rollouts.sequences] == [
        prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)
    ]
    assert rollouts.loss_masks is not None
    assert [mask.astype(int).tolist() for mask in rollouts.loss_masks] == [
        [0] * len(prompt) + mask for prompt, mask in zip(PROMPTS, MASKS, strict=True)
    ]
    assert rollouts.groups == ["a", "a", "b"]


def _writer() -> Any:
    """`dump_per_dataset_eval_results` alone: its module imports Ray."""
    spec = importlib.util.find_spec("skyrl")
    assert spec is not None and spec.submodule_search_locations is not None
    (folder,) = spec.submodule_search_locations
    tree = ast.parse((Path(folder) / "train/utils/trainer_utils.py").read_text())
    names = ("dump_per_dataset_eval_results", "sanitize_data_source")
    found = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in names]
    future = ast.parse("from __future__ import annotations").body
    space = {"json": json, "re": re, "logger": SimpleNamespace(info=lambda text: None)}
    exec(compile(ast.Module([*future, *found], []), "trainer_utils.py", "exec"), space)
    return space[names[0]]


def test_evaluations(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "tokenizer", CHATML)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = "<|im_start|>user\nwhere?<|im_end|>\n<|im_start|>assistant\n"
    prompts = [tokenizer(asked)["input_ids"]] * 2
    responses = [tokenizer(text)["input_ids"] for text in ("here<|im_end|>", "no<|im_end|>")]
    outputs = {"prompt_token_ids": prompts, "response_ids": responses, "rewards": [1.0, 0.0]}
    _writer()(tmp_path, tokenizer, outputs, ["search"] * 2, ["env"] * 2, [{}] * 2, {})
    path = tmp_path / "search.jsonl"
    rollouts = read_rollouts(path, strict=True, tokenizer=ChatTokenizer(folder))
    assert [tokens.tolist() for tokens in rollouts.sequences] == [
        prompt + response for prompt, response in zip(prompts, responses, strict=True)
    ]
    assert rollouts.loss_masks is not None
    assert [int(mask.sum()) for mask in rollouts.loss_masks] == [5, 3]
