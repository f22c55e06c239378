"""TRL's own tool loop: calls are parsed and run, answers are read and kept out of the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from trl import GRPOTrainer
from trl.chat_template_utils import qwen3_chat_template

from prefixtree.integrations.trl import PrefixTreeGRPOTrainer
from tests.integrations.trl.runs import SameOrder, make, moved, worst_metric, worst_parameter

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": %d, "b": %d}}\n</tool_call>'


def add(a: int, b: int) -> int:
    """
    Adds two numbers.

    Args:
        a: The first.
        b: The second.

    Returns:
        Their sum.
    """
    return a + b


class Scripted(GRPOTrainer):
    """A model that calls the tool once or twice and answers; a group begins alike."""

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        encode = self.processing_class.encode
        completions = []
        for row, ids in enumerate(prompt_ids):
            turn = self.processing_class.decode(ids).count("<tool_response>")
            calls = 1 + row % 2
            text = CALL % (turn, row // 4) if turn < calls else f"{row % 3} it is."
            completions.append([*encode(text), self.eos_token_ids[0]])
        return completions, None


class Ours(PrefixTreeGRPOTrainer, Scripted):
    pass


class Theirs(SameOrder, Scripted):
    pass


@pytest.fixture
def tokenizer(folder: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = qwen3_chat_template
    return tokenizer


def test_tool_calls(folder: Path, tokenizer: Any) -> None:
    runs = []
    for trainer in (Ours, Theirs):
        made = make(
            trainer,
            folder,
            options={"tools": [add], "processing_class": tokenizer},
            max_completion_length=600,
            max_steps=2,
            optim="sgd",
            learning_rate=0.3,
        )
        made.train()
        runs.append(made)
    ours, theirs = runs
    metric, parameter = worst_metric(ours, theirs), worst_parameter(ours, theirs)
    print(f"metrics {metric}, parameters {parameter}")
    assert moved(theirs, folder) > 1e-3
    assert metric[0] < 1e-5 and parameter[0] < 1e-5
    log = ours.state.log_history[0]
    assert log["tools/call_frequency"] == 1.5 and log["tools/failure_frequency"] == 0
    batch = ours._buffered_inputs[0]
    answers = (batch["completion_mask"] * (1 - batch["tool_mask"])).bool()
    for ids, answer in zip(batch["completion_ids"], answers, strict=True):
        # an answer of the tool and the frame around it, in every row
        text = tokenizer.decode(ids[answer])
        assert "<tool_response>" in text and "<tool_call>" not in text
    assert torch.equal(answers.any(1), torch.ones(4, dtype=torch.bool))
    # instructions, tools and first calls are computed once
    assert log["prefixtree/replication_ratio"] > 2
