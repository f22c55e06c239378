"""Attention to a pool of keys in plain torch, on any device; it waits for the device.

Legend: B rows, H query heads, Hk kv heads, G = H / Hk, D and Dv head dims, C keys of the pools, L
keys of an item.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from prefixtree.kernels.decoding.work import DecodeTables

# numbers gathered from the pools at once
_GATHERED = 1 << 24


class DecodeCall(NamedTuple):
    """One call of the operator.

    Attributes:
        q: [B, H, D].
        k, v: [B, Hk, D] and [B, Hk, Dv], the keys and values that rows write.
        key_pool, value_pool: [C, Hk, D] and [C, Hk, Dv].
        sinks: [H] or None.
        tables: of the work list.
        scale: the factor on q k^T.
        window: 0 for none.
        softcap: 0 for none.
        block, narrow_block: most rows of a wide item and of a narrow one.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    key_pool: torch.Tensor
    value_pool: torch.Tensor
    sinks: torch.Tensor | None
    tables: DecodeTables
    scale: float
    window: int
    softcap: float
    block: int
    narrow_block: int


def forward(call: DecodeCall) -> torch.Tensor:
    """Writes k and v, -> out [B, H, Dv] in q's dtype."""
    tables = call.tables
    first, room, depth = tables.tails.long().unbind(1)
    written = tables.written.long()
    writes = tables.live & (written < room)
    at = (first + written)[writes]
    call.key_pool[at], call.value_pool[at] = call.k[writes], call.v[writes]
    # the depth of the last key that a row sees
    last = torch.where(tables.live, depth + torch.minimum(written, room - 1), -1)

    dtype = torch.promote_types(call.q.dtype, torch.float32)
    part = call.q.new_zeros(len(tables.slots), call.q.shape[1], call.v.shape[2], dtype=dtype)
    lse = part.new_full(part.shape[:2], -torch.inf)
    _partial(call, last, part, lse)
    return _merge(call, part, lse)


def _partial(call: DecodeCall, last: torch.Tensor, part: torch.Tensor, lse: torch.Tensor) -> None:
    """The items. Those of about as many rows and keys stand side by side, padded to the longest."""
    items = torch.cat([call.tables.wide, call.tables.narrow]).long()
    items = items[items[:, 1] > 0]
    first_row, rows, first_piece, stop_piece, first_slot = items.unbind(1)
    # an item's last row fills its place up
    lane = torch.arange(call.block, device=last.device).minimum(rows[:, None] - 1)
    row, slot = first_row[:, None] + lane, first_slot[:, None] + lane
    seen_to = last[row]
    item, piece = _ranges(first_piece, stop_piece - first_piece)
    first, keys, first_depth, *seers = call.tables.pieces[piece].long().unbind(1)
    # nothing is read that is not written yet
    sees = (row[item] >= seers[0][:, None]) & (row[item] < seers[1][:, None])
    deepest = seen_to[item].masked_fill(~sees, -1).amax(1)
    keys = keys.minimum(deepest + 1 - first_depth).clamp(min=0)
    which, key = _ranges(first, keys)
    seers = [rows[which] for rows in seers]
    depth = key + (first_depth - first)[which]
    length = torch.bincount(item[which], minlength=len(items))
    start = length.cumsum(0) - length

    (_, kv_heads, dim), d_v = call.k.shape, call.v.shape[2]
    group = call.q.shape[1] // kv_heads
    kind = 64 * rows.log2().ceil() + length.log2().ceil()
    for one in kind[length > 0].unique():
        alike = (kind == one).nonzero()[:, 0]
        most, longest = int(rows[alike].max()), int(length[alike].max())
        at_once = max(1, _GATHERED // (longest * kv_heads * (dim + d_v)))
        for some in alike.split(at_once):
            lane = torch.arange(longest, device=last.device)
            inside = lane < length[some, None]
            # and its first key
            at = start[some, None] + lane * inside
            key_depth, newest = depth[at][:, None], seen_to[some, :most, None]
            mine = row[some, :most, None]
            visible = (key_depth <= newest) & inside[:, None]  # [items, rows, L]
            visible &= (mine >= seers[0][at][:, None]) & (mine < seers[1][at][:, None])
            if call.window:
                visible &= key_depth > newest - call.window
            q = call.q[row[some, :most]].to(part.dtype).unflatten(2, (kv_heads, group))
            k, v = (pool[key[at]].to(part.dtype) for pool in (call.key_pool, call.value_pool))
            out, top = _attend(
                q.transpose(1, 2).flatten(2, 3),
                k.transpose(1, 2),
                v.transpose(1, 2),
                visible.repeat_interleave(group, 1)[:, None],
                call,
            )
            for to, x in ((part, out), (lse, top)):
                to[slot[some, :most]] = x.unflatten(2, (most, group)).transpose(1, 2).flatten(2, 3)


def _ranges(first: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """first[0], first[0] + 1, .. (count[0] numbers), first[1], ..; before them whose they are."""
    which = torch.repeat_interleave(count)
    start = count.cumsum(0) - count
    return which, (first - start)[which] + torch.arange(len(which), device=first.device)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, call: DecodeCall
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [.., rows, D], k [.., L, D], v [.., L, Dv] -> out [.., rows, Dv], lse [.., rows].

    A row that sees nothing has zeros and -inf.
    """
    scores = q @ k.transpose(-1, -2) * call.scale
    if call.softcap:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    finite = lse.masked_fill(lse == -torch.inf, 0)
    return torch.exp(scores - finite[..., None]) @ v, lse


def _merge(call: DecodeCall, part: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """The rows' slots joined by their lse, and the sinks, once."""
    tables, rows = call.tables, len(call.q)
    row = torch.repeat_interleave(tables.slot_ptr.diff())
    slot = tables.slots[: len(row)]
    part, lse = part[slot], lse[slot]
    start = lse.new_full((rows, lse.shape[1]), -torch.inf)
    if call.sinks is not None:
        start = call.sinks.to(lse.dtype).expand_as(start)
    where = row.long()[:, None].expand_as(lse)
    top = start.scatter_reduce(0, where, lse, "amax")
    # a row that sees nothing
    top = top.masked_fill(top == -torch.inf, 0)
    weight = torch.exp(lse - top[row])
    total = torch.exp(start - top).index_add(0, row, weight)
    out = part.new_zeros(rows, *part.shape[1:]).index_add(0, row, part * weight[..., None])
    return (out / total.masked_fill(total == 0, 1)[..., None]).to(call.q.dtype)
