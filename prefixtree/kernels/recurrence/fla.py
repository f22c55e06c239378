"""The backend "fla": which calls it serves, and how it brings them to `fla_rules`.

fla-core norms queries and keys too, but tries 25 configurations anew for every 65,536 more rows
(2,048 tokens of 32 heads). A trainer whose micro-batches differ in length would compile for half a
minute in many of its first steps. So these norms have Triton kernels here.

Legend: T packed tokens, Hk key heads, Hv value heads, K and V head dims, H heads, P head dim; of
norms R rows, D head dim.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import triton
import triton.language as tl

from prefixtree.kernels import runtime
from prefixtree.kernels.recurrence.protocol import Call, Computed, ConvCall, DeltaCall, SsdCall
from prefixtree.kernels.recurrence.states import CHUNK, INTERPRETED
from prefixtree.packing.segments import StateSchedule, tables_of

# numbers that a program holds
_SIZE = 4096


@triton.jit
def _l2norm_forward(
    x_ptr, y_ptr, factor_ptr, R, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLS)
    at = row[:, None] * D + column[None, :]
    inside = (row < R)[:, None] & (column < D)[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    # the same as in fla and transformers
    factor = 1.0 / tl.sqrt(tl.sum(x * x, 1) + 1e-6)
    tl.store(y_ptr + at, x * factor[:, None], mask=inside)
    tl.store(factor_ptr + row, factor, mask=row < R)


@triton.jit
def _l2norm_backward(
    y_ptr, factor_ptr, dy_ptr, dx_ptr, R, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLS)
    at = row[:, None] * D + column[None, :]
    inside = (row < R)[:, None] & (column < D)[None, :]
    y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(factor_ptr + row, mask=row < R, other=0.0)
    dx = (dy - y * tl.sum(dy * y, 1)[:, None]) * factor[:, None]
    tl.store(dx_ptr + at, dx, mask=inside)


def l2norm(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes x / sqrt(sum of squares + 1e-6), x [.., D], in its dtype, and factors, fp32 [..]."""
    x = x.contiguous()
    y, factors = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
    _launch(_l2norm_forward, x, y, factors)
    return y, factors


def through_l2norm(y: torch.Tensor, factors: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """Computes the gradient of `l2norm`'s input in the dtype of y; y, dy [.., D], factors [..]."""
    dx = torch.empty_like(y)
    _launch(_l2norm_backward, y, factors, dy.contiguous(), dx)
    return dx


def _launch(kernel: Any, x: torch.Tensor, *others: torch.Tensor) -> None:
    """Launches a kernel over the rows of x [.., D]."""
    dim = x.shape[-1]
    rows, columns = x.numel() // dim, triton.next_power_of_2(dim)
    size = max(1, _SIZE // columns)
    kernel[(triton.cdiv(rows, size),)](x, *others, rows, dim, ROWS=size, COLS=columns)


# releases whose inner functions are those that `fla_rules` calls
VERSIONS = ("0.6.0",)


def refusal(call: Call) -> str | None:
    """Says why this backend cannot serve a call; None if it can."""
    if isinstance(call, ConvCall):
        return "it has no convolution; use backend='triton'"
    x = call[0]
    if not (x.is_cuda or INTERPRETED):
        return f"it runs on GPUs, and the inputs are on {x.device}"
    dtypes = (torch.float16, torch.bfloat16)
    if x.dtype not in dtypes and not (INTERPRETED and x.dtype == torch.float32):
        return f"it computes in float16 and bfloat16, and the inputs are {x.dtype}"
    if x.shape[0] == 0:
        return "there are no tokens"
    key = call.B if isinstance(call, SsdCall) else call.key
    value = call.x if isinstance(call, SsdCall) else call.value
    if max(key.shape[2], value.shape[2]) > 256 or min(key.shape[2], value.shape[2]) < 16:
        return f"head dims must be 16 to 256, and are {key.shape[2]} and {value.shape[2]}"
    if x.is_cuda and runtime.capability(x.device) < (8, 0):
        return "it needs compute capability 8.0 (Ampere) or later"
    if (reason := _package_refusal()) is not None:
        return reason
    if not (isinstance(call, DeltaCall) and call.g.ndim == 3):
        return _gate_refusal()
    return None


@cache
def _package_refusal() -> str | None:
    try:
        installed = version("fla-core")
    except PackageNotFoundError:
        needed = " or ".join(VERSIONS)
        return f"fla-core ({needed}) is not installed: pip install 'prefixtree-attention[fla]'"
    if installed not in VERSIONS:
        return f"it works with fla-core {' or '.join(VERSIONS)}, and {installed} is installed"
    return None


@cache
def _gate_refusal() -> str | None:
    """Says why fla refuses its gated backward, which some Tritons miscompile; or None."""
    from fla.ops.common.backends import CommonTileLangBackend
    from fla.ops.common.chunk_o import IS_NVIDIA_HOPPER, TRITON_ABOVE_3_4_0, TRITON_ABOVE_3_7_1

    if not IS_NVIDIA_HOPPER or not TRITON_ABOVE_3_4_0 or TRITON_ABOVE_3_7_1:
        return None
    if CommonTileLangBackend.can_use():
        return None
    return (
        f"Triton {version('triton')} miscompiles fla's gated backward on Hopper (fla's issue 640); "
        "install tilelang, with nvcc on the PATH, or Triton 3.7.1 or later"
    )


def saves(call: Call) -> list[torch.Tensor]:
    """Makes tensors like `forward` saves: gates summed along chunks; triangles of each chunk."""
    if isinstance(call, SsdCall):
        return [call.dt.new_empty(call.dt.shape, dtype=torch.float32)]
    assert isinstance(call, DeltaCall)
    heads, value = call.value.shape[1], call.value
    saved = [call.g.new_empty(call.g.shape, dtype=torch.float32)]
    triangles = 2 if call.g.ndim == 3 else 1
    return saved + [value.new_empty(value.shape[0], heads, CHUNK) for _ in range(triangles)]


def forward(call: Call) -> Computed:
    """Computes out [T, Hv, V] or [T, H, P], and saves what the backward needs in addition."""
    from prefixtree.kernels.recurrence import fla_rules as rules

    schedule = _schedule(call)
    with runtime.current(call[0].device):
        if isinstance(call, SsdCall):
            value, g = _ssd_inputs(call)
            C, B = call.C.contiguous(), call.B.contiguous()
            out, kept, final = rules.linear_attention_forward(
                C, B, value, g, schedule, 1.0, call.initial
            )
            return Computed(out, list(kept), None if call.num_final is None else final)
        assert isinstance(call, DeltaCall)
        query, key = normed(call)[:2]
        value, g, beta = call.value.contiguous(), call.g.contiguous(), call.beta.contiguous()
        rule = rules.channel_delta_rule_forward if g.ndim == 3 else rules.delta_rule_forward
        out, kept, final = rule(query, key, value, g, beta, schedule, call.scale, call.initial)
        return Computed(out, list(kept), None if call.num_final is None else final)


def backward(
    call: Call, dout: torch.Tensor, saved: list[torch.Tensor], dfinal: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Computes a gradient for each tensor of the call, in their order and dtypes."""
    from prefixtree.kernels.recurrence import fla_rules as rules

    schedule, dout = _schedule(call), dout.contiguous()
    with runtime.current(call[0].device):
        if isinstance(call, SsdCall):
            value, _ = _ssd_inputs(call)
            C, B = call.C.contiguous(), call.B.contiguous()
            dC, dB, dvalue, dg, dinitial = rules.linear_attention_backward(
                C, B, value, tuple(saved), dout, schedule, 1.0, call.initial, dfinal
            )
            dt, dvalue = call.dt.float(), dvalue.float()
            dx = dvalue * dt[..., None]
            ddt = (dvalue * call.x).sum(-1) + dg * call.A.float()
            grads = [dx, ddt, (dg * dt).sum(0), dB, dC, dinitial]
        else:
            assert isinstance(call, DeltaCall)
            query, key, *norms = normed(call)
            value, beta = call.value.contiguous(), call.beta.contiguous()
            channels = call.g.ndim == 3
            rule = rules.channel_delta_rule_backward if channels else rules.delta_rule_backward
            states = call.initial, dfinal
            grads = list(
                rule(query, key, value, beta, tuple(saved), dout, schedule, call.scale, *states)
            )
            through_norms(grads, query, key, *norms)
    return in_dtypes(call, grads if call.initial is not None else grads[:-1])


def _schedule(call: Call) -> StateSchedule:
    assert call.mask is not None
    return tables_of(call.mask, call[0].device).schedule(CHUNK)


def normed(call: DeltaCall) -> tuple[torch.Tensor, ...]:
    """Gives query and key and, if they are to be normed, both normed and the factors."""
    # the backward norms them again: two passes over them cost less than keeping both
    if not call.qk_l2norm:
        return call.query.contiguous(), call.key.contiguous()
    (query, of_query), (key, of_key) = l2norm(call.query), l2norm(call.key)
    return query, key, of_query, of_key


def through_norms(
    grads: list[torch.Tensor], query: torch.Tensor, key: torch.Tensor, *norms: torch.Tensor
) -> None:
    """Replaces the first two gradients by those of the inputs of `normed`."""
    if norms:
        grads[0] = through_l2norm(query, norms[0], grads[0])
        grads[1] = through_l2norm(key, norms[1], grads[1])


def in_dtypes(call: Call, grads: list[torch.Tensor]) -> list[torch.Tensor]:
    """Casts gradients to the dtypes of a call's tensors, contiguous."""
    tensors = [x for x in call if isinstance(x, torch.Tensor)]
    return [grad.to(x.dtype).contiguous() for grad, x in zip(grads, tensors, strict=True)]


def _ssd_inputs(call: SsdCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Brings Mamba-2 to gated linear attention: the value dt x, the log of the decay dt A."""
    value = (call.x * call.dt[..., None]).to(call.x.dtype)
    return value.contiguous(), call.dt.float() * call.A.float()
