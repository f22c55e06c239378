"""The browser example: both updates agree, and what is printed is what was run."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

import prefixtree as pt
from prefixtree.demo.browser import write_rollouts
from prefixtree.rollouts import ChatTokenizer, expand_turns, read_rollouts

_PATH = Path(__file__).parents[2] / "examples" / "browser_images.py"
_SPEC = importlib.util.spec_from_file_location("browser_images", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
example = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(example)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    write_rollouts(folder)
    return folder


@pytest.fixture(scope="module")
def rollouts(folder):
    tokenizer = ChatTokenizer(folder / "model")
    return read_rollouts(folder / "rollouts.jsonl", strict=True, tokenizer=tokenizer)


def compare(folder, rollouts):
    lines = (folder / "rollouts.jsonl").read_text().splitlines()
    rewards = [json.loads(line)["reward"] for line in lines]
    return example.compare(rollouts, rewards, AutoConfig.from_pretrained(folder / "model"))


@pytest.mark.full
def test_both_ways_agree(folder, rollouts, capsys):
    # two tasks; rollouts of one reward alone would have no gradient
    some = rollouts.take([0, 1, 6, 12, 13, 20])
    facts = compare(folder, some)
    assert facts["sequences"] == 6 and facts["tokens"][0] == sum(map(len, some.sequences))
    assert facts["images encoded"][0] == 30 > 2 * facts["images encoded"][1]
    assert 0 < facts["differences"]["log-probabilities"] < 2e-5
    assert 0 < facts["differences"]["gradients"] < 2e-5
    assert example.show(facts, "rollout")
    assert "6 sequences, one per rollout" in capsys.readouterr().out
    # a turn at a time: the same forest, more copies of it
    per_turn = compare(folder, expand_turns(some.take([0, 2])))
    assert per_turn["images encoded"][0] == 2 * (1 + 2 + 3 + 4 + 5)
    assert per_turn["differences"]["gradients"] < 2e-5


def test_a_wrong_packed_run_is_red(folder, rollouts, monkeypatch, capsys):
    """A step on one side alone of the features that the vision encoder gives."""
    packed = example.packed

    def damaged(model, *arguments):
        with torch.no_grad():
            model.model.visual.patch_embed.proj.weight.mul_(1.1)
        return packed(model, *arguments)

    monkeypatch.setattr(example, "packed", damaged)
    facts = compare(folder, rollouts.take([0, 6]))
    assert not example.show(facts, "rollout")
    words = capsys.readouterr().out
    # no speed-up of a wrong result
    assert "FAIL: the limit is 1e-04" in words and "x\n" not in words


def test_the_loop_of_the_page(folder, monkeypatch):
    """docs/images.md's lines for one's own loop run as they stand, on fewer rollouts."""
    page = (_PATH.parents[1] / "docs" / "images.md").read_text()
    code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[-1]
    few = "browser/rollouts.jsonl"
    (folder / "browser").mkdir()
    lines = (folder / "rollouts.jsonl").read_text().splitlines(keepends=True)
    (folder / few).write_text("".join(lines[:2]))
    for name in ("model", "screens"):
        (folder / "browser" / name).symlink_to(folder / name)
    monkeypatch.chdir(folder)
    parts = {"": "prefixtree", "text_config": "prefixtree", "vision_config": "sdpa"}
    config = AutoConfig.from_pretrained(folder / "model")
    model = AutoModelForImageTextToText.from_config(config, attn_implementation=parts)
    names = {"pt": pt, "model": model.eval()}
    exec(code, names)
    assert [len(s) for s in names["scores"].logprobs] == [
        len(s) - 1 for s in names["rollouts"].sequences
    ]
    assert names["images"].num_given == 10
