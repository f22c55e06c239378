"""The places of sequences in a trainer's batch: in padded rows, or several per row.

Legend: B rows, L columns, S sequences, n tokens of one, R tokens of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from prefixtree._forest_inputs import unbroken_runs
from prefixtree._numbers import to_numpy
from prefixtree.errors import ForestError
from prefixtree.packing.copies import move

_WAYS = (
    "give attention_mask for padded rows, or position_ids or cu_seqlens for rows that hold several "
    "sequences"
)


@dataclass(frozen=True)
class BatchLayout:
    """The places of the tokens of a batch [B, L], sequence by sequence."""

    shape: tuple[int, int]
    # int64 [R], each token's entry in the flattened batch
    place: np.ndarray
    # int64 [S], above 0
    lengths: np.ndarray

    @classmethod
    def of(
        cls,
        shape: Sequence[int],
        attention_mask: Any = None,
        position_ids: Any = None,
        cu_seqlens: Any = None,
    ) -> BatchLayout:
        """Reads the layout from the arguments of `batch_logprobs`; raises its ForestErrors."""
        if len(shape) != 2:
            raise ForestError(f"input_ids must be [B, L], got shape {list(shape)}")
        rows, columns = shape
        if cu_seqlens is not None:
            if attention_mask is not None or position_ids is not None:
                raise ForestError(
                    "cu_seqlens says where sequences stand: leave out attention_mask and "
                    "position_ids"
                )
            lengths = _between(cu_seqlens, rows * columns)
            return cls((rows, columns), np.arange(lengths.sum()), lengths[lengths > 0])
        positions = None if position_ids is None else _positions(position_ids, rows, columns)
        if attention_mask is not None:
            mask, first, lengths = _padded(attention_mask, rows, columns)
            if positions is not None:
                _check_positions_of_padded(positions, mask, first)
            return cls((rows, columns), np.flatnonzero(mask), lengths[lengths > 0])
        if positions is None:
            raise ForestError(f"nothing says where sequences stand: {_WAYS}")
        begins = _beginnings(positions)
        lengths = np.diff(np.flatnonzero(begins), append=rows * columns)
        return cls((rows, columns), np.arange(rows * columns), lengths)

    @cached_property
    def first(self) -> np.ndarray:
        """The index in `place` at which each sequence begins, int64 [S]."""
        first: np.ndarray = np.cumsum(self.lengths) - self.lengths
        return first

    @cached_property
    def predicted(self) -> np.ndarray:
        """The `place` of every token but the first of its sequence, int64 [R - S]."""
        predicted: np.ndarray = np.delete(self.place, self.first)
        return predicted

    @property
    def rows(self) -> np.ndarray:
        """The row in which each sequence begins, int64 [S]."""
        rows: np.ndarray = self.place[self.first] // self.shape[1]
        return rows

    def sequences(self, name: str, values: Any) -> list[np.ndarray]:
        """Cuts values [B, L] into the entries [n] of each sequence; refuses another shape."""
        array = to_numpy(values, name)
        if array.shape != self.shape:
            raise ForestError(
                f"{name} must be [B, L] as input_ids, {list(self.shape)}, got {list(array.shape)}"
            )
        if not len(self.lengths):
            return []
        return np.split(array.reshape(-1)[self.place], self.first[1:])

    def spread(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Puts [n - 1, ...] per sequence, its tokens but the first, into [B, L, ...]; else 0."""
        # without sequences, `values` holds one tensor without entries
        flat = torch.cat(list(values))
        out = flat.new_zeros(self.shape[0] * self.shape[1], *flat.shape[1:])
        return out.index_copy(0, self._predicted_on(flat.device), flat).unflatten(0, self.shape)

    def _predicted_on(self, device: torch.device) -> torch.Tensor:
        """Moves `predicted` to a device, once."""
        if device not in self._moved:
            self._moved[device] = move(torch.from_numpy(self.predicted), device)
        return self._moved[device]

    @cached_property
    def _moved(self) -> dict[torch.device, torch.Tensor]:
        return {}


def _between(cu_seqlens: Any, size: int) -> np.ndarray:
    """Reads the lengths between the borders `cu_seqlens`."""
    borders = to_numpy(cu_seqlens, "cu_seqlens")
    if borders.ndim != 1 or borders.dtype.kind not in "iu" or len(borders) < 1:
        raise ForestError(
            f"cu_seqlens must be integers [S + 1], got {borders.dtype} {list(borders.shape)}"
        )
    borders = borders.astype(np.int64)
    if borders[0] != 0 or (np.diff(borders) < 0).any():
        raise ForestError("cu_seqlens must begin with 0 and not descend")
    if borders[-1] > size:
        raise ForestError(
            f"cu_seqlens ends at {borders[-1]}, beyond the {size} tokens of the batch"
        )
    return np.diff(borders)


def _positions(position_ids: Any, rows: int, columns: int) -> np.ndarray:
    positions = to_numpy(position_ids, "position_ids")
    if positions.ndim != 2 or positions.shape[1] != columns or len(positions) not in (1, rows):
        raise ForestError(
            f"position_ids must be {[rows, columns]} as input_ids, got {list(positions.shape)}; "
            "where a model has several rows of positions (multi-dimensional RoPE), give "
            "attention_mask or cu_seqlens in their place: positions are computed anew"
        )
    return np.broadcast_to(positions, (rows, columns))


def _beginnings(positions: np.ndarray) -> np.ndarray:
    """Finds where sequences begin, bool [B, L], in positions that restart."""
    begins = np.ones(positions.shape, bool)
    begins[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    for row, column in np.argwhere(begins & (positions != 0))[:1]:
        raise ForestError(
            f"position_ids of row {row} jump to {positions[row, column]} at column {column}; "
            "expected positions that count up and restart at 0"
        )
    return begins


def _padded(
    attention_mask: Any, rows: int, columns: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Reads a padding mask: bool [B, L], the first column of each row, and its length."""
    mask = to_numpy(attention_mask, "attention_mask")
    if mask.shape != (rows, columns):
        raise ForestError(
            f"attention_mask must be [B, L] as input_ids, {[rows, columns]}, got {list(mask.shape)}"
        )
    if not ((mask == 0) | (mask == 1)).all():
        raise ForestError("attention_mask must hold 1 on tokens and 0 elsewhere")
    return mask != 0, *unbroken_runs(mask != 0)


def _check_positions_of_padded(positions: np.ndarray, mask: np.ndarray, first: np.ndarray) -> None:
    expected = np.arange(mask.shape[1]) - first[:, None]
    for row in np.flatnonzero((mask & (positions != expected)).any(1))[:1]:
        raise ForestError(
            f"position_ids of row {row} do not count from 0 along attention_mask; for rows that "
            "hold several sequences give position_ids without attention_mask"
        )
