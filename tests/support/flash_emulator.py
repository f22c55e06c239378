"""flash-attn-4 as plain torch: what its Hopper kernels compute of block lists and a mask function,
and of sequences of variable lengths.

Written from its sources (4.0.0b36), in float64 inside. Block lists go tile by tile: which tiles are
visited, which of them have the mask or only the sequence end applied, that keys behind the end are
zeros. Sequences go one by one: `cu_seqlens`, causality and a window to the left. What its lse and
its sink are, is common to both. `install` puts it, and stand-ins for the functions that run on the
device, where `prefixtree.kernels.attention.flash.launch` imports the real ones from.
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

from prefixtree import TreeMask
from prefixtree.kernels.attention.flash import launch
from tests.support.attention_checks import Case, eager, ours, run


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


class Sequences(NamedTuple):
    """Sequences of the last call, where they were given by `cu_seqlens`."""

    count: int
    longest: int


last: dict[str, Counts | Sequences] = {}
# what the backward was asked for: "heads first" or "tiles first"
orders: list[str] = []
# keys of a tile of the backward at head dim 256
KEYS = {"by lists": 64, "dense": 48}


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


def visible_to_rows(
    q: torch.Tensor, k: torch.Tensor, spans: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    return visible(tokens[q], k, spans)


def visible_in_window_to_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    spans: torch.Tensor,
    positions: torch.Tensor,
    reach: torch.Tensor,
    tokens: torch.Tensor,
) -> torch.Tensor:
    return visible(tokens[q], k, spans) & (positions[q][:, None] < reach[k][None])


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
    pack_gqa: bool,
    return_lse: bool,
    cu_seqlens_q: torch.Tensor | None = None,
    **how: Any,
) -> None:
    assert return_lse
    # packed, tile i of a kv head has its list in row i / group: the same tiles for every head
    assert not pack_gqa or q.shape[-2] > k.shape[-2]
    if cu_seqlens_q is None:
        _forward_of_lists(q, k, v, **how)
    else:
        _forward_of_sequences(q, k, v, cu_seqlens_q, **how)


def _forward_of_lists(
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
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    asked, tokens, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
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
    total = scores[:, :asked].logsumexp(-1)
    if learnable_sink is not None:
        assert learnable_sink.dtype == torch.float32
        total = torch.logaddexp(total, learnable_sink.double()[:, None])
    p = torch.exp(scores[:, :asked] - total[..., None])
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
    cu_seqlens_q: torch.Tensor | None = None,
    dlse: torch.Tensor | None,
    order: str = "tiles first",
    tiles: str = "by lists",
    **how: Any,
) -> tuple[torch.Tensor, ...]:
    orders.append(order)
    assert lse.dtype == torch.float32 and (dlse is None or dlse.dtype == torch.float32)
    if cu_seqlens_q is None:
        if q.shape[-1] == 256:
            assert how["block_sparse_tensors"].block_size[1] == KEYS[tiles]
        return _backward_of_lists(q, k, v, out, dout, lse, dlse, **how)
    assert tiles == "by lists", "sequences have no lists"
    assert order == "tiles first", "the other order has a scheduler for block lists alone"
    return _backward_of_sequences(q, k, v, out, dout, lse, dlse, cu_seqlens_q, **how)


def _backward_of_lists(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
    *,
    softmax_scale: float,
    score_mod: Any,
    score_mod_bwd: Any,
    mask_mod: Any,
    aux_scalars: tuple[torch.Tensor, ...],
    block_sparse_tensors: BlockSparseTensorsTorch,
    learnable_sink: torch.Tensor | None,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    asked, tokens, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    tile_q, tile_k = block_sparse_tensors.block_size
    query, key, value = _padded(q, tile_q), _padded(k, tile_k), _padded(v, tile_k)
    key, value = (x.repeat_interleave(group, 0) for x in (key, value))
    grad = _padded(dout, tile_q)
    delta = (dout[0].double() * out[0].double()).sum(-1).t() - (0 if dlse is None else dlse[0])
    room = (0, query.shape[1] - asked)
    total, delta_padded = F.pad(lse[0].double(), room), F.pad(delta, room)
    grads = [torch.zeros_like(x) for x in (query, key, value)]
    rows, columns = key.shape[1] // tile_k, query.shape[1] // tile_q
    partial_tiles = full_tiles = 0
    for j, i, partial, _ in _lists(block_sparse_tensors, rows, columns):
        at_q = torch.arange(i * tile_q, (i + 1) * tile_q)
        at_k = torch.arange(j * tile_k, (j + 1) * tile_k)
        raw = _scores(query[:, at_q], key[:, at_k], softmax_scale, None)
        # its rows of q and dout behind the end are zeros and add nothing; a partial tile masks them
        seen = (at_k < tokens)[None] & (at_q < asked)[:, None]
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
    dq.copy_(grads[0][:, :asked].transpose(0, 1)[None])
    for got, want in ((dk, grads[1]), (dv, grads[2])):
        got.copy_(want[:, :tokens].unflatten(0, (-1, group)).sum(1).transpose(0, 1)[None])
    if learnable_sink is None:
        return dq, dk, dv
    share = torch.exp(learnable_sink.double()[:, None] - lse[0].double())
    return dq, dk, dv, -(share * delta).sum(1).float()


# ---- sequences of variable lengths ---------------------------------------------------------------


def _pieces(
    q: torch.Tensor, k: torch.Tensor, starts: torch.Tensor, longest: tuple[int, int], **how: Any
) -> tuple[list[slice], list[torch.Tensor]]:
    """The tokens of every sequence and what its queries see, after flash-attn-4's checks."""
    assert how.pop("cu_seqlens_k") is starts and how.pop("causal") is True
    left = how.pop("window_size_left")
    assert not how, f"not of sequences: {how}"
    assert starts.dtype == torch.int32 and starts.ndim == 1 and starts.is_contiguous()
    assert starts[0] == 0 and starts[-1] == len(q) == len(k)
    lengths = starts.diff().tolist()
    assert min(lengths) > 0 and longest == (max(lengths), max(lengths))
    pieces, seen = [], []
    for start, length in zip(starts.tolist(), lengths, strict=False):
        pieces.append(slice(start, start + length))
        at = torch.arange(length)
        behind = at[:, None] - at[None]
        seen.append((behind >= 0) & (behind <= (length if left is None else left)))
    return pieces, seen


def _heads_first(x: torch.Tensor, piece: slice, group: int = 1) -> torch.Tensor:
    """[T, H, D] -> [H x group, tokens of the piece, D] float64."""
    return x[piece].double().transpose(0, 1).repeat_interleave(group, 0)


def _forward_of_sequences(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    *,
    softmax_scale: float,
    learnable_sink: torch.Tensor | None,
    score_mod: Any,
    out: torch.Tensor,
    lse: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **how: Any,
) -> None:
    group = q.shape[1] // k.shape[1]
    assert out.shape == (*q.shape[:2], v.shape[2]) and lse.shape == (q.shape[1], len(q))
    pieces, seen = _pieces(q, k, starts, (max_seqlen_q, max_seqlen_k), **how)
    last["forward"] = Sequences(len(pieces), max_seqlen_q)
    for piece, visible_ in zip(pieces, seen, strict=True):
        query, key, value = (_heads_first(x, piece, n) for x, n in ((q, 1), (k, group), (v, group)))
        scores = _scores(query, key, softmax_scale, score_mod).masked_fill(~visible_, -torch.inf)
        total = scores.logsumexp(-1)
        if learnable_sink is not None:
            assert learnable_sink.dtype == torch.float32
            total = torch.logaddexp(total, learnable_sink.double()[:, None])
        out[piece] = (torch.exp(scores - total[..., None]) @ value).transpose(0, 1).to(out.dtype)
        lse[:, piece] = total.float()


def _backward_of_sequences(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
    starts: torch.Tensor,
    *,
    softmax_scale: float,
    score_mod: Any,
    score_mod_bwd: Any,
    learnable_sink: torch.Tensor | None,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **how: Any,
) -> tuple[torch.Tensor, ...]:
    group = q.shape[1] // k.shape[1]
    assert out.shape == dout.shape and lse.shape == (q.shape[1], len(q))
    pieces, seen = _pieces(q, k, starts, (max_seqlen_q, max_seqlen_k), **how)
    last["backward"] = Sequences(len(pieces), max_seqlen_q)
    delta = (dout.double() * out.double()).sum(-1).t() - (0 if dlse is None else dlse)
    for piece, visible_ in zip(pieces, seen, strict=True):
        query, key, value, grad = (
            _heads_first(x, piece, n) for x, n in ((q, 1), (k, group), (v, group), (dout, 1))
        )
        raw = _scores(query, key, softmax_scale, None)
        scores = raw if score_mod is None else score_mod(raw)
        scores = scores.masked_fill(~visible_, -torch.inf)
        p = torch.exp(scores - lse[:, piece].double()[..., None])
        ds = p * (grad @ value.transpose(1, 2) - delta[:, piece][..., None])
        if score_mod_bwd is not None:
            ds = score_mod_bwd(ds, raw)
        dq[piece] = (softmax_scale * ds @ key).transpose(0, 1).to(dq.dtype)
        for got, wide in (
            (dk, softmax_scale * ds.transpose(1, 2) @ query),
            (dv, p.transpose(1, 2) @ grad),
        ):
            got[piece] = wide.unflatten(0, (-1, group)).sum(1).transpose(0, 1).to(got.dtype)
    if learnable_sink is None:
        return dq, dk, dv
    share = torch.exp(learnable_sink.double()[:, None] - lse.double())
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
        "prefixtree.kernels.attention.flash.mask_mods",
        address=lambda array: array,
        visible=visible,
        visible_in_window=visible_in_window,
        visible_to_rows=visible_to_rows,
        visible_in_window_to_rows=visible_in_window_to_rows,
        softcap=softcap,
    )
    backwards = module(
        "prefixtree.kernels.attention.flash.backwards",
        heads_first=functools.partial(flash_attn_bwd, order="heads first"),
        in_dense_tiles=lambda call: functools.partial(call, tiles="dense"),
        # the emulator writes what it is given, in any dtype
        in_float32=lambda call, *tensors, **how: call(*tensors, **how),
    )
    import prefixtree.kernels.attention.flash as package

    patch.setattr(package, "mask_mods", mask_mods, raising=False)
    patch.setattr(package, "backwards", backwards, raising=False)
    # an H200's
    patch.setattr(launch.runtime, "processors", lambda device: 132)
    orders.clear()
    patch.setattr(launch, "refusal", lambda *arguments: None)


def assert_exact(mask: TreeMask, case: Case) -> None:
    """out, lse and all gradients of the backend equal float64's; its lse is kept in float32."""
    position = mask.position_ids.long()
    want = run(case, eager(mask.dense(), (position, position)), torch.float64)
    got = run(case, ours(mask, backend="flash"))
    assert got.keys() == want.keys()
    for name in want:
        # dtypes of the backend: lse float32
        torch.testing.assert_close(got[name].double(), want[name], atol=2e-5, rtol=2e-5)
