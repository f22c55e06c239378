"""Metrics of packing, for engines of every backend (`MeteredEngine`): tokens saved, what could
still be shared, and the model FLOPs utilisation (MFU) of useful FLOPs.

verl's `mfu` counts every replicated token as if it had been computed: on packed batches it is the
MFU that an unpacked run would need for this speed, and may exceed 1.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.utils.device import get_device_id, get_device_name
from verl.utils.flops_counter import FlopsCounter

from prefixtree.forest import PrefixForest
from prefixtree.integrations.common import announce
from prefixtree.integrations.core.work import Work
from prefixtree.packing.visible import visible_pairs
from prefixtree.planning.micro_batch import MicroBatch


def work_of(batches: Sequence[MicroBatch], masks: Sequence[np.ndarray] | None = None) -> Work:
    """Counts the work of micro-batches; with `masks` of sampled tokens, also what runs again."""
    if (trunks := getattr(batches, "trunks", None)) is not None:
        # all stages compute a token once
        return _with_squares(trunks.forest, masks)
    found = (_with_squares(b.forest, None if masks is None else b.take(masks)) for b in batches)
    return sum(found, Work())


def _with_squares(forest: PrefixForest, masks: Sequence[np.ndarray] | None) -> Work:
    """Counts the work of a forest, with the squares that verl's estimate of FLOPs takes."""
    position, length = forest.node_position.astype(np.int64), forest.node_length
    # 1 + 3 + .. + (2 n - 1) = n^2, where a token sees position + 1 keys
    squares = 2 * visible_pairs(position, length, None) - forest.num_tokens
    return replace(Work.of(forest, masks), squares=squares)


def warn_if_nothing_is_shared(work: Work) -> None:
    """Warns of a mini-batch that packing did not make smaller, on the first rank."""
    if dist.get_rank() == 0 and work.shares_nothing:
        warnings.warn(
            f"the first mini-batch shared nothing: rank 0 had {work.replicated} tokens, of which "
            f"{work.packed} are distinct, so packing saves nothing. Keep the samples of a prompt "
            "on one rank (trainer.v1.trainer_mode=prefixtree_sync) and in one mini-batch "
            "(actor.shuffle=False), or look at `prefixtree report` for what differs between them",
            stacklevel=2,
        )


def work_metrics(
    work: Work, counter: FlopsCounter, seconds: float, forward_only: bool
) -> dict[str, list[float]]:
    """verl's metrics of one call on one rank: lists of one number, which verl averages."""
    metrics = {name: [x] for name, x in work.metrics("replicated_over_packed").items()}
    metrics["prefixtree/packed_tokens_per_second"] = [work.packed / seconds]
    formula = _formula(counter)
    if formula is not None:
        a, b, promised = formula
        flops = a * work.packed + b * work.squares
        mfu = flops / seconds / promised
        # without a backward, a third of the FLOPs
        metrics["prefixtree/mfu"] = [mfu / 3 if forward_only else mfu]
    return metrics


def _formula(counter: FlopsCounter) -> tuple[float, float, float] | None:
    """Reads verl's TFLOPs, a x tokens + b x sum of n^2: (a, b, the device's TFLOP/s), or None."""

    def flops(length: int) -> float:
        return counter.estimate_flops([length], 1.0)[0]

    flops_of_one, flops_of_many, length = flops(1), flops(4096), 4096
    b = (flops_of_many - length * flops_of_one) / (length * (length - 1))
    a = flops_of_one - b
    if flops_of_one == 0 or not np.isclose(
        flops(2 * length), 2 * length * a + (2 * length) ** 2 * b
    ):
        return None
    return a, b, counter.estimate_flops([1], 1.0)[1]


# ---- engines with metrics ------------------------------------------------------------------------

NAME = "prefixtree"


class MeteredEngine:
    """A base of verl's engines that adds metrics, if it `packs`: the attention is "prefixtree"."""

    packs: bool
    _work: Work
    _flops_counter: FlopsCounter
    _has_trained: bool

    def _read_attention(self, hf_config: Any) -> None:
        """Sets `packs`, and warns where nothing is packed."""
        self.packs = hf_config._attn_implementation == NAME
        self._has_trained, self._work = False, Work()
        self._flops_counter = FlopsCounter(hf_config)
        if self.packs:
            # verl leaves its override as a plain attribute, which saved configurations would keep:
            # they would load nowhere but here
            vars(hf_config).pop("attn_implementation", None)
            return
        warnings.warn(
            f"nothing is packed: the model runs {hf_config._attn_implementation!r}; set "
            "+actor_rollout_ref.model.override_config.attn_implementation=prefixtree (for a "
            "critic +critic.model...), or leave external_lib out",
            stacklevel=3,
        )

    def _announce(self, hf_config: Any, dtype: torch.dtype, **settings: Any) -> None:
        """Logs on the first rank that packing is on."""
        if self.packs and (not dist.is_initialized() or dist.get_rank() == 0):
            name = get_device_name()
            device = torch.device("cpu") if name == "cpu" else torch.device(name, get_device_id())
            announce(hf_config, device, dtype, **settings)

    def train_batch(self, data: TensorDict, loss_function: Callable[..., Any]) -> Any:
        """Runs one optimiser step on a mini-batch; adds the metrics of `work_metrics` to verl's."""
        start = time.perf_counter()
        outputs = super().train_batch(data, loss_function)  # type: ignore[misc]
        if self.packs and not self._has_trained:
            self._has_trained = True
            warn_if_nothing_is_shared(self._work)
        # the gradient norm came to the host: the work is done
        return self._with_metrics(outputs, time.perf_counter() - start, forward_only=False)

    def infer_batch(self, data: TensorDict, loss_function: Callable[..., Any] | None = None) -> Any:
        """Computes a batch's log-probabilities or values; adds the metrics of `work_metrics`."""
        start = time.perf_counter()
        outputs = super().infer_batch(data, loss_function)  # type: ignore[misc]
        return self._with_metrics(outputs, time.perf_counter() - start, forward_only=True)

    def _with_metrics(self, outputs: dict[str, Any], seconds: float, forward_only: bool) -> Any:
        # pipeline stages before the last give no metrics
        if self.packs and "metrics" in outputs:
            # per GPU: so many did this work together
            seconds *= getattr(self, "ulysses_sequence_parallel_size", 1)
            metrics = work_metrics(self._work, self._flops_counter, seconds, forward_only)
            outputs["metrics"].update(metrics)
        return outputs
