"""The example that the tests of forests and of packing share, and how they compare forests."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from prefixtree import PackedForest, PrefixForest, pack
from tests.support.strategies import Sequences

EXAMPLE: Sequences = [[1, 2, 3, 4], [1, 2, 3], [1, 2, 5, 6, 7, 8], [9], [1, 2, 3]]
ARRAYS = (
    "node_parent",
    "node_start",
    "node_length",
    "node_position",
    "node_subtree_end",
    "sequence_node",
    "tokens",
)


def example(**kwargs: Any) -> PackedForest:
    """Packed as 1 2 | 5 6 7 8 | 3 | 4 and 9."""
    return pack(PrefixForest.from_sequences(EXAMPLE), **kwargs)


def as_lists(tensors: list[torch.Tensor]) -> list[Any]:
    return [t.tolist() for t in tensors]


def assert_same(a: PrefixForest, b: PrefixForest) -> None:
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


def children_of(forest: PrefixForest, node: int) -> list[int]:
    """Children in preorder; the roots for node -1."""
    return np.flatnonzero(forest.node_parent == node).tolist()


# two trees, the first five nodes deep; nodes of 1 to 50 tokens
CATERPILLAR = PrefixForest.from_parents(
    [-1, 0, 0, 2, 2, 4, 4, 6, -1, 8, 8], [40, 33, 20, 3, 17, 50, 1, 30, 5, 21, 18]
)
