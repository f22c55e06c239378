"""The invariants of every `PrefixForest`, however it was made."""

from __future__ import annotations

from typing import Any

import numpy as np

from prefixtree import loops
from prefixtree.errors import ForestError


def check_invariants(forest: Any) -> None:
    """Checks the arrays of a forest.

    Args:
        forest: a `PrefixForest`, which lists the rules.

    Raises:
        ForestError: with the node that breaks one, and the rule.
    """
    parent, start, length = forest.node_parent, forest.node_start, forest.node_length
    n = len(parent)
    per_node = (start, length, forest.node_position, forest.node_subtree_end)
    if n == 0 or any(len(a) != n for a in per_node) or len(forest.sequence_node) == 0:
        raise ForestError(
            "a forest needs at least one node and one sequence, and node arrays with one entry "
            f"per node; got {n} parents, {[len(a) for a in per_node]} other entries and "
            f"{len(forest.sequence_node)} sequences"
        )
    child, end = parent >= 0, start + length
    above = np.where(child, parent, 0)

    def require(holds: np.ndarray, rule: str) -> None:
        for bad in np.flatnonzero(~holds)[:1]:
            raise ForestError(f"node {bad} breaks the forest: {rule}")

    require((parent >= -1) & (parent < np.arange(n)), "parents precede children")
    require(length >= 1, "a node has at least one token")
    require(start == np.concatenate([[0], end[:-1]]), "nodes lie side by side from 0")
    position = np.where(child, forest.node_position[above] + length[above], 0)
    require(forest.node_position == position, "its position is its parent's position + length")
    subtree_end = forest.node_subtree_end
    limit = np.where(child, subtree_end[above], end[-1])
    require((subtree_end >= end) & (subtree_end <= limit), "subtree ends nest")
    weight = loops.trie.subtree_weights(parent, length)
    require(
        subtree_end - start == weight,
        "its subtree holds its tokens and its descendants'",
    )
    leaf = subtree_end == end
    ends = forest.sequence_node
    if ends.min() < 0 or ends.max() >= n:
        raise ForestError(f"sequence_node must name nodes below {n}")
    ended = np.zeros(n, bool)
    ended[ends] = True
    require(~leaf | ended, "a leaf ends at least one sequence; name it in sequence_ends")
    if forest.tokens is not None and forest.tokens.shape != (int(end[-1]),):
        raise ForestError(f"tokens must hold {end[-1]} ids, got shape {forest.tokens.shape}")
    if forest.routes is not None and (
        forest.routes.ndim != 3 or len(forest.routes) != end[-1] or forest.tokens is None
    ):
        raise ForestError(
            f"routes must be [{end[-1]}, layers, experts per token], beside tokens; got shape "
            f"{forest.routes.shape}"
        )
