"""SplitMix64 on int64 tensors, whose sums and products wrap around: numbers that a counter decides.

Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014. Legend: T packed tokens.
"""

from __future__ import annotations

import torch

GAMMA = 0x9E3779B97F4A7C15 - 2**64
FIRST = 0xBF58476D1CE4E5B9 - 2**64
SECOND = 0x94D049BB133111EB - 2**64


def mix(z: torch.Tensor) -> torch.Tensor:
    """Computes SplitMix64's output function."""
    z = (z ^ _shifted(z, 30)) * FIRST
    z = (z ^ _shifted(z, 27)) * SECOND
    return z ^ _shifted(z, 31)


def wrapped(number: int) -> int:
    """Reads any integer as an int64."""
    return (number + 2**63) % 2**64 - 2**63


def path_keys(
    tokens: torch.Tensor, positions: torch.Tensor, subtree_end: torch.Tensor, seed: int
) -> torch.Tensor:
    """Hashes the seed and the token ids of each packed token's path: int64 [T].

    Args:
        tokens, positions: int64 [T]. subtree_end: int32 [T], as in `PackedForest`.
        seed: any integer.
    """
    of_token = mix(mix(positions * GAMMA) + tokens * GAMMA)
    ended = of_token.new_zeros(len(of_token) + 1)
    ended.index_add_(0, subtree_end.long(), of_token)
    # of the tokens so far, those whose subtrees have ended are not on the path
    of_path = of_token.cumsum(0) - ended.cumsum(0)[:-1]
    return mix(of_path + wrapped(seed * GAMMA))


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Shifts logically to the right; torch's shift copies the sign."""
    return (z >> bits) & (2 ** (64 - bits) - 1)
