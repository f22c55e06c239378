"""A small multi-turn tool-use environment: an agent steers a robot, one tool call per turn.

It makes the rollouts of `prefixtree demo`. Every word is a token, so that no tokenizer is needed;
whatever the agent says is an answer the depot can deal with: the first tool word it says is called.
Deterministic: the same words always get the same reply.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

_SYSTEM = """
you steer a small robot through a parcel depot . the depot has five rows and five columns of
shelves . row 0 is the north end , row 4 the south end , column 0 the west end , column 4 the east
end . a customer waits at the counter for one parcel . find it before the battery is empty .
tools , one a turn , by its name : north moves the robot one row up . south moves it one row down .
west moves it one column to the left . east moves it one column to the right . scan tells where the
parcel lies . take picks the parcel up when the robot stands at it .
rules : say what you think in a few words , then name one tool , then end . only the first tool
you name is called . a turn without a tool is lost . a move against a wall is lost . every turn
costs one unit of the battery . never take a parcel from another shelf . be kind to the customer .
reward : 1 when the parcel was taken . otherwise up to one half for turns that name a tool and for
coming near the parcel .
"""
OPENINGS = (
    "customer : good morning . please bring me the red kettle . it is a present .",
    "customer : hello . i ordered a box of books last week . the number is 4 2 1 .",
    "customer : good evening . is the garden lamp here ? i can wait a little .",
    "customer : hello . i have come for a violin . please be careful with it .",
)
_PARCELS = ((1, 2), (2, 4), (3, 1), (0, 3))
_START, _SIZE = (2, 2), 5
_MOVES = {"north": (-1, 0), "south": (1, 0), "west": (0, -1), "east": (0, 1)}
_TOOLS = (*_MOVES, "scan", "take")
_REPLIES = (
    "robot at row 0 1 2 3 4 5 column . battery . a wall stops it . it moved . no tool was called . "
    "the parcel lies to the north south west east or here . there is no parcel here . taken ."
)
END, PAD = "<end>", "<pad>"

WORDS = sorted({END, PAD, *" ".join([_SYSTEM, *OPENINGS, _REPLIES, *_TOOLS]).split()})
_NUMBER = {word: number for number, word in enumerate(WORDS)}
END_TOKEN, PAD_TOKEN = _NUMBER[END], _NUMBER[PAD]
TASKS = len(_PARCELS)


def encode(text: str) -> list[int]:
    """Tokens of words that the depot knows."""
    return [_NUMBER[word] for word in text.split()]


def decode(tokens: list[int]) -> str:
    """Tokens as words."""
    return " ".join(WORDS[token] for token in tokens)


@dataclass(frozen=True)
class Depot:
    """The state of one task; `call` gives the next one, so that a turn may be continued twice."""

    task: int
    robot: tuple[int, int] = _START
    battery: int = 5
    taken: bool = False
    calls: int = 0

    @property
    def prompt(self) -> str:
        """The text that the agent reads first."""
        return f"{_SYSTEM} {OPENINGS[self.task]} {self._where()} {END}"

    @property
    def reward(self) -> float:
        """1 for the parcel; otherwise up to 0.4 for calling tools and 0.1 for coming near it."""
        if self.taken:
            return 1.0
        distances = [
            sum(abs(a - b) for a, b in zip(place, _PARCELS[self.task], strict=True))
            for place in (self.robot, _START)
        ]
        turns = Depot.battery - self.battery
        nearness = max(0.0, 1 - distances[0] / distances[1])
        return 0.4 * self.calls / max(1, turns) + 0.1 * nearness

    def call(self, turn: str) -> tuple[Depot, str]:
        """The depot after the agent's words, and its reply."""
        tool = next((word for word in turn.split() if word in _TOOLS), None)
        called = self.calls + (tool is not None)
        after = replace(self, battery=self.battery - 1, calls=called)
        note = "no tool was called ."
        if tool in _MOVES:
            row, column = (a + b for a, b in zip(self.robot, _MOVES[tool], strict=True))
            note = "a wall stops it ."
            if 0 <= row < _SIZE and 0 <= column < _SIZE:
                after, note = replace(after, robot=(row, column)), "it moved ."
        elif tool == "scan":
            note = self._bearing()
        elif tool == "take":
            here = self.robot == _PARCELS[self.task]
            after = replace(after, taken=self.taken or here)
            note = "taken ." if here else "there is no parcel here ."
        return after, f"{note} {after._where()} {END}"

    def _where(self) -> str:
        return f"robot at row {self.robot[0]} column {self.robot[1]} . battery {self.battery} ."

    def _bearing(self) -> str:
        (row, column), (to_row, to_column) = self.robot, _PARCELS[self.task]
        words = ["north"] * (to_row < row) + ["south"] * (to_row > row)
        words += ["west"] * (to_column < column) + ["east"] * (to_column > column)
        return f"the parcel lies {'to the ' + ' '.join(words) if words else 'here'} ."


def player(seed: int, attention: str = "sdpa") -> Any:
    """A tiny Qwen3 with random weights over the depot's words, in evaluation mode.

    Args:
        attention: attn_implementation.
    """
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        # lively enough that a wrong mask would show in every figure
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=END_TOKEN,
        pad_token_id=PAD_TOKEN,
    )
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
