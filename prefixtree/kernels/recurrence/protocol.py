"""The calls that operators hand to a backend, steps of rows, and the protocol of a backend.

Legend: T packed tokens, D channels, W taps, Hk key heads, Hv value heads, K and V head dims, H
heads, G groups, P head dim, N state dim, I states that enter, F states that leave; R rows of a
decode step, S slots of a pool.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from prefixtree.packing.host_mask import HostMask


class ConvCall(NamedTuple):
    """The inputs of one call of `tree_conv`, all of which fit together."""

    # [T, D], [D, W], [D]; the last tap is the token's own
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    # kernels read `packing.segments.tables_of` it; None if only shapes are asked for
    mask: HostMask | None
    silu: bool


class DeltaCall(NamedTuple):
    """The inputs of one call of `tree_delta_rule`, all of which fit together."""

    # [T, Hk, K] twice, [T, Hv, V], of one dtype; value head h reads key head h // (Hv / Hk)
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    # [T, Hv] log of the decay, or [T, Hv, K], one per channel; [T, Hv]; each with a dtype of its
    # own
    g: torch.Tensor
    beta: torch.Tensor
    # [I, Hv, K, V] float32 (float64 for float64 value), the states that enter, at
    # `segments_of(mask).entry`; None if all roots start from zeros
    initial: torch.Tensor | None
    mask: HostMask | None
    scale: float
    # whether query and key are first divided by sqrt(sum of squares + 1e-6)
    qk_l2norm: bool
    # F, the states that leave after `segments_of(mask).exits`; None without borders
    num_final: int | None = None

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """The shape of a state, (Hv, K, V)."""
        return self.value.shape[1], self.key.shape[2], self.value.shape[2]


class SsdCall(NamedTuple):
    """The inputs of one call of `tree_ssd`, after the treatment of dt and before D."""

    # [T, H, P]
    x: torch.Tensor
    # [T, H] step sizes, float32 (float64 for float64 x), bias, softplus and limits applied
    dt: torch.Tensor
    # [H]; exp(dt A) is the decay
    A: torch.Tensor
    # [T, G, N] twice, in the dtype of x; head h reads group h // (H / G)
    B: torch.Tensor
    C: torch.Tensor
    # [I, H, N, P]; all three as in `DeltaCall`
    initial: torch.Tensor | None
    mask: HostMask | None
    num_final: int | None = None

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """The shape of a state, (H, N, P)."""
        return self.x.shape[1], self.B.shape[2], self.x.shape[2]


Call = ConvCall | DeltaCall | SsdCall


class RowSlots(NamedTuple):
    """The slots of a pool that a decode step's rows read and write, int64 [R]; live bool [R]."""

    source: torch.Tensor
    target: torch.Tensor
    live: torch.Tensor


class StateStep(NamedTuple):
    """The inputs of one step of a rule, all of which fit together."""

    # with S the state before the token, S' = exp(g) S and u = beta (value - key S') (`delta`) or
    # beta value, the state after it is S' + key u, and out = scale query (S' + key u)

    # [R, Hk, K] twice, [R, H, V]; head h reads key head h // (H / Hk)
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    # [R, H] or [R, H, K], log of the decay; [R, H]
    g: torch.Tensor
    beta: torch.Tensor
    # [S, H, K, V], float32 (float64 for float64 values), contiguous; written
    states: torch.Tensor
    rows: RowSlots
    scale: float
    # whether query and key are first divided by sqrt(sum of squares + 1e-6)
    qk_l2norm: bool
    # whether the rule subtracts what the key finds
    delta: bool


class ConvStep(NamedTuple):
    """The inputs of one step of a convolution."""

    # [R, D], [D, W], [D]; the last tap is the token's own
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    # [S, W - 1, D] in x's dtype, contiguous, the token before last; written
    tails: torch.Tensor
    rows: RowSlots
    silu: bool


class Computed(NamedTuple):
    """The results of a forward."""

    # contiguous, in the dtype of x or value
    out: torch.Tensor
    # what the backward needs in addition to the call, no tensor of the call
    saved: list[torch.Tensor]
    # states that leave [F, ...], in initial's dtype; None without num_final
    final: torch.Tensor | None = None


class Kernels(Protocol):
    """The functions that the module of a backend of the three operators has."""

    def refusal(self, call: Call) -> str | None:
        """Says why they cannot serve a call, to follow the backend's name; None if they can.

        Compiled code asks it with a mask of None: it may look at shapes, dtypes and devices only.
        """
        ...

    def saves(self, call: Call) -> list[torch.Tensor]:
        """Makes new tensors like those that `forward` saves, uninitialised; the mask is None."""
        ...

    def forward(self, call: Call) -> Computed:
        """Computes the layer's result, and what the backward needs."""
        ...

    def backward(
        self,
        call: Call,
        dout: torch.Tensor,
        saved: list[torch.Tensor],
        dfinal: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """Computes a gradient for each tensor of the call, in their order and dtypes, contiguous.

        A bias or an initial of None has none. dfinal has the shape and dtype of final; None stands
        for zeros.
        """
        ...
