"""The examples run, and what docs/trl.md shows does what it says."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import trl
from safetensors.torch import load_file
from typer.testing import CliRunner

from prefixtree.cli import app
from prefixtree.demo.tasks import TASKS
from prefixtree.integrations.trl import (
    PrefixTreeGRPOTrainer,
    PrefixTreeSFTTrainer,
    tree_rollouts,
)
from tests.integrations.trl.runs import make, prompts, reward

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load("trl_grpo")


@pytest.fixture(scope="module")
def sft_example() -> Iterator[ModuleType]:
    # it imports the other, which stands beside it
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples")
        yield load("trl_sft_turns")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_and_trls_own(example: ModuleType, tmp_path: Path) -> None:
    tiny = ["--tiny", "--steps", "2", "--output"]
    ours = example.main([*tiny, str(tmp_path / "ours")])
    theirs = example.main([*tiny, str(tmp_path / "theirs"), "--stock"])
    assert type(ours) is PrefixTreeGRPOTrainer and type(theirs) is not PrefixTreeGRPOTrainer
    losses = [
        [(log["loss"], log["grad_norm"]) for log in run.state.log_history if "loss" in log]
        for run in (ours, theirs)
    ]
    assert len(losses[0]) == 2 and any(abs(loss) > 1e-3 for loss, _ in losses[0])
    for mine, other in zip(*losses, strict=True):
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-5)
    # prompts of 4 worked examples, in micro-batches of two groups of 4
    assert ours.state.log_history[0]["prefixtree/replication_ratio"] > 4
    assert (tmp_path / "ours" / "model.safetensors").exists()


def test_on_one_gpu(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --fast."""
    ran = example.main(["--tiny", "--steps", "2", "--fast", "--output", str(tmp_path)])
    assert ran.rollout_func is tree_rollouts and len(ran.state.log_history) == 3
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [("tokens/s" in line, "reward" in line) for line in said] == [(True,) * 2, (False,) * 2]
    assert all(re.search(r", \d\.\d tokens per distinct one", line) for line in said)
    with pytest.raises(SystemExit):
        example.main(["--tiny", "--fast", "--stock"])


def test_the_tiny_run_has_prompts_for_all_processes_of_a_configuration(
    example: ModuleType, tmp_path: Path
) -> None:
    """TRL leaves out what does not fill a batch of all ranks, and then trains on nothing."""
    trainer = example.main(["--tiny", "--steps", "1", "--output", str(tmp_path)])
    args = trainer.args
    for name in ("fsdp2", "zero2", "zero3"):
        text = (ROOT / "examples" / "configs" / f"{name}.yaml").read_text()
        processes = int(re.search(r"^num_processes: (\d+)", text, re.MULTILINE)[1])
        of_all = args.per_device_train_batch_size * args.gradient_accumulation_steps * processes
        assert len(trainer.train_dataset) >= of_all // args.num_generations, name


@pytest.mark.parametrize("name", list(TASKS))
def test_a_pretrained_model(
    name: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = load("trl_pretrained")
    # the protocol need not be a dataclass, the tasks are
    task: Any = TASKS[name]
    task = replace(task, shots=1, new_tokens=16)
    monkeypatch.setitem(script.TASKS, name, task)
    scored, replies = [], []

    def score(self: Any, facts: Any, said: list[str]) -> float:
        scored.append(str(facts))
        return len(scored) % 4 / 4

    def sample(prompts: list[Any], trainer: Any, reply: Any) -> dict[str, Any]:
        tokenizer = trainer.processing_class
        for row, chat in enumerate(prompts):
            room = chat[-1]["content"].split()[-1]
            said = [*tokenizer(f"open {room}").input_ids, tokenizer.eos_token_id]
            replies.append((following := reply(row, said)) and tokenizer.decode(following))
        return tree_rollouts(prompts, trainer, reply=reply)

    monkeypatch.setattr(type(task), "score", score)
    monkeypatch.setattr(script, "tree_rollouts", sample)
    given = {"model": folder, "task": name, "prompts": 2, "samples": 4, "steps": 2}
    given["output"] = tmp_path
    trainer = script.main([word for key in given for word in (f"--{key}", str(given[key]))])
    assert type(trainer) is PrefixTreeGRPOTrainer
    # 2 steps of 2 questions, each of 4 samples; the environment knows every row's own
    assert len(scored) == 16 and len(set(scored)) == 4
    assert len(replies) == 16
    assert len(set(replies)) == (4 if name == "coins" else 1)
    assert all("coins" in text if name == "coins" else text is None for text in replies)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert len(said) == 2 and all(": reward 0.375, " in line for line in said)
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path))
    assert any(not torch.equal(before[key], after[key]) for key in before)
    assert all(float(line.split()[4]) > 3 for line in said)


@pytest.mark.parametrize(
    ("text", "value"),
    [("... #### 1,200", 1.0), ("#### 3 no: #### 1200", 1.0), ("#### 12", 0.1), ("1200", 0.0)],
)
def test_the_reward(example: ModuleType, text: str, value: float) -> None:
    completion = [{"role": "assistant", "content": text}]
    assert example.correct([completion], solution=["1,200"]) == [value]


def test_the_prompts(example: ModuleType) -> None:
    problems = example.Dataset.from_list(
        [{"question": f"{i}?", "answer": f"so\n#### {i}"} for i in range(5)]
    )
    rows = example.prompts(problems, num_examples=2)
    assert rows.column_names == ["prompt", "solution"]
    assert rows["solution"] == ["2", "3", "4"]
    assert len({row["prompt"][0]["content"] for row in rows}) == 1
    assert "1?\nso\n#### 1" in rows[0]["prompt"][0]["content"]


def test_turns_of_conversations(sft_example: ModuleType, tmp_path: Path) -> None:
    """From a file of JSON lines, with both trainers."""
    tiny = ["--tiny", "--output"]
    ours = sft_example.main([*tiny, str(tmp_path / "ours")])
    theirs = sft_example.main([*tiny, str(tmp_path / "theirs"), "--stock"])
    assert type(ours) is PrefixTreeSFTTrainer and type(theirs) is not PrefixTreeSFTTrainer
    losses = [
        [(log["loss"], log["grad_norm"]) for log in run.state.log_history if "loss" in log]
        for run in (ours, theirs)
    ]
    # 12 conversations of 8 answers, 16 a step
    assert len(losses[0]) == 6 and losses[0][-1][0] < losses[0][0][0] - 0.5
    for mine, other in zip(*losses, strict=True):
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-5)
    assert ours.state.log_history[0]["prefixtree/replication_ratio"] > 3
    assert (tmp_path / "ours" / "model.safetensors").exists()
    # the same from a file
    file = tmp_path / "conversations.jsonl"
    sft_example.sums(count=12, answers=8).to_json(file)
    model = str(tmp_path / "ours" / "model")
    with pytest.raises(SystemExit):
        sft_example.main(["--model", model])
    read = sft_example.load_dataset("json", data_files=str(file), split="train")
    expected = sft_example.turns(sft_example.sums(count=12, answers=8))
    assert sft_example.turns(read).to_list() == expected.to_list()


def test_a_sample_per_turn(sft_example: ModuleType) -> None:
    user, answer, tool = ({"role": role, "content": role} for role in ("user", "assistant", "tool"))
    rows = [{"messages": [user, answer, tool, answer], "tools": [{"name": "f"}]}] * 2
    got = sft_example.turns(sft_example.Dataset.from_list(rows)).to_list()
    assert (
        got
        == [
            {"prompt": [user], "completion": [answer], "tools": [{"name": "f"}]},
            {"prompt": [user, answer, tool], "completion": [answer], "tools": [{"name": "f"}]},
        ]
        * 2
    )


def test_rollouts_written_as_the_page_says(folder: Path, tmp_path: Path) -> None:
    """The ids that were trained on, which `prefixtree report` reads."""
    page = (ROOT / "docs" / "trl.md").read_text()
    (code,) = (c for c in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def saving" in c)
    names: dict = {}
    exec(code, names)
    file = tmp_path / "rollouts.jsonl"
    trainer = make(PrefixTreeGRPOTrainer, folder, max_steps=1, num_iterations=1)
    trainer.reward_funcs = [names["saving"](reward, trainer.processing_class, file)]
    trainer.train()
    written = [json.loads(line) for line in file.read_text().splitlines()]
    trained = {
        tuple(ids[mask.bool()].tolist())
        for batch in trainer._buffered_inputs
        for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)
    }
    assert len(written) == 8
    assert {tuple(row["prompt_ids"]) for row in written} == trained
    assert len(trained) == 2 < len(prompts())
    result = CliRunner().invoke(app, ["report", str(file), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["tokens"]["ratio"] > 1.8


def test_the_page_names_what_is_tested_and_refused() -> None:
    from prefixtree.integrations.trl import TESTED, refusals

    page = " ".join((ROOT / "docs" / "trl.md").read_text().split())
    assert f"**TRL {TESTED[1]}**" in page
    refused = (ROOT / "docs" / "refusals.md").read_text()
    for row in (*refusals.ARGUMENTS, *refusals.ALONE):
        # rows of one text stand in one line
        assert re.search(rf"{row.name}(=|, )", refused), row.name


def test_the_page_names_every_trainer_of_trl() -> None:
    """Those of subfolders too, of which most are experimental."""
    folder = Path(trl.__file__).parent
    names = {
        name
        for file in folder.rglob("*_trainer.py")
        for name in re.findall(r"^class (\w+Trainer)\(", file.read_text(), re.MULTILINE)
    }
    assert {"GRPOTrainer", "ORPOTrainer"} < names
    page = (ROOT / "docs" / "trl.md").read_text()
    # of 1.15, and gone since
    missing = {n for n in names if n not in page} - {"_BaseTrainer", "SSDTrainer"}
    assert not missing
