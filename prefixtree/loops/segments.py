"""The compiled loops of `Segments` and its schedule of states.

Legend: T packed tokens, N segments, W taps of a convolution, M entries.
"""

from __future__ import annotations

import numba
import numpy as np
from numba import njit


@njit(cache=True)
def find(predictor, exits):
    """Cuts a packed forest where it branches, and after the tokens `exits`, int32 [F].

    Returns start int32 [N + 1], parent, level and has_children (uint8) [N] of `Segments`.
    """
    num_tokens = len(predictor)
    children = np.zeros(num_tokens, np.int32)
    for t in range(num_tokens):
        if predictor[t] >= 0:
            children[predictor[t]] += 1
    for t in exits:
        # as at a branch: no segment goes on after it
        children[t] += 2
    segment_of = np.empty(num_tokens, np.int32)
    count = 0
    for t in range(num_tokens):
        if predictor[t] < 0 or predictor[t] != t - 1 or children[t - 1] > 1:
            count += 1
        segment_of[t] = count - 1
    start = np.empty(count + 1, np.int32)
    parent = np.empty(count, np.int32)
    level = np.empty(count, np.int32)
    has_children = np.empty(count, np.uint8)
    start[count] = num_tokens
    for t in range(num_tokens):
        s = segment_of[t]
        if t == 0 or segment_of[t - 1] != s:
            start[s] = t
            above = predictor[t]
            parent[s] = -1 if above < 0 else segment_of[above]
            # parents stand before their children
            level[s] = 0 if above < 0 else level[parent[s]] + 1
        # the last token of the segment is the last to write
        has_children[s] = children[t] > 0
    return start, parent, level, has_children


@njit(cache=True)
def sorted_by(keys, num_keys):
    """Sorts 0, 1, .. stably by key, without key -1: order int32 [n], starts [num_keys + 1]."""
    starts = np.zeros(num_keys + 1, np.int32)
    for key in keys:
        if key >= 0:
            starts[key + 1] += 1
    for k in range(num_keys):
        starts[k + 1] += starts[k]
    fill = starts[:-1].copy()
    order = np.empty(starts[num_keys], np.int32)
    for i in range(len(keys)):
        if keys[i] >= 0:
            order[fill[keys[i]]] = i
            fill[keys[i]] += 1
    return order, starts


@njit(cache=True)
def chunks(start, size):
    """Cuts segments into chunks of at most `size` tokens: the fields of `Chunks`."""
    num_segments = len(start) - 1
    cu_chunks = np.zeros(num_segments + 1, np.int32)
    for s in range(num_segments):
        cu_chunks[s + 1] = cu_chunks[s] + (start[s + 1] - start[s] + size - 1) // size
    indices = np.empty((cu_chunks[num_segments], 2), np.int32)
    for s in range(num_segments):
        for c in range(cu_chunks[s + 1] - cu_chunks[s]):
            indices[cu_chunks[s] + c, 0] = s
            indices[cu_chunks[s] + c, 1] = c
    return cu_chunks, indices


@njit(cache=True)
def taps(predictor, width):
    """Builds `Taps`: ancestors int32 [W, T], start int32 [T + 1], token and tap int32 [M]."""
    num_tokens = len(predictor)
    ancestors = np.empty((width, num_tokens), np.int32)
    start = np.zeros(num_tokens + 1, np.int32)
    for t in range(num_tokens):
        above = np.int32(t)
        for j in range(width):
            ancestors[j, t] = above
            if above >= 0:
                if above != t - j:
                    start[above + 1] += 1
                above = predictor[above]
    for t in range(num_tokens):
        start[t + 1] += start[t]
    token = np.empty(start[num_tokens], np.int32)
    tap = np.empty(start[num_tokens], np.int32)
    if len(token):
        fill = start[:-1].copy()
        for t in range(num_tokens):
            for j in range(1, width):
                above = ancestors[j, t]
                if above < 0:
                    break
                if above != t - j:
                    token[fill[above]] = t
                    tap[fill[above]] = j
                    fill[above] += 1
    return ancestors, start, token, tap


@njit(cache=True)
def runs(predictor: np.ndarray, most: int) -> np.ndarray:
    """Lists where the runs of `Taps`, of at most `most` tokens, begin, and T: int32 [R + 1]."""
    total = len(predictor)
    start = np.empty(total + 1, np.int32)
    count = 0
    for token in range(total):
        if count == 0 or predictor[token] != token - 1 or token - start[count - 1] == most:
            start[count] = token
            count += 1
    start[count] = total
    return start[: count + 1]


@numba.njit(cache=True)
def above_and_below(parent: np.ndarray, chunks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Counts chunks on the path above a segment, and on the longest path below, int32 [N]."""
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
    """Deals children onto slots in `order`: slot and rank, int32 [N] (-1 at roots), children."""
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
