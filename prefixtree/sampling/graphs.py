"""CUDA graphs of decode steps: when one is captured, and when it may be replayed.

A captured step is a list of kernels and of the addresses that they read and write. Whatever Python
decided while it was captured stays decided.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

# steps that run as they are before one is captured: kernels are compiled in the first, and the
# second is watched
_WARM = 2
# transformers looks for packed sequences in position_ids there, and not while a graph is captured
_NOT_WHEN_CAPTURED = "masking_utils.py"


class StepGraphs:
    """Captures steps on a device as CUDA graphs, which share one pool of memory.

    One runs at a time, and what it leaves is in tensors made before, so they may share.

    Args:
        device: of the steps.
        wanted: False: none is captured. Default: they are where the device has CUDA graphs.

    Attributes:
        num_captured: how many were.
        reason: why steps are not captured; None if they are.
    """

    def __init__(self, device: torch.device, wanted: bool = True) -> None:
        self.num_captured = 0
        self.reason: str | None = None
        if not wanted or device.type != "cuda":
            self.reason = "the device has no CUDA graphs" if wanted else "graphs=False"
            return
        self._stream = _stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def size_of(self, rows: int) -> int:
        """The size of a step for so many rows. Where steps are captured there are few sizes, at
        most a quarter above the rows."""
        if self.reason is not None:
            return rows
        step = max(8, 1 << max(0, (rows - 1).bit_length() - 3))
        return -(-rows // step) * step

    def captured(self) -> Callable[[Callable[[], None]], None]:
        """Runs a step: as it is at first, then captured and replayed.

        Returns:
            What takes the step, the same one at every call; it reads and writes tensors that stay
            where they are. It is not kept, so no circle of references keeps its tensors.
        """
        calls, replay = 0, None

        def run(step: Callable[[], None]) -> None:
            nonlocal calls, replay
            calls += 1
            if self.reason is not None or torch.is_autocast_enabled("cuda"):
                # an autocast around the call keeps cast weights that a graph would read later
                step()
            elif replay is not None:
                replay()
            elif calls < _WARM:
                self._beside(step)
            elif calls == _WARM:
                self._watch(step)
            else:
                replay = self._capture(step)
                self.num_captured += 1
                replay()

        return run

    def _watch(self, step: Callable[[], None]) -> None:
        """Runs a step and notes whether it waits for the device, which no graph can."""
        if places := self._waits(step):
            self.reason = f"{', '.join(sorted(places))} waits for the GPU"
            warnings.warn(
                f"decode steps of this model are not captured in a CUDA graph, because "
                f"{self.reason}; every step launches its kernels one by one, which is slower. "
                "TreeSampler(graphs=False) does so without this warning",
                stacklevel=2,
            )

    # ---- CUDA --------------------------------------------------------------------------------

    def _beside(self, step: Callable[[], None]) -> None:
        """Runs a step on the stream of the captures, so that libraries have their memory for it."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            step()
        current.wait_stream(self._stream)

    def _waits(self, step: Callable[[], None]) -> set[str]:
        """Runs a step; the places in Python where it waited for the device."""
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            try:
                torch.cuda.set_sync_debug_mode("warn")
                self._beside(step)
            finally:
                torch.cuda.set_sync_debug_mode(before)
        files = [(Path(w.filename), w) for w in seen if "synchronizing CUDA op" in str(w.message)]
        return {
            f"{file.parent.name}/{file.name}:{w.lineno}"
            for file, w in files
            if file.name != _NOT_WHEN_CAPTURED
        }

    def _capture(self, step: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # other threads may go on meanwhile: those that fetch data
        options: dict[str, Any] = {"capture_error_mode": "thread_local", "stream": self._stream}
        with torch.cuda.graph(graph, pool=self._pool, **options):
            step()
        return lambda: graph.replay()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all samplers: cuBLAS keeps a workspace for every stream that it has seen."""
    return torch.cuda.Stream(device)


def state_of(model: nn.Module, addresses: list[int]) -> int:
    """A number for all that a captured step of a model depends on, beside what tensors hold.

    Addresses of parameters and buffers, the modules, their hooks and plain attributes (which
    adapter is active, whether it is merged, its scaling), and the configuration.

    Args:
        addresses: others that it depends on.
    """
    config: Any = model.config
    facts = [_facts(vars(part)) for part in (*model.modules(), config, config.get_text_config())]
    return hash((tuple(facts), tuple(addresses)))


def _facts(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if isinstance(value, dict):
        return tuple((key, _facts(one)) for key, one in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_facts, value))
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return id(value)
