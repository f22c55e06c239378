"""The kernels of attention to gathered latents (`latents.gathered`), for Hopper.

A program has a query and 64 of its heads, the rows of its products, and goes through the query's
chosen keys. Two warpgroups share a tile. Each has half of the columns of the sums over all keys,
because neither has registers for more.

Legend: T packed tokens, n queries of a chunk, H heads, R and P columns of a latent and of its key
with positions, k keys a query may choose.
"""

from __future__ import annotations

import triton
import triton.language as tl

from prefixtree.kernels.triton_primitives import (
    LN2,
    LOG2E,
    add_product,
    key_lanes,
    load_rows,
    product,
    store_rows,
    visible,
    zeros_of,
)


# CHOSEN may be a slice, which starts anywhere
@triton.jit(do_not_specialize=("CHOSEN", "first", "end", "first_tile", "num_words", "most"))
def index_kernel(
    CHOSEN,
    INDEX,
    COUNT,
    K_SPANS,
    POSITION,
    Q_TILES,
    Q_PTR,
    Q_RUNS,
    first,
    end,
    first_tile,
    num_words,
    most,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Writes INDEX [n, most] and COUNT [n] of the queries from `first` to before `end`."""
    tile = first_tile + tl.program_id(0)
    start = tl.load(Q_TILES + 3 * tile)
    token = tl.arange(0, TOKENS)
    query = tl.load(Q_TILES + 3 * tile + 1) + token
    alive = (token < tl.load(Q_TILES + 3 * tile + 2)) & (query >= first) & (query < end)
    row = (query - first).to(tl.int64)
    count = tl.zeros([TOKENS], tl.int32)
    for run in range(tl.load(Q_PTR + tile), tl.load(Q_PTR + tile + 1)):
        for k_tile in range(tl.load(Q_RUNS + 3 * run), tl.load(Q_RUNS + 3 * run + 1)):
            key, live, span, _ = key_lanes(
                K_SPANS, POSITION, k_tile, k_tile * KEYS, KEYS, False, False
            )
            seen = (
                visible((start + token)[:, None], key[None, :], span[None, :], 0, 0, 0, False)
                & alive[:, None]
            )
            place = tl.load(POSITION + key, mask=live, other=0)
            at_word = query.to(tl.int64)[:, None] * num_words + (place // 32)[None, :]
            word = tl.load(CHOSEN + at_word, mask=seen, other=0)
            picked = ((word >> (place % 32)[None, :]) & 1) * seen.to(tl.int32)
            at = count[:, None] + tl.cumsum(picked, 1) - 1
            into = INDEX + row[:, None] * most + at
            tl.store(into, key[None, :] + tl.zeros_like(at), mask=(picked != 0) & (at < most))
            count += tl.sum(picked, 1)
    tl.store(COUNT + row, count, mask=alive)


@triton.jit
def _rows_of_program(n, HEADS: tl.constexpr, ROWS: tl.constexpr, R: tl.constexpr):
    """Finds a query, heads, whether each exists, rows of [H, n, R] and [n, H]. # [], 4 x [ROWS]"""
    BLOCKS: tl.constexpr = (HEADS + ROWS - 1) // ROWS
    query = (tl.program_id(0) // BLOCKS).to(tl.int64)
    head = tl.program_id(0) % BLOCKS * ROWS + tl.arange(0, ROWS)
    return query, head, head < HEADS, (head.to(tl.int64) * n + query) * R, query * HEADS + head


@triton.jit(do_not_specialize=("n", "most"))
def forward_kernel(
    Q,
    Q_ROPE,
    LATENTS,
    INDEX,
    COUNT,
    OUT,
    LSE,
    rope_token,
    rope_head,
    n,
    most,
    scale,
    HEADS: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    R_PADDED: tl.constexpr,
    P_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Writes OUT [H, n, R] and LSE [n, H]."""
    query, head, alive, at, at_lse = _rows_of_program(n, HEADS, ROWS, R)
    at_rope = query * rope_token + head * rope_head
    q = load_rows(Q, at, alive, R, R_PADDED)
    q_rope = load_rows(Q_ROPE, at_rope, alive, P, P_PADDED)
    count = tl.load(COUNT + query)
    INDEX += query * most
    outer = scale * LOG2E
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, R_PADDED], tl.float32)
    length = tl.minimum(count, most)
    lane = tl.arange(0, KEYS)
    following = tl.load(INDEX + lane, mask=lane < length, other=0)
    for first in tl.range(0, length, KEYS, num_stages=STAGES):
        live = lane < length - first
        # after the last key comes some token, whose scores are masked
        key = following.to(tl.int64) * (R + P)
        # a step ahead, or latents would be copied a stage later
        ahead = first + KEYS + lane
        following = tl.load(INDEX + ahead, mask=ahead < length, other=0)
        k = load_rows(LATENTS, key, key >= 0, R, R_PADDED)
        k_rope = load_rows(LATENTS + R, key, key >= 0, P, P_PADDED)
        k_rope = tl.trans(k_rope)
        # if Triton sees that a product feeds another, each warpgroup computes all of it (64 rows
        # are those of one), and the next keys are copied after the last product, not during it.
        # Branches hide that. These are always taken; their conditions differ, so that they stay
        # apart
        scores = tl.zeros([ROWS, KEYS], tl.float32)
        if count > -1:
            scores = product(q_rope, k_rope)
        if count > 0:
            scores = add_product(q, tl.trans(k), scores) * outer
            scores = tl.where(live[None, :], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            p = tl.exp2(scores - new_top[:, None])
            decay = tl.exp2(top - new_top)
            total = total * decay + tl.sum(p, 1)
            top = new_top
            p = p.to(k.dtype)
        else:
            # any values that take no shared memory while the loop runs
            decay = top
            p = tl.load(Q + at[:, None] + tl.arange(0, KEYS)[None, :])
        if count > -2:
            acc = add_product(p, k, acc * decay[:, None])
    # no softmax of no keys, nor of more than the list holds
    total = tl.where((count > 0) & (count <= most), total, float("nan"))
    tl.store(LSE + at_lse, (top + tl.log2(total)) * LN2, mask=alive)
    store_rows(OUT, at, alive, acc / total[:, None], R, R_PADDED)


@triton.jit
def _pieces(X, at, alive, R: tl.constexpr, R_PADDED: tl.constexpr, WIDTH: tl.constexpr):
    """Loads rows in pieces of columns: a tuple of [rows, WIDTH]."""
    pieces = ()
    for first in tl.static_range(0, R_PADDED, WIDTH):
        pieces += (load_rows(X + first, at, alive, R - first, WIDTH),)
    return pieces


@triton.jit(do_not_specialize=("n", "most"))
def backward_kernel(
    Q,
    Q_ROPE,
    LATENTS,
    INDEX,
    COUNT,
    DOUT,
    LSE,
    DELTA,
    DQ,
    DQ_ROPE,
    DLATENTS,
    rope_token,
    rope_head,
    drope_token,
    drope_head,
    n,
    most,
    scale,
    HEADS: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    R_PADDED: tl.constexpr,
    P_PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Writes DQ [H, n, R] and DQ_ROPE [n, H, P], and adds to DLATENTS [T, R + P] float32."""
    query, head, alive, at, at_lse = _rows_of_program(n, HEADS, ROWS, R)
    at_rope = query * rope_token + head * rope_head
    # q above dout: both are multiplied with keys, and give the latents' gradient, in one product
    # of 128 rows, which two warpgroups share
    double_row = tl.arange(0, 2 * ROWS)
    of_both = tl.program_id(0) % ((HEADS + ROWS - 1) // ROWS) * ROWS + double_row % ROWS
    at_both = (of_both.to(tl.int64) * n + query) * R
    # one load, not a sum of two: a loaded tensor is in shared memory once
    base = tl.where(double_row < ROWS, Q + at_both, DOUT + at_both)[:, None]
    rows = ()
    for first in tl.static_range(0, R_PADDED, WIDTH):
        part = first + tl.arange(0, WIDTH)
        there = (of_both < HEADS)[:, None]
        if first + WIDTH > R:
            there = there & (part < R)[None, :]
        rows += (tl.load(base + part[None, :], mask=there, other=0.0),)
    q_rope = load_rows(Q_ROPE, at_rope, alive, P, P_PADDED)
    lse = tl.load(LSE + at_lse, mask=alive, other=0.0) * LOG2E
    delta = tl.load(DELTA + at_lse, mask=alive, other=0.0)
    INDEX += query * most
    outer = scale * LOG2E
    dq = zeros_of(ROWS, R_PADDED, WIDTH)
    dq_rope = tl.zeros([ROWS, P_PADDED], tl.float32)
    length = tl.minimum(tl.load(COUNT + query), most)
    lane = tl.arange(0, KEYS)
    following = tl.load(INDEX + lane, mask=lane < length, other=0)
    p_column, column = tl.arange(0, P_PADDED), tl.arange(0, WIDTH)
    for first in range(0, length, KEYS):
        live = lane < length - first
        key = following.to(tl.int64) * (R + P)
        # a step ahead, so that a step waits for memory once
        ahead = first + KEYS + lane
        following = tl.load(INDEX + ahead, mask=ahead < length, other=0)
        k = _pieces(LATENTS, key, key >= 0, R, R_PADDED, WIDTH)
        k_rope = load_rows(LATENTS + R, key, key >= 0, P, P_PADDED)
        products = product(rows[0], tl.trans(k[0]))
        for i in tl.static_range(1, len(k)):
            products = add_product(rows[i], tl.trans(k[i]), products)
        scores, dp = tl.split(tl.permute(tl.reshape(products, [2, ROWS, KEYS]), (1, 2, 0)))
        scores += product(q_rope, tl.trans(k_rope))
        p = tl.where(live[None, :], tl.exp2(scores * outer - lse[:, None]), 0.0)
        ds = (p * (dp - delta[:, None]) * scale).to(k_rope.dtype)
        weights = tl.join(ds, p.to(k_rope.dtype))
        weights = tl.reshape(tl.permute(weights, (2, 0, 1)), [2 * ROWS, KEYS])
        dq_rope = add_product(ds, k_rope, dq_rope)
        sums = ()
        for i in tl.static_range(len(k)):
            sums += (add_product(ds, k[i], dq[i]),)
        dq = sums
        inside = live[None, :]
        if P_PADDED != P:
            inside = inside & (p_column < P)[:, None]
        tl.atomic_add(
            DLATENTS + R + key[None, :] + p_column[:, None],
            product(tl.trans(q_rope), ds),
            mask=inside,
            sem="relaxed",
        )
        for i in tl.static_range(len(k)):
            inside = live[None, :]
            if R_PADDED != R:
                inside = inside & (i * WIDTH + column < R)[:, None]
            tl.atomic_add(
                DLATENTS + i * WIDTH + key[None, :] + column[:, None],
                product(tl.trans(rows[i]), weights),
                mask=inside,
                sem="relaxed",
            )
    at_drope = query * drope_token + head * drope_head
    store_rows(DQ_ROPE, at_drope, alive, dq_rope, P, P_PADDED)
    for i in tl.static_range(len(dq)):
        store_rows(DQ + i * WIDTH, at, alive, dq[i], R - i * WIDTH, WIDTH)
