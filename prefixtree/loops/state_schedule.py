"""numba loops of `packing.state_schedule`: where a recurrence's work stands on its paths."""

import numba
import numpy as np


@numba.njit(cache=True)
def above_and_below(parent: np.ndarray, chunks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Chunks on the path above a segment, and on the longest path below it.

    Args:
        parent: int32 [N], the segment above, -1 at roots; a parent comes before its children.
        chunks: int32 [N], chunks of each segment.
    """
    above = np.zeros(len(parent), np.int32)
    below = np.zeros(len(parent), np.int32)
    for segment in range(len(parent)):
        if parent[segment] >= 0:
            above[segment] = above[parent[segment]] + chunks[parent[segment]]
    for segment in range(len(parent) - 1, -1, -1):
        up = parent[segment]
        if up >= 0:
            below[up] = max(below[up], below[segment] + chunks[segment])
    return above, below


@numba.njit(cache=True)
def deal_slots(
    order: np.ndarray, parent_state: np.ndarray, num_states: int, most: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Deals the children of each branch point onto its slots, in the order of the backward.

    Returns:
        slot_in_branch int32 [N], rank int32 [N] (both -1 at roots), children int32 [B].
    """
    slot = np.full(len(order), -1, np.int32)
    rank = np.full(len(order), -1, np.int32)
    children = np.zeros(num_states, np.int32)
    for segment in order:
        branch = parent_state[segment]
        if branch >= 0:
            slot[segment] = children[branch] % most
            rank[segment] = children[branch] // most
            children[branch] += 1
    return slot, rank, children
