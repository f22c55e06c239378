"""One more token for every row of a batch: convolution, delta rule and Mamba-2 from kept states.

A row reads its state at slot `source[row]` of a pool and writes the state after its token at slot
`target[row]`. So rows that branched read one slot, and each writes its own. No two live rows write
one slot, and no row reads a slot that another row writes. A row that is not live writes nothing,
and its output is 0. On GPUs with Triton, one kernel does each step; elsewhere torch's operations
do.

Legend: B rows, D channels, W taps, Hk key heads, H heads, K and V head dims (N and P of Mamba-2), S
slots.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from prefixtree.kernels.recurrence.api import step_sizes, with_skip
from prefixtree.kernels.recurrence.protocol import ConvStep, RowSlots, StateStep
from prefixtree.kernels.runtime import installed


def conv_step(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tails: torch.Tensor,
    rows: RowSlots,
    silu: bool,
) -> torch.Tensor:
    """Computes `tree_conv` for the token after each row's tail: [B, D] in x's dtype."""
    call = ConvStep(x, weight, bias, tails, rows, silu)
    if in_one_kernel(call.x):
        from prefixtree.kernels.recurrence import decode_kernels

        return decode_kernels.conv(call)
    return conv_eager(call)


def delta_rule_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    rows: RowSlots,
    *,
    scale: float | None = None,
    qk_l2norm: bool = False,
) -> torch.Tensor:
    """Computes `tree_delta_rule` for the token after each row's state: [B, H, V], value's dtype."""
    scale = query.shape[2] ** -0.5 if scale is None else scale
    return _rule_step(
        StateStep(query, key, value, g, beta, states, rows, scale, qk_l2norm, delta=True)
    )


def ssd_step(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    states: torch.Tensor,
    rows: RowSlots,
    *,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
) -> torch.Tensor:
    """Computes `tree_ssd` for the token after each row's state: [B, H, P] in x's dtype."""
    sizes = step_sizes(dt, dt_bias, dt_softplus, dt_limit, states.dtype)
    decay = sizes * A.to(states.dtype)
    out = _rule_step(StateStep(C, B, x, decay, sizes, states, rows, 1.0, False, delta=False))
    return with_skip(out, x, D)


def in_one_kernel(x: torch.Tensor) -> bool:
    """Whether Triton kernels compute a step of these tensors."""
    # in torch a step is some 20 kernels, and states are read and written several times
    return x.is_cuda and x.dtype != torch.float64 and installed("triton")


def _rule_step(call: StateStep) -> torch.Tensor:
    if in_one_kernel(call.value):
        from prefixtree.kernels.recurrence import decode_kernels

        return decode_kernels.rule(call)
    return rule_eager(call)


# ---- torch's operations --------------------------------------------------------------------------


def conv_eager(call: ConvStep) -> torch.Tensor:
    """Computes `conv_step` by torch's operations; in float32, in float64 for float64 x."""
    x, weight, bias, tails, rows, silu = call
    wide = torch.promote_types(x.dtype, torch.float32)
    # [B, W, D]
    taps = torch.cat([tails[rows.source], x[:, None]], 1)
    out = (taps.to(wide) * weight.t().to(wide)).sum(1)
    if bias is not None:
        out = out + bias.to(wide)
    _write(tails, rows, taps[:, 1:])
    return _of_live(F.silu(out) if silu else out, rows).to(x.dtype)


def rule_eager(call: StateStep) -> torch.Tensor:
    """Computes `delta_rule_step` and `ssd_step` by torch's operations, in the states' dtype."""
    wide, group = call.states.dtype, call.value.shape[1] // call.key.shape[1]
    query, key, value, g, beta = (x.to(wide) for x in call[:5])
    if call.qk_l2norm:
        query, key = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (query, key))
    query, key = (x.repeat_interleave(group, 1) for x in (query * call.scale, key))
    decay = g.exp()[..., None] if g.ndim == 3 else g.exp()[..., None, None]
    state = decay * call.states[call.rows.source]
    if call.delta:
        value = value - torch.einsum("bhk,bhkv->bhv", key, state)
    state = state + key[..., None] * (beta[..., None] * value)[:, :, None]
    _write(call.states, call.rows, state)
    out = torch.einsum("bhk,bhkv->bhv", query, state)
    return _of_live(out, call.rows).to(call.value.dtype)


def _write(pool: torch.Tensor, rows: RowSlots, new: torch.Tensor) -> None:
    """Writes the new entries of live rows; other rows write what is there."""
    live = rows.live.view(-1, *[1] * (new.ndim - 1))
    pool.index_copy_(0, rows.target, torch.where(live, new, pool[rows.target]))


def _of_live(out: torch.Tensor, rows: RowSlots) -> torch.Tensor:
    return out.masked_fill(~rows.live.view(-1, *[1] * (out.ndim - 1)), 0)
