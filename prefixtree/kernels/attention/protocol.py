"""`AttentionCall`: the inputs of a call. `Kernels`: the functions that compute it.

Legend: T packed tokens, Tq query rows, H query heads, Hk kv heads, D and Dv head dims.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from prefixtree.packing.host_mask import HostMask


class Options(NamedTuple):
    """The numbers of an `AttentionCall`, in the order of the operators, and a backend or "auto"."""

    scale: float
    window: int = 0
    softcap: float = 0.0
    deterministic: bool = False
    backend: str = "auto"
    wide: bool = False


# a named tuple, which takes a third of the time of a frozen dataclass to make: every layer makes
# one
class AttentionCall(NamedTuple):
    """The inputs of one call of `tree_attention`, all of which fit together."""

    # [Tq, H, D], [T, Hk, D], [T, Hk, Dv], [H]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor | None
    # tables on any device are made from it
    mask: HostMask
    scale: float
    # in tokens; 0 for none, as of softcap
    window: int = 0
    softcap: float = 0.0
    deterministic: bool = False
    # whether the backward gives dk and dv in float32 (float64 for float64 inputs), because the
    # caller adds to them; known in the forward too
    wide: bool = False
    # whether the caller gets lse, which is otherwise saved for the backward; known in the forward
    # alone
    lse_used: bool = False
    # int32 [Tq, W], a bit per position (`kernels.chosen`); None for all keys
    chosen: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        mask: HostMask,
        options: Options,
        lse_used: bool = False,
        chosen: torch.Tensor | None = None,
    ) -> AttentionCall:
        """Makes a call for a backend; its window is 0 if no path outgrows it."""
        scale, window, softcap, deterministic, _, wide = options
        window = reach(mask, window)
        numbers = scale, window, softcap, deterministic, wide, lse_used
        return cls(q, k, v, sinks, mask, *numbers, chosen)


# why a backend of GPUs refuses `chosen`
CHOSEN = "it does not take chosen keys (those of an indexer) yet"


def gradient_dtype(call: AttentionCall) -> torch.dtype:
    """The dtype of dk and dv."""
    return torch.promote_types(call.k.dtype, torch.float32) if call.wide else call.k.dtype


def reach(mask: HostMask, window: int) -> int:
    """Gives backends a window of 0 if no path outgrows it, so that plain kernels serve."""
    return 0 if window >= mask.deepest else window


class Kernels(Protocol):
    """The functions that the module of a backend has."""

    def refusal(self, call: AttentionCall) -> str | None:
        """Says why they cannot serve a call, to follow the backend's name; None if they can."""
        ...

    def forward(self, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes attention.

        Returns out [Tq, H, Dv] in q's dtype, contiguous, and lse [H, Tq], float32 (float64 for
        float64 inputs): the natural log of the sum of exponentials over the keys, without the sink.
        """
        ...

    def backward(
        self,
        call: AttentionCall,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Computes the gradients; out and lse are the forward's, dlse is None if lse was not used.

        Returns dq, dk and dv in the inputs' dtypes, contiguous, and dsinks (None without sinks). dk
        and dv of a `wide` call are float32 (float64 for float64).
        """
        ...
