"""What backends ask of a device; off the GPU, what Triton's interpreter stands for."""

from __future__ import annotations

import contextlib
from functools import cache
from typing import Any

import torch

_NOTHING = contextlib.nullcontext()


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability; (9, 0) off the GPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors; 1 off the GPU."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Inside, the device is the current one, which kernels are launched on."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)
