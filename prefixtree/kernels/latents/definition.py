"""Attention to gathered latents: `Chunk`, some queries of a call, and `Kernels`, the functions.

The functions here are torch's operations, which define the result on any device.

Legend: T packed tokens, n queries of a chunk, H heads, R and P columns of a latent and of its key
with positions, k keys a query may choose.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch

from prefixtree.kernels.chosen import from_bits
from prefixtree.packing.host_mask import HostMask


class Chunk(NamedTuple):
    """Queries, and the keys that each chose."""

    # [H, n, R]
    absorbed: torch.Tensor
    # [n, H, P], any strides but the last
    rope: torch.Tensor
    # [T, R + P]
    latents: torch.Tensor
    # int32 [n, k], the packed tokens of the chosen keys, then anything
    lists: torch.Tensor
    # int32 [n], how many a query chose; more than k are an error, which gives NaN
    lengths: torch.Tensor
    scale: float


class Kernels(Protocol):
    """The functions of an implementation: `definition`, or Triton's in `launch`."""

    def serves(self, q: torch.Tensor, rank: int, rope: int) -> bool:
        """Whether they run in the dtype of q, for so many columns R and P."""
        ...

    def indices(
        self, chosen: torch.Tensor, mask: HostMask, rows: slice, most: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Lists and counts the chosen keys for `Chunk`, from bits int32 [T, W]."""
        ...

    def forward(self, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes out [H, n, R] in the inputs' dtype, lse float32 (float64) [n, H], natural."""
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
        """Returns the gradient of `absorbed`, writes drope, adds to dlatents, float32 (float64).

        dout [H, n, R]; delta [n, H], the sums of out x dout; drope and dlatents as rope and
        latents.
        """
        ...


def sums_of(x: torch.Tensor) -> torch.dtype:
    """The dtype of sums."""
    return torch.promote_types(x.dtype, torch.float32)


# numbers that are gathered at once
_GATHERED = 1 << 24


def serves(q: torch.Tensor, rank: int, rope: int) -> bool:
    """Says yes: torch's operations run everywhere."""
    return True


def indices(
    chosen: torch.Tensor, mask: HostMask, rows: slice, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `Kernels.indices` by bool [n, T] for some queries at a time."""
    on = mask.on(chosen.device)
    end, position = on["subtree_end"], on["position_ids"].long()
    tokens = torch.arange(mask.num_tokens, device=chosen.device, dtype=torch.int32)
    parts = []
    for queries in tokens[rows].split(max(1, _GATHERED // max(1, mask.num_tokens))):
        is_chosen = from_bits(chosen[queries.long()], 0, mask.deepest)[:, position]
        is_chosen &= (tokens <= queries[:, None]) & (queries[:, None] < end)
        of_query = torch.where(is_chosen, tokens, mask.num_tokens).sort(-1).values
        index = of_query.new_zeros(len(queries), most)
        index[:, : of_query.shape[1]] = of_query[:, :most]
        parts.append((index, is_chosen.sum(-1, dtype=torch.int32)))
    index, count = (torch.cat(part) for part in zip(*parts, strict=True))
    return index, count


class _Gather(NamedTuple):
    """The queries `rows` of a chunk in the sums' dtype, and the rows of their keys."""

    rows: slice
    # [H, m, R + P], [m, k, R + P], int64 [m, k], [H, m, k]
    q: torch.Tensor
    keys: torch.Tensor
    tokens: torch.Tensor
    scores: torch.Tensor


def _gathers(chunk: Chunk) -> Iterator[_Gather]:
    list_length, width = chunk.lists.shape[1], chunk.latents.shape[1]
    dtype, number = sums_of(chunk.latents), max(1, _GATHERED // max(1, list_length * width))
    q = torch.cat([chunk.absorbed, chunk.rope.transpose(0, 1)], -1)
    place = torch.arange(list_length, device=q.device)
    for first in range(0, q.shape[1], number):
        rows = slice(first, first + number)
        count = chunk.lengths[rows, None]
        index = chunk.lists[rows].long().masked_fill(place >= count, 0)
        keys, q_rows = chunk.latents[index].to(dtype), q[:, rows].to(dtype)
        scores = torch.einsum("hmw,mkw->hmk", q_rows, keys) * chunk.scale
        scores = scores.masked_fill(place >= count, -torch.inf)
        scores = scores.masked_fill(count > list_length, torch.nan)
        yield _Gather(rows, q_rows, keys, index, scores)


def forward(chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `Kernels.forward`."""
    rank, parts = chunk.absorbed.shape[2], []
    for gather in _gathers(chunk):
        lse = gather.scores.logsumexp(-1)
        p = torch.exp(gather.scores - lse[..., None])
        parts.append((torch.einsum("hmk,mkr->hmr", p, gather.keys[..., :rank]), lse.T))
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
    """Computes `Kernels.backward`."""
    rank = chunk.absorbed.shape[2]
    dabsorbed = torch.empty_like(chunk.absorbed)
    for rows, q, keys, tokens, scores in _gathers(chunk):
        p = torch.exp(scores - lse[rows].T[..., None])
        dout_rows = dout[:, rows].to(keys.dtype)
        dp = torch.einsum("hmr,mkr->hmk", dout_rows, keys[..., :rank])
        ds = p * (dp - delta[rows].T[..., None]) * chunk.scale
        dq = torch.einsum("hmk,mkw->hmw", ds, keys)
        dabsorbed[:, rows] = dq[..., :rank].to(dabsorbed.dtype)
        drope[rows] = dq[..., rank:].transpose(0, 1).to(drope.dtype)
        dkeys = torch.einsum("hmk,hmw->mkw", ds, q)
        dkeys[..., :rank] += torch.einsum("hmk,hmr->mkr", p, dout_rows)
        dlatents.index_add_(0, tokens.flatten(), dkeys.flatten(0, 1))
    return dabsorbed
