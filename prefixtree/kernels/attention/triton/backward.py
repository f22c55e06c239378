"""The backward: sums of rows, then dK and dV by pieces of key tiles, then dQ by query tiles.

With p the probabilities (sink in the denominator), dp = dout v^T and a row's delta = dout . out:

    dv = p^T dout    ds = p (dp - delta)    dk = scale ds^T q    dq = scale ds k

(FlashAttention-2, arXiv 2307.08691, algorithm 2). A gradient of lse, whose derivative is the
softmax over the keys alone, is subtracted from delta. dQ has a separate kernel: atomics from the
dK/dV kernel were 1.2-2x slower when they were tried. Legend as in `forward`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from prefixtree.kernels.triton_primitives import (
    FOREST_ARGUMENTS,
    LOG2E,
    add_product,
    add_products,
    chosen,
    chosen_words,
    key_lanes,
    load_keys,
    load_queries,
    load_rows,
    load_vector,
    only_chosen,
    product,
    rows_of_tile,
    scores_of,
    squash,
    store_rows,
    visible,
    zeros_of,
)


@triton.jit(do_not_specialize=FOREST_ARGUMENTS)
def prepare_kernel(
    OUT,
    DOUT,
    LSE,
    DLSE,
    SINKS,
    ROW_VALUES,
    DSINKS,
    dout_token,
    dout_head,
    num_queries,
    tokens_a_block,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DV: tl.constexpr,
    DV_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Writes the float32 values of each row that the other kernels need: ROW_VALUES [2 or 3, rows].

    They are top and delta: p = exp2(logit - top), ds = p (dp - delta). Rows are in the order of a
    tile's, [Hk, blocks of heads, tokens_a_block, HEADS]. Beyond Tq they hold inf and 0, so that a
    tile's dead rows have p = ds = 0. With sinks and a gradient of lse there is a third value, share
    = p / softmax over the keys. Then p = share exp2(logit - top) and ds = exp2(logit - top) (share
    dp - delta), so no factor can overflow. DSINKS [programs, H] gets each program's share of the
    sinks' gradient.
    """
    BLOCKS: tl.constexpr = GROUP // HEADS
    head = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    alive = row < num_queries
    row = row.to(tl.int64)
    out = load_rows(OUT, (row * (KV_HEADS * GROUP) + head) * DV, alive, DV, DV_PADDED)
    dout = load_rows(DOUT + head.to(tl.int64) * dout_head, row * dout_token, alive, DV, DV_PADDED)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    at_lse = head.to(tl.int64) * num_queries + row
    block = head // GROUP * BLOCKS + head % GROUP // HEADS
    at = (block.to(tl.int64) * tokens_a_block + row) * HEADS + head % GROUP % HEADS
    rows = tokens_a_block.to(tl.int64) * (KV_HEADS * GROUP)
    top = tl.load(LSE + at_lse, mask=alive, other=0.0) * LOG2E
    if HAS_SINKS:
        sink = tl.load(SINKS + head).to(tl.float32) * LOG2E
        high = tl.maximum(top, sink)
        total = high + tl.log2(tl.exp2(top - high) + tl.exp2(sink - high))
        lost = tl.exp2(sink - total) * delta  # 0 where dead: delta is
        tl.store(DSINKS + tl.program_id(0) * (KV_HEADS * GROUP) + head, -tl.sum(lost, 0))
        if HAS_DLSE:
            share = tl.exp2(top - total)
            tl.store(ROW_VALUES + 2 * rows + at, share)
            delta *= share
        else:
            top = total
    if HAS_DLSE:
        delta -= tl.load(DLSE + at_lse, mask=alive, other=0.0)
    tl.store(ROW_VALUES + at, tl.where(alive, top, float("inf")))
    tl.store(ROW_VALUES + rows + at, delta)


@triton.jit
def _gradients(
    scores, logits, dp, delta, share, inner, SOFTCAP: tl.constexpr, SHARED: tl.constexpr
):
    """Computes p and ds before scaling, from logits less top; masked logits give 0 and 0."""
    p = tl.exp2(logits)
    if SHARED:
        ds = p * (dp * share - delta)
        p = p * share
    else:
        ds = p * (dp - delta)
    if SOFTCAP:
        # d tanh x = 1 - tanh^2 x
        ds = ds * (1.0 - scores * scores)
    return p, ds


@triton.jit(do_not_specialize=FOREST_ARGUMENTS)
def dkdv_kernel(
    Q,
    K,
    V,
    DOUT,
    ROW_VALUES,
    DK,
    DV_OUT,
    PARTIALS,
    K_SPANS,
    POSITION,
    CHOSEN,
    RUN_PAIRS,
    Q_TILES,
    K_TILES,
    PIECES,
    K_RUNS,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    dout_token,
    dout_head,
    num_queries,
    rows_a_block,
    inner,
    outer,
    scale,
    window,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_WIDTH: tl.constexpr,
    DV_PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SHARE: tl.constexpr,
    HAS_CHOSEN: tl.constexpr,
    TOKENS_PADDED: tl.constexpr,
    SUBSET: tl.constexpr,
    DETERMINISTIC: tl.constexpr,
    WITH_DK: tl.constexpr,
    WITH_DV: tl.constexpr,
    TMA: tl.constexpr,
    ROWS_TMA: tl.constexpr,
):
    """Computes dK, dV or both of one piece of a key tile, for all query heads of one kv head."""
    # scores are held transposed, [KEYS, ROWS], so that p and ds feed the products from registers;
    # dead key lanes are rows of dK and dV that are not stored; dead query rows have top = inf
    BLOCKS: tl.constexpr = GROUP // HEADS
    PIECES += 5 * (tl.program_id(0) // KV_HEADS)
    kv_head = tl.program_id(0) % KV_HEADS
    tile = tl.load(PIECES)
    slot = tl.load(PIECES + 3)
    begin = tl.load(K_TILES + 2 * tile)
    key, live, span, key_position = key_lanes(K_SPANS, POSITION, tile, begin, KEYS, HAS_WINDOW, TMA)
    k = load_keys(K, begin, live, kv_head, k_token, k_head, KEYS, D, D_WIDTH, TMA, False)
    v = load_keys(V, begin, live, kv_head, v_token, v_head, KEYS, DV, DV_PADDED, TMA, False)[0]
    first_head = kv_head * GROUP
    first_block = kv_head * BLOCKS
    rows = KV_HEADS * BLOCKS * rows_a_block

    dk = zeros_of(KEYS, D, D_WIDTH)
    dv = tl.zeros([KEYS, DV_PADDED], tl.float32)
    for run in range(tl.load(PIECES + 1), tl.load(PIECES + 2)):
        full_begin = tl.load(K_RUNS + 4 * run + 1)
        full_end = tl.load(K_RUNS + 4 * run + 2)
        for i in range(tl.load(K_RUNS + 4 * run) * BLOCKS, tl.load(K_RUNS + 4 * run + 3) * BLOCKS):
            q_tile = i // BLOCKS
            if SUBSET:
                start = tl.load(Q_TILES + 3 * q_tile)
                first_row = tl.load(Q_TILES + 3 * q_tile + 1)
                length = tl.load(Q_TILES + 3 * q_tile + 2)
            else:
                start = q_tile * TOKENS
                first_row = start
                length = tl.minimum(num_queries - start, TOKENS)
            token, head, alive = rows_of_tile(ROWS, HEADS, length)
            block_head = first_head + (i % BLOCKS) * HEADS
            q = load_queries(
                Q,
                first_row,
                block_head,
                token,
                head,
                alive,
                q_token,
                q_head,
                ROWS,
                D,
                D_WIDTH,
                TMA,
            )
            dout = load_queries(
                DOUT,
                first_row,
                block_head,
                token,
                head,
                alive,
                dout_token,
                dout_head,
                ROWS,
                DV,
                DV_PADDED,
                TMA,
            )[0]
            at_row = (first_block + i % BLOCKS) * rows_a_block + first_row * HEADS
            top = load_vector(ROW_VALUES, at_row, ROWS, ROWS_TMA)
            delta = load_vector(ROW_VALUES, rows + at_row, ROWS, ROWS_TMA)
            share = delta
            if HAS_SHARE:
                share = load_vector(ROW_VALUES, 2 * rows + at_row, ROWS, ROWS_TMA)
            scores = squash(scores_of(k, q), inner, HAS_SOFTCAP)
            logits = scores * outer - top[None, :]
            if HAS_CHOSEN:
                pair = tl.load(RUN_PAIRS + run) + q_tile - tl.load(K_RUNS + 4 * run)
                lane = tl.arange(0, KEYS)
                words = chosen_words(CHOSEN, pair, lane, token, KEYS, TOKENS_PADDED)
                logits = tl.where(chosen(words, token), logits, float("-inf"))
            else:
                if SUBSET or ROWS != TOKENS * HEADS:
                    # rows after a short tile are another tile's
                    logits = tl.where(alive[None, :], logits, float("-inf"))
                if (q_tile < full_begin) | (q_tile >= full_end):
                    query = start + token
                    position = query
                    if HAS_WINDOW:
                        position = tl.load(POSITION + query, mask=alive, other=0)
                    seen = visible(
                        query[None, :],
                        key[:, None],
                        span[:, None],
                        position[None, :],
                        key_position[:, None],
                        window,
                        HAS_WINDOW,
                    )
                    logits = tl.where(seen, logits, float("-inf"))
            if WITH_DK:
                dp = product(v, tl.trans(dout))
                p, ds = _gradients(
                    scores,
                    logits,
                    dp,
                    delta[None, :],
                    share[None, :],
                    inner,
                    HAS_SOFTCAP,
                    HAS_SHARE,
                )
            else:
                p = tl.exp2(logits)
                if HAS_SHARE:
                    p = p * share[None, :]
            if WITH_DV:
                dv = add_product(p.to(dout.dtype), dout, dv)
            if WITH_DK:
                dk = add_products(ds.to(dout.dtype), q, dk)
    token = key.to(tl.int64) * KV_HEADS + kv_head
    # [slots or partials, Hk, KEYS, D + DV] float32
    partial = slot
    if DETERMINISTIC:
        partial = tl.load(PIECES + 4)
    at_row = (partial.to(tl.int64) * KV_HEADS + kv_head) * KEYS + tl.arange(0, KEYS)
    at_row *= D + DV
    if WITH_DK:
        for i in tl.static_range(len(dk)):
            _keep(
                DK,
                token * D + i * D_WIDTH,
                PARTIALS,
                at_row + i * D_WIDTH,
                slot,
                live,
                dk[i] * scale,
                D - i * D_WIDTH,
                D_WIDTH,
                DETERMINISTIC,
            )
    if WITH_DV:
        at_row += D
        _keep(DV_OUT, token * DV, PARTIALS, at_row, slot, live, dv, DV, DV_PADDED, DETERMINISTIC)


@triton.jit
def _keep(
    X,
    at,
    PARTIALS,
    at_partial,
    slot,
    live,
    values,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    DETERMINISTIC: tl.constexpr,
):
    """Writes the rows of an uncut key tile, or what a piece adds to those of a cut one."""
    if slot < 0:
        store_rows(X, at, live, values, DIM, PADDED)
    elif DETERMINISTIC:
        store_rows(PARTIALS, at_partial, live, values, DIM, PADDED)
    else:
        _add_rows(PARTIALS, at_partial, live, values, DIM, PADDED)


@triton.jit
def _add_rows(base, offsets, alive, values, DIM: tl.constexpr, PADDED: tl.constexpr):
    column = tl.arange(0, PADDED)
    inside = alive[:, None]
    if PADDED != DIM:
        inside = inside & (column < DIM)[None, :]
    at = base + offsets[:, None] + column[None, :]
    tl.atomic_add(at, values, mask=inside, sem="relaxed")


@triton.jit(do_not_specialize=FOREST_ARGUMENTS)
def reduce_kernel(
    PARTIALS,
    DK,
    DV_OUT,
    K_TILES,
    SLOTS,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_PADDED: tl.constexpr,
    DV_PADDED: tl.constexpr,
    KEYS: tl.constexpr,
    DETERMINISTIC: tl.constexpr,
):
    """Casts the float32 sums of cut key tiles; if deterministic, sums their partials in order."""
    slot = tl.program_id(0)
    kv_head = tl.program_id(1)
    tile = tl.load(SLOTS + 3 * slot)
    first = slot
    end = slot + 1
    if DETERMINISTIC:
        first = tl.load(SLOTS + 3 * slot + 1)
        end = tl.load(SLOTS + 3 * slot + 2)
    begin = tl.load(K_TILES + 2 * tile)
    lane = tl.arange(0, KEYS)
    live = lane < tl.load(K_TILES + 2 * tile + 1)
    dk = tl.zeros([KEYS, D_PADDED], tl.float32)
    dv = tl.zeros([KEYS, DV_PADDED], tl.float32)
    at = (first.to(tl.int64) * KV_HEADS + kv_head) * KEYS * (D + DV)
    for _ in range(first, end):
        dk += load_rows(PARTIALS + at, lane * (D + DV), live, D, D_PADDED)
        dv += load_rows(PARTIALS + at + D, lane * (D + DV), live, DV, DV_PADDED)
        at += KV_HEADS * KEYS * (D + DV)
    token = (begin + lane).to(tl.int64) * KV_HEADS + kv_head
    store_rows(DK, token * D, live, dk, D, D_PADDED)
    store_rows(DV_OUT, token * DV, live, dv, DV, DV_PADDED)


@triton.jit(do_not_specialize=FOREST_ARGUMENTS)
def dq_kernel(
    Q,
    K,
    V,
    DOUT,
    ROW_VALUES,
    DQ,
    K_SPANS,
    POSITION,
    CHOSEN,
    CHOSEN_TILES,
    Q_TILES,
    Q_ORDER,
    K_TILES,
    Q_PTR,
    Q_SPLIT,
    Q_RUNS,
    PARTIAL_PTR,
    PARTIAL,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    dout_token,
    dout_head,
    num_queries,
    rows_a_block,
    inner,
    outer,
    scale,
    window,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_WIDTH: tl.constexpr,
    DV_PADDED: tl.constexpr,
    TOKENS_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SHARE: tl.constexpr,
    HAS_CHOSEN: tl.constexpr,
    TMA: tl.constexpr,
    Q_TMA: tl.constexpr,
    DOUT_TMA: tl.constexpr,
    ROWS_TMA: tl.constexpr,
):
    """Computes dQ of one query tile, over the same key tiles as the forward."""
    BLOCKS: tl.constexpr = GROUP // HEADS
    tile = tl.load(Q_ORDER + tl.program_id(0) // (KV_HEADS * BLOCKS))
    kv_head = tl.program_id(0) % (KV_HEADS * BLOCKS) // BLOCKS
    block = tl.program_id(0) % BLOCKS
    start = tl.load(Q_TILES + 3 * tile)
    first_row = tl.load(Q_TILES + 3 * tile + 1)
    length = tl.load(Q_TILES + 3 * tile + 2)
    token, head, alive = rows_of_tile(ROWS, HEADS, length)
    query = start + token
    first_head = kv_head * GROUP + block * HEADS
    q = load_queries(
        Q, first_row, first_head, token, head, alive, q_token, q_head, ROWS, D, D_WIDTH, Q_TMA
    )
    dout = load_queries(
        DOUT,
        first_row,
        first_head,
        token,
        head,
        alive,
        dout_token,
        dout_head,
        ROWS,
        DV,
        DV_PADDED,
        DOUT_TMA,
    )[0]
    row = first_row.to(tl.int64)
    at_row = (kv_head * BLOCKS + block) * rows_a_block + first_row * HEADS
    rows = KV_HEADS * BLOCKS * rows_a_block
    top = load_vector(ROW_VALUES, at_row, ROWS, ROWS_TMA)
    delta = load_vector(ROW_VALUES, rows + at_row, ROWS, ROWS_TMA)
    share = delta
    if HAS_SHARE:
        share = load_vector(ROW_VALUES, 2 * rows + at_row, ROWS, ROWS_TMA)

    dq = zeros_of(ROWS, D, D_WIDTH)
    # partial tiles first, as in the forward
    position = query
    if HAS_WINDOW:
        position = tl.load(POSITION + query, mask=alive, other=0)
    first = tl.load(PARTIAL_PTR + tile)
    end = tl.load(PARTIAL_PTR + tile + 1)
    if HAS_CHOSEN:
        # a tile ahead: a load in its own step would make the pipeline a stage shorter
        following = tl.load(CHOSEN_TILES + first)
    for i in range(first, end):
        if HAS_CHOSEN:
            begin = following ^ (following >> 31)
            is_dense = following < 0
            following = tl.load(CHOSEN_TILES + tl.minimum(i + 1, end - 1))
            lane = tl.arange(0, KEYS)
            words = chosen_words(CHOSEN, i, token, lane, TOKENS_PADDED, KEYS)
        else:
            begin = tl.load(PARTIAL + 2 * i + 1)
        key, live, span, key_position = key_lanes(
            K_SPANS, POSITION, tl.load(PARTIAL + 2 * i), begin, KEYS, HAS_WINDOW, TMA
        )
        k = load_keys(K, begin, live, kv_head, k_token, k_head, KEYS, D, D_WIDTH, TMA, False)
        v = load_keys(V, begin, live, kv_head, v_token, v_head, KEYS, DV, DV_PADDED, TMA, False)[0]
        if HAS_CHOSEN:
            scores = squash(scores_of(q, k), inner, HAS_SOFTCAP)
            # before the branch, across which products do not overlap
            dp = product(dout, tl.trans(v))
            logits = scores * outer - top[:, None]
            logits = only_chosen(logits, float("-inf"), words, lane, is_dense, KEYS != D_WIDTH)
        else:
            seen = visible(
                query[:, None],
                key[None, :],
                span[None, :],
                position[:, None],
                key_position[None, :],
                window,
                HAS_WINDOW,
            )
            scores = squash(scores_of(q, k), inner, HAS_SOFTCAP)
            logits = tl.where(seen, scores * outer - top[:, None], float("-inf"))
            dp = product(dout, tl.trans(v))
        _, ds = _gradients(
            scores, logits, dp, delta[:, None], share[:, None], inner, HAS_SOFTCAP, HAS_SHARE
        )
        dq = add_products(ds.to(dout.dtype), k, dq)
    if not HAS_CHOSEN:
        for run in range(tl.load(Q_PTR + tile), tl.load(Q_SPLIT + tile)):
            begin = tl.load(K_TILES + 2 * tl.load(Q_RUNS + 3 * run))
            for i in range(tl.load(Q_RUNS + 3 * run + 1) - tl.load(Q_RUNS + 3 * run)):
                at = begin + i * KEYS
                k = load_keys(K, at, 0, kv_head, k_token, k_head, KEYS, D, D_WIDTH, TMA, True)
                v = load_keys(V, at, 0, kv_head, v_token, v_head, KEYS, DV, DV_PADDED, TMA, True)[0]
                scores = squash(scores_of(q, k), inner, HAS_SOFTCAP)
                logits = scores * outer - top[:, None]
                dp = product(dout, tl.trans(v))
                _, ds = _gradients(
                    scores,
                    logits,
                    dp,
                    delta[:, None],
                    share[:, None],
                    inner,
                    HAS_SOFTCAP,
                    HAS_SHARE,
                )
                dq = add_products(ds.to(dout.dtype), k, dq)
    DQ += (row * (KV_HEADS * GROUP) + first_head) * D
    at = (token * (KV_HEADS * GROUP) + head) * D
    for i in tl.static_range(len(dq)):
        store_rows(DQ, at + i * D_WIDTH, alive, dq[i] * scale, D - i * D_WIDTH, D_WIDTH)
