"""OpenRLHF's SFT command on two ranks, from arguments to saved weights, packed and as it is."""

from __future__ import annotations

import json
import os
from typing import Any
from unittest.mock import patch

import pytest

from tests.integrations.batch_trainers.openrlhf_run import CASES
from tests.support.chat_tokenizer import CHATML, save_tokenizer
from tests.support.models import build
from tests.support.spawn import run_ranks

# OpenRLHF cuts a newline at the end of a text, and scores the padding in its place
TEMPLATE = CHATML.replace("<|im_end|>\n", "<|im_end|>")
RUN = "tests.integrations.batch_trainers.openrlhf_run"
Run = dict[str, Any]


def rows(count: int, first: int) -> str:
    """Questions that begin alike, with answers of other lengths; also as turns of a chat."""
    found = []
    for i in range(first, first + count):
        question = f"Be short, please, and count from one. What is {i}?"
        answer = " ".join(map(str, range(i % 5 + 1)))
        turns = [(question, answer), ("And then?", f"{i}"), ("Why?", "So it is.")][: i % 3 + 1]
        messages = [
            {"role": role, "content": text}
            for turn in turns
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]
        found.append(json.dumps({"input": question, "output": answer, "messages": messages}))
    return "\n".join(found)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Run, Run]]:
    """Of all cases, the trainer's own and packed; two ranks start once."""
    folder = tmp_path_factory.mktemp("openrlhf")
    for model_type in {case.model for case in CASES.values()}:
        model = build(model_type, "eager", vocab_size=258, eos_token_id=256)
        model.save_pretrained(folder / model_type)
        save_tokenizer(folder / model_type, TEMPLATE)
    (folder / "train.jsonl").write_text(rows(32, 0))
    (folder / "eval.jsonl").write_text(rows(8, 40))
    variables = {"DS_ACCELERATOR": "cpu", "HF_HOME": str(folder / "hub")}
    with patch.dict(os.environ, variables):
        found: dict[str, tuple[Run, Run]] = run_ranks(RUN, folder)[0]
    return found


def worst_weight(theirs: Run, ours: Run) -> float:
    """The largest difference between saved weights."""
    assert theirs["weights"] and theirs["weights"].keys() == ours["weights"].keys()
    return max(
        float((ours["weights"][name] - weight).abs().max())
        for name, weight in theirs["weights"].items()
    )


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.wrong is None])
def test_the_command(name: str, runs: dict[str, tuple[Run, Run]]) -> None:
    theirs, ours = runs[name]
    assert min(ours["ratios"]) > 1.3
    assert len(theirs["logs"]) == len(ours["logs"])
    seen: dict[str, int] = {}
    for want, got in zip(theirs["logs"], ours["logs"], strict=True):
        assert want.keys() == got.keys()
        for key, value in want.items():
            assert got[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
            seen[key] = seen.get(key, 0) + 1
    # two steps of two micro-batches, one evaluation of a batch per rank
    assert seen["gpt_loss"] == seen["grad_norm"] == 4 and seen["eval gpt_loss"] == 1
    assert ("aux_loss" in seen) == (name == "experts")
    assert worst_weight(theirs, ours) < 1e-5


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.wrong is not None])
def test_what_is_wrong_is_seen(name: str, runs: dict[str, tuple[Run, Run]]) -> None:
    theirs, ours = runs[name]
    assert worst_weight(theirs, ours) > 1e-4
