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
    """Counts the visible (query, key) pairs of runs of tokens, per head, int64 [N].

    position int64 [N] is that of each run's first token in its sequence, length int64 [N] its
    tokens.
    """

    def up_to(n: np.ndarray) -> np.ndarray:
        near = n if window is None else np.minimum(n, window)
        return near * (near + 1) // 2 + (n - near) * (0 if window is None else window)

    return up_to(position + length) - up_to(position)
