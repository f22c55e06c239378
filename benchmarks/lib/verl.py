"""verl's way to make micro-batches, written out: verl is on none of the machines with GPUs."""

from __future__ import annotations

import heapq

import numpy as np


def largest_differencing(weights: np.ndarray, parts: int, equal_sizes: bool) -> list[list[int]]:
    """Karmarkar and Karp's method for `parts` sums as equal as can be: the two partial solutions
    that differ most in their sums are joined, heaviest onto lightest, until one is left. With
    equal sizes the first ones hold `parts` neighbours in weight each, one a part."""
    order = np.argsort(weights, kind="stable").tolist()
    chunk = parts if equal_sizes else 1
    heap = []
    for serial, first in enumerate(range(0, len(order), chunk)):
        state = [(float(weights[i]), [i]) for i in order[first : first + chunk]]
        state += [(0.0, []) for _ in range(parts - len(state))]
        state.sort(key=lambda part: -part[0])
        heap.append((state[-1][0] - state[0][0], serial, state))
    heapq.heapify(heap)
    serial = len(heap)
    while len(heap) > 1:
        (_, _, a), (_, _, b) = heapq.heappop(heap), heapq.heappop(heap)
        state = [
            (x + y, mine + theirs) for (x, mine), (y, theirs) in zip(a, reversed(b), strict=True)
        ]
        state.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (state[-1][0] - state[0][0], serial, state))
        serial += 1
    return [items for _, items in heap[0][2]]


def verl_micro_batches(
    lengths: np.ndarray, max_tokens: int, num_ranks: int
) -> list[list[list[int]]]:
    """The method of verl's `rearrange_micro_batches` with dynamic batches, one list per rank.

    As of verl 0.9.1: samples go to the ranks, and within a rank to micro-batches, each time by
    largest differencing over a workload of 24,576 n + n^2 for n replicated tokens. Ranks get as
    many samples each where that is possible. They have as many micro-batches each: at first what
    the largest rank's tokens need, then one more until none holds more than max_tokens.
    """
    workload = 24576 * lengths.astype(np.float64) + lengths.astype(np.float64) ** 2
    equal = len(lengths) % num_ranks == 0
    ranks = [np.sort(rank) for rank in largest_differencing(workload, num_ranks, equal)]
    count = max(-(-int(lengths[rank].sum()) // max_tokens) for rank in ranks)
    while True:
        plan = [
            [rank[part].tolist() for part in largest_differencing(workload[rank], count, False)]
            for rank in ranks
        ]
        if max(lengths[batch].sum() for rank in plan for batch in rank) <= max_tokens:
            return plan
        count += 1
