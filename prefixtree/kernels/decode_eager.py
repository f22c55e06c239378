"""Attention to a pool of keys in plain torch, on any device; it waits for the device.

Legend: B rows, H query heads, Hk kv heads, G = H / Hk, D and Dv head dims, C keys of the pools, L
keys of an item.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from prefixtree.packing.decode_work import DecodeTables

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
    heads, d_v = call.q.shape[1], call.v.shape[2]
    num_slots = len(tables.slots)
    part = call.q.new_zeros(num_slots, heads, d_v, dtype=dtype)
    lse = part.new_full((num_slots, heads), -torch.inf)
    pieces = tables.pieces.tolist()
    single = []
    for item in (*tables.wide.tolist(), *tables.narrow.tolist()):
        if item[1] == 1:
            single.append(item)
        elif item[1]:
            _together(call, item, pieces[item[2] : item[3]], last, part, lse)
    if single:
        _alone(call, torch.tensor(single, device=last.device), last, part, lse)
    return _merge(call, part, lse)


def _together(
    call: DecodeCall,
    item: list[int],
    pieces: list[list[int]],
    last: torch.Tensor,
    part: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """An item of several rows; a single run of keys is read in place."""
    row, rows, _, _, slot = item
    seen_to = last[row : row + rows]
    # nothing is read that is not written yet
    ends = [min(keys, int(seen_to.max()) + 1 - depth) for _, keys, depth in pieces]
    spans = [(a, a + n, depth) for (a, _, depth), n in zip(pieces, ends, strict=True) if n > 0]
    if not spans:
        return
    k, v = (_joined(pool, spans) for pool in (call.key_pool, call.value_pool))
    depths = [torch.arange(depth, depth + b - a, device=last.device) for a, b, depth in spans]
    visible = _visible(torch.cat(depths)[None], seen_to[:, None], call.window)  # [rows, L]
    kv_heads, group = k.shape[1], call.q.shape[1] // k.shape[1]
    q = call.q[row : row + rows].unflatten(1, (kv_heads, group)).to(part.dtype)
    out, top = _attend(
        q.permute(1, 0, 2, 3).flatten(1, 2),
        k.to(part.dtype).transpose(0, 1),
        v.to(part.dtype).transpose(0, 1),
        visible.repeat_interleave(group, 0),
        call,
    )
    part[slot : slot + rows] = out.unflatten(1, (rows, group)).transpose(0, 1).flatten(1, 2)
    lse[slot : slot + rows] = top.unflatten(1, (rows, group)).transpose(0, 1).flatten(1, 2)


def _joined(pool: torch.Tensor, spans: list[tuple[int, int, int]]) -> torch.Tensor:
    parts = [pool[a:b] for a, b, _ in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _alone(
    call: DecodeCall,
    items: torch.Tensor,
    last: torch.Tensor,
    part: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Items of one row, side by side: their keys are gathered, padded to the longest."""
    row, slot = items[:, 0], items[:, 4]
    # (item, piece) pairs, then (item, key) pairs that are visible or above the window
    count = items[:, 3] - items[:, 2]
    item = torch.repeat_interleave(count)
    piece = _ranges(items[:, 2], count)
    begin, keys, depth = call.tables.pieces[piece].long().unbind(1)
    keys = torch.minimum(keys, last[row[item]] + 1 - depth).clamp(min=0)
    pair = torch.repeat_interleave(keys)
    key, key_depth, item = _ranges(begin, keys), _ranges(depth, keys), item[pair]
    length = torch.bincount(item, minlength=len(items))
    lane = _ranges(torch.zeros_like(length), length)

    longest = int(length.max())
    if longest == 0:
        return
    index = torch.zeros(len(items), longest, dtype=torch.int64, device=key.device)
    visible = torch.zeros(len(items), longest, dtype=torch.bool, device=key.device)
    index[item, lane] = key
    visible[item, lane] = _visible(key_depth, last[row[item]], call.window)
    kv_heads, group = call.k.shape[1], call.q.shape[1] // call.k.shape[1]
    width = longest * kv_heads * (call.k.shape[2] + call.v.shape[2])
    for rows in torch.arange(len(items), device=key.device).split(max(1, _GATHERED // width)):
        seen = visible[rows]
        q = call.q[row[rows]].unflatten(1, (kv_heads, group)).to(part.dtype)
        # lanes without a key point at one that may never have been written
        hidden = ~seen[:, None, :, None]
        k = call.key_pool[index[rows]].to(part.dtype).transpose(1, 2).masked_fill(hidden, 0)
        v = call.value_pool[index[rows]].to(part.dtype).transpose(1, 2).masked_fill(hidden, 0)
        out, top = _attend(q, k, v, seen[:, None, None], call)
        part[slot[rows]], lse[slot[rows]] = out.flatten(1, 2), top.flatten(1, 2)


def _ranges(first: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """first[0], first[0] + 1, .. (count[0] numbers), first[1], .."""
    which = torch.repeat_interleave(count)
    start = count.cumsum(0) - count
    return (first - start)[which] + torch.arange(len(which), device=first.device)


def _visible(depth: torch.Tensor, last: torch.Tensor, window: int) -> torch.Tensor:
    seen = depth <= last
    return seen & (depth > last - window) if window else seen


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
