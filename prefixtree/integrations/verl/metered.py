"""`MeteredEngine`: the metrics of packing, for engines of every backend."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.utils.device import get_device_id, get_device_name
from verl.utils.flops_counter import FlopsCounter

from prefixtree.integrations.announcement import announce
from prefixtree.integrations.verl.metrics import Work, warn_if_nothing_is_shared, work_metrics

NAME = "prefixtree"


class MeteredEngine:
    """Stands before an engine of verl; adds metrics to the results of its batches.

    Attributes:
        packs: whether the model's attention is "prefixtree".
    """

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
        """One optimiser step on a mini-batch; adds the metrics of `work_metrics` to verl's."""
        start = time.perf_counter()
        outputs = super().train_batch(data, loss_function)  # type: ignore[misc]
        if self.packs and not self._has_trained:
            self._has_trained = True
            warn_if_nothing_is_shared(self._work)
        # the gradient norm came to the host: the work is done
        return self._with_metrics(outputs, time.perf_counter() - start, forward_only=False)

    def infer_batch(self, data: TensorDict, loss_function: Callable[..., Any] | None = None) -> Any:
        """Log-probabilities (or values) of a batch; adds the metrics of `work_metrics`."""
        start = time.perf_counter()
        outputs = super().infer_batch(data, loss_function)  # type: ignore[misc]
        return self._with_metrics(outputs, time.perf_counter() - start, forward_only=True)

    def _with_metrics(self, outputs: dict[str, Any], seconds: float, forward_only: bool) -> Any:
        # stages of a pipeline before the last give none
        if self.packs and "metrics" in outputs:
            # per GPU, of which so many did this work together
            seconds *= getattr(self, "ulysses_sequence_parallel_size", 1)
            metrics = work_metrics(self._work, self._flops_counter, seconds, forward_only)
            outputs["metrics"].update(metrics)
        return outputs
