"""Attention to chosen keys of multi-head latent attention, gathered: for long paths.

The keys and values of a token come of one latent row, by a projection of each head. Moved over to
queries and outputs ("absorbed"), it lets all heads of a query read the rows themselves: 3.4 times
the work a pair of DeepSeek V3.2, but only of the pairs that were chosen. Tiles of all keys
(`attention.triton`) read every visible pair.

    score = (q_nope W_k) . latent + q_rope . rope,    out = (sum of p latent) W_v

Queries are worked off in chunks, so that nothing as large as heads x latents of all tokens exists.
The gradient of a latent is summed over queries in float32, by atomics in Triton: not repeatable.

Legend: T packed tokens, n queries of a chunk, H heads, R and P columns of a latent and of its key
with positions, D = N + P and Dv head dims, k keys a query may choose.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.function import once_differentiable

from prefixtree.kernels.chosen import from_bits
from prefixtree.kernels.packages import installed
from prefixtree.kernels.torch_library import as_given, uncompiled
from prefixtree.packing.host_mask import HostMask

# numbers of a chunk's absorbed queries: 128 MiB in half precision; of lists of keys, made for
# several chunks, as it takes many queries to fill a GPU: 64 MiB
_CHUNK, _LISTED = 1 << 26, 1 << 24
# numbers that torch's operations gather at once
_GATHERED = 1 << 24
# TFLOP/s forward and backward of tiles of all keys, and of gathered ones (predicted, H200)
TILES, GATHERED = (350, 250), (450, 200)


class Chunk(NamedTuple):
    """Some queries, and the keys that each chose.

    Attributes:
        absorbed: [H, n, R].
        rope: [n, H, P], any strides but the last.
        latents: [T, R + P].
        lists: int32 [n, k], packed tokens of the chosen keys in front, anything behind.
        lengths: int32 [n], how many a query chose; more than k are an error, which gives NaN.
        scale: factor on scores.
    """

    absorbed: torch.Tensor
    rope: torch.Tensor
    latents: torch.Tensor
    lists: torch.Tensor
    lengths: torch.Tensor
    scale: float


class Kernels(Protocol):
    """The functions of an implementation: this module's, or `attention.triton.gathered`."""

    def serves(self, q: torch.Tensor, rank: int, rope: int) -> bool:
        """Whether they run in the dtype of q, for so many columns R and P."""
        ...

    def indices(
        self, chosen: torch.Tensor, mask: HostMask, rows: slice, most: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """lists and lengths of `Chunk`, from bits int32 [T, W]."""
        ...

    def forward(self, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
        """out [H, n, R] in the inputs' dtype, lse float32 (float64) [n, H], natural log."""
        ...

    def backward(
        self,
        chunk: Chunk,
        dout: torch.Tensor,
        lse: torch.Tensor,
        delta: torch.Tensor,
        drope: torch.Tensor,
        dlatents: torch.Tensor,
    ) -> torch.Tensor:
        """The gradient of `absorbed`; writes that of `rope`, and adds to that of `latents`.

        dout [H, n, R]; delta [n, H], the sums of out x dout; drope as rope; dlatents as latents, in
        float32 (float64)."""
        ...


def pays(mask: HostMask, most: int, dims: tuple[int, int], latent: tuple[int, int]) -> bool:
    """Whether gathered keys are expected to take less time than tiles of all keys.

    Args:
        mask: of the forest. most: k. dims: D and Dv. latent: R and P.
    """
    rank, rope = latent

    def cost(pairs: int, d: int, dv: int, speed: tuple[int, int]) -> float:
        return pairs * ((d + dv) / speed[0] + (3 * d + 2 * dv) / speed[1])

    return cost(mask.visible_pairs(0), *dims, TILES) > cost(
        # a query chooses of its path as a window of as many tokens sees of it
        mask.visible_pairs(most),
        rank + rope,
        rank,
        GATHERED,
    )


def kernels_for(backend: str, device: torch.device) -> Any:
    """The Triton kernels where they are verified for a device, or None."""
    if backend not in ("auto", "triton") or not installed("triton"):
        return None
    if device.type != "cuda" and backend != "triton":
        return None
    from prefixtree.kernels.attention.triton import gathered

    return gathered if gathered.runs_on(device) else None


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
    """Attention of every packed token to the keys that it chose.

    Args:
        q: [T, H, D], N columns without positions first.
        latents: [T, R + P] in q's dtype: a row is a latent and the part of its key with positions,
            which all heads share.
        w: [R, H, N + Dv] in q's dtype, what makes keys without positions, and values, of latents.
        mask: of the forest.
        chosen: int32 [T, W], as `tree_attention` takes it.
        most: k. A query that chose more, or none, has NaN for its row.
        scale: the factor on scores.
        kernels: this module's definition or the Triton kernels.

    Returns:
        [T, H, Dv] in q's dtype. Differentiable once in q, latents and w.
    """
    with as_given(q):
        out: torch.Tensor = _Gathered.apply(q, latents, w, chosen, (mask, most, scale, kernels))
    return out


def _chunks(
    q: torch.Tensor, latents: torch.Tensor, w: torch.Tensor, chosen: torch.Tensor, call: Any
) -> Iterator[tuple[slice, Chunk]]:
    mask, most, scale, kernels = call
    rope = latents.shape[1] - w.shape[0]
    nope = q.shape[2] - rope
    size = max(1, _CHUNK // (w.shape[0] * w.shape[1]))
    listed = size * max(1, _LISTED // (most * size))
    for start in range(0, len(q), listed):
        block = slice(start, min(start + listed, len(q)))
        lists, lengths = kernels.indices(chosen, mask, block, most)
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
        lse = q.new_empty(q.shape[:2], dtype=_sums(q))
        for rows, chunk in _chunks(q, latents, w, chosen, call):
            found, lse[rows] = kernels.forward(chunk)
            out[rows] = torch.bmm(found, w[..., nope:].transpose(0, 1)).transpose(0, 1)
        ctx.save_for_backward(q, latents, w, chosen, out, lse)
        ctx.call = call
        return out

    @staticmethod
    @uncompiled
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        with as_given(dout):
            return (*_gradients(ctx, dout), None, None)


def _gradients(
    ctx: Any, dout: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Of q, latents and w."""
    q, latents, w, chosen, out, lse = ctx.saved_tensors
    kernels = ctx.call[3]
    nope = q.shape[2] - (latents.shape[1] - w.shape[0])
    of_keys, of_values = w[..., :nope].transpose(0, 1), w[..., nope:].permute(1, 2, 0)
    dq = torch.empty_like(q)
    dlatents = torch.zeros_like(latents, dtype=_sums(q))
    dw = torch.zeros_like(w.transpose(0, 1), dtype=_sums(q)) if ctx.needs_input_grad[2] else None
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
            # where no projection is trained, the outputs of latents need not be there again
            found, _ = kernels.forward(chunk)
            without_rope = q[rows, :, :nope].transpose(0, 1)
            dw[..., :nope] += torch.bmm(dabsorbed.transpose(1, 2), without_rope)
            dw[..., nope:] += torch.bmm(found.transpose(1, 2), by_head)
    found = None if dw is None else dw.transpose(0, 1).to(w.dtype)
    return dq, dlatents.to(latents.dtype), found


def _sums(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


# ---- the definition, on any device ---------------------------------------------------------------


def serves(q: torch.Tensor, rank: int, rope: int) -> bool:
    """As `Kernels` says."""
    return True


def indices(
    chosen: torch.Tensor, mask: HostMask, rows: slice, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `Kernels` says; bool [n, T] for some queries at a time."""
    on = mask.on(chosen.device)
    end, position = on["subtree_end"], on["position_ids"].long()
    tokens = torch.arange(mask.num_tokens, device=chosen.device, dtype=torch.int32)
    parts = []
    for own in tokens[rows].split(max(1, _GATHERED // max(1, mask.num_tokens))):
        is_chosen = from_bits(chosen[own.long()], 0, mask.deepest)[:, position]
        is_chosen &= (tokens <= own[:, None]) & (own[:, None] < end)
        of_query = torch.where(is_chosen, tokens, mask.num_tokens).sort(-1).values
        index = of_query.new_zeros(len(own), most)
        index[:, : of_query.shape[1]] = of_query[:, :most]
        parts.append((index, is_chosen.sum(-1, dtype=torch.int32)))
    index, count = (torch.cat(part) for part in zip(*parts, strict=True))
    return index, count


class _Gather(NamedTuple):
    """Some queries of a chunk in the sums' dtype, and the rows of their keys.

    Attributes:
        rows: of the chunk.
        q: [H, m, R + P]. keys: [m, k, R + P]. tokens: int64 [m, k]. scores: [H, m, k].
    """

    rows: slice
    q: torch.Tensor
    keys: torch.Tensor
    tokens: torch.Tensor
    scores: torch.Tensor


def _gathers(chunk: Chunk) -> Iterator[_Gather]:
    most, width = chunk.lists.shape[1], chunk.latents.shape[1]
    dtype, number = _sums(chunk.latents), max(1, _GATHERED // max(1, most * width))
    q = torch.cat([chunk.absorbed, chunk.rope.transpose(0, 1)], -1)
    place = torch.arange(most, device=q.device)
    for first in range(0, q.shape[1], number):
        rows = slice(first, first + number)
        count = chunk.lengths[rows, None]
        index = chunk.lists[rows].long().masked_fill(place >= count, 0)
        keys, own = chunk.latents[index].to(dtype), q[:, rows].to(dtype)
        scores = torch.einsum("hmw,mkw->hmk", own, keys) * chunk.scale
        scores = scores.masked_fill(place >= count, -torch.inf)
        scores = scores.masked_fill(count > most, torch.nan)
        yield _Gather(rows, own, keys, index, scores)


def forward(chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
    """As `Kernels` says."""
    rank, parts = chunk.absorbed.shape[2], []
    for some in _gathers(chunk):
        lse = some.scores.logsumexp(-1)
        p = torch.exp(some.scores - lse[..., None])
        parts.append((torch.einsum("hmk,mkr->hmr", p, some.keys[..., :rank]), lse.T))
    out, lse = (
        torch.cat(part, dim) for part, dim in zip(zip(*parts, strict=True), (1, 0), strict=True)
    )
    return out.to(chunk.latents.dtype), lse


def backward(
    chunk: Chunk,
    dout: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    drope: torch.Tensor,
    dlatents: torch.Tensor,
) -> torch.Tensor:
    """As `Kernels` says."""
    rank = chunk.absorbed.shape[2]
    dabsorbed = torch.empty_like(chunk.absorbed)
    for rows, q, keys, tokens, scores in _gathers(chunk):
        p = torch.exp(scores - lse[rows].T[..., None])
        own = dout[:, rows].to(keys.dtype)
        dp = torch.einsum("hmr,mkr->hmk", own, keys[..., :rank])
        ds = p * (dp - delta[rows].T[..., None]) * chunk.scale
        dq = torch.einsum("hmk,mkw->hmw", ds, keys)
        dabsorbed[:, rows] = dq[..., :rank].to(dabsorbed.dtype)
        drope[rows] = dq[..., rank:].transpose(0, 1).to(drope.dtype)
        dkeys = torch.einsum("hmk,hmw->mkw", ds, q)
        dkeys[..., :rank] += torch.einsum("hmk,hmr->mkr", p, own)
        dlatents.index_add_(0, tokens.flatten(), dkeys.flatten(0, 1))
    return dabsorbed
