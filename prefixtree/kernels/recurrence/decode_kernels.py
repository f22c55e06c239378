"""Triton kernels of a decode step of recurrent layers, and their launches.

A program has a row and a block of its state. It reads and writes that block alone, so a row may
write the slot that it reads. All sums are in float32.

Legend: B rows, D channels, W taps, Hk key heads, H heads, K and V head dims.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from prefixtree.kernels import runtime
from prefixtree.kernels.recurrence.protocol import ConvStep, StateStep

# numbers of a state that a program holds, in 4 warps, and channels of a convolution's program
STATE_NUMBERS, COLUMNS = 4096, 256
INTERPRETED: bool


# one compilation serves all numbers of rows
@triton.jit
def conv_step_kernel(
    X, WEIGHT, BIAS, TAILS, SOURCE, TARGET, LIVE, OUT, x_stride, D,
    W: tl.constexpr, SILU: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Computes a row's block of channels."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < D
    live = tl.load(LIVE + row)
    if live == 0:
        tl.store(OUT + row * D + column, tl.zeros([COLUMNS], tl.float32), mask=inside)
    else:
        # int64: a slot's place may lie beyond 2**31 numbers
        source = TAILS + tl.load(SOURCE + row) * ((W - 1) * D) + column
        target = TAILS + tl.load(TARGET + row) * ((W - 1) * D) + column
        x = tl.load(X + row * x_stride + column, mask=inside, other=0)
        weight = WEIGHT + column * W
        total = x.to(tl.float32) * tl.load(weight + W - 1, mask=inside, other=0).to(tl.float32)
        if BIAS is not None:
            total += tl.load(BIAS + column, mask=inside, other=0).to(tl.float32)
        for tap in tl.static_range(W - 1):
            before = tl.load(source + tap * D, mask=inside, other=0)
            if tap > 0:
                tl.store(target + (tap - 1) * D, before, mask=inside)
            factor = tl.load(weight + tap, mask=inside, other=0).to(tl.float32)
            total += before.to(tl.float32) * factor
        if W > 1:
            tl.store(target + (W - 2) * D, x, mask=inside)
        if SILU:
            total = total / (1 + tl.exp(-total))
        tl.store(OUT + row * D + column, total, mask=inside)


@triton.jit
def rule_step_kernel(
    QUERY, KEY, VALUE, G, BETA, STATES, SOURCE, TARGET, LIVE, OUT,
    q_stride, k_stride, v_stride, g_stride, beta_stride, scale,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    K_PADDED: tl.constexpr, BLOCK_V: tl.constexpr,
    PER_CHANNEL: tl.constexpr, DELTA: tl.constexpr, L2NORM: tl.constexpr,
):  # fmt: skip
    """Computes `StateStep` for a row's head and a block of its values' columns."""
    row = (tl.program_id(0) // H).to(tl.int64)
    head = tl.program_id(0) % H
    k = tl.arange(0, K_PADDED)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    out = OUT + (row * H + head) * V + v
    live = tl.load(LIVE + row)
    if live == 0:
        tl.store(out, tl.zeros([BLOCK_V], tl.float32), mask=v < V)
    else:
        # int64: a slot's place may lie beyond 2**31 numbers
        place = head * (K * V) + k[:, None] * V + v[None, :]
        inside = (k[:, None] < K) & (v[None, :] < V)
        source = STATES + tl.load(SOURCE + row) * (H * K * V)
        target = STATES + tl.load(TARGET + row) * (H * K * V)
        state = tl.load(source + place, mask=inside, other=0)
        at = (head // GROUP) * K + k
        query = tl.load(QUERY + row * q_stride + at, mask=k < K, other=0).to(tl.float32)
        key = tl.load(KEY + row * k_stride + at, mask=k < K, other=0).to(tl.float32)
        value = tl.load(VALUE + row * v_stride + head * V + v, mask=v < V, other=0).to(tl.float32)
        beta = tl.load(BETA + row * beta_stride + head).to(tl.float32)
        if L2NORM:
            query = query / tl.sqrt(tl.sum(query * query, 0) + 1e-6)
            key = key / tl.sqrt(tl.sum(key * key, 0) + 1e-6)
        if PER_CHANNEL:
            g = tl.load(G + row * g_stride + head * K + k, mask=k < K, other=0).to(tl.float32)
            state *= tl.exp(g)[:, None]
        else:
            state *= tl.exp(tl.load(G + row * g_stride + head).to(tl.float32))
        if DELTA:
            value -= tl.sum(key[:, None] * state, 0)
        state += key[:, None] * (beta * value)[None, :]
        tl.store(target + place, state, mask=inside)
        tl.store(out, scale * tl.sum(query[:, None] * state, 0), mask=v < V)


INTERPRETED = not isinstance(rule_step_kernel, triton.JITFunction)


def conv(call: ConvStep) -> torch.Tensor:
    """Computes [B, D] in x's dtype."""
    x = _inner_contiguous(call.x)
    out = x.new_empty(x.shape)
    with runtime.current(x.device):
        conv_step_kernel[(len(x), triton.cdiv(x.shape[1], COLUMNS))](
            *(x, call.weight.contiguous(), call.bias, call.tails, *_slots(call), out),
            *(x.stride(0), x.shape[1]),
            W=call.weight.shape[1],
            SILU=call.silu,
            COLUMNS=COLUMNS,
            num_warps=2,
        )
    return out


def rule(call: StateStep) -> torch.Tensor:
    """Computes [B, H, V] in value's dtype."""
    tensors = [_inner_contiguous(x) for x in call[:5]]
    (rows, heads, d_v), (_, key_heads, d_k) = call.value.shape, call.key.shape
    out = call.value.new_empty(call.value.shape)
    sizes = rule_sizes(d_k, d_v)
    with runtime.current(out.device):
        rule_step_kernel[(rows * heads, triton.cdiv(d_v, sizes["BLOCK_V"]))](
            *(*tensors, call.states, *_slots(call), out),
            *(*(x.stride(0) for x in tensors), call.scale),
            H=heads,
            GROUP=heads // key_heads,
            PER_CHANNEL=call.g.ndim == 3,
            DELTA=call.delta,
            L2NORM=call.qk_l2norm,
            **sizes,
        )
    return out


def rule_sizes(d_k: int, d_v: int) -> dict[str, int]:
    """Names the sizes by which `rule_step_kernel` cuts a state of these head dims."""
    padded = triton.next_power_of_2(d_k)
    block = min(triton.next_power_of_2(d_v), max(1, STATE_NUMBERS // padded))
    return {"K": d_k, "V": d_v, "K_PADDED": padded, "BLOCK_V": block, "num_warps": 4}


def _slots(call: ConvStep | StateStep) -> tuple[Any, ...]:
    return call.rows.source, call.rows.target, call.rows.live.view(torch.uint8)


def _inner_contiguous(x: torch.Tensor) -> torch.Tensor:
    """Makes the numbers of a row contiguous; rows may be a part of longer rows."""
    return x if x[0].is_contiguous() else x.contiguous()
