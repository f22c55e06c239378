"""The kernels of decoding: partial attention of rows to runs of keys, and its merge by lse.

Tensors are contiguous. Numbers that differ by step or forest are read from tensors of the work list
(`DecodeTables`), so a captured launch stays right while they change.

Legend: B rows, H query heads, Hk kv heads, G = H / Hk, D and Dv head dims.
"""

from __future__ import annotations

import triton
import triton.language as tl

from prefixtree.kernels.triton_primitives import (
    LOG2E,
    MASKED,
    absorb,
    load_rows,
    product,
    rows_of_tile,
    squash,
    store_rows,
)


@triton.jit
def write_kernel(
    K, V, KEY_POOL, VALUE_POOL, TAILS, WRITTEN, LIVE,
    KEY: tl.constexpr, VALUE: tl.constexpr, KEY_PADDED: tl.constexpr, VALUE_PADDED: tl.constexpr,
):  # fmt: skip
    """Writes a row's key (KEY = Hk x D numbers) and value if it is live and its tail has room."""
    row = tl.program_id(0).to(tl.int64)
    written = tl.load(WRITTEN + row)
    if (tl.load(LIVE + row) != 0) & (written < tl.load(TAILS + 3 * row + 1)):
        at = tl.load(TAILS + 3 * row).to(tl.int64) + written
        column = tl.arange(0, KEY_PADDED)
        k = tl.load(K + row * KEY + column, mask=column < KEY)
        tl.store(KEY_POOL + at * KEY + column, k, mask=column < KEY)
        column = tl.arange(0, VALUE_PADDED)
        v = tl.load(V + row * VALUE + column, mask=column < VALUE)
        tl.store(VALUE_POOL + at * VALUE + column, v, mask=column < VALUE)


@triton.jit(do_not_specialize=["window"])
def partial_kernel(
    Q, K, V, PART, LSE, ITEMS, PIECES, TAILS, WRITTEN, LIVE, inner, outer, window,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    D_PADDED: tl.constexpr, DV_PADDED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Computes an item's rows x the query heads of one kv head; lse is -inf if nothing is seen."""
    # the kv heads of a key are side by side in the pool: their programs run at the same time
    item = ITEMS + 5 * (tl.program_id(0) // KV_HEADS)
    kv_head = tl.program_id(0) % KV_HEADS
    rows = tl.load(item + 1)
    if rows > 0:
        first_row = tl.load(item)
        slot = tl.load(item + 4)
        token, head, alive = rows_of_tile(ROWS, GROUP, rows)
        # the depth of the last key that a row sees: the key just written, or the last of a full
        # tail
        tail = first_row + token
        room = tl.load(TAILS + 3 * tail + 1, mask=alive, other=0)
        last = tl.load(TAILS + 3 * tail + 2, mask=alive, other=0)
        last += tl.minimum(tl.load(WRITTEN + tail, mask=alive, other=0), room - 1)
        alive_now = alive & (tl.load(LIVE + tail, mask=alive, other=0) != 0)
        at_query = tail * (KV_HEADS * GROUP) + kv_head * GROUP + head
        q = load_rows(Q, at_query.to(tl.int64) * D, alive, D, D_PADDED)

        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, DV_PADDED], tl.float32)
        lane = tl.arange(0, KEYS)
        for piece in range(tl.load(item + 2), tl.load(item + 3)):
            begin = tl.load(PIECES + 5 * piece)
            depth = tl.load(PIECES + 5 * piece + 2)
            sees = alive_now & (tail >= tl.load(PIECES + 5 * piece + 3))
            sees = sees & (tail < tl.load(PIECES + 5 * piece + 4))
            seen_to = tl.where(sees, last, -1)
            # a tail is listed with all its room: no key after the last written one is read
            keys = tl.minimum(tl.load(PIECES + 5 * piece + 1), tl.max(seen_to, 0) + 1 - depth)
            low = 0
            if HAS_WINDOW:
                # if no row sees, `low` leaves room for what a pipelined loop adds to it: compiled
                # loops load ahead, at low + KEYS, and a wrapped number would pass for a small one
                shallowest = tl.min(tl.where(sees, last, 1073741824), 0)
                low = tl.minimum(tl.maximum(low, shallowest - window + 1 - depth), keys)
            for at in range(low, keys, KEYS):
                inside = at + lane < keys
                first = (begin + at).to(tl.int64) * KV_HEADS + kv_head
                k = load_rows(K + first * D, lane * (KV_HEADS * D), inside, D, D_PADDED)
                v = load_rows(V + first * DV, lane * (KV_HEADS * DV), inside, DV, DV_PADDED)
                key_depth = depth + at + lane
                seen = inside[None, :] & (key_depth[None, :] <= seen_to[:, None])
                if HAS_WINDOW:
                    seen = seen & (key_depth[None, :] > seen_to[:, None] - window)
                scores = squash(product(q, tl.trans(k)), inner, HAS_SOFTCAP)
                logits = tl.where(seen, scores * outer, MASKED)
                top, total, acc = absorb(logits, 1.0, v, top, total, acc)

        # a sum over masked keys alone counts for nothing
        is_empty = top < 0.5 * MASKED
        total = tl.where(is_empty, 1.0, total)
        lse = tl.where(is_empty, float("-inf"), top + tl.log2(total))
        at_row = (slot + token).to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + head
        tl.store(LSE + at_row, lse, mask=alive)
        store_rows(PART, at_row * DV, alive & (is_empty == 0), acc / total[:, None], DV, DV_PADDED)


@triton.jit
def merge_kernel(
    PART, LSE, SINKS, OUT, SLOT_PTR, SLOTS,
    HEADS: tl.constexpr, DV: tl.constexpr, DV_PADDED: tl.constexpr, BLOCK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Joins a row's slots by their lse for one head, and the sink once. Zeros without keys."""
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
        part = load_rows(PART, at * DV, lse > float("-inf"), DV, DV_PADDED)
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
