"""How `plan_micro_batches` finds its plan over one forest, in two stages:

1. Ranks (`_deal`). The forest is cut into items: subtrees that cost at most a share of a rank's
   part. A subtree that would repeat a long path for little stays whole. Items are dealt out
   heaviest first, and also as runs of neighbours. Moves and exchanges then even the ranks out. A
   rank pays once for what its items share. Coarse to fine items are tried. The plan with the least
   sum of the heaviest and the mean rank is taken: the time of the slowest accelerator and of all.
2. Micro-batches of a rank (`_fill`), from the leaves up. First-fit decreasing joins what hangs
   below a node into pieces that fit the budget with the path above them. Then the pieces are
   offered to the parent. So a tree is cut only where it does not fit, and as high up as possible,
   where the repeated path is short. Repeated paths are known only then. If they leave the ranks
   uneven, the ranks are evened out again with them (`assign`).

First-fit decreasing: Johnson, "Near-optimal bin packing algorithms" (1973); heaviest first: Graham,
"Bounds on multiprocessing timing anomalies" (1969).

Legend: S sequences, N nodes, U units (never cut: the sequences that end at one node, or a group
that fits into a micro-batch).
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from prefixtree import loops
from prefixtree.forest import PrefixForest
from prefixtree.planning.costs import CostModel

# most entries of a table of (shared node, rank); beyond it, neighbours stay together
_MOST_HELD = 1 << 26
# most shared entries of items that are tried; deep trees in very many items have more
_MOST_SHARED = 1 << 24
# steps of evening out the ranks, for each way to deal the items
_WORK = 1 << 20
# an item costs at most a rank's part, halved up to so many times ...
_HALVINGS = 6
# ... but a subtree that costs less than so many times the path above it stays whole
_KEEPS = (1, 4)
# how often ranks are evened out again for repeated paths, and the balance below which they are not
_CORRECTIONS, _EVEN = 3, 1.01
# budgets tried below max_tokens to make the micro-batches of a rank even
_EVENINGS = 6


class Tree(NamedTuple):
    """A forest numbered independently of the order of its sequences: siblings by token."""

    parent: np.ndarray
    length: np.ndarray
    # int64 [N] in units of `unit_cost` FLOPs, so that sums are exact in any order
    cost: np.ndarray
    # int64 [S], the node at which each sequence ends
    ends: np.ndarray
    unit_cost: float


class Units(NamedTuple):
    """Sets of sequences that are never cut: distinct (group, end) pairs, each set contiguous."""

    # int64 [pairs], ascending within a unit
    ends: np.ndarray
    # int64 [pairs], the unit of each
    of_pair: np.ndarray
    # int64 [U + 1], into `ends`
    ptr: np.ndarray
    # int64 [S]
    of_sequence: np.ndarray
    # int64 [U], -1 for none; a group that does not fit has several units
    group: np.ndarray


def make_tree(forest: PrefixForest, model: CostModel) -> Tree:
    above, start = forest.node_parent, forest.node_start
    token = start if forest.tokens is None else forest.tokens[start]
    new_id, parent, _, length, position, _ = loops.trie.preorder(
        above, forest.node_length.astype(np.int64), np.lexsort((token, above))
    )
    image_of = None
    if forest.tokens is not None and model.first_image is not None:
        image_of = np.empty(len(start), np.int64)
        before = np.concatenate([[0], np.cumsum(forest.tokens >= model.first_image)])
        image_of[new_id] = before[start + forest.node_length] - before[start]
    cost = model.cost(position.astype(np.int64), length.astype(np.int64), image_of)
    # a millionth of a token's mean cost: 2^31 tokens stay far below 2^63
    unit_cost = float(cost.sum()) / forest.num_tokens * 1e-6
    return Tree(
        parent.astype(np.int64),
        length.astype(np.int64),
        np.maximum(1, np.rint(cost / unit_cost)).astype(np.int64),
        new_id[forest.sequence_node].astype(np.int64),
        unit_cost,
    )


def make_units(tree: Tree, group: np.ndarray, max_tokens: int) -> Units:
    order = np.lexsort((tree.ends, group))
    groups, ends = group[order], tree.ends[order]
    other_group = np.append(True, groups[1:] != groups[:-1])
    is_new = other_group | np.append(True, ends[1:] != ends[:-1])
    pair_of_sequence = np.empty(len(order), np.int64)
    pair_of_sequence[order] = np.cumsum(is_new) - 1
    groups, ends, other_group = groups[is_new], ends[is_new], other_group[is_new]
    group_ptr = np.append(np.flatnonzero(other_group), len(ends))
    tokens = loops.planning.union_weights(tree.parent, tree.length, group_ptr, ends)
    fits = (tokens <= max_tokens) & (groups[group_ptr[:-1]] >= 0)
    is_first = other_group | ~fits[np.cumsum(other_group) - 1]
    first = np.flatnonzero(is_first)
    of_pair = np.cumsum(is_first) - 1
    ptr = np.append(first, len(ends))
    return Units(ends, of_pair, ptr, of_pair[pair_of_sequence], groups[first])


def make_sets(label: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Groups distinct ends by label, as the loops take them: (ptr, ends)."""
    order = np.lexsort((ends, label))
    label, ends = label[order], ends[order]
    is_new = np.append(True, (label[1:] != label[:-1]) | (ends[1:] != ends[:-1]))
    ptr = np.append(0, np.cumsum(np.bincount(label[is_new])))
    return ptr, ends[is_new]


# ---- ranks and micro-batches ---------------------------------------------------------------------


class Deal(NamedTuple):
    """Items int64 [U], the rank of each int64 [I], and the items' `split_weights`."""

    item: np.ndarray
    rank: np.ndarray
    split: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def assign(
    tree: Tree, units: Units, num_ranks: int, max_tokens: int, whole_trees: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Assigns units ranks and micro-batches, int64 [U] each; micro-batches count up by rank."""
    # with `whole_trees`, a rank's share of a tree is one micro-batch, however large
    deal = _deal(tree, units, num_ranks)
    least, best = None, None
    for _ in range(1 + _CORRECTIONS):
        unit_rank = deal.rank[deal.item]
        unit_bin = _fill(tree, units, unit_rank, max_tokens, whole_trees)
        sets = make_sets(unit_bin[units.of_pair], units.ends)
        cost = loops.planning.union_weights(tree.parent, tree.cost, *sets)
        bin_rank = np.zeros(len(cost), np.int64)
        bin_rank[unit_bin] = unit_rank
        loads = np.zeros(num_ranks, np.int64)
        np.add.at(loads, bin_rank, cost)
        price = _price(loads)
        if least is None or price < least:
            least, best = price, (unit_rank, unit_bin)
        if loads.max() * num_ranks <= _EVEN * loads.sum():
            break
        # repeated paths are known only now; they are charged to the rank's items
        planned = np.maximum(1, loops.planning.rank_loads(*deal.split, deal.rank, num_ranks))
        weight, *shared = deal.split
        split = (np.rint(weight * (loads / planned)[deal.rank]).astype(np.int64), *shared)
        rank = deal.rank.copy()
        if len(split[3]) * num_ranks <= _MOST_HELD:
            loops.planning.even_out(*split, rank, num_ranks, _WORK)
        if (rank == deal.rank).all():
            break
        deal = Deal(deal.item, rank, split)
    assert best is not None
    return best


def _price(loads: np.ndarray) -> int:
    """The sum of the heaviest and the mean rank, times the number of ranks."""
    return int(loads.max()) * len(loads) + int(loads.sum())


def _deal(tree: Tree, units: Units, num_ranks: int) -> Deal:
    """Deals items out to the ranks, by their cost if nothing is repeated on a rank."""
    part = int(tree.cost.sum()) // num_ranks
    longest = int(loops.planning.path_weights(tree.parent, tree.cost)[tree.ends].max())
    # finer items change nothing where every unit has a group
    finer = range(_HALVINGS if (units.group < 0).any() and num_ranks > 1 else 1)
    least, best = None, None
    tried: list[int] = []
    for halving, keep in itertools.product(finer, _KEEPS):
        item = _items(tree, units, part >> halving, keep, part)
        # about as many items are about the same items
        count = int(item.max()) + 1
        if any(abs(count - other) <= 0.05 * other for other in tried):
            continue
        tried.append(count)
        sets = make_sets(item[units.of_pair], units.ends)
        if best and loops.planning.shared_entries(tree.parent, *sets) > _MOST_SHARED:
            break
        split = loops.planning.split_weights(tree.parent, tree.cost, *sets)
        ranks = [loops.planning.deal_in_line(*split, num_ranks)]
        if len(split[3]) * num_ranks <= _MOST_HELD:
            ranks.insert(0, loops.planning.deal_heaviest_first(*split, num_ranks))
            for rank in ranks:
                loops.planning.even_out(*split, rank, num_ranks, _WORK)
        for rank in ranks:
            loads = loops.planning.rank_loads(*split, rank, num_ranks)
            price = _price(loads)
            if least is None or price < least:
                least, best = price, Deal(item, rank, split)
        # nothing finer can be much better
        if least is not None and least <= 1.005 * (max(part, longest) + part) * num_ranks:
            break
    assert best is not None
    return best


def _items(tree: Tree, units: Units, capacity: int, keep: int, limit: int) -> np.ndarray:
    """Item of each unit, int64 [U], in preorder: a group, or a tree's piece of `join_units`."""
    item = units.group.copy()
    free = np.flatnonzero(item < 0)
    if len(free):
        ends = units.ends[units.ptr[free]]
        below = np.zeros(len(free), np.int64)
        options = (capacity, False, keep, limit)
        piece = loops.planning.join_units(tree.parent, tree.cost, ends, below, *options)
        item[free] = item.max() + 1 + piece
    first = np.full(item.max() + 1, len(tree.parent))
    np.minimum.at(first, item, units.ends[units.ptr[:-1]])
    number = np.empty(len(first), np.int64)
    number[np.argsort(first, kind="stable")] = np.arange(len(first))
    return number[item]


def _fill(
    tree: Tree, units: Units, unit_rank: np.ndarray, max_tokens: int, whole_trees: bool
) -> np.ndarray:
    """The micro-batch of each unit, int64 [U], numbered rank by rank."""
    if whole_trees:
        return _fill_with_trees(tree, units, unit_rank, max_tokens)
    node = loops.planning.common_ancestors(tree.parent, units.ptr, units.ends)
    above = np.append(loops.planning.path_weights(tree.parent, tree.length), 0)[node]
    below = loops.planning.union_weights(tree.parent, tree.length, units.ptr, units.ends) - above
    # one sort for all ranks, so that many ranks do not each look at everything
    by_rank = np.argsort(unit_rank, kind="stable")
    unit_ptr = np.append(0, np.cumsum(np.bincount(unit_rank)))
    pair_rank = unit_rank[units.of_pair]
    pairs_by_rank = np.argsort(pair_rank, kind="stable")
    pair_ptr = np.append(0, np.cumsum(np.bincount(pair_rank)))
    unit_bin = np.empty(len(unit_rank), np.int64)
    count = 0
    for rank in range(len(unit_ptr) - 1):
        rank_units = by_rank[unit_ptr[rank] : unit_ptr[rank + 1]]
        if len(rank_units) == 0:
            continue
        pairs = pairs_by_rank[pair_ptr[rank] : pair_ptr[rank + 1]]
        nodes = loops.planning.used_nodes(tree.parent, np.unique(units.ends[pairs]))
        label = _fill_rank(
            renumber(tree.parent[nodes], nodes),
            tree.length[nodes],
            (renumber(node[rank_units], nodes), below[rank_units]),
            (np.searchsorted(rank_units, units.of_pair[pairs]), renumber(units.ends[pairs], nodes)),
            max_tokens,
        )
        unit_bin[rank_units] = count + label
        count += int(label.max()) + 1
    return unit_bin


def _fill_with_trees(
    tree: Tree, units: Units, unit_rank: np.ndarray, max_tokens: int
) -> np.ndarray:
    """Fills micro-batches with whole trees; trees that a group joins go together too."""
    tree_of_node = np.cumsum(tree.parent < 0) - 1
    num_trees = int(tree_of_node[-1]) + 1
    # each rank's share of a tree counts as a tree of its own
    pair_tree = unit_rank[units.of_pair] * num_trees + tree_of_node[units.ends]
    label, joined = np.arange(int(pair_tree.max()) + 1), True
    while joined:
        least = np.full(len(unit_rank), len(label))
        np.minimum.at(least, units.of_pair, label[pair_tree])
        before = label.copy()
        np.minimum.at(label, pair_tree, least[units.of_pair])
        joined = bool((label != before).any())
    of_pair = np.unique(label[pair_tree], return_inverse=True)[1]
    order = np.lexsort((units.ends, of_pair))
    coarse = of_pair[order]
    ptr = np.append(0, np.cumsum(np.bincount(coarse)))
    coarse_of_unit = of_pair[units.ptr[:-1]]
    coarse_rank = np.empty(len(ptr) - 1, np.int64)
    coarse_rank[coarse_of_unit] = unit_rank
    trees = Units(units.ends[order], coarse, ptr, coarse, np.full(len(ptr) - 1, -1))
    return _fill(tree, trees, coarse_rank, max_tokens, False)[coarse_of_unit]


def _fill_rank(
    parent: np.ndarray,
    length: np.ndarray,
    unit: tuple[np.ndarray, np.ndarray],
    pairs: tuple[np.ndarray, np.ndarray],
    max_tokens: int,
) -> np.ndarray:
    """The micro-batch of each unit of one rank, of sizes as even as no repeated token allows.

    parent and length, int64, are of the rank's nodes alone; unit is the node and the size of each,
    as in `join_units`; pairs the unit and the end of each.
    """
    # even ones need less memory, and ranks that meet in every step wait less

    def attempt(capacity: int) -> tuple[np.ndarray, int, int]:
        label = loops.planning.join_units(parent, length, *unit, capacity, True, 0, 0)
        sizes = loops.planning.union_weights(parent, length, *make_sets(label[pairs[0]], pairs[1]))
        return label, len(sizes), int(sizes.sum())

    best, num_bins, tokens = attempt(max_tokens)
    low, high = -(-tokens // num_bins), max_tokens
    for _ in range(_EVENINGS if num_bins > 1 else 0):
        middle = (low + high) // 2
        label, other_bins, other_tokens = attempt(middle)
        if other_bins <= num_bins and other_tokens <= tokens:
            best, high = label, middle
        else:
            low = middle
    return best


def renumber(values: np.ndarray, nodes: np.ndarray) -> np.ndarray:
    """The place of each value among the ascending nodes, int64; -1 stays."""
    return np.where(values < 0, -1, np.searchsorted(nodes, values))
