"""How much sharing recorded routes cost: tokens whose experts differ are not shared."""

from __future__ import annotations

from typing import Any

from prefixtree.errors import ForestError, InputError
from prefixtree.forest import PrefixForest
from prefixtree.rollouts.sequences import Rollouts


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
