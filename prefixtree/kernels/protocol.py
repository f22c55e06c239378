"""What passes between the operator and a backend: `AttentionCall`, and what a `Backend` is.

Legend: T packed tokens, Tq query rows, H query heads, Hk kv heads, D and Dv head dims.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from prefixtree.packing.host_mask import HostMask


# A named tuple is frozen too, and made in a third of the time of a frozen dataclass: every layer
# makes one.
class AttentionCall(NamedTuple):
    """The inputs of one call of `tree_attention`, all of which fit together.

    Attributes:
        q: [Tq, H, D].
        k: [T, Hk, D].
        v: [T, Hk, Dv].
        sinks: [H], or None.
        mask: the host side of the mask; tables on any device are made from it.
        scale: factor on q k^T.
        window: distance in positions; 0 for none.
        softcap: c in c tanh(scale q k^T / c); 0 for none.
        deterministic: gradients are bitwise repeatable.
        lse_used: the caller sees lse, known in the forward alone. If not, lse is saved for the
            backward and nothing else.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor | None
    mask: HostMask
    scale: float
    window: int = 0
    softcap: float = 0.0
    deterministic: bool = False
    lse_used: bool = False


def reach(mask: HostMask, window: int) -> int:
    """The window as backends get it: 0 if no path outgrows it, so that plain kernels serve."""
    return 0 if window >= mask.deepest else window


class Backend(Protocol):
    """One implementation of tree attention. Stateless; `backends.BACKENDS` holds them all."""

    @property
    def name(self) -> str:
        """What `tree_attention(backend=...)` calls it."""
        ...

    def refuses(self, call: AttentionCall) -> str | None:
        """Why this backend cannot serve a call, in words that follow its name; None if it can."""
        ...

    def forward(self, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
        """-> out [Tq, H, Dv] in q's dtype, contiguous; lse [H, Tq] over the keys, the sink left
        out, float32 (float64 for float64 inputs), natural log."""
        ...

    def backward(
        self,
        call: AttentionCall,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """-> dq, dk, dv in the inputs' dtypes, contiguous; dsinks, None without sinks.

        out and lse are what the forward returned; dlse is None where lse was not used.
        """
        ...
