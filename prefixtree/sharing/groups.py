"""Measures what the rollouts of each group share, what groups share, and where they part."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from prefixtree.forest import PrefixForest
from prefixtree.rollouts import Rollouts
from prefixtree.sharing.differences import describe

_SHOWN = 5


def measure_groups(
    forest: PrefixForest, rollouts: Rollouts, tokenizer: Any = None
) -> dict[str, Any] | None:
    """Per-group figures, ready for JSON; None where no rollout has a group.

    A group's ratio is its replicated tokens divided by its distinct tokens. A rollout without a
    group counts as a group alone, and is not listed. `across` is the number of tokens that several
    groups have in common: one forest per group computes them again, one forest over all does not.
    `first_forks` counts the groups by what parts their rollouts first: the role of the message, or
    else the kind of difference.

    Args:
        forest: of `rollouts.sequences`.
        rollouts: at least one with a group.
        tokenizer: decodes the text where groups part. Default: no text.
    """
    from prefixtree.sharing.near_misses import with_shared_masks

    if rollouts.groups is None:
        return None
    keys = [("", i) if group is None else (group,) for i, group in enumerate(rollouts.groups)]
    rollouts = with_shared_masks(forest, rollouts)
    apart = PrefixForest.from_sequences(rollouts.sequences, keys)
    numbers = {key: n for n, key in enumerate(dict.fromkeys(keys))}
    group_of = np.array([numbers[key] for key in keys])
    count = len(numbers)

    tree_of_node = np.cumsum(apart.node_parent < 0) - 1
    group_of_tree = np.empty(tree_of_node[-1] + 1, np.int64)
    group_of_tree[tree_of_node[apart.sequence_node]] = group_of
    group_of_node = group_of_tree[tree_of_node]
    distinct = np.bincount(group_of_node, apart.node_length, count).astype(np.int64)
    replicated = np.bincount(group_of, apart.sequence_lengths, count).astype(np.int64)
    members = np.bincount(group_of, minlength=count)
    named = [n for key, n in numbers.items() if len(key) == 1]
    forks = _first_forks(apart, group_of_node, group_of_tree, count)

    def entry(n: int) -> dict[str, Any]:
        fork = forks.get(n)
        difference = None
        if fork is not None:
            pair, position = fork
            difference = describe(rollouts, pair, position, None, tokenizer)
        return {
            "group": next(iter(names[n])),
            "sequences": int(members[n]),
            "replicated": int(replicated[n]),
            "distinct": int(distinct[n]),
            "ratio": float(replicated[n] / distinct[n]),
            "first_fork": None if difference is None else difference.facts(),
        }

    names = list(numbers)
    ratios = replicated / distinct
    order = sorted(named, key=lambda n: -ratios[n])
    separates: Counter[str] = Counter()
    for n in named:
        if n in forks:
            difference = describe(rollouts, *forks[n], None)
            separates[difference.role or difference.kind] += 1
    best = order[:_SHOWN]
    return {
        "groups": len(named),
        "ratio": {
            "min": float(ratios[named].min()),
            "median": float(np.median(ratios[named])),
            "mean": float(ratios[named].mean()),
            "max": float(ratios[named].max()),
        },
        "across": apart.num_tokens - forest.num_tokens,
        "first_forks": dict(separates.most_common()),
        "best": [entry(n) for n in best],
        "worst": [entry(n) for n in order[len(best) :][-_SHOWN:]],
    }


def _first_forks(
    apart: PrefixForest, group_of_node: np.ndarray, group_of_tree: np.ndarray, count: int
) -> dict[int, tuple[tuple[int, int], int]]:
    """For each group that forks: two sequences that part first, and how many tokens they share."""
    parent = apart.node_parent.astype(np.int64)
    some_sequence = np.empty(apart.num_nodes, np.int64)
    some_sequence[apart.sequence_node] = np.arange(apart.num_sequences)
    # a leaf ends a sequence, and the first leaf below a node is the next one in preorder
    leaf = apart.node_subtree_end == apart.node_start + apart.node_length
    leaves = np.flatnonzero(leaf)

    def below(node: int) -> int:
        return int(some_sequence[leaves[np.searchsorted(leaves, node)]])

    trees = np.bincount(group_of_tree, minlength=count)
    roots = np.flatnonzero(parent < 0)
    forks: dict[int, tuple[tuple[int, int], int]] = {}
    by_group = roots[np.argsort(group_of_tree, kind="stable")]
    first_tree = np.cumsum(trees) - trees
    for n in np.flatnonzero(trees > 1):
        one, other = by_group[first_tree[n] : first_tree[n] + 2]
        forks[int(n)] = (below(one), below(other)), 0
    # a node that is not its parent's first child makes the parent a branching one; the first of a
    # group's in preorder stands on the unbranched way down from the root
    later = np.flatnonzero((parent >= 0) & (parent != np.arange(-1, len(parent) - 1)))
    nodes, at = np.unique(parent[later], return_index=True)
    groups, first = np.unique(group_of_node[nodes], return_index=True)
    for n, node, child in zip(groups, nodes[first], later[at[first]], strict=True):
        if int(n) not in forks:
            position = int(apart.node_position[node] + apart.node_length[node])
            forks[int(n)] = (below(node + 1), below(child)), position
    return forks
