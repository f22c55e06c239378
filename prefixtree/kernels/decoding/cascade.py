"""`cascade_attention`: attention of new tokens to a growing forest's keys, each read once.

Keys that several rows share are read once for all of them, and a row's partial results are joined
by their lse. It is a registered operator that writes into the pools; torch.compile keeps it in one
graph.

Legend: B rows, H query heads, Hk kv heads, G = H / Hk, D and Dv head dims, C keys of the pools, L
keys of an item.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from prefixtree.errors import UnsupportedError
from prefixtree.kernels.decoding.work import DecodeCall, DecodeTables, DecodeWork
from prefixtree.kernels.operators import as_given, new_library, register
from prefixtree.kernels.runtime import installed

# numbers gathered from the pools at once
_GATHERED = 1 << 24


def _chosen(backend: str, call: DecodeCall) -> Callable[[DecodeCall], torch.Tensor]:
    """Chooses the forward of the backend that serves a call: Triton's if it does."""
    if backend not in ("auto", "triton", "torch"):
        raise UnsupportedError(f"backend {backend!r} is none of 'auto', 'triton' and 'torch'")
    if backend == "torch" or (backend == "auto" and not call.q.is_cuda):
        return _eager
    reason: str | None = "it needs the package triton"
    if installed("triton"):
        from prefixtree.kernels.decoding import launch as decode_launch

        reason = decode_launch.refusal(call)
        if reason is None:
            return decode_launch.forward
    if backend == "triton":
        raise UnsupportedError(f"{reason}; use backend='torch'")
    return _eager


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    sinks: torch.Tensor | None,
    tables: list[torch.Tensor],
    scale: float,
    window: int,
    softcap: float,
    block: int,
    narrow_block: int,
    backend: str,
) -> torch.Tensor:
    pools, blocks = (key_pool, value_pool), (block, narrow_block)
    work = DecodeTables(*tables)
    call = DecodeCall(q, k, v, *pools, sinks, work, scale, window, softcap, *blocks)
    with as_given(q):
        return _chosen(backend, call)(call)


def _fake(q, k, v, *_):
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2])


_CASCADE = register(
    new_library("_decode_library"),
    "cascade_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) key_pool, Tensor(b!) value_pool, Tensor? sinks, "
    "Tensor[] tables, float scale, SymInt window, float softcap, int block, int narrow_block, "
    "str backend) -> Tensor",
    _forward,
    _fake,
)


def cascade_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    work: DecodeWork,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Writes the rows' keys and values into the pools and attends to all that each row sees.

    Every live row's k and v are written at the next key of its tail. Then the row sees its runs,
    and its tail up to that key. Call `work.advance()` after the last layer, before the next step.
    It is not differentiable. Arguments that `tree_attention` has mean the same; B is
    `work.num_rows`.

    Args:
        q: [B, H, D], any strides.
        k, v: [B, Hk, D] and [B, Hk, Dv] in q's dtype.
        key_pool, value_pool: [C, Hk, D] and [C, Hk, Dv] in q's dtype, changed in place.
        work: on q's device, for this window; its keys are less than C.
        backend: "triton" (GPUs; contiguous pools), "torch" (any device; it waits for the device),
            or "auto": triton if it serves the call.

    Returns:
        [B, H, Dv] in q's dtype; zeros for rows that are not live.
    """
    if (window or 0) != work.window:
        raise ValueError(
            f"window is {window}, and the work list was built for {work.window or None}; build one "
            "for each window of the model"
        )
    _check(q, k, v, key_pool, value_pool, work, sinks)
    tensors = q, k, v, key_pool, value_pool, sinks
    scale = q.shape[2] ** -0.5 if scale is None else float(scale)
    numbers = scale, work.window, float(softcap or 0.0), work.block, work.narrow_block
    out: torch.Tensor = _CASCADE(*tensors, list(work.tables), *numbers, backend)
    return out


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    work: DecodeWork,
    sinks: torch.Tensor | None,
) -> None:
    """Refuses tensors that do not fit together: kernels would read and write beyond them."""
    rows, keys, (heads, dim), (kv_heads, d_v) = (
        work.num_rows,
        len(key_pool),
        q.shape[1:],
        v.shape[1:],
    )
    expected = {
        "q": (q, [rows, heads, dim]),
        "k": (k, [rows, kv_heads, dim]),
        "v": (v, [rows, kv_heads, d_v]),
        "key_pool": (key_pool, [keys, kv_heads, dim]),
        "value_pool": (value_pool, [keys, kv_heads, d_v]),
    }
    for name, (tensor, shape) in expected.items():
        came = list(tensor.shape), tensor.dtype, tensor.device
        wanted = shape, q.dtype, work.tables.written.device
        if came != wanted:
            raise ValueError(f"{name} must be {wanted}, as q, v and the work list say, got {came}")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"cascade_attention has no gradient, and {name} requires one; call it under "
                "torch.no_grad()"
            )
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are no multiple of {kv_heads} kv heads")
    if work.num_keys > keys:
        raise ValueError(f"the work list has keys up to {work.num_keys}, the pools have {keys}")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks must be [{heads}], one per query head, got {list(sinks.shape)}")


# ---- in plain torch, on any device; it waits for the device --------------------------------------


def _eager(call: DecodeCall) -> torch.Tensor:
    """Writes k and v, and computes out [B, H, Dv] in q's dtype."""
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
    """Computes the items; those of about as many rows and keys at once, padded to the longest."""
    items = torch.cat([call.tables.wide, call.tables.narrow]).long()
    items = items[items[:, 1] > 0]
    first_row, rows, first_piece, stop_piece, first_slot = items.unbind(1)
    # an item's last row fills the places that are left
    lane = torch.arange(call.block, device=last.device).minimum(rows[:, None] - 1)
    row, slot = first_row[:, None] + lane, first_slot[:, None] + lane
    seen_to = last[row]
    item, piece = _ranges(first_piece, stop_piece - first_piece)
    first, keys, first_depth, *seers = call.tables.pieces[piece].long().unbind(1)
    # keys that are not written yet are not read
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
    for chosen_kind in kind[length > 0].unique():
        alike = (kind == chosen_kind).nonzero()[:, 0]
        most_rows, longest = int(rows[alike].max()), int(length[alike].max())
        at_once = max(1, _GATHERED // (longest * kv_heads * (dim + d_v)))
        for batch in alike.split(at_once):
            lane = torch.arange(longest, device=last.device)
            inside = lane < length[batch, None]
            # places beyond an item's keys take its first key
            at = start[batch, None] + lane * inside
            key_depth, newest = depth[at][:, None], seen_to[batch, :most_rows, None]
            own_row = row[batch, :most_rows, None]
            visible = (key_depth <= newest) & inside[:, None]  # [items, rows, L]
            visible &= (own_row >= seers[0][at][:, None]) & (own_row < seers[1][at][:, None])
            if call.window:
                visible &= key_depth > newest - call.window
            q = call.q[row[batch, :most_rows]].to(part.dtype).unflatten(2, (kv_heads, group))
            k, v = (pool[key[at]].to(part.dtype) for pool in (call.key_pool, call.value_pool))
            out, top = _attend(
                q.transpose(1, 2).flatten(2, 3),
                k.transpose(1, 2),
                v.transpose(1, 2),
                visible.repeat_interleave(group, 1)[:, None],
                call,
            )
            for to, x in ((part, out), (lse, top)):
                to[slot[batch, :most_rows]] = (
                    x.unflatten(2, (most_rows, group)).transpose(1, 2).flatten(2, 3)
                )


def _ranges(first: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists first[i] .. first[i] + count[i] - 1 for each i, after the i of each number."""
    which = torch.repeat_interleave(count)
    start = count.cumsum(0) - count
    return which, (first - start)[which] + torch.arange(len(which), device=first.device)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, call: DecodeCall
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes out [.., rows, Dv] and lse of keys [.., L, D]; zeros and -inf if nothing is seen."""
    scores = q @ k.transpose(-1, -2) * call.scale
    if call.softcap:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    finite = lse.masked_fill(lse == -torch.inf, 0)
    return torch.exp(scores - finite[..., None]) @ v, lse


def _merge(call: DecodeCall, part: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Joins the rows' slots by their lse, and the sinks, once."""
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
