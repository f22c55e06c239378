"""The warning of a run that computes nothing once where TRL computes it several times."""

from __future__ import annotations

import warnings
from typing import Any

from transformers import TrainerCallback

from prefixtree.forest import PrefixForest


class SharingReport(TrainerCallback):
    """Warns once, after the first optimiser step, if nothing was shared or packed in it.

    It warns on the main process, about the micro-batches of that process.
    """

    def __init__(self, advice: str) -> None:
        """`advice` says what to set where sequences share no token; it follows a semicolon."""
        self._advice = advice
        self._tokens = self._distinct = 0
        self._done = False

    def saw(self, forest: PrefixForest) -> None:
        """Counts a micro-batch that is trained on."""
        self._tokens += forest.num_replicated_tokens
        self._distinct += forest.num_tokens

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._done:
            return
        self._done = True
        if not state.is_world_process_zero:
            return
        if self._distinct == 0:
            warnings.warn(
                "the first optimiser step packed nothing: a subclass or a mixin computes "
                "log-probabilities without the packed forward; call super() in the method that it "
                "overrides",
                stacklevel=2,
            )
        elif self._tokens < 1.005 * self._distinct:
            warnings.warn(
                f"the first optimiser step shared nothing: its micro-batches have {self._tokens} "
                f"tokens, of which {self._distinct} are distinct (replication ratio "
                f"{self._tokens / self._distinct:.2f}), so this trainer saves nothing; "
                f"{self._advice}",
                stacklevel=2,
            )
