"""Which keys of its path a query attends to, where a model chooses them: a bit per position.

A query sees one key per position of its path, so the position names the key. Bit d % 32 of word
d // 32 stands for position d. T x (deepest / 32) words take the place of a T x T object.

Legend: n queries, K positions, W words per query.
"""

from __future__ import annotations

from typing import Any

import torch

from prefixtree.kernels.runtime import installed


def words(positions: int) -> int:
    """The number of int32 words that hold a bit per position, W."""
    return -(-positions // 32)


def best_keys(scores: torch.Tensor, count: int, position: torch.Tensor) -> torch.Tensor:
    """The best keys of queries on their paths, ties broken by position, lowest first.

    Every selection that keeps to this order finds the same keys, whatever its algorithm: equal
    scores are common, as a ReLU makes many of them exactly 0.

    Args:
        scores: [n, K], any float dtype; column d is of the key at position d of the query's path.
            -0.0 equals 0.0. Columns behind the query may hold anything.
        count: keys per query. A query that sees fewer gets all that it sees.
        position: int [n], those of the queries.

    Returns:
        bool [n, K], true for at most `count` keys, none of them behind its query.
    """
    width = scores.shape[1]
    if (kernels := _kernels_for(scores)) is not None:
        return from_bits(kernels.best_bits(scores, count, position, words(width)), 0, width)
    seen = torch.arange(width, device=scores.device) <= position[:, None]
    if width == 0:
        return seen
    scores = scores.masked_fill(~seen, -torch.inf)
    # which of equal scores this takes does not matter: the least of the values is the same
    least = scores.topk(min(count, width), -1, sorted=False).values.amin(-1, keepdim=True)
    better = scores > least
    tied = (scores == least) & seen
    left = count - better.sum(-1, keepdim=True)
    return better | (tied & (tied.cumsum(-1, dtype=torch.int32) <= left))


def best_bits(
    scores: torch.Tensor, count: int, position: torch.Tensor, num_words: int
) -> torch.Tensor:
    """`best_keys` as int32 [n, num_words], 0 behind the K positions."""
    if (kernels := _kernels_for(scores)) is not None:
        bits: torch.Tensor = kernels.best_bits(scores, count, position, num_words)
        return bits
    return to_bits(best_keys(scores, count, position), num_words)


def _kernels_for(scores: torch.Tensor) -> Any:
    """The module whose kernel selects, or None: torch's operations, which alone know tensors
    without numbers."""
    if type(scores) is not torch.Tensor or not scores.is_cuda or not installed("triton"):
        return None
    from prefixtree.kernels import indexer_kernels

    return indexer_kernels if indexer_kernels.serves_choice(scores) else None


def to_bits(chosen: torch.Tensor, num_words: int) -> torch.Tensor:
    """bool [n, K] -> int32 [n, num_words], 0 behind the K positions."""
    n, width = chosen.shape
    octets = chosen.new_zeros(n, num_words * 32, dtype=torch.uint8)
    octets[:, :width] = chosen
    octets = octets.view(n, num_words * 4, 8)
    octets <<= torch.arange(8, dtype=torch.uint8, device=chosen.device)
    # every machine that torch runs on has the low byte of a word first
    return octets.sum(-1, dtype=torch.uint8).view(torch.int32)


def from_bits(bits: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """int32 [n, W] -> bool [n, end - start], of the positions from `start` to before `end`."""
    first = start // 8
    octets = bits.contiguous().view(torch.uint8)[:, first : -(-end // 8)]
    shift = torch.arange(8, dtype=torch.uint8, device=bits.device)
    of_position = ((octets[..., None] >> shift) & 1).flatten(1).bool()
    return of_position[:, start - 8 * first : end - 8 * first]
