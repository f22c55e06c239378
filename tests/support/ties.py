"""A rule for equal scores, of which torch.topk takes any: the lowest position first."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class LowestFirst(TorchFunctionMode):
    """Inside, torch.topk takes the first of equal values, as indexers along the tree do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.topk, torch.Tensor.topk):
            return func(*args, **(kwargs or {}))
        x, k = args[0], args[1] if len(args) > 1 else kwargs["k"]
        ordered = x.sort(dim=-1, descending=True, stable=True)
        return torch.return_types.topk((ordered.values[..., :k], ordered.indices[..., :k]))
