"""The figures of a forest: tokens, query-key pairs, nodes and branching."""

from __future__ import annotations

from typing import Any

import numpy as np

from prefixtree.forest import PrefixForest
from prefixtree.packing.visible import visible_pairs


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


def _spread(lengths: np.ndarray) -> dict[str, Any]:
    return {
        "min": int(lengths.min()),
        "median": float(np.median(lengths)),
        "mean": float(lengths.mean()),
        "max": int(lengths.max()),
    }
