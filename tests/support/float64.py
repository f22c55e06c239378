"""Runs in float64 of code that casts to float32."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Float64(TorchFunctionMode):
    """A cast to float32 in a float64 run stays float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()

        def swap(x: Any) -> Any:
            return torch.float64 if x is torch.float32 else x

        return func(*map(swap, args), **{k: swap(v) for k, v in (kwargs or {}).items()})
