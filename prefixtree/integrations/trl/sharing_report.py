"""How much is shared: the metric of every batch, and one warning where nothing is."""

from __future__ import annotations

import warnings
from typing import Any

from transformers import TrainerCallback

from prefixtree.forest import PrefixForest

DATA_SET_ADVICE = (
    "put samples that begin alike next to each other in the data set, set "
    "train_sampling_strategy='sequential', and make per_device_train_batch_size at least their "
    "number; or use TRL's trainer"
)


class SharingReport(TrainerCallback):
    """Logs `prefixtree/replication_ratio`, and warns once if nothing was shared or packed.

    The warning comes after the first optimiser step, on the main process, about the batches of that
    process.

    Args:
        trainer: a trainer of TRL, which gets the callback.
        advice: what to set where sequences share no token; it follows a semicolon.
    """

    def __init__(self, trainer: Any, advice: str) -> None:
        self._metrics, self._advice = trainer._metrics["train"], advice
        self._tokens = self._distinct = 0
        self._done = False
        trainer.add_callback(self)

    def saw(self, forest: PrefixForest) -> None:
        """Takes a batch that is trained on."""
        self._metrics["prefixtree/replication_ratio"].append(forest.replication_ratio)
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
