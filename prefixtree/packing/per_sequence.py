"""Values that are given per sequence, checked against the sequences. Legend: S sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from prefixtree._numbers import check_without_gradient, entries, not_a_mask, selection
from prefixtree.errors import ForestError


def per_sequence(name: str, values: Any, count: int) -> list[Any]:
    """The entries of a list that has one per sequence, whatever they are.

    Args:
        name: of the argument.
        values: a list, an array or a tensor.
        count: S.

    Raises:
        ForestError: no list, or another number of entries than S.
    """
    found = entries(name, values, "a list of one entry per sequence")
    if len(found) != count:
        raise ForestError(
            f"{name} must hold one entry per sequence: expected {count}, got {len(found)}"
        )
    return found


def check_lengths(name: str, lengths: list[int], expected: np.ndarray) -> None:
    """Raises a ForestError unless there is one entry per sequence, of the sequence's length.

    Args:
        name: of the argument.
        lengths: of the entries given; -1 for an entry that has none.
        expected: [S] lengths of the sequences.
    """
    per_sequence(name, lengths, len(expected))
    for bad in np.flatnonzero(np.array(lengths) != expected)[:1]:
        got = "no 1-D array" if lengths[bad] < 0 else f"length {lengths[bad]}"
        raise ForestError(
            f"{name}[{bad}] must have the sequence's length {expected[bad]}, got {got}"
        )


def zeros_like(entry: Any) -> Any:
    """A stand-in, in an empty step, for an entry of a list with one entry per sequence.

    Args:
        entry: of another sequence.

    Returns:
        0 for a number, one row of zeros for a list, an array or a tensor with rows, without a
        gradient; None for what has no zero.
    """
    if isinstance(entry, (list, tuple)):
        return [zeros_like(first) for first in entry[:1]] or [0]
    if isinstance(entry, (torch.Tensor, np.ndarray)):
        rows = entry[:1] if entry.ndim else entry
        return torch.zeros_like(rows) if isinstance(rows, torch.Tensor) else np.zeros_like(rows)
    is_number = isinstance(entry, (int, float, complex, np.number, np.bool_))
    return type(entry)(0) if is_number else None


def flat_selection(loss_mask: Sequence[Any], expected: np.ndarray) -> np.ndarray:
    """Masks per sequence as one uint8 array over all replicated tokens, 1 where one is 1.

    Args:
        loss_mask: S lists, arrays or tensors of 0 and 1, each of its sequence's length.
        expected: [S] lengths of the sequences.

    Raises:
        ForestError: masks of another number or length than the sequences, or that hold anything but
            0 and 1.
    """
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
    """One copy from the device, not one per sequence."""
    for i, mask in enumerate(masks):
        check_without_gradient(f"{name}[{i}]", mask)
    flat = torch.cat(masks)
    if flat.dtype == torch.bool:
        return flat.cpu().numpy().view(np.uint8)
    # 1 where it is 1, 0 where it is 0, otherwise 2
    is_one = flat == 1
    kinds = (is_one.byte() + 2 * (~is_one & (flat != 0)).byte()).cpu().numpy()
    for bad in np.flatnonzero(kinds == 2)[:1]:
        ends = np.cumsum(expected)
        i = int(np.searchsorted(ends, bad, side="right"))
        at = bad - (ends[i] - expected[i])
        raise not_a_mask(f"{name}[{i}][{at}]", flat[int(bad)].item())
    return kinds
