"""Random choices of keys, for tests of attention to chosen keys."""

from __future__ import annotations

import torch

from prefixtree import TreeMask
from prefixtree.kernels.chosen import to_bits, words

# as a model's choice has them: tiles whose queries all chose every key
SHORT = 32


def random_choice(
    mask: TreeMask, seed: int = 0, share: float = 0.4
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> bits int32 [Tq, W] of a choice, each query's own key among it, of short paths all keys,
    and the pairs that attend, bool [Tq, T]. Bits behind a query count for nothing."""
    host, generator = mask.host, torch.Generator().manual_seed(seed)
    position = torch.from_numpy(host.position).long()
    rows = position[torch.from_numpy(host.query_tokens).long()]
    chosen = torch.rand(len(rows), host.deepest, generator=generator) < share
    chosen[torch.arange(len(rows)), rows] = True
    chosen |= (rows < SHORT)[:, None]
    chosen[:, :1] = True
    bits = to_bits(chosen, words(host.deepest))
    return bits.to(mask.device), mask.dense() & chosen[:, position].to(mask.device)
