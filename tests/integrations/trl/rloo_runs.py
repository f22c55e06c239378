"""RLOO's trainers, which take no `rollout_func`, with the rollouts of runs.py."""

from __future__ import annotations

from typing import Any

from trl import RLOOConfig, RLOOTrainer

from prefixtree.integrations.trl import PrefixTreeRLOOTrainer
from tests.integrations.trl.runs import OnRows, rollouts


class _Given:
    def _generate_single_turn(self, prompt_ids: list[Any], *images: Any) -> list[list[int]]:
        trainer: Any = self
        chats = [[{"content": ""}]] * len(prompt_ids)
        completions: list[list[int]] = rollouts(chats, trainer)["completion_ids"]
        return completions


class Ours(_Given, PrefixTreeRLOOTrainer): ...


class SameOrder(OnRows, Ours): ...


class Theirs(_Given, RLOOTrainer): ...


# a ratio is of whole completions: rounding of log-probabilities adds up
RATIO = 5e-5
KINDS = (Ours, SameOrder)
# two generations, as the KL is one's
ON_RANKS: dict[str, Any] = {"config": RLOOConfig, "learning_rate": 0.03, "max_steps": 4}
