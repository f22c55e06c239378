"""Copies of tensors to a device, and of rows out of tensors and back.

- **To a device**: the host does not wait for the copy.
- **`gather`**: the gradient of a row is the sum over its copies, in fp32 and in a fixed order. An
  indexed add on CUDA has no fixed order.
- **`RowRuns`**: a part of a forest is a few long runs. Copies of slices move them at the rate of
  memory. Kernels that look up each row do not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch

from prefixtree import loops

# decorates a function whose tensors outlive the call: no later backward could save a tensor that
# was made in inference mode, nor a view of it
lasting = torch.inference_mode(False)


def check_device(device: Any) -> None:
    """Raises a TypeError for anything but a device."""
    if isinstance(device, torch.dtype):
        raise TypeError(
            f"to() takes a device, got {device}: token ids, positions and masks are integers "
            "whatever the model computes in; model.to(dtype) is what sets that"
        )
    if not isinstance(device, (str, int, torch.device)):
        raise TypeError(
            f'to() takes a device, as "cuda" or model.device, got {type(device).__name__}'
        )


@lasting
def move(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copies to a device; to CUDA through pinned memory, and the host does not wait."""
    device = torch.device(device)
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@lasting
def move_joined(tensors: list[torch.Tensor], device: torch.device | str) -> torch.Tensor:
    """Moves `torch.cat(tensors)`, which for CUDA is joined in pinned memory, in one copy."""
    device, first = torch.device(device), tensors[0]
    is_plain = all(
        tensor.device.type == "cpu" and tensor.dtype == first.dtype and not tensor.requires_grad
        for tensor in tensors
    )
    if device.type != "cuda" or not is_plain:
        return move(torch.cat(tensors), device)
    shape = sum(map(len, tensors)), *first.shape[1:]
    pinned = torch.empty(shape, dtype=first.dtype, pin_memory=True)
    return torch.cat(tensors, out=pinned).to(device, non_blocking=True)


def to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Copies a CUDA tensor to pinned memory, without waiting; returns a CPU tensor as it is."""
    if not tensor.is_cuda:
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


@lasting
def move_all(tensors: list[torch.Tensor], device: torch.device | str) -> list[torch.Tensor]:
    """Moves tensors of one dtype in one copy; each starts at a multiple of 64 bytes."""
    # a kernel is compiled for the alignment of its addresses, which must not vary by forest
    step = 64 // tensors[0].element_size()
    room = [-(-tensor.numel() // step) * step for tensor in tensors]
    flat = tensors[0].new_zeros(sum(room))
    for view, tensor in zip(flat.split(room), tensors, strict=True):
        view[: tensor.numel()] = tensor.reshape(-1)
    views = move(flat, device).split(room)
    return [
        view[: tensor.numel()].view(tensor.shape)
        for view, tensor in zip(views, tensors, strict=True)
    ]


# rows of a backward are summed in pieces of at most this many fp32 numbers
_CHUNK = 1 << 26


class GatherIndex:
    """The row that each copy takes: index [r], -1 for a zero, or a function that computes it."""

    def __init__(
        self, index: np.ndarray | Callable[[], np.ndarray], num_rows: int, device: torch.device
    ) -> None:
        self._given = index
        self.num_rows = num_rows
        self.device = device

    @cached_property
    def _index(self) -> np.ndarray:
        # a function is called when other work has been launched
        return self._given() if callable(self._given) else self._given

    @cached_property
    def rows(self) -> torch.Tensor:
        """The index on the device, in which zeros point one row past the source."""
        index = self._index
        if self.has_zeros:
            index = np.where(index < 0, self.num_rows, index)
        return move(torch.from_numpy(np.ascontiguousarray(index)), self.device)

    @cached_property
    def has_zeros(self) -> bool:
        return bool((self._index < 0).any())

    @cached_property
    def copies(self) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
        """The copies sorted by row and their number per row, on the device, and its running sum."""
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
    """Takes rows, values [rows, ...] -> [r, ...]; differentiable once."""
    return _Gather.apply(values, index)


# one copy per run is launched if runs are few, and long enough to hide the launch
_MOST_RUNS = 32
_LEAST_LENGTH = 64


def rows_of_runs(first: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Lists first, first + 1, .. of each run in turn, int64."""
    before = np.cumsum(length) - length
    return np.repeat(first - before, length) + np.arange(int(length.sum()))


class RowRuns:
    """Rows of a larger tensor: runs of `length` rows from `first` on, int64 [N], no row twice."""

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

    @classmethod
    def of(cls, rows: np.ndarray, device: torch.device) -> RowRuns:
        """Finds the runs of rows, integers [count], each once."""
        first = np.flatnonzero(np.diff(rows, prepend=rows[:1] - 2) != 1)
        return cls(rows[first].astype(np.int64), np.diff(first, append=len(rows)), device)

    @property
    def rows(self) -> np.ndarray:
        """The rows, int64 [count]."""
        return rows_of_runs(self._first, self._length)

    @cached_property
    def index(self) -> torch.Tensor:
        """The rows on the device, int64 [count]."""
        return move(torch.from_numpy(self.rows), self._device)

    def take(self, source: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Copies the rows of `source` [rows, ...] into `out` [count, ...], and returns it."""
        if not self._by_slices:
            if not out.is_contiguous():
                return out.copy_(source.index_select(0, self.index))
            return torch.index_select(source, 0, self.index, out=out)
        for first, at, length in self._runs:
            out[at : at + length] = source[first : first + length]
        return out

    def put(self, target: torch.Tensor, rows: torch.Tensor) -> None:
        """Writes rows [count, ...] of the same dtype into `target` [rows, ...]; any strides."""
        if not self._by_slices:
            target.index_copy_(0, self.index, rows)
            return
        for first, at, length in self._runs:
            target[first : first + length] = rows[at : at + length]

    def add(self, target: torch.Tensor, rows: torch.Tensor) -> None:
        """Adds rows [count, ...] of the same dtype to those of `target` [rows, ...], in place."""
        if not self._by_slices:
            # each row is there once, so the order of additions does not matter
            target.index_add_(0, self.index, rows)
            return
        for first, at, length in self._runs:
            target[first : first + length].add_(rows[at : at + length])

    def spread(self, rows: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Makes [num_rows, ...] of these rows and zeros elsewhere; the runs must ascend."""
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
