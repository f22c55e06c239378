"""The causal convolution along paths by torch's operations on any device.

Legend: T packed tokens, D channels, W taps, M entries of `Taps`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from prefixtree.kernels.recurrence.protocol import ConvCall
from prefixtree.packing.segments import Taps

# a slab of channels has at most so many numbers in an intermediate
_SLAB_NUMBERS = 1 << 24


def forward(call: ConvCall) -> torch.Tensor:
    """-> out [T, D] in x's dtype."""
    out = torch.empty_like(call.x, memory_format=torch.contiguous_format)
    for channels in _slabs(call):
        total = _sums(call, channels)
        out[:, channels] = (F.silu(total) if call.silu else total).to(out.dtype)
    return out


def backward(call: ConvCall, dout: torch.Tensor) -> list[torch.Tensor]:
    """-> gradients of x, weight and, if there is one, bias."""
    taps, width = _taps(call), call.weight.shape[1]
    wide = torch.promote_types(call.x.dtype, torch.float32)
    dx = torch.empty_like(call.x, memory_format=torch.contiguous_format)
    dweight = call.weight.new_empty(call.weight.shape, dtype=wide)
    dbias = None if call.bias is None else call.bias.new_empty(call.bias.shape, dtype=wide)
    rows = taps.branch_tokens
    counts = taps.start.diff()
    for channels in _slabs(call):
        dtotal = dout[:, channels].to(wide)
        if call.silu:
            dtotal = _silu_backward(dtotal, _sums(call, channels))
        weight = call.weight[channels].to(wide)
        x = call.x[:, channels].to(wide)
        # the taps of the token itself; then those of tokens next in packed order
        dpart = dtotal * weight[:, width - 1]
        dweight[channels, width - 1] = (dtotal * x).sum(0)
        for j in range(1, width):
            reads = (taps.ancestors[j] >= 0)[:, None]
            read = x.index_select(0, taps.ancestors[j].clamp(min=0)) * reads
            dweight[channels, width - 1 - j] = (dtotal * read).sum(0)
            if j < len(dpart):
                near = taps.ancestors[j, j:] == torch.arange(len(dpart) - j, device=dpart.device)
                dpart[:-j] += dtotal[j:] * weight[:, width - 1 - j] * near[:, None]
        if len(rows):
            # those over a branch: one after another, never atomics
            terms = dtotal.index_select(0, taps.token)
            terms *= weight.t().index_select(0, width - 1 - taps.tap)
            dpart[rows] += torch.segment_reduce(
                terms, "sum", lengths=counts[rows], axis=0, unsafe=True, initial=0
            )
        dx[:, channels] = dpart.to(dx.dtype)
        if dbias is not None:
            dbias[channels] = dtotal.sum(0)
    grads = [dx, dweight.to(call.weight.dtype)]
    return grads if call.bias is None or dbias is None else [*grads, dbias.to(call.bias.dtype)]


def _taps(call: ConvCall) -> Taps[torch.Tensor]:
    assert call.mask is not None
    return call.mask.segment_tables(call.x.device).taps(call.weight.shape[1])


def _slabs(call: ConvCall) -> list[slice]:
    """Channels that are done together."""
    rows, channels = max(len(call.x), len(_taps(call).token), 1), call.x.shape[1]
    step = max(1, _SLAB_NUMBERS // rows)
    return [slice(first, min(first + step, channels)) for first in range(0, channels, step)]


def _sums(call: ConvCall, channels: slice) -> torch.Tensor:
    """[T, channels], before the activation."""
    taps, width = _taps(call), call.weight.shape[1]
    wide = torch.promote_types(call.x.dtype, torch.float32)
    x, weight = call.x[:, channels].to(wide), call.weight[channels].to(wide)
    total = x * weight[:, width - 1]
    if call.bias is not None:
        total += call.bias[channels].to(wide)
    for j in range(1, width):
        reads = (taps.ancestors[j] >= 0)[:, None]
        read = x.index_select(0, taps.ancestors[j].clamp(min=0))
        total += read * (weight[:, width - 1 - j] * reads)
    return total


def _silu_backward(dout: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    sigmoid = x.sigmoid()
    return dout * sigmoid * (1 + x * (1 - sigmoid))
