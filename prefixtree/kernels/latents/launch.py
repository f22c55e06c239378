"""The host side of attention to gathered latents in Triton: buffers and launches.

Legend: n queries of a chunk, H heads, R and P columns of a latent and of its key with positions.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Any

import torch
import triton

from prefixtree.kernels import runtime
from prefixtree.kernels.latents.definition import Chunk
from prefixtree.kernels.latents.kernels import (
    backward_kernel,
    forward_kernel,
    index_kernel,
)
from prefixtree.packing.block_tables import TileShape
from prefixtree.packing.host_mask import HostMask

# queries and keys of a tile of the lists of keys: few steps along long paths, each waiting for
# memory
LISTED = TileShape(2, 1024)
# heads of a program, and its warps
ROWS, WARPS = 64, 8
# keys of a step and stages, forward and backward; columns of a latent that the backward has at
# once. Of 227 KiB of shared memory the forward takes 224 and the backward 184, compiled for sm_90.
# The backward has no room for a second tile of keys
FORWARD, BACKWARD, WIDTH = (64, 2), (32, 1), 128

INTERPRETED = not isinstance(forward_kernel, triton.JITFunction)


def padded(columns: int) -> int:
    """The power of two that holds so many columns; a matrix product takes at least 16."""
    return max(16, triton.next_power_of_2(columns))


def runs_on(device: torch.device) -> bool:
    """Whether the kernels are verified on a device: Hopper alone has their shared memory."""
    if device.type != "cuda":
        return INTERPRETED
    return torch.version.hip is None and runtime.capability(device) == (9, 0)


def serves(q: torch.Tensor, rank: int, rope: int) -> bool:
    """Says whether the kernels serve a call: `Kernels.serves`."""
    dtypes = (torch.float16, torch.bfloat16) + ((torch.float32,) if INTERPRETED else ())
    return q.dtype in dtypes and 1 <= rank <= 512 and 1 <= rope <= 64


def indices(
    chosen: torch.Tensor, mask: HostMask, rows: slice, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `Kernels.indices`."""
    device, n = chosen.device, rows.stop - rows.start
    # searched without numpy, which would copy this view
    starts = mask.tables(LISTED, 0, torch.device("cpu")).q_tiles[:, 1].numpy()
    tile = bisect_right(range(len(starts)), rows.start, key=starts.__getitem__) - 1
    end = bisect_left(range(len(starts)), rows.stop, key=starts.__getitem__)
    tables = mask.tables(LISTED, 0, device)
    index = chosen.new_empty(n, most)
    count = chosen.new_empty(n)
    with runtime.current(device):
        index_kernel[(end - tile,)](
            chosen.contiguous(),
            index,
            count,
            tables.k_spans,
            mask.on(device)["position_ids"],
            tables.q_tiles,
            tables.q_ptr,
            tables.q_runs,
            rows.start,
            rows.stop,
            tile,
            chosen.shape[1],
            most,
            TOKENS=LISTED.tile_q,
            KEYS=LISTED.tile_k,
            num_warps=4,
        )
    return index, count


def _launch(kernel: Any, chunk: Chunk, tensors: Any, strides: Any, size: Any, **more: int) -> None:
    heads, n, rank = chunk.absorbed.shape
    rope = chunk.rope.shape[2]
    with runtime.current(chunk.latents.device):
        kernel[(n * triton.cdiv(heads, ROWS),)](
            chunk.absorbed,
            chunk.rope,
            chunk.latents,
            chunk.lists,
            chunk.lengths,
            *tensors,
            *strides,
            n,
            chunk.lists.shape[1],
            chunk.scale,
            HEADS=heads,
            R=rank,
            P=rope,
            R_PADDED=padded(rank),
            P_PADDED=padded(rope),
            ROWS=ROWS,
            KEYS=size[0],
            num_warps=WARPS,
            num_stages=size[1],
            **more,
        )


def forward(chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `Kernels.forward`."""
    chunk = chunk._replace(absorbed=chunk.absorbed.contiguous())
    heads, n, _ = chunk.absorbed.shape
    out = torch.empty_like(chunk.absorbed)
    lse = out.new_empty(n, heads, dtype=torch.float32)
    _launch(forward_kernel, chunk, (out, lse), chunk.rope.stride()[:2], FORWARD, STAGES=FORWARD[1])
    return out, lse


def backward(
    chunk: Chunk,
    dout: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    drope: torch.Tensor,
    dlatents: torch.Tensor,
) -> torch.Tensor:
    """Computes `Kernels.backward`."""
    chunk = chunk._replace(absorbed=chunk.absorbed.contiguous())
    dabsorbed = torch.empty_like(chunk.absorbed)
    tensors = (dout.contiguous(), lse, delta.contiguous(), dabsorbed, drope, dlatents)
    strides = (*chunk.rope.stride()[:2], *drope.stride()[:2])
    width = min(WIDTH, padded(dabsorbed.shape[2]))
    _launch(backward_kernel, chunk, tensors, strides, BACKWARD, WIDTH=width)
    return dabsorbed
