"""How many keys tokens see, in closed form."""

from __future__ import annotations

import numpy as np


def visible_keys(position: np.ndarray, window: int | None) -> np.ndarray:
    """The number of keys that a token at each position sees: position + 1, or at most `window`."""
    return position + 1 if window is None else np.minimum(position + 1, window)


def visible_pairs(position: np.ndarray, length: np.ndarray, window: int | None) -> int:
    """The number of visible (query, key) pairs of all runs, per head; see `pairs_per_run`."""
    return int(pairs_per_run(position, length, window).sum())


def pairs_per_run(position: np.ndarray, length: np.ndarray, window: int | None) -> np.ndarray:
    """Counts the visible (query, key) pairs of runs of tokens, per head.

    This is the sum of `visible_keys` over each run, in closed form.

    Args:
        position: int64 [N], the position of each run's first token in its sequence.
        length: int64 [N], the number of tokens of each run.
        window: the sliding window, in tokens; None for none.

    Returns:
        int64 [N].
    """

    def up_to(n: np.ndarray) -> np.ndarray:
        near = n if window is None else np.minimum(n, window)
        return near * (near + 1) // 2 + (n - near) * (0 if window is None else window)

    return up_to(position + length) - up_to(position)
