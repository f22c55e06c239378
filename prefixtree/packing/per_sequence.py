"""Values that are given per sequence, checked against the sequences. Legend: S sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from prefixtree.errors import ForestError


def check_lengths(name: str, lengths: list[int], expected: np.ndarray) -> None:
    """Raises a ForestError unless there is one entry per sequence, of the sequence's length.

    Args:
        name: of the argument.
        lengths: of the entries given; -1 for an entry that has none.
        expected: [S] lengths of the sequences.
    """
    if len(lengths) != len(expected):
        raise ForestError(
            f"{name} must hold one entry per sequence: expected {len(expected)}, got {len(lengths)}"
        )
    for bad in np.flatnonzero(np.array(lengths) != expected)[:1]:
        got = "no 1-D array" if lengths[bad] < 0 else f"length {lengths[bad]}"
        raise ForestError(
            f"{name}[{bad}] must have the sequence's length {expected[bad]}, got {got}"
        )


def flat_selection(loss_mask: Sequence[Any], expected: np.ndarray) -> np.ndarray:
    """Masks per sequence as one uint8 array over all replicated tokens, 1 where nonzero.

    Args:
        loss_mask: S lists, arrays or tensors, each of its sequence's length.
        expected: [S] lengths of the sequences.

    Raises:
        ForestError: masks of another number or length than the sequences.
    """
    if loss_mask is None or len(loss_mask) == 0:
        raise ForestError("loss_mask must hold one mask per sequence, got none")
    if all(isinstance(m, torch.Tensor) for m in loss_mask):
        check_lengths("loss_mask", [len(m) if m.ndim == 1 else -1 for m in loss_mask], expected)
        # one copy from the device, not one per sequence
        flat = (torch.cat(list(loss_mask)) != 0).cpu().numpy()
    else:
        arrays = [m.cpu().numpy() if hasattr(m, "cpu") else np.asarray(m) for m in loss_mask]
        check_lengths("loss_mask", [len(m) if m.ndim == 1 else -1 for m in arrays], expected)
        flat = np.concatenate(arrays) != 0
    return flat.view(np.uint8)
