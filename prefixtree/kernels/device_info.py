"""Device queries (compute capability, SM count). On a CPU: what Triton's interpreter assumes."""

from __future__ import annotations

import contextlib
from functools import cache
from typing import Any

import torch

_NOTHING = contextlib.nullcontext()


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability; (9, 0) on a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


@cache
def processors(device: torch.device) -> int:
    """The number of multiprocessors; 1 on a CPU."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context in which this device is the current one, on which kernels are launched."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)
