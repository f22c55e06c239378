"""`RowRuns`: some rows of a tensor, copied out of it and back run by run.

Parts of a forest are a few long runs. Copies of slices move them at the rate of memory; kernels
that look every element's row up do not.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch

from prefixtree.packing.transfers import move

# a copy per run is launched where runs are long enough to hide that, and few
_MOST_RUNS = 32
_LEAST_LENGTH = 64


class RowRuns:
    """Rows of a larger tensor, in the order of their runs.

    Args:
        first: int64 [N], the first row of each run in the larger tensor.
        length: int64 [N], rows of each run. No row may stand in two runs.
        device: where the tensors are.
    """

    def __init__(self, first: np.ndarray, length: np.ndarray, device: torch.device) -> None:
        self.count = int(length.sum())
        end = np.cumsum(length)
        self._runs = (
            []
            if not self.count
            else list(zip(first.tolist(), (end - length).tolist(), length.tolist(), strict=True))
        )
        self._first, self._length, self._device = first, length, device
        few = len(first) <= _MOST_RUNS
        self._by_slices = few and self.count >= _LEAST_LENGTH * len(first)

    @cached_property
    def index(self) -> torch.Tensor:
        """int64 [count], each row on the device."""
        before = np.cumsum(self._length) - self._length
        rows = np.repeat(self._first - before, self._length) + np.arange(self.count)
        return move(torch.from_numpy(rows), self._device)

    def take(self, source: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Copies the rows out of a larger tensor.

        Args:
            source: [rows, ...], any strides.
            out: [count, ...] of the same dtype, any strides; written.

        Returns:
            `out`.
        """
        if not self._by_slices:
            if not out.is_contiguous():
                return out.copy_(source.index_select(0, self.index))
            return torch.index_select(source, 0, self.index, out=out)
        for first, at, length in self._runs:
            out[at : at + length] = source[first : first + length]
        return out

    def put(self, target: torch.Tensor, rows: torch.Tensor) -> None:
        """Writes rows into a larger tensor.

        Args:
            target: [rows, ...], any strides; written.
            rows: [count, ...] of the same dtype, any strides.
        """
        if not self._by_slices:
            target.index_copy_(0, self.index, rows)
            return
        for first, at, length in self._runs:
            target[first : first + length] = rows[at : at + length]

    def add(self, target: torch.Tensor, rows: torch.Tensor) -> None:
        """Adds rows to those of a larger tensor.

        Args:
            target: [rows, ...]; changed.
            rows: [count, ...] of the same dtype.
        """
        if not self._by_slices:
            # each row stands there once, so the order of additions does not matter
            target.index_add_(0, self.index, rows)
            return
        for first, at, length in self._runs:
            target[first : first + length].add_(rows[at : at + length])

    def spread(self, rows: torch.Tensor, num_rows: int) -> torch.Tensor:
        """A larger tensor of zeros but for these rows.

        Args:
            rows: [count, ...].
            num_rows: rows of the larger tensor. Runs ascend.

        Returns:
            [num_rows, ...].
        """
        shape = (num_rows, *rows.shape[1:])
        if not self._by_slices:
            return rows.new_zeros(shape).index_copy_(0, self.index, rows)
        out, end = rows.new_empty(shape), 0
        for first, at, length in self._runs:
            out[end:first] = 0
            out[first : first + length] = rows[at : at + length]
            end = first + length
        out[end:] = 0
        return out
