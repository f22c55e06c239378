"""The figures of a batch that is trained on: what packing saves, and what it could still share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from prefixtree.forest import PrefixForest
from prefixtree.planning.cost_model import CostModel
from prefixtree.sharing.near_misses import tokens_to_win


class BatchSharing(NamedTuple):
    """Tokens and FLOPs of a batch, packed and not; see `sharing_of`.

    Attributes:
        replicated, computed: tokens of all sequences, and distinct ones.
        to_win: tokens that run again behind forks that the policy did not sample.
        replicated_cost, cost: FLOPs of an update with all sequences apart, and packed.
    """

    replicated: int
    computed: int
    to_win: int
    replicated_cost: float
    cost: float


def sharing_of(
    forest: PrefixForest, loss_masks: Sequence[np.ndarray] | None, cost: CostModel
) -> BatchSharing:
    """The figures of a batch.

    Args:
        forest: of the batch, with its tokens.
        loss_masks: bool [n] per sequence, true where the policy sampled the token; None where it
            sampled none.
        cost: of the model.
    """
    lengths = forest.sequence_lengths.astype(np.int64)
    position, own = forest.node_position.astype(np.int64), forest.node_length.astype(np.int64)
    return BatchSharing(
        forest.num_replicated_tokens,
        forest.num_tokens,
        tokens_to_win(forest, loss_masks),
        float(cost.cost(np.zeros_like(lengths), lengths).sum()),
        float(cost.cost(position, own).sum()),
    )
