"""The best keys of queries on their paths.

Legend: n queries, K positions.
"""

from __future__ import annotations

from typing import Any

import torch

from prefixtree.kernels.chosen import from_bits, to_bits, words
from prefixtree.kernels.runtime import installed


def best_keys(scores: torch.Tensor, count: int, position: torch.Tensor) -> torch.Tensor:
    """Selects at most `count` keys of each query's path, bool [n, K]: the highest scores.

    scores [n, K] of any float dtype have a column per position of the path; columns after
    `position`, int [n], may hold anything. Of equal scores the lowest position wins, so that every
    algorithm finds the same keys: a ReLU makes many scores exactly 0. -0.0 equals 0.0.
    """
    width = scores.shape[1]
    if (kernels := _kernels_for(scores)) is not None:
        return from_bits(kernels.best_bits(scores, count, position, words(width)), 0, width)
    seen = torch.arange(width, device=scores.device) <= position[:, None]
    if width == 0:
        return seen
    scores = scores.masked_fill(~seen, -torch.inf)
    # which of equal scores topk takes does not matter: the least of the values is the same
    least = scores.topk(min(count, width), -1, sorted=False).values.amin(-1, keepdim=True)
    better = scores > least
    tied = (scores == least) & seen
    left = count - better.sum(-1, keepdim=True)
    return better | (tied & (tied.cumsum(-1, dtype=torch.int32) <= left))


def best_bits(
    scores: torch.Tensor, count: int, position: torch.Tensor, num_words: int
) -> torch.Tensor:
    """Gives `best_keys` as int32 [n, num_words], 0 after the K positions."""
    if (kernels := _kernels_for(scores)) is not None:
        bits: torch.Tensor = kernels.best_bits(scores, count, position, num_words)
        return bits
    return to_bits(best_keys(scores, count, position), num_words)


def _kernels_for(scores: torch.Tensor) -> Any:
    """Imports the module whose kernel selects; None for torch, which alone serves fake tensors."""
    if type(scores) is not torch.Tensor or not scores.is_cuda or not installed("triton"):
        return None
    from prefixtree.kernels import indexer_kernels

    return indexer_kernels if indexer_kernels.serves_choice(scores) else None
