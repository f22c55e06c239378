"""The figures of a forest (tokens, query-key pairs, nodes and branching), of its images and
recorded routes, of rollouts and their turns, and of groups."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from prefixtree.errors import ForestError, InputError
from prefixtree.forest import PrefixForest
from prefixtree.packing.visible import visible_pairs
from prefixtree.rollouts import Rollouts, expand_turns
from prefixtree.rollouts.image_messages import FIRST_IMAGE, RolloutImage
from prefixtree.sharing.differences import describe


def measure(forest: PrefixForest) -> dict[str, Any]:
    """The figures of a forest as plain numbers, ready for JSON."""
    parent, length = forest.node_parent, forest.node_length.astype(np.int64)
    children = np.bincount(parent[parent >= 0], minlength=forest.num_nodes)
    branching = children[children > 1]
    sequence_lengths = forest.sequence_lengths
    packed_pairs = visible_pairs(forest.node_position.astype(np.int64), length, None)
    replicated_pairs = visible_pairs(np.zeros_like(sequence_lengths), sequence_lengths, None)
    return {
        "sequences": forest.num_sequences,
        "tokens": {
            "replicated": forest.num_replicated_tokens,
            "distinct": forest.num_tokens,
            "ratio": forest.replication_ratio,
        },
        "attention": {
            "replicated_pairs": replicated_pairs,
            "packed_pairs": packed_pairs,
            "flop_ratio": replicated_pairs / packed_pairs,
        },
        "sequence_length": _spread(sequence_lengths),
        "nodes": forest.num_nodes,
        "trees": int((parent < 0).sum()),
        "leaves": int((children == 0).sum()),
        "levels": forest.num_levels,
        # its old name, for one release
        "depth": forest.num_levels,
        "branching": {
            "nodes": len(branching),
            "mean_children": float(branching.mean()) if len(branching) else 0.0,
            "max_children": int(branching.max(initial=0)),
        },
        "node_length": _spread(length),
    }


def measure_turns(rollouts: Rollouts) -> dict[str, Any] | None:
    """Measures rollouts per rollout and per assistant turn; None where none has two turns."""
    counts = [
        len(turns) if turns is not None else 0 if ends is None else len(ends)
        for turns, ends in zip(rollouts.turns, rollouts.turn_ends, strict=True)
    ]
    if max(counts, default=0) < 2:
        return None
    with_turns = rollouts.take([i for i, count in enumerate(counts) if count])
    facts: dict[str, Any] = {"rollouts": len(with_turns)}
    for name, part in (("per_rollout", with_turns), ("per_turn", expand_turns(with_turns))):
        figures = measure(PrefixForest.from_sequences(part.sequences))
        facts[name] = {key: figures[key] for key in ("sequences", "tokens", "attention")}
    return facts


def _spread(lengths: np.ndarray) -> dict[str, Any]:
    return {
        "min": int(lengths.min()),
        "median": float(np.median(lengths)),
        "mean": float(lengths.mean()),
        "max": int(lengths.max()),
    }


def measure_images(forest: PrefixForest, rollouts: Rollouts) -> dict[str, Any] | None:
    """Measures the images, ready for JSON; None where no sequence has one.

    `replicated` is what every sequence alone has, `packed` what stands in the forest (twice if in
    two branches), and `distinct` what the vision encoder has to read.
    """
    assert forest.tokens is not None
    count = len(rollouts.images)
    if count == 0:
        return None
    replicated = sum(
        (_counts(sequence, rollouts.images) for sequence in rollouts.sequences),
        np.zeros(count, np.int64),
    )
    if not replicated.any():
        return None
    packed = _counts(forest.tokens, rollouts.images)
    sides = {"replicated": replicated, "packed": packed, "distinct": np.minimum(replicated, 1)}
    tokens = np.array([image.tokens for image in rollouts.images])
    patches = np.array([image.patches for image in rollouts.images])
    return {
        "images": {name: int(times.sum()) for name, times in sides.items()},
        "tokens": {name: int(times @ tokens) for name, times in list(sides.items())[:2]},
        "patches": {name: int(times @ patches) for name, times in sides.items()},
        "ratio": float(replicated @ patches / (sides["distinct"] @ patches)),
    }


def _counts(tokens: np.ndarray, images: tuple[RolloutImage, ...]) -> np.ndarray:
    """How often each image stands in some tokens: int64 [images]."""
    there = tokens[tokens >= FIRST_IMAGE] - FIRST_IMAGE
    # by tokens and not by runs: in packed order two of a kind may lie side by side
    times = np.bincount(there, minlength=len(images))
    return times // [image.tokens for image in images]


def measure_routes(rollouts: Rollouts) -> dict[str, Any] | None:
    """Measures rollouts with and without routes; None where none has routes.

    Raises:
        InputError: routes of two models, or that name an expert twice.
    """
    routed = rollouts.take([i for i, route in enumerate(rollouts.routes) if route is not None])
    if len(routed) == 0:
        return None
    without = PrefixForest.from_sequences(routed.sequences)
    try:
        forest = PrefixForest.from_sequences(routed.sequences, routes=routed.routes)
    except ForestError as problem:
        raise InputError(
            f"{rollouts.source}: {problem} (routes[i] is the i-th of the {len(routed)} sequences "
            "with routes, counted from 0)"
        ) from None
    assert forest.routes is not None
    return {
        "sequences": len(routed),
        "layers": forest.routes.shape[1],
        "experts_per_token": forest.routes.shape[2],
        "distinct": forest.num_tokens,
        "ratio": forest.replication_ratio,
        "distinct_without_routes": without.num_tokens,
        "ratio_without_routes": without.replication_ratio,
    }


_SHOWN = 5


def measure_groups(
    forest: PrefixForest, rollouts: Rollouts, tokenizer: Any = None
) -> dict[str, Any] | None:
    """Measures each group, ready for JSON; None where no rollout has a group.

    A group's ratio is its replicated tokens divided by its distinct tokens. A rollout without a
    group counts as a group alone, and is not listed. `across` is the number of tokens that several
    groups have in common, which one forest per group computes again. `first_forks` counts the
    groups by what parts their rollouts first: the role of the message, or else the kind of
    difference.
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
    """Two sequences of each forking group that part first, and how many tokens they share."""
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
        tree, next_tree = by_group[first_tree[n] : first_tree[n] + 2]
        forks[int(n)] = (below(tree), below(next_tree)), 0
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
