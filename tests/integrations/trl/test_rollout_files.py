"""Files and data sets of TRL, read by `read_rollouts`: completions that GRPO logs; texts for SFT
and DPO, against the tokens that TRL's own trainers make of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from trl import DPOTrainer, GRPOTrainer, SFTTrainer

from prefixtree.rollouts import ChatTokenizer, Rollouts, read_rollouts
from tests.integrations.trl.runs import prompts, train
from tests.integrations.trl.sample_runs import make_dpo, make_sft

TEXTS = [("How many a in aba?", " 2"), ("How many a in aba?", " two<|im_end|>"), ("Hm", "?")]


def written(rollouts: Rollouts, tokenizer: ChatTokenizer) -> list[str]:
    """The text that each rollout's loss mask selects."""
    assert rollouts.loss_masks is not None
    pairs = zip(rollouts.sequences, rollouts.loss_masks, strict=True)
    return [tokenizer.decode(tokens[mask].tolist()) for tokens, mask in pairs]


@pytest.mark.parametrize("is_chat", [True, False])
def test_completions_that_grpo_logs(folder: Path, tmp_path: Path, is_chat: bool) -> None:
    asked = prompts()
    if not is_chat:
        asked = Dataset.from_dict({"prompt": [p[-1]["content"] for p in asked["prompt"]]})
    train(
        GRPOTrainer,
        folder,
        output_dir=str(tmp_path),
        max_steps=1,
        log_completions=True,
        num_completions_to_print=0,
        options={"train_dataset": asked},
    )
    (path,) = (tmp_path / "completions").glob("*.parquet")
    logged = pq.read_table(path).to_pylist()
    tokenizer = ChatTokenizer(folder)
    rollouts = read_rollouts(path, strict=True, tokenizer=tokenizer)
    # two groups of four
    assert len(rollouts) == len(logged) == 8
    whole = [tokenizer.decode(tokens.tolist()) for tokens in rollouts.sequences]
    for row, text, scored in zip(logged, whole, written(rollouts, tokenizer), strict=True):
        if is_chat:
            (answer,) = row["completion"]
            assert scored == answer["content"] + "<|im_end|>"
            assert text.startswith(f"<|im_start|>system\n{row['prompt'][0]['content']}")
        else:
            assert (text, scored) == (row["prompt"] + row["completion"], row["completion"])


def read_lines(path: Path, rows: list[dict[str, Any]], folder: Path) -> Rollouts:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_rollouts(path, strict=True, tokenizer=ChatTokenizer(folder))


def test_texts_for_sft(folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in TEXTS]
    trainer = make_sft(SFTTrainer, folder, options={"train_dataset": Dataset.from_list(rows)})
    rollouts = read_lines(tmp_path / "r.jsonl", rows, folder)
    for row, tokens, mask in zip(
        trainer.train_dataset, rollouts.sequences, rollouts.loss_masks or (), strict=True
    ):
        assert tokens.tolist() == row["input_ids"]
        assert mask.tolist() == [label >= 0 for label in row["labels"]]


@pytest.mark.parametrize("has_prompt", [True, False])
def test_texts_for_dpo(folder: Path, tmp_path: Path, has_prompt: bool) -> None:
    before = "" if has_prompt else "Who was it? "
    more = {"prompt": "Who was it?"} if has_prompt else {}
    rows = [{"chosen": before + "He", "rejected": before + "it", **more}]
    trainer = make_dpo(DPOTrainer, folder, options={"train_dataset": Dataset.from_list(rows)})
    rollouts = read_lines(tmp_path / "r.jsonl", rows, folder)
    (row,) = trainer.train_dataset
    both = [row["prompt_ids"] + row[f"{side}_ids"] for side in ("chosen", "rejected")]
    assert [tokens.tolist() for tokens in rollouts.sequences] == both
    masks = rollouts.loss_masks or ()
    assert [int((~mask).sum()) for mask in masks] == [len(row["prompt_ids"])] * 2
