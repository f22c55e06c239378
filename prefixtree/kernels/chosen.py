"""Chosen keys of a query's path, to which it attends: a bit per position.

A query sees one key per position of its path, so the position names the key. Bit d % 32 of word d
// 32 stands for position d. T x (deepest / 32) words replace a T x T object.

Legend: n queries, K positions, W words per query.
"""

from __future__ import annotations

import torch


def words(positions: int) -> int:
    """The number of int32 words that hold a bit per position, W."""
    return -(-positions // 32)


def to_bits(chosen: torch.Tensor, num_words: int) -> torch.Tensor:
    """Packs bool [n, K] into int32 [n, num_words], 0 after the K positions."""
    n, width = chosen.shape
    octets = chosen.new_zeros(n, num_words * 32, dtype=torch.uint8)
    octets[:, :width] = chosen
    octets = octets.view(n, num_words * 4, 8)
    octets <<= torch.arange(8, dtype=torch.uint8, device=chosen.device)
    # every machine that torch runs on has the low byte of a word first
    return octets.sum(-1, dtype=torch.uint8).view(torch.int32)


def from_bits(bits: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Unpacks int32 [n, W] to bool [n, end - start], the positions from `start` to before `end`."""
    first = start // 8
    octets = bits.contiguous().view(torch.uint8)[:, first : -(-end // 8)]
    shift = torch.arange(8, dtype=torch.uint8, device=bits.device)
    of_position = ((octets[..., None] >> shift) & 1).flatten(1).bool()
    return of_position[:, start - 8 * first : end - 8 * first]
