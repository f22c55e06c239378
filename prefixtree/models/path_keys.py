"""Keys of packed tokens by their paths, which travel through a model's forward for shared dropout.

A model that shares dropout (`models.dropout`) has its seed as an attribute.
"""

from __future__ import annotations

from typing import Any

import torch

from prefixtree.kernels.splitmix import GAMMA, mix, wrapped
from prefixtree.packing.layout import PackedForest

# the attribute of transformers' model, and the keyword of its forward
SEED = "_prefixtree_dropout_seed"
KEYS = "tree_dropout_keys"


def seed_of(transformer: Any) -> int | None:
    """Gives the seed of the dropout that a model shares and that is active, or None."""
    return vars(transformer).get(SEED) if transformer.training else None


def path_keys(packed: PackedForest, seed: int) -> torch.Tensor:
    """Hashes the seed and the token ids of each packed token's path: int64 [T]."""
    assert packed.input_ids is not None
    of_token = mix(mix(packed.position_ids * GAMMA) + packed.input_ids * GAMMA)
    ended = of_token.new_zeros(len(of_token) + 1)
    ended.index_add_(0, packed.subtree_end.long(), of_token)
    # of the tokens so far, those whose subtrees have ended are not on the path
    of_path = of_token.cumsum(0) - ended.cumsum(0)[:-1]
    return mix(of_path + wrapped(seed * GAMMA))
