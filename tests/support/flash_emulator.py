"""flash-attn-4 as plain torch: what its Hopper kernels compute of block lists and a mask function.

Written from its sources (4.0.0b36), in float64 inside, tile by tile: which tiles are visited, which
of them have the mask or only the sequence end applied, that keys behind the end are zeros, what its
lse and its sink are. `install` puts it, and stand-ins for the functions that run on the device,
where `prefixtree.kernels.flash.launch` imports the real ones from.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

from prefixtree.kernels.flash import launch


class BlockSparseTensorsTorch(NamedTuple):
    """The fields that the backend passes; the real one has more, all optional."""

    mask_block_cnt: torch.Tensor
    mask_block_idx: torch.Tensor
    full_block_cnt: torch.Tensor
    full_block_idx: torch.Tensor
    block_size: tuple[int, int]


class Counts(NamedTuple):
    """Tiles visited by the last call, of either kind."""

    partial: int
    full: int


last: dict[str, Counts] = {}
# what the backward was asked for: "heads first" or "tiles first"
orders: list[str] = []


# ---- device functions ----------------------------------------------------------------------------


def visible(q: torch.Tensor, k: torch.Tensor, spans: torch.Tensor) -> torch.Tensor:
    wrapped = (q[:, None] - k[None]) % 2**32
    return wrapped < spans[k].long()[None]


def visible_in_window(
    q: torch.Tensor,
    k: torch.Tensor,
    spans: torch.Tensor,
    positions: torch.Tensor,
    reach: torch.Tensor,
) -> torch.Tensor:
    return visible(q, k, spans) & (positions[q][:, None] < reach[k][None])


def softcap(cap: float) -> tuple[Any, Any]:
    return (
        lambda score: cap * torch.tanh(score / cap),
        lambda grad, score: grad * (1 - torch.tanh(score / cap) ** 2),
    )


# ---- the two calls -------------------------------------------------------------------------------


def _padded(x: torch.Tensor, tile: int) -> torch.Tensor:
    """[1, T, H, D] -> [H, tiles x tile, D] float64, zeros behind the end as TMA reads them."""
    x = x[0].double().transpose(0, 1)
    return F.pad(x, (0, 0, 0, -x.shape[1] % tile))


def _lists(
    given: BlockSparseTensorsTorch, rows: int, columns: int
) -> Iterator[tuple[int, int, bool, bool]]:
    """(row, column, partial, last of its list) for every tile, after flash-attn-4's checks."""
    counts = {True: given.mask_block_cnt, False: given.full_block_cnt}
    indices = {True: given.mask_block_idx, False: given.full_block_idx}
    for partial in (True, False):
        count, index = counts[partial], indices[partial]
        assert count.dtype == index.dtype == torch.int32
        assert count.shape == (1, 1, rows), count.shape
        assert index.shape[:3] == (1, 1, rows) and index.shape[3] >= 1, index.shape
        assert index.stride(3) == 1
        for row in range(rows):
            listed = index[0, 0, row, : count[0, 0, row]].tolist()
            assert len(listed) == count[0, 0, row], "a count is beyond the index array"
            assert all(0 <= column < columns for column in listed), (row, listed)
            for place, column in enumerate(listed):
                yield row, column, partial, place == len(listed) - 1


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float, score_mod: Any) -> torch.Tensor:
    scores = scale * q @ k.transpose(1, 2)
    return scores if score_mod is None else score_mod(scores)


def flash_attn_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float,
    learnable_sink: torch.Tensor | None,
    score_mod: Any,
    mask_mod: Any,
    aux_scalars: tuple[torch.Tensor, ...],
    block_sparse_tensors: BlockSparseTensorsTorch,
    pack_gqa: bool,
    out: torch.Tensor,
    lse: torch.Tensor,
    return_lse: bool,
) -> None:
    assert return_lse
    tokens, group = q.shape[1], q.shape[2] // k.shape[2]
    # packed, tile i of a kv head has its list in row i / group: the same tiles for every head
    assert not pack_gqa or group > 1
    tile_q, tile_k = block_sparse_tensors.block_size
    query, key, value = _padded(q, tile_q), _padded(k, tile_k), _padded(v, tile_k)
    key, value = (x.repeat_interleave(group, 0) for x in (key, value))
    scores = torch.full((len(query), query.shape[1], key.shape[1]), -torch.inf).double()
    rows, columns = query.shape[1] // tile_q, key.shape[1] // tile_k
    visited = torch.zeros(rows, columns, dtype=torch.int64)
    for i, j, partial, is_last in _lists(block_sparse_tensors, rows, columns):
        visited[i, j] += 1 if partial else 1000
        at_q = torch.arange(i * tile_q, (i + 1) * tile_q)
        at_k = torch.arange(j * tile_k, (j + 1) * tile_k)
        tile = _scores(query[:, at_q], key[:, at_k], softmax_scale, score_mod)
        seen = mask_mod(at_q, at_k, *aux_scalars) if partial else torch.ones(tile.shape[1:]).bool()
        # lists are read from behind; only the tile that comes first is held against the end
        if is_last:
            seen = seen & (at_k < tokens)[None]
        scores[:, at_q[0] : at_q[-1] + 1, at_k[0] : at_k[-1] + 1] = tile.masked_fill(
            ~seen, -torch.inf
        )
    assert set(visited.unique().tolist()) <= {0, 1, 1000}, "a tile is listed twice"
    last["forward"] = Counts(int((visited == 1).sum()), int((visited == 1000).sum()))
    total = scores[:, :tokens].logsumexp(-1)
    if learnable_sink is not None:
        assert learnable_sink.dtype == torch.float32
        total = torch.logaddexp(total, learnable_sink.double()[:, None])
    p = torch.exp(scores[:, :tokens] - total[..., None])
    out.copy_((p @ value).transpose(0, 1)[None])
    lse.copy_(total[None])


def flash_attn_bwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    *,
    softmax_scale: float,
    score_mod: Any,
    score_mod_bwd: Any,
    mask_mod: Any,
    aux_scalars: tuple[torch.Tensor, ...],
    block_sparse_tensors: BlockSparseTensorsTorch,
    dlse: torch.Tensor | None,
    learnable_sink: torch.Tensor | None,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    order: str = "tiles first",
) -> tuple[torch.Tensor, ...]:
    orders.append(order)
    assert lse.dtype == torch.float32 and (dlse is None or dlse.dtype == torch.float32)
    tokens, group = q.shape[1], q.shape[2] // k.shape[2]
    tile_q, tile_k = block_sparse_tensors.block_size
    query, key, value = _padded(q, tile_q), _padded(k, tile_k), _padded(v, tile_k)
    key, value = (x.repeat_interleave(group, 0) for x in (key, value))
    grad = _padded(dout, tile_q)
    delta = (dout[0].double() * out[0].double()).sum(-1).t() - (0 if dlse is None else dlse[0])
    room = (0, query.shape[1] - tokens)
    total, delta_padded = F.pad(lse[0].double(), room), F.pad(delta, room)
    grads = [torch.zeros_like(x) for x in (query, key, value)]
    rows, columns = key.shape[1] // tile_k, query.shape[1] // tile_q
    partial_tiles = full_tiles = 0
    for j, i, partial, _ in _lists(block_sparse_tensors, rows, columns):
        at_q = torch.arange(i * tile_q, (i + 1) * tile_q)
        at_k = torch.arange(j * tile_k, (j + 1) * tile_k)
        raw = _scores(query[:, at_q], key[:, at_k], softmax_scale, None)
        # its rows of q and dout behind the end are zeros and add nothing; a partial tile masks them
        seen = (at_k < tokens)[None] & (at_q < tokens)[:, None]
        if partial:
            seen = seen & mask_mod(at_q, at_k, *aux_scalars)
        partial_tiles, full_tiles = partial_tiles + partial, full_tiles + (not partial)
        scores = raw if score_mod is None else score_mod(raw)
        p = torch.exp(scores - total[:, at_q][..., None]) * seen
        dp = grad[:, at_q] @ value[:, at_k].transpose(1, 2)
        ds = p * (dp - delta_padded[:, at_q][..., None])
        if score_mod_bwd is not None:
            ds = score_mod_bwd(ds, raw)
        grads[0][:, at_q] += softmax_scale * ds @ key[:, at_k]
        grads[1][:, at_k] += softmax_scale * ds.transpose(1, 2) @ query[:, at_q]
        grads[2][:, at_k] += p.transpose(1, 2) @ grad[:, at_q]
    last["backward"] = Counts(partial_tiles, full_tiles)
    dq.copy_(grads[0][:, :tokens].transpose(0, 1)[None])
    for got, want in ((dk, grads[1]), (dv, grads[2])):
        got.copy_(want[:, :tokens].unflatten(0, (-1, group)).sum(1).transpose(0, 1)[None])
    if learnable_sink is None:
        return dq, dk, dv
    share = torch.exp(learnable_sink.double()[:, None] - lse[0].double())
    return dq, dk, dv, -(share * delta).sum(1).float()


def install(patch: pytest.MonkeyPatch) -> None:
    """`backend="flash"` runs the emulator, on any device and in any dtype."""

    def module(name: str, **members: Any) -> ModuleType:
        made = ModuleType(name)
        made.__dict__.update(members)
        patch.setitem(sys.modules, name, made)
        return made

    interface = module(
        "flash_attn.cute.interface", _flash_attn_fwd=flash_attn_fwd, _flash_attn_bwd=flash_attn_bwd
    )
    sparsity = module(
        "flash_attn.cute.block_sparsity", BlockSparseTensorsTorch=BlockSparseTensorsTorch
    )
    cute = module("flash_attn.cute", interface=interface, block_sparsity=sparsity)
    module("flash_attn", cute=cute)
    mask_mods = module(
        "prefixtree.kernels.flash.mask_mods",
        address=lambda array: array,
        visible=visible,
        visible_in_window=visible_in_window,
        softcap=softcap,
    )
    heads_first_backward = module(
        "prefixtree.kernels.flash.heads_first_backward",
        flash_attn_bwd=functools.partial(flash_attn_bwd, order="heads first"),
    )
    import prefixtree.kernels.flash as package

    patch.setattr(package, "mask_mods", mask_mods, raising=False)
    patch.setattr(package, "heads_first_backward", heads_first_backward, raising=False)
    # an H200's
    patch.setattr(launch.device_info, "processors", lambda device: 132)
    orders.clear()
    patch.setattr(launch, "refusal", lambda *arguments: None)
