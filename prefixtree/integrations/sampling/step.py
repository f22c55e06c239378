"""`DecodeStep`: one token more for every row of a batch, on tensors that stay where they are.

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from prefixtree.integrations.sampling.draws import Draws


class Drawn(NamedTuple):
    """What n steps drew, on the host: tokens int64 [B, n], log-probabilities and, with truncation,
    logs of the kept probability float32 [B, n]."""

    tokens: np.ndarray
    logprobs: np.ndarray
    kept: np.ndarray | None


class DecodeStep:
    """Model call, draw, stop, advance. Nothing in `run` reads a tensor on the host.

    Args:
        forward: (ids int64 [B], positions int64 [B]) -> logits [B, V]; it writes the tokens' keys.
        draws: how tokens are drawn.
        stop: int64 [stop tokens].
        keys: int64 [B], of the rows' draws.
        positions: int64 [B], of the last token that each row's keys hold.
        room: the most tokens that are drawn.

    Attributes:
        ids: int64 [B], the last tokens drawn. positions: theirs.
        live: bool [B], whether no stop token was drawn.
        count: tokens drawn per row, on the host.
    """

    def __init__(
        self,
        forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        draws: Draws,
        stop: torch.Tensor,
        keys: torch.Tensor,
        positions: torch.Tensor,
        room: int,
    ) -> None:
        self._forward, self._draws, self._stop, self._keys = forward, draws, stop, keys
        self.ids = torch.zeros_like(positions)
        self.positions = positions.clone()
        self.live = torch.ones_like(positions, dtype=torch.bool)
        self.count = 0
        self._column = positions.new_zeros(1)
        self._tokens = positions.new_zeros(room, len(positions))
        # log-probabilities, and logs of the kept probability
        rows = 2 if draws.warpers else 1
        self._scores = torch.zeros(room, rows, len(positions), device=positions.device)

    def draw(self, logits: torch.Tensor) -> None:
        """Draws from logits [B, V] of the last tokens."""
        self.positions += 1
        tokens, logprobs, kept = self._draws.choose(logits, self._keys, self.positions)
        scores = logprobs[None] if kept is None else torch.stack([logprobs, kept])
        self.ids.copy_(tokens)
        self._tokens.index_copy_(0, self._column, tokens[None])
        self._scores.index_copy_(0, self._column, scores[None])
        self.live &= ~(tokens[:, None] == self._stop).any(1)
        self._column += 1
        self.count += 1

    def run(self) -> None:
        """One step: reads the last tokens and draws the next ones."""
        self.draw(self._forward(self.ids, self.positions))

    def take(self) -> Drawn:
        """Reads what was drawn, once: after an interruption nothing is handed out twice."""
        count, self.count = self.count, 0
        tokens = self._tokens[:count].t().cpu().numpy()
        scores = self._scores[:count].permute(1, 2, 0).cpu().numpy()
        return Drawn(tokens, scores[0], scores[1] if len(scores) > 1 else None)

    def narrowed(self, rows: list[int]) -> DecodeStep:
        """The step of some rows alone, with nothing drawn yet and the room that is left."""
        index = torch.tensor(rows, device=self.ids.device)
        room = len(self._tokens) - self.count
        step = DecodeStep(
            self._forward,
            self._draws,
            self._stop,
            self._keys[index],
            self.positions[index],
            room,
        )
        step.ids.copy_(self.ids[index])
        return step
