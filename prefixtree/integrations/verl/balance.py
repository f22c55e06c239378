"""The choice of rank and mini-batch for each sample: groups together, costs even, counts exact.

verl gives every data-parallel rank as many samples, in one contiguous part of the batch, and takes
mini-batches from each part in order. So a batch is divided twice: groups over ranks, then each
rank's groups over its mini-batches. Nothing of verl is used here: plain lists and numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from prefixtree.forest import PrefixForest

# cost of a lone sequence by its length; 0 for 0
Workload = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Balanced:
    """An order of the batch, and its costs.

    Attributes:
        order: the samples, rank after rank, mini-batch after mini-batch.
        rank_costs: the cost of each rank's forest.
        divided_groups: the number of groups on more than one rank.
    """

    order: list[int]
    rank_costs: list[float]
    divided_groups: int


def leaf_order(forest: PrefixForest) -> list[int]:
    """Orders sequences by their ends in the packed forest: those that share most are neighbours."""
    return np.argsort(forest.sequence_node, kind="stable").tolist()


class GroupCosts:
    """The cost of sets of samples when each set is packed: every token once, at its position.

    Tokens from position d on cost workload(n) - workload(d). In `order`, samples that share most
    are neighbours.
    """

    def __init__(self, sequences: Sequence[np.ndarray], workload: Workload) -> None:
        forest = PrefixForest.from_sequences(sequences)
        self.order = leaf_order(forest)
        self._node = forest.sequence_node
        self._parent = forest.node_parent
        ends = forest.node_position + forest.node_length
        self._node_cost = workload(ends) - workload(forest.node_position.astype(np.int64))

    def cost(self, samples: Sequence[int]) -> float:
        """The cost of the forest of some samples."""
        seen: set[int] = set()
        for sample in samples:
            node = int(self._node[sample])
            while node >= 0 and node not in seen:
                seen.add(node)
                node = int(self._parent[node])
        return float(self._node_cost[list(seen)].sum())


def balance(
    sequences: Sequence[np.ndarray],
    groups: Sequence[Hashable],
    num_ranks: int,
    num_mini_batches: int,
    workload: Workload,
) -> Balanced:
    """Orders S samples so that groups stay together and ranks and mini-batches cost the same.

    A group is divided only where it does not fit: more samples than a mini-batch has on a rank, or
    group sizes that do not add up to the exact counts. Its parts follow the order of the forest's
    leaves, so that samples which share most stay together. S is a multiple of num_ranks x
    num_mini_batches.
    """
    count = len(sequences)
    if count % (num_ranks * num_mini_batches):
        raise ValueError(
            f"{count} samples do not divide into {num_ranks} ranks of {num_mini_batches} "
            "mini-batches"
        )
    costs = GroupCosts(sequences, workload)
    members: dict[Hashable, list[int]] = {}
    for sample in costs.order:
        members.setdefault(groups[sample], []).append(sample)
    ranks = deal(list(members.values()), num_ranks, count // num_ranks, costs)
    of_rank = [{groups[i] for piece in pieces for i in piece} for pieces in ranks]
    divided = sum(sum(g in groups_there for groups_there in of_rank) > 1 for g in members)
    order = []
    for pieces in ranks:
        size = count // num_ranks // num_mini_batches
        for cell in deal(pieces, num_mini_batches, size, costs):
            order += [sample for piece in cell for sample in piece]
    rank_costs = [costs.cost([i for piece in pieces for i in piece]) for pieces in ranks]
    return Balanced(order, rank_costs, divided)


def deal(
    groups: list[list[int]], num_cells: int, size: int, costs: GroupCosts
) -> list[list[list[int]]]:
    """Deals groups into cells of exactly `size` samples, and evens out the cells' costs.

    The costliest group goes first, each to the cell with least so far. Then groups of one size are
    exchanged as long as that lowers the costliest cell.
    """
    cells: list[list[list[int]]] = [[] for _ in range(num_cells)]
    room, load = [size] * num_cells, [0.0] * num_cells

    def put(group: list[int], cell: int) -> None:
        cells[cell].append(group)
        room[cell] -= len(group)
        load[cell] += costs.cost(group)

    for group in sorted(groups, key=costs.cost, reverse=True):
        uncut = group
        while uncut:
            fitting = [c for c in range(num_cells) if room[c] >= len(uncut)]
            if fitting:
                put(uncut, min(fitting, key=load.__getitem__))
                break
            cell = max(range(num_cells), key=room.__getitem__)
            put(uncut[: room[cell]], cell)
            uncut = uncut[len(cells[cell][-1]) :]
    _exchange(cells, load, costs)
    return cells


def _exchange(cells: list[list[list[int]]], load: list[float], costs: GroupCosts) -> None:
    """Lowers the costliest cell by exchanging a group with a cheaper one of the same size."""
    cost = [np.array([costs.cost(group) for group in cell]) for cell in cells]
    size = [np.array([len(group) for group in cell]) for cell in cells]
    # every exchange lowers the costliest cell or leaves fewer as costly; the bound is for time
    for _ in range(20 * len(cells)):
        high = max(range(len(cells)), key=load.__getitem__)
        best, exchange = load[high] * (1 - 1e-9), None
        for low in range(len(cells)):
            difference = cost[high][:, None] - cost[low]
            after = np.maximum(load[high] - difference, load[low] + difference)
            after[size[high][:, None] != size[low]] = np.inf
            if after.size and after.min() < best:
                best = after.min()
                exchange = low, *np.unravel_index(after.argmin(), after.shape)
        if exchange is None:
            return
        low, i, j = exchange
        difference = cost[high][i] - cost[low][j]
        load[high] -= difference
        load[low] += difference
        cells[high][i], cells[low][j] = cells[low][j], cells[high][i]
        cost[high][i], cost[low][j] = cost[low][j], cost[high][i]
