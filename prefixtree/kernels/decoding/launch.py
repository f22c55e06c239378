"""The host side of decoding's Triton kernels: four launches, and no read from the device.

Legend: B rows, H query heads, Hk kv heads, D and Dv head dims.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache

import torch
import triton

from prefixtree.kernels import runtime
from prefixtree.kernels.attention.triton import configs
from prefixtree.kernels.attention.triton.configs import padded
from prefixtree.kernels.attention.triton.launch import INTERPRETED, LOG2E
from prefixtree.kernels.decoding.kernels import merge_kernel, partial_kernel, write_kernel
from prefixtree.kernels.decoding.work import DecodeCall

# slots that a program of the merge loads at once, and its warps: it waits for memory, and more
# small programs wait at the same time (H200, agent rollouts: 88 us less of 1,023 than 4 warps)
_MERGED, _MERGE_WARPS = 16, 1


def refusal(call: DecodeCall) -> str | None:
    """Says why these kernels cannot serve a call; None if they can."""
    q, d_v = call.q, call.v.shape[2]
    if not (q.is_cuda or INTERPRETED):
        return f"it runs on GPUs, and q is on {q.device}"
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"it computes in float16, bfloat16 and float32, and q is {q.dtype}"
    if q.is_cuda and torch.version.hip is None and runtime.capability(q.device) < (8, 0):
        return "it needs compute capability 8.0 (Ampere) or later"
    if max(q.shape[2], d_v) > 256:
        return f"head dims must be 1 to 256, and are {q.shape[2]} and {d_v}"
    if not (call.key_pool.is_contiguous() and call.value_pool.is_contiguous()):
        return "it writes into contiguous pools"
    return None


def forward(call: DecodeCall) -> torch.Tensor:
    """Writes k and v, and computes out [B, H, Dv] in q's dtype."""
    tables, (rows, heads, d) = call.tables, call.q.shape
    kv_heads, d_v = call.v.shape[1:]
    q, pools = call.q.contiguous(), (call.key_pool, call.value_pool)
    out = q.new_empty(rows, heads, d_v)
    part = q.new_empty(len(tables.slots), heads, d_v, dtype=torch.float32)
    lse = part.new_empty(len(tables.slots), heads)
    dims = {"D": d, "DV": d_v, "D_PADDED": padded(d), "DV_PADDED": padded(d_v)}
    tail_tables = tables.tails, tables.written, tables.live.view(torch.uint8)
    with runtime.current(q.device):
        key, value = kv_heads * d, kv_heads * d_v
        widths = {"KEY": key, "KEY_PADDED": triton.next_power_of_2(key)}
        widths |= {"VALUE": value, "VALUE_PADDED": triton.next_power_of_2(value)}
        write_kernel[(rows,)](
            call.k.contiguous(), call.v.contiguous(), *pools, *tail_tables, **widths
        )
        group = heads // kv_heads
        config_pair = configs.choose_decode(
            runtime.capability(q.device), dims["D_PADDED"], dims["DV_PADDED"], q.dtype.itemsize
        )
        kinds = (tables.wide, tables.narrow), (call.block, call.narrow_block), config_pair
        # in a graph, narrow items run on processors that wide ones leave idle; kernels launched one
        # by one are too short to gain what another stream costs the host
        side_stream = None
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            side_stream = _beside(q.device)
            side_stream.wait_stream(torch.cuda.current_stream())
        for stream, items, most_rows, config in zip((None, side_stream), *kinds, strict=True):
            if len(items) == 0:
                continue
            with torch.cuda.stream(stream) if stream else nullcontext():
                partial_kernel[(len(items) * kv_heads,)](
                    q,
                    *pools,
                    part,
                    lse,
                    items,
                    tables.pieces,
                    *tail_tables,
                    *_factors(call),
                    call.window,
                    GROUP=group,
                    KV_HEADS=kv_heads,
                    # a list may have been built for another group
                    ROWS=max(16, triton.next_power_of_2(most_rows * group)),
                    KEYS=config.keys,
                    HAS_WINDOW=call.window > 0,
                    HAS_SOFTCAP=call.softcap > 0,
                    **_options(config),
                    **dims,
                )
        if side_stream is not None:
            torch.cuda.current_stream().wait_stream(side_stream)
        merge_kernel[(rows * heads,)](
            part,
            lse,
            lse if call.sinks is None else call.sinks.contiguous(),
            out,
            tables.slot_ptr,
            tables.slots,
            HEADS=heads,
            DV=d_v,
            DV_PADDED=dims["DV_PADDED"],
            BLOCK=_MERGED,
            HAS_SINKS=call.sinks is not None,
            num_warps=_MERGE_WARPS,
        )
    return out


@cache
def _beside(device: torch.device) -> torch.cuda.Stream:
    """Makes the stream to which a captured call forks, and which it joins again."""
    return torch.cuda.Stream(device)


def _options(config: configs.Config) -> dict[str, int]:
    """Names the launch options of a configuration."""
    out = {"num_warps": config.warps, "num_stages": config.stages}
    if config.registers and torch.version.hip is None:
        out["maxnreg"] = config.registers
    return out


def _factors(call: DecodeCall) -> tuple[float, float]:
    """Computes `inner` and `outer` of `triton_primitives.squash`."""
    if call.softcap:
        return call.scale / call.softcap, call.softcap * LOG2E
    return 0.0, call.scale * LOG2E
