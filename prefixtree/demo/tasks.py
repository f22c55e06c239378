"""Two tasks that a small pretrained chat model learns by GRPO: sums, and rooms with coins.

A prompt is a chat: a system message, worked examples that all prompts share, and a question. The
environment replies to what the assistant said so far, or ends the dialogue. It is deterministic, so
a reward replays it over the token ids of a completion: nothing that the policy writes passes for a
reply.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

from prefixtree.errors import InputError

_COLOURS = [
    *("red", "blue", "green", "white", "black", "pink"),
    *("brown", "gold", "silver", "orange", "purple", "yellow"),
]

#: A chat message: {"role": .., "content": ..}.
Message = dict[str, str]


class Task(Protocol):
    """A kind of question. Its `facts` are what the environment knows of one question."""

    @property
    def system(self) -> str:
        """The system message."""

    @property
    def shots(self) -> int:
        """Worked examples in a prompt."""

    @property
    def new_tokens(self) -> int:
        """Tokens of a completion, replies included."""

    def make(self, rng: random.Random, number: int) -> Any:
        """Draws the facts of a question."""

    def ask(self, facts: Any) -> str:
        """Words the question."""

    def solve(self, facts: Any, said: Sequence[str]) -> str:
        """The right next message of the assistant, who said the right ones so far."""

    def reply(self, facts: Any, said: Sequence[str]) -> str | None:
        """The environment's answer to the assistant's last message; None ends the dialogue."""

    def score(self, facts: Any, said: Sequence[str]) -> float:
        """The reward of a dialogue, from 0 to 1."""


@dataclass(frozen=True)
class Sums:
    """Adds two numbers of two digits: one turn, 1,214 tokens of prompt with SmolLM2's tokenizer."""

    shots: int = 40
    new_tokens: int = 14
    system: str = "Add the numbers. Answer with the sum in the form of the examples."

    def make(self, rng: random.Random, number: int) -> tuple[int, int]:
        return rng.randint(10, 99), rng.randint(10, 99)

    def ask(self, facts: tuple[int, int]) -> str:
        return "{} + {} = ?".format(*facts)

    def solve(self, facts: tuple[int, int], said: Sequence[str]) -> str:
        return "{} + {} = {}".format(*facts, sum(facts))

    def reply(self, facts: tuple[int, int], said: Sequence[str]) -> None:
        return None

    def score(self, facts: tuple[int, int], said: Sequence[str]) -> float:
        """1 for the right sum, up to a half for one that is less than 20 off, 0 in another form."""
        answer = re.fullmatch(r"{} \+ {} = (\d{{1,4}})".format(*facts), said[-1].strip())
        if not answer:
            return 0.0
        off = abs(int(answer[1]) - sum(facts))
        return 0.5 * max(0.0, 1 - off / 20) if off else 1.0


@dataclass(frozen=True)
class House:
    """The path through a house, and the coins in each of its rooms."""

    name: str
    path: list[str]
    coins: list[int]


@dataclass(frozen=True)
class Coins:
    """Walks through three rooms as each reply says, then names the most coins of a room."""

    shots: int = 8
    new_tokens: int = 72
    rooms: int = 3
    system: str = (
        "You are in a house of rooms with coins. Open a room with `open ROOM`. You see how many "
        "coins are in it and where to go. At the end answer with `most NUMBER`, the most coins of "
        "a room."
    )

    def make(self, rng: random.Random, number: int) -> House:
        # three letters that differ from house to house, and give no number away
        code = (number * 7919 + 4242) % 26**3
        name = "".join(chr(65 + code // 26**k % 26) for k in range(3))
        coins = rng.sample(range(10, 100), self.rooms)
        return House(name, rng.sample(_COLOURS, self.rooms), coins)

    def ask(self, facts: House) -> str:
        return f"House {facts.name}: start at {facts.path[0]}"

    def solve(self, facts: House, said: Sequence[str]) -> str:
        at = len(said)
        return f"open {facts.path[at]}" if at < self.rooms else f"most {max(facts.coins)}"

    def reply(self, facts: House, said: Sequence[str]) -> str | None:
        at = len(said) - 1
        if at >= self.rooms or said[-1].strip() != f"open {facts.path[at]}":
            return None
        onwards = f"go to {facts.path[at + 1]}" if at + 1 < self.rooms else "answer most"
        return f"coins {facts.coins[at]}, {onwards}"

    def score(self, facts: House, said: Sequence[str]) -> float:
        """After the whole path: 1 for the right number, 0.2 for another."""
        if len(said) != self.rooms + 1:
            return 0.0
        if said[-1].strip() == self.solve(facts, said[:-1]):
            return 1.0
        return 0.2 * bool(re.fullmatch(r"most \d{1,3}", said[-1].strip()))


TASKS: dict[str, Task] = {"sums": Sums(), "coins": Coins()}


@dataclass(frozen=True)
class Question:
    """A prompt and the facts that its environment knows."""

    prompt: list[Message]
    facts: Any

    @property
    def text(self) -> str:
        return self.prompt[-1]["content"]


def questions(task: Task, count: int, seed: int = 0) -> list[Question]:
    """Draws questions, no two alike; the worked examples are the same in all.

    Raises:
        ValueError: the task has fewer questions than `count`.
    """
    examples_rng, rng = random.Random(1234), random.Random(10_000 + seed)
    head = [{"role": "system", "content": task.system}]
    for number in range(task.shots):
        head += _solved(task, task.make(examples_rng, number))
    drawn: dict[str, Question] = {}
    for number in range(20 * count):
        facts = task.make(rng, task.shots + number)
        text = task.ask(facts)
        drawn.setdefault(text, Question([*head, {"role": "user", "content": text}], facts))
        if len(drawn) == count:
            return list(drawn.values())
    raise ValueError(f"count is {count}, and only {len(drawn)} different questions were drawn")


def _solved(task: Task, facts: Any) -> Iterator[Message]:
    """A dialogue in which the assistant says what is right."""
    text: str | None = task.ask(facts)
    said: list[str] = []
    while text is not None:
        yield {"role": "user", "content": text}
        said.append(task.solve(facts, said))
        yield {"role": "assistant", "content": said[-1]}
        text = task.reply(facts, said)


class Dialogue:
    """A task's dialogues over token ids.

    Args:
        tokenizer: of a chat model whose template ends an assistant's turn with `eos_token`.

    Raises:
        InputError: it has no template, or one that does not.
    """

    def __init__(self, task: Task, tokenizer: Any) -> None:
        if not tokenizer.chat_template:
            raise InputError(
                f"{tokenizer.name_or_path}: its tokenizer has no chat template, and questions are "
                "chats: take the folder of a chat model (Instruct), or save the template as its "
                "chat_template.jinja"
            )
        self.task, self.tokenizer = task, tokenizer
        # every row is played anew after each of its turns
        self.answer_ids = cache(self._answer_ids)
        self.answer_ids("")

    def _answer_ids(self, text: str) -> list[int]:
        """The token ids after an assistant's turn: a user's message, and the next turn's head."""
        turns = ("user", "?"), ("assistant", "!"), ("user", text)
        chat = [{"role": role, "content": content} for role, content in turns]
        rendered = self.tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True
        )
        _, end, after = rendered.partition(f"!{self.tokenizer.eos_token}")
        if not end:
            raise InputError(
                f"expected a chat template that ends an assistant's turn with eos_token "
                f"{self.tokenizer.eos_token!r}, and it wrote {rendered!r}: set eos_token to the "
                "token that ends a turn"
            )
        return [int(token) for token in self.tokenizer(after, add_special_tokens=False).input_ids]

    def play(self, facts: Any, completion: Sequence[int]) -> tuple[list[str], list[int] | None]:
        """The assistant's turns in a completion, and the ids that come next (None: it is over)."""
        ids, end = list(completion), self.tokenizer.eos_token_id
        said: list[str] = []
        begin = 0
        while True:
            if end not in ids[begin:]:
                return [*said, self.tokenizer.decode(ids[begin:])], None
            stop = ids.index(end, begin)
            said.append(self.tokenizer.decode(ids[begin:stop]))
            text = self.task.reply(facts, said)
            if text is None:
                return said, None
            answer = self.answer_ids(text)
            begin = stop + 1
            if begin >= len(ids):
                return said, answer
            begin += len(answer)

    def reward(self, facts: Any, completion: Sequence[int]) -> float:
        """The task's score of what the assistant said."""
        return self.task.score(facts, self.play(facts, completion)[0])

    def is_right(self, facts: Any, completion: Sequence[int]) -> bool:
        """Whether the assistant said what `solve` says, turn by turn."""
        said = [text.strip() for text in self.play(facts, completion)[0]]
        right: list[str] = []
        while True:
            right.append(self.task.solve(facts, right))
            if self.task.reply(facts, right) is None:
                return said == right
