"""Reports how much is shared: a line at the start, the metrics of every batch, and one warning
where nothing is.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from prefixtree.forest import PrefixForest
from prefixtree.integrations.common import announce
from prefixtree.integrations.core.work import Work
from prefixtree.models.checks import transformer_of

DATA_SET_ADVICE = (
    "put samples that begin alike next to each other in the data set, set "
    "train_sampling_strategy='sequential', and make per_device_train_batch_size at least their "
    "number; or use TRL's trainer"
)
PACKING_ADVICE = (
    "set packing=False, or padding_free=True alone, which both keep the order of the data set, and "
    f"{DATA_SET_ADVICE}"
)


class SharingReport(TrainerCallback):
    """Logs what packing saves, and warns once if nothing was shared or packed.

    When training begins, the main process logs that packing is on (`announce`). The process that
    logs adds these metrics of every micro-batch that is trained on:

        prefixtree/replication_ratio    tokens of all sequences over distinct ones
        prefixtree/tokens_computed      distinct tokens
        prefixtree/tokens_saved         tokens of all sequences less the distinct ones
        prefixtree/tokens_to_win        tokens computed again after a difference that the policy
                                        did not sample (`prefixtree report` says which)

    The warning comes after the first optimiser step, on the main process, about the batches of that
    process.

    Args:
        trainer: a trainer of TRL, which gets the callback.
        advice: settings that help where sequences share no token; it follows a semicolon.
        settings: those of the plan, by name, for the line at the start.
    """

    def __init__(self, trainer: Any, advice: str, **settings: Any) -> None:
        self._settings = settings
        self._advice = advice
        self._metrics = trainer._metrics["train"]
        self._work = Work()
        self._done = False
        trainer.add_callback(self)

    def saw(
        self,
        forest: PrefixForest,
        masks: Sequence[np.ndarray] | None,
        computed: int | None = None,
    ) -> None:
        """Counts a batch, after its forward is launched so that no GPU waits; as `Work.of`."""
        work = Work.of(forest, masks, computed)
        for name, value in work.metrics("replication_ratio").items():
            self._metrics[name].append(value)
        self._work += work

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero or args.get_process_log_level() > logging.WARNING:
            return
        model = transformer_of(kwargs["model"])
        autocast = {args.bf16: torch.bfloat16, args.fp16: torch.float16}
        announce(model.config, args.device, autocast.get(True, model.dtype), **self._settings)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._done:
            return
        self._done, work = True, self._work
        if not state.is_world_process_zero:
            return
        if work.packed == 0:
            warnings.warn(
                "the first optimiser step packed nothing: a subclass or a mixin computes "
                "log-probabilities without the packed forward; call super() in the method that it "
                "overrides",
                stacklevel=2,
            )
        elif work.shares_nothing:
            warnings.warn(
                f"the first optimiser step shared nothing: its micro-batches have "
                f"{work.replicated} tokens, of which {work.packed} are distinct (replication ratio "
                f"{work.ratio:.2f}), so this trainer saves nothing; {self._advice}",
                stacklevel=2,
            )


def warn_of_packing(strategy: str) -> None:
    """Warns that TRL's `packing` scatters samples that begin alike."""
    how = (
        "cuts samples wherever a row ends, and rows begin anywhere"
        if strategy == "wrapped"
        else "puts samples together by their lengths"
    )
    warnings.warn(
        f"packing=True ({strategy}) {how}, so samples that begin alike may stand in different "
        f"batches, which share nothing (see prefixtree/replication_ratio); {PACKING_ADVICE}",
        stacklevel=4,
    )
