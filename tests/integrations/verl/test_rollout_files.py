"""What verl writes into trainer.rollout_data_dir, by its own code, read by `read_rollouts`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer
from verl import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from prefixtree.rollouts import ChatTokenizer, read_rollouts
from tests.support.chat_tokenizer import CHATML, save_tokenizer


class Logger(RayPPOTrainer):
    """Its part that writes rollouts."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.global_steps = tokenizer, 7
        self._init_dump_executor()


def test_rollouts_of_a_step(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "tokenizer", CHATML)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = "<|im_start|>user\nwhere?<|im_end|>\n<|im_start|>assistant\n"
    answers = ["here<|im_end|>", "i do not know<|im_end|>"]
    ids = tokenizer([asked] * 2, return_tensors="pt")["input_ids"]
    tokenizer.pad_token = "<|im_end|>"
    padded = tokenizer(answers, return_tensors="pt", padding=True)["input_ids"]
    batch = DataProto.from_dict(
        {"prompts": ids, "responses": padded, "token_level_scores": torch.ones_like(padded) / 2},
        {"request_id": np.array(["a", "b"], object)},
    )
    logger = Logger(tokenizer)
    logger._log_rollout_data(batch, {}, {}, str(tmp_path / "dumps"))
    logger._shutdown_dump_executor()
    path = tmp_path / "dumps" / "7.jsonl"
    reader = ChatTokenizer(folder)
    rollouts = read_rollouts(path, strict=True, tokenizer=reader)
    # without special tokens, as verl decodes them
    assert [reader.decode(tokens.tolist()) for tokens in rollouts.sequences] == [
        "user\nwhere?\nassistant\nhere",
        "user\nwhere?\nassistant\ni do not know",
    ]
    assert rollouts.loss_masks is not None
    assert [int(mask.sum()) for mask in rollouts.loss_masks] == [4, 13]


def test_the_newer_trainer_writes_the_same_fields(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "tokenizer", CHATML)
    extra = {"uid": ["p_0_0", "p_1_0"]}
    PPOTrainer._write_generations(
        ["a", "a"], ["b", "c"], [None] * 2, [1.0, 0.0], extra, str(tmp_path), 3
    )
    rollouts = read_rollouts(tmp_path / "3.jsonl", strict=True, tokenizer=ChatTokenizer(folder))
    assert [len(tokens) for tokens in rollouts.sequences] == [2, 2]
    assert len({tokens[0] for tokens in rollouts.sequences}) == 1
