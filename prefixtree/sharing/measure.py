"""The figures of a forest: tokens, query-key pairs, nodes and branching, its pictures, and what its
recorded routes cost.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from prefixtree.errors import ForestError, InputError
from prefixtree.forest import PrefixForest
from prefixtree.packing.host_mask import visible_pairs
from prefixtree.rollouts.picture_messages import FIRST_PICTURE, RolloutPicture
from prefixtree.rollouts.sequences import Rollouts


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


def measure_pictures(forest: PrefixForest, rollouts: Rollouts) -> dict[str, Any] | None:
    """The figures of the pictures, ready for JSON; None where no sequence has one.

    `replicated` is what every sequence alone has, `packed` what stands in the forest. A picture
    that is in two branches stands there twice. `distinct` counts every picture once: these are
    what the vision encoder has to read.

    Args:
        forest: of `rollouts.sequences`.
        rollouts: as they are read.
    """
    assert forest.tokens is not None
    count = len(rollouts.pictures)
    if count == 0:
        return None
    replicated = sum(
        (_counts(sequence, rollouts.pictures) for sequence in rollouts.sequences),
        np.zeros(count, np.int64),
    )
    if not replicated.any():
        return None
    packed = _counts(forest.tokens, rollouts.pictures)
    sides = {"replicated": replicated, "packed": packed, "distinct": np.minimum(replicated, 1)}
    tokens = np.array([picture.tokens for picture in rollouts.pictures])
    patches = np.array([picture.patches for picture in rollouts.pictures])
    return {
        "pictures": {name: int(times.sum()) for name, times in sides.items()},
        "tokens": {name: int(times @ tokens) for name, times in list(sides.items())[:2]},
        "patches": {name: int(times @ patches) for name, times in sides.items()},
        "ratio": float(replicated @ patches / (sides["distinct"] @ patches)),
    }


def _counts(tokens: np.ndarray, pictures: tuple[RolloutPicture, ...]) -> np.ndarray:
    """How often each picture stands in some tokens: int64 [pictures]."""
    there = tokens[tokens >= FIRST_PICTURE] - FIRST_PICTURE
    # by tokens and not by runs: in packed order two of a kind may lie side by side
    times = np.bincount(there, minlength=len(pictures))
    return times // [picture.tokens for picture in pictures]


def measure_routes(rollouts: Rollouts) -> dict[str, Any] | None:
    """The figures of the rollouts that have routes, with and without them, ready for JSON.

    Args:
        rollouts: as they are read.

    Returns:
        None where no rollout has routes.

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
