"""How much is shared: the metrics of every batch, and one warning where nothing is."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import TrainerCallback

from prefixtree.errors import UnsupportedError
from prefixtree.forest import PrefixForest
from prefixtree.models.checks import find_causal_lm
from prefixtree.planning.cost_model import CostModel, cost_model_of
from prefixtree.planning.model_cost import model_cost
from prefixtree.sharing.batches import BatchSharing, sharing_of

DATA_SET_ADVICE = (
    "put samples that begin alike next to each other in the data set, set "
    "train_sampling_strategy='sequential', and make per_device_train_batch_size at least their "
    "number; or use TRL's trainer"
)


class SharingReport(TrainerCallback):
    """Logs what packing saves, and warns once if nothing was shared or packed.

    Of every micro-batch that is trained on, on the process that logs:

        prefixtree/replication_ratio    tokens of all sequences over distinct ones
        prefixtree/tokens_computed      distinct tokens
        prefixtree/tokens_saved         tokens of all sequences less the distinct ones
        prefixtree/tokens_to_win        tokens computed again behind a difference that the policy
                                        did not sample (`prefixtree report` says which)
        prefixtree/seconds_saved        an estimate: the seconds of forward and backward, times the
                                        FLOPs of all sequences over those computed, less 1

    The warning comes after the first optimiser step, on the main process, about the batches of that
    process.

    Args:
        trainer: a trainer of TRL, which gets the callback.
        advice: what to set where sequences share no token; it follows a semicolon.
    """

    def __init__(self, trainer: Any, advice: str) -> None:
        self._trainer, self._advice = trainer, advice
        self._metrics = trainer._metrics["train"]
        self._tokens = self._distinct = 0
        self._done = False
        # now, while its weights are whole
        self._cost = _cost_of(trainer.model)
        # of the batches since the last backward ended: FLOPs, and when the first of them began
        self._saved, self._computed = 0.0, 0.0
        self._began: Any = None
        # spans whose end the device may not have reached
        self._spans: list[tuple[Any, Any, float]] = []
        trainer.add_callback(self)

    @property
    def cost(self) -> CostModel:
        """The model's FLOPs."""
        return self._cost

    def begins(
        self,
        forest: PrefixForest,
        loss_masks: Sequence[np.ndarray],
        computed: tuple[int, float] | None = None,
    ) -> None:
        """Takes a batch that is trained on, before its forward.

        Args:
            loss_masks: bool [n] per sequence, true where the policy sampled the token.
            computed: the tokens that run for it, and their FLOPs. Default: its forest's.
        """
        found = sharing_of(forest, loss_masks, self._cost)
        if computed is not None:
            found = found._replace(computed=computed[0], cost=computed[1])
        self._log(found)
        self._saved += found.replicated_cost - found.cost
        self._computed += found.cost
        self._tokens += found.replicated
        self._distinct += found.computed
        if self._began is None:
            self._began = _now(self._trainer.accelerator.device)

    def _log(self, found: BatchSharing) -> None:
        for name, value in (
            ("replication_ratio", found.replicated / found.computed),
            ("tokens_computed", found.computed),
            ("tokens_saved", found.replicated - found.computed),
            ("tokens_to_win", found.to_win),
        ):
            self._metrics[f"prefixtree/{name}"].append(float(value))

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A backward that no optimiser step follows has ended."""
        if self._began is not None:
            end = _now(self._trainer.accelerator.device)
            self._spans.append((self._began, end, self._saved / self._computed))
            self._began, self._saved, self._computed = None, 0.0, 0.0
        while self._spans and _is_over(self._spans[0][1]):
            begin, end, saved = self._spans.pop(0)
            self._metrics["prefixtree/seconds_saved"].append(saved * _seconds(begin, end))

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """The last backward of a step has ended."""
        self.on_substep_end(*args, **kwargs)

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


def _cost_of(model: nn.Module) -> CostModel:
    """The model's FLOPs; the defaults where they are not known, as of weights that ZeRO-3 divided
    while it loaded them."""
    try:
        cost = model_cost(find_causal_lm(model))
    except (ValueError, UnsupportedError):
        return CostModel()
    return cost_model_of(cost) if cost.token_weights > cost.hidden else CostModel()


def _now(device: torch.device) -> Any:
    """A moment: of the device's queue on a GPU, which nobody waits for."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _is_over(moment: Any) -> bool:
    return isinstance(moment, float) or moment.query()


def _seconds(begin: Any, end: Any) -> float:
    return end - begin if isinstance(end, float) else 1e-3 * begin.elapsed_time(end)
