"""Values that are given per sequence, checked against the sequences. Legend: S sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from prefixtree._numbers import check_without_gradient, entries, not_a_mask, selection
from prefixtree.errors import ForestError


def per_sequence(name: str, values: Any, count: int) -> list[Any]:
    """Lists the `count` entries of values that hold one per sequence; refuses another number."""
    listed = entries(name, values, "a list of one entry per sequence")
    if len(listed) != count:
        raise ForestError(
            f"{name} must hold one entry per sequence: expected {count}, got {len(listed)}"
        )
    return listed


def check_lengths(name: str, lengths: list[int], expected: np.ndarray) -> None:
    """Refuses lengths (-1: no length) that are not the expected ones of the sequences, [S]."""
    per_sequence(name, lengths, len(expected))
    for bad in np.flatnonzero(np.array(lengths) != expected)[:1]:
        got = "no 1-D array" if lengths[bad] < 0 else f"length {lengths[bad]}"
        raise ForestError(
            f"{name}[{bad}] must have the sequence's length {expected[bad]}, got {got}"
        )


def zeros_like(entry: Any) -> Any:
    """Makes a stand-in, for an empty step, of an entry of another sequence."""
    # 0 for a number, one row of zeros without a gradient for a list, an array or a tensor, and None
    # for anything else
    if isinstance(entry, (list, tuple)):
        return [zeros_like(first) for first in entry[:1]] or [0]
    if isinstance(entry, (torch.Tensor, np.ndarray)):
        rows = entry[:1] if entry.ndim else entry
        return torch.zeros_like(rows) if isinstance(rows, torch.Tensor) else np.zeros_like(rows)
    is_number = isinstance(entry, (int, float, complex, np.number, np.bool_))
    return type(entry)(0) if is_number else None


def flat_selection(loss_mask: Sequence[Any], expected: np.ndarray) -> np.ndarray:
    """Joins masks, one per sequence of 0 and 1, to uint8 [R] over all replicated tokens."""
    name = "loss_mask"
    masks = entries(name, loss_mask, "a list of one mask per sequence")
    if not masks:
        raise ForestError("loss_mask must hold one mask per sequence, got none")
    if all(isinstance(m, torch.Tensor) for m in masks):
        check_lengths(name, [len(m) if m.ndim == 1 else -1 for m in masks], expected)
        return _of_tensors(name, masks, expected)
    arrays = [selection(f"{name}[{i}]", m) for i, m in enumerate(masks)]
    check_lengths(name, [len(m) if m.ndim == 1 else -1 for m in arrays], expected)
    return np.concatenate(arrays).view(np.uint8)


def _of_tensors(name: str, masks: list[torch.Tensor], expected: np.ndarray) -> np.ndarray:
    """Joins masks that are tensors with one copy from the device, not one per sequence."""
    for i, mask in enumerate(masks):
        check_without_gradient(f"{name}[{i}]", mask)
    flat = torch.cat(masks)
    if flat.dtype == torch.bool:
        return flat.cpu().numpy().view(np.uint8)
    # 1 for 1, 0 for 0, 2 for anything else
    is_one = flat == 1
    kinds = (is_one.byte() + 2 * (~is_one & (flat != 0)).byte()).cpu().numpy()
    for bad in np.flatnonzero(kinds == 2)[:1]:
        ends = np.cumsum(expected)
        i = int(np.searchsorted(ends, bad, side="right"))
        at = bad - (ends[i] - expected[i])
        raise not_a_mask(f"{name}[{i}][{at}]", flat[int(bad)].item())
    return kinds
