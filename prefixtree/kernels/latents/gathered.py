"""Attention to chosen keys of multi-head latent attention, gathered: for long paths.

One latent row gives the keys and values of a token, by a projection of each head. If queries and
outputs absorb the projection, all heads of a query read the rows themselves. That is 3.4 times the
work per pair (DeepSeek V3.2), but only for chosen pairs. Tiles of all keys (`tree_attention`) read
every visible pair.

    score = (q_nope W_k) . latent + q_rope . rope,    out = (sum of p latent) W_v

Queries are processed in chunks, so no object is as large as heads x latents of all tokens. The
gradient of a latent is summed over queries in float32, by atomics in Triton: not repeatable.

Legend: T packed tokens, n queries of a chunk, H heads, R and P columns of a latent and of its key
with positions, D = N + P and Dv head dims, k keys a query may choose.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from prefixtree.kernels.latents.definition import Chunk, Kernels, sums_of
from prefixtree.kernels.operators import as_given, uncompiled
from prefixtree.kernels.runtime import installed
from prefixtree.packing.host_mask import HostMask

# numbers of a chunk's absorbed queries (128 MiB in half precision), and of lists of keys (64 MiB),
# which are made for several chunks because it takes many queries to fill a GPU
_CHUNK, _LISTED = 1 << 26, 1 << 24
# TFLOP/s forward and backward of tiles of all keys, and of gathered keys, whose backward runs their
# forward once more for a projection that trains: chains of 32K and 128K on an H200
TILES, GATHERED = (440, 330), (290, 150)


def pays(mask: HostMask, most: int, dims: tuple[int, int], latent: tuple[int, int]) -> bool:
    """Whether gathering should beat tiles of all keys, for dims (D, Dv) and latent (R, P)."""
    rank, rope = latent

    def cost(pairs: int, d: int, dv: int, speed: tuple[int, int]) -> float:
        return pairs * ((d + dv) / speed[0] + (3 * d + 2 * dv) / speed[1])

    return cost(mask.visible_pairs(0), *dims, TILES) > cost(
        # a query chooses as many keys of its path as a window of so many tokens shows
        mask.visible_pairs(most),
        rank + rope,
        rank,
        GATHERED,
    )


def kernels_for(backend: str, device: torch.device) -> Any:
    """Imports the Triton kernels if they are verified for a device, or returns None."""
    if backend not in ("auto", "triton") or not installed("triton"):
        return None
    if device.type != "cuda" and backend != "triton":
        return None
    from prefixtree.kernels.latents import launch

    return launch if launch.runs_on(device) else None


def gathered_attention(
    q: torch.Tensor,
    latents: torch.Tensor,
    w: torch.Tensor,
    mask: HostMask,
    chosen: torch.Tensor,
    most: int,
    scale: float,
    kernels: Kernels,
) -> torch.Tensor:
    """Computes attention of every packed token to the keys that it chose: [T, H, Dv].

    q [T, H, D] has N columns without positions first. A row of latents, [T, R + P], is a latent and
    the part of its key with positions, which all heads share. w [R, H, N + Dv] projects latents to
    keys without positions, and values. All are of one dtype, and it is differentiable once in them.
    chosen int32 [T, W] is that of `tree_attention`. A query that chose more than `most`, or none,
    gets NaN.
    """
    with as_given(q):
        out: torch.Tensor = _Gathered.apply(q, latents, w, chosen, (mask, most, scale, kernels))
    return out


def _chunks(
    q: torch.Tensor, latents: torch.Tensor, w: torch.Tensor, chosen: torch.Tensor, call: Any
) -> Iterator[tuple[slice, Chunk]]:
    mask, max_keys, scale, kernels = call
    rope = latents.shape[1] - w.shape[0]
    nope = q.shape[2] - rope
    size = max(1, _CHUNK // (w.shape[0] * w.shape[1]))
    listed = size * max(1, _LISTED // (max_keys * size))
    for start in range(0, len(q), listed):
        block = slice(start, min(start + listed, len(q)))
        lists, lengths = kernels.indices(chosen, mask, block, max_keys)
        for first in range(start, block.stop, size):
            rows = slice(first, min(first + size, block.stop))
            part, own = q[rows], slice(first - start, rows.stop - start)
            absorbed = torch.bmm(part[..., :nope].transpose(0, 1), w[..., :nope].permute(1, 2, 0))
            yield rows, Chunk(absorbed, part[..., nope:], latents, lists[own], lengths[own], scale)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        latents: torch.Tensor,
        w: torch.Tensor,
        chosen: torch.Tensor,
        call: tuple[HostMask, int, float, Kernels],
    ) -> torch.Tensor:
        kernels = call[3]
        nope = q.shape[2] - (latents.shape[1] - w.shape[0])
        out = q.new_empty(*q.shape[:2], w.shape[2] - nope)
        lse = q.new_empty(q.shape[:2], dtype=sums_of(q))
        for rows, chunk in _chunks(q, latents, w, chosen, call):
            latent_out, lse[rows] = kernels.forward(chunk)
            out[rows] = torch.bmm(latent_out, w[..., nope:].transpose(0, 1)).transpose(0, 1)
        ctx.save_for_backward(q, latents, w, chosen, out, lse)
        ctx.call = call
        return out

    @staticmethod
    @uncompiled
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        with as_given(dout):
            return (*_gradients(ctx, dout), None, None)


def _gradients(
    ctx: Any, dout: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Computes the gradients of q, latents and w."""
    q, latents, w, chosen, out, lse = ctx.saved_tensors
    kernels = ctx.call[3]
    nope = q.shape[2] - (latents.shape[1] - w.shape[0])
    of_keys, of_values = w[..., :nope].transpose(0, 1), w[..., nope:].permute(1, 2, 0)
    dq = torch.empty_like(q)
    dlatents = torch.zeros_like(latents, dtype=sums_of(q))
    dw = torch.zeros_like(w.transpose(0, 1), dtype=sums_of(q)) if ctx.needs_input_grad[2] else None
    for rows, chunk in _chunks(q, latents, w, chosen, ctx.call):
        by_head = dout[rows].transpose(0, 1)
        delta = (dout[rows].to(lse.dtype) * out[rows]).sum(-1)
        dabsorbed = kernels.backward(
            chunk,
            torch.bmm(by_head, of_values),
            lse[rows],
            delta,
            dq[rows, :, nope:],
            dlatents,
        )
        dq[rows, :, :nope] = torch.bmm(dabsorbed, of_keys).transpose(0, 1)
        if dw is not None:
            # only a trained projection needs the outputs of latents again
            result, _ = kernels.forward(chunk)
            without_rope = q[rows, :, :nope].transpose(0, 1)
            dw[..., :nope] += torch.bmm(dabsorbed.transpose(1, 2), without_rope)
            dw[..., nope:] += torch.bmm(result.transpose(1, 2), by_head)
    result = None if dw is None else dw.transpose(0, 1).to(w.dtype)
    return dq, dlatents.to(latents.dtype), result
