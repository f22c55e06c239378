"""Which keys of its path a query attends to, where a model chooses them: a bit per position.

A query sees one key per position of its path, so the position names the key. Bit d % 32 of word
d // 32 stands for position d. T x (deepest / 32) words take the place of a T x T object.

Legend: n queries, K positions, W words per query.
"""

from __future__ import annotations

import torch


def words(positions: int) -> int:
    """The number of int32 words that hold a bit per position, W."""
    return -(-positions // 32)


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
