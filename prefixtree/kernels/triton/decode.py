"""Decoding: partial attention of rows to runs of a pool's keys, and its merge by lse.

Legend: B rows, H query heads, Hk kv heads, G = H / Hk, D and Dv head dims, C keys of the pools.
Everything that differs from step to step and from forest to forest is read from tensors of the work
list (`DecodeTables`), so a captured launch stays right while they change.
"""

from __future__ import annotations

import triton
import triton.language as tl

from prefixtree.kernels.triton.primitives import (
    LOG2E,
    MASKED,
    absorb,
    load_queries,
    load_rows,
    product,
    rows_of_tile,
    squash,
    store_rows,
)


@triton.jit
def write_kernel(
    K,
    V,
    KEY_POOL,
    VALUE_POOL,
    TAILS,
    WRITTEN,
    LIVE,
    k_row,
    k_head,
    v_row,
    v_head,
    pool_k,
    pool_k_head,
    pool_v,
    pool_v_head,
    KV_HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_PADDED: tl.constexpr,
    DV_PADDED: tl.constexpr,
):
    """A row's key and value, where it is live and its tail has room."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.load(TAILS + 3 * row).to(tl.int64)
    written = tl.load(WRITTEN + row)
    writes = (tl.load(LIVE + row) != 0) & (written < tl.load(TAILS + 3 * row + 1))
    at = first + written
    head = tl.arange(0, HEADS_PADDED)
    alive = (head < KV_HEADS) & writes
    column = tl.arange(0, D_PADDED)
    inside = alive[:, None] & (column < D)[None, :]
    k = tl.load(K + row * k_row + head[:, None] * k_head + column[None, :], mask=inside)
    to = KEY_POOL + at * pool_k
    tl.store(to + head[:, None] * pool_k_head + column[None, :], k, mask=inside)
    column = tl.arange(0, DV_PADDED)
    inside = alive[:, None] & (column < DV)[None, :]
    v = tl.load(V + row * v_row + head[:, None] * v_head + column[None, :], mask=inside)
    to = VALUE_POOL + at * pool_v
    tl.store(to + head[:, None] * pool_v_head + column[None, :], v, mask=inside)


@triton.jit(do_not_specialize=["window"])
def partial_kernel(
    Q,
    K,
    V,
    PART,
    LSE,
    ITEMS,
    PIECES,
    TAILS,
    WRITTEN,
    LIVE,
    q_row,
    q_head,
    k_key,
    k_head,
    v_key,
    v_head,
    inner,
    outer,
    window,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_PADDED: tl.constexpr,
    DV_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """An item's rows x the query heads of one kv head over the item's keys.

    A slot where a row sees nothing has lse -inf, and no partial result.
    """
    # the kv heads of a key lie side by side in the pool: their programs run at the same time
    item = ITEMS + 5 * (tl.program_id(0) // KV_HEADS)
    kv_head = tl.program_id(0) % KV_HEADS
    rows = tl.load(item + 1)
    if rows > 0:
        first_row = tl.load(item)
        slot = tl.load(item + 4)
        token, head, alive = rows_of_tile(ROWS, GROUP, rows)
        # the depth of the last key that a row sees: what it has just written, or of a full tail
        tail = first_row + token
        room = tl.load(TAILS + 3 * tail + 1, mask=alive, other=0)
        last = tl.load(TAILS + 3 * tail + 2, mask=alive, other=0)
        last += tl.minimum(tl.load(WRITTEN + tail, mask=alive, other=0), room - 1)
        alive_now = alive & (tl.load(LIVE + tail, mask=alive, other=0) != 0)
        last = tl.where(alive_now, last, -1)
        deepest = tl.max(last, 0)
        shallowest = tl.min(tl.where(alive_now, last, 2147483647), 0)
        q = load_queries(
            Q, first_row, kv_head * GROUP, token, head, alive, q_row, q_head, ROWS, D, D_PADDED,
            False,
        )  # fmt: skip

        K += kv_head.to(tl.int64) * k_head
        V += kv_head.to(tl.int64) * v_head
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, DV_PADDED], tl.float32)
        lane = tl.arange(0, KEYS)
        for piece in range(tl.load(item + 2), tl.load(item + 3)):
            begin = tl.load(PIECES + 3 * piece)
            depth = tl.load(PIECES + 3 * piece + 2)
            # a tail is listed with all its room: nothing behind the last written key is read
            keys = tl.minimum(tl.load(PIECES + 3 * piece + 1), deepest + 1 - depth)
            low = 0
            if HAS_WINDOW:
                low = tl.maximum(low, shallowest - window + 1 - depth)
            for at in range(low, keys, KEYS):
                inside = at + lane < keys
                first = (begin + at).to(tl.int64)
                k = load_rows(K + first * k_key, lane * k_key, inside, D, D_PADDED)
                v = load_rows(V + first * v_key, lane * v_key, inside, DV, DV_PADDED)
                key_depth = depth + at + lane
                seen = inside[None, :] & (key_depth[None, :] <= last[:, None])
                if HAS_WINDOW:
                    seen = seen & (key_depth[None, :] > last[:, None] - window)
                scores = squash(product(q, tl.trans(k)), inner, HAS_SOFTCAP)
                logits = tl.where(seen, scores * outer, MASKED)
                top, total, acc = absorb(logits, 1.0, v, top, total, acc)

        # what was gathered of masked keys alone counts for nothing
        is_empty = top < 0.5 * MASKED
        total = tl.where(is_empty, 1.0, total)
        lse = tl.where(is_empty, float("-inf"), top + tl.log2(total))
        at_row = (slot + token).to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + head
        tl.store(LSE + at_row, lse, mask=alive)
        store_rows(PART, at_row * DV, alive & (is_empty == 0), acc / total[:, None], DV, DV_PADDED)


@triton.jit
def merge_kernel(
    PART,
    LSE,
    SINKS,
    OUT,
    SLOT_PTR,
    SLOTS,
    HEADS: tl.constexpr,
    DV: tl.constexpr,
    DV_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """A row's slots joined by their lse, for one head; the sink joins once. Zeros without keys."""
    row = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    top = tl.full([], MASKED, tl.float32)
    total = tl.zeros([], tl.float32)
    if HAS_SINKS:
        top = tl.load(SINKS + head).to(tl.float32) * LOG2E
        total += 1.0
    acc = tl.zeros([DV_PADDED], tl.float32)
    lane = tl.arange(0, BLOCK)
    stop = tl.load(SLOT_PTR + row + 1)
    for i in range(tl.load(SLOT_PTR + row), stop, BLOCK):
        inside = i + lane < stop
        slot = tl.load(SLOTS + i + lane, mask=inside, other=0)
        at = slot.to(tl.int64) * HEADS + head
        lse = tl.load(LSE + at, mask=inside, other=float("-inf"))
        # a slot without a result has never been written
        part = _load_parts(PART, at, lse > float("-inf"), DV, DV_PADDED)
        new_top = tl.maximum(top, tl.max(lse, 0))
        weight = tl.exp2(lse - new_top)
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(weight, 0)
        acc = acc * decay + tl.sum(part * weight[:, None], 0)
        top = new_top
    column = tl.arange(0, DV_PADDED)
    out = acc / tl.where(total == 0.0, 1.0, total)
    to = OUT + (row.to(tl.int64) * HEADS + head) * DV + column
    tl.store(to, out.to(OUT.dtype.element_ty), mask=column < DV)


@triton.jit
def _load_parts(PART, at, alive, DV: tl.constexpr, DV_PADDED: tl.constexpr):
    column = tl.arange(0, DV_PADDED)
    inside = alive[:, None] & (column < DV)[None, :]
    return tl.load(PART + at[:, None] * DV + column[None, :], mask=inside, other=0.0)
