"""Copies rows out of a tensor so that the gradient of a row is the sum over its copies, in fp32
and in a fixed order: bitwise repeatable on every device, which an indexed add on CUDA is not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch

from prefixtree import loops
from prefixtree.packing.transfers import move

# rows of a backward are summed in pieces of at most so many fp32 numbers
_CHUNK = 1 << 26


class GatherIndex:
    """Which row each copy takes.

    Args:
        index: [r] rows of the source, -1 for a zero; or a function that finds them when they are
            first used, other work having been launched.
        num_rows: rows of the source.
        device: where the tensors will be.
    """

    def __init__(
        self, index: np.ndarray | Callable[[], np.ndarray], num_rows: int, device: torch.device
    ) -> None:
        self._given = index
        self.num_rows = num_rows
        self.device = device

    @cached_property
    def _index(self) -> np.ndarray:
        return self._given() if callable(self._given) else self._given

    @cached_property
    def rows(self) -> torch.Tensor:
        """The index on the device, zeros pointing at one row behind the source."""
        index = self._index
        if self.has_zeros:
            index = np.where(index < 0, self.num_rows, index)
        return move(torch.from_numpy(np.ascontiguousarray(index)), self.device)

    @cached_property
    def has_zeros(self) -> bool:
        return bool((self._index < 0).any())

    @cached_property
    def copies(self) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
        """Copies sorted by row, their number per row, and its running sum; all on the device."""
        order, counts = loops.sequence_copies.counting_sort(self._index, self.num_rows)
        both = move(torch.from_numpy(np.concatenate([order, counts])), self.device)
        by_row, number = both.split([len(order), len(counts)])
        return by_row, number, np.concatenate([[0], np.cumsum(counts)])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, index: GatherIndex) -> torch.Tensor:
        ctx.index = index
        if index.has_zeros:
            values = torch.cat([values, values.new_zeros((1, *values.shape[1:]))])
        return values.index_select(0, index.rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        index = ctx.index
        by_row, number, ends = index.copies
        dtype = torch.float64 if grad.dtype == torch.float64 else torch.float32
        out = grad.new_empty((index.num_rows, *grad.shape[1:]))
        width = max(1, out[:1].numel())
        first = 0
        while first < index.num_rows:
            limit = ends[first] + max(1, _CHUNK // width)
            last = max(first + 1, int(np.searchsorted(ends, limit, side="right")) - 1)
            rows = grad.index_select(0, by_row[ends[first] : ends[last]]).to(dtype)
            if len(rows) == 0:
                out[first:last] = 0
            else:
                # one after another within a row, never atomics
                out[first:last] = torch.segment_reduce(
                    rows, "sum", lengths=number[first:last], axis=0, unsafe=True, initial=0
                )
            first = last
        return out, None


def gather(values: torch.Tensor, index: GatherIndex) -> torch.Tensor:
    """values [rows, ...] -> [r, ...] by the index, differentiable once."""
    return _Gather.apply(values, index)
