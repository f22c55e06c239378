"""Forests whose trees do not branch: sequences one after the other, as flash-attn-4's own
variable-length kernels take them.

Their tiles begin anew with each sequence. Those of block lists lie on one grid over all tokens, so
that a tile may hold the end of one sequence and the beginning of the next.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from prefixtree.packing.host_mask import HostMask
from prefixtree.packing.transfers import lasting, move


@dataclass(frozen=True, eq=False)
class Chains:
    """The sequences of a forest without branches, on one device.

    Attributes:
        starts: int32 [sequences + 1], where each begins, then the number of tokens (`cu_seqlens`).
        longest: tokens of the longest sequence.
    """

    starts: torch.Tensor
    longest: int

    def arguments(self, window: int) -> dict[str, Any]:
        """Arguments of flash-attn-4's forward and backward, by keyword.

        Args:
            window: the number of tokens a query sees, itself included; 0 for all.
        """
        return {
            "cu_seqlens_q": self.starts,
            "cu_seqlens_k": self.starts,
            "max_seqlen_q": self.longest,
            "max_seqlen_k": self.longest,
            "causal": True,
            # of flash-attn-4: the tokens before a query that it sees
            "window_size_left": window - 1 if window else None,
        }


# chains live as long as their mask
_made: weakref.WeakKeyDictionary[HostMask, dict[torch.device, Chains]] = weakref.WeakKeyDictionary()


def chains_of(mask: HostMask, device: torch.device) -> Chains | None:
    """The sequences of a mask, made once per device; None if a tree branches. Nothing waits for the
    device."""
    if mask.chain_starts is None:
        return None
    made = _made.setdefault(mask, {})
    if device not in made:
        made[device] = _build(mask.chain_starts, device)
    return made[device]


@lasting
def _build(starts: np.ndarray, device: torch.device) -> Chains:
    return Chains(move(torch.from_numpy(starts), device), int(np.diff(starts).max(initial=0)))
