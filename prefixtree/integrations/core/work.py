"""Metrics of packing for the logs of TRL and verl: the tokens of a batch, the computed ones, and
what could still be shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prefixtree.forest import PrefixForest
from prefixtree.sharing.near_misses import tokens_to_win


@dataclass
class Work:
    """The work of a rank, summed over its micro-batches.

    Attributes:
        replicated: tokens of all sequences. packed: computed tokens, padding left out.
        squares: sum over packed tokens of 2 x position + 1; n^2 for a lone sequence of n tokens. 0
            where nobody counted.
        to_win: tokens that run again after forks that the policy did not sample; None where nobody
            looked.
    """

    replicated: int = 0
    packed: int = 0
    squares: int = 0
    to_win: int | None = None

    @classmethod
    def of(
        cls,
        forest: PrefixForest,
        masks: Sequence[np.ndarray] | None = None,
        packed: int | None = None,
    ) -> Work:
        """Counts the work of a forest.

        Args:
            masks: bool [n] per sequence, true where the policy sampled the token. Default: `to_win`
                is not counted.
            packed: the number of tokens that run for it. Default: the forest's.
        """
        return cls(
            forest.num_replicated_tokens,
            forest.num_tokens if packed is None else packed,
            to_win=None if masks is None else tokens_to_win(forest, masks),
        )

    def __add__(self, other: Work) -> Work:
        to_win = [x for x in (self.to_win, other.to_win) if x is not None]
        return Work(
            self.replicated + other.replicated,
            self.packed + other.packed,
            self.squares + other.squares,
            sum(to_win) if to_win else None,
        )

    @property
    def ratio(self) -> float:
        """Tokens of all sequences over computed ones."""
        return self.replicated / self.packed

    @property
    def shares_nothing(self) -> bool:
        """Whether packing saves less than half a per cent."""
        return self.replicated < 1.005 * self.packed

    def metrics(self, ratio: str) -> dict[str, float]:
        """Metrics by their names in a trainer's log; `ratio` is its name of the ratio."""
        numbers = {
            ratio: self.ratio,
            "tokens_computed": float(self.packed),
            "tokens_saved": float(self.replicated - self.packed),
        }
        if self.to_win is not None:
            numbers["tokens_to_win"] = float(self.to_win)
        return {f"prefixtree/{name}": value for name, value in numbers.items()}
