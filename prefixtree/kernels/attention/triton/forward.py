"""The forward: online softmax over the key runs of a query tile.

It is algorithm 1 of FlashAttention-2 (arXiv 2307.08691) over the runs of `BlockTables`. A program
has one query tile and one kv head (or a block of its query heads); rows are (token, head) pairs.

Legend: T packed tokens, Tq query rows of q, H query heads, Hk kv heads, G = H / Hk, D and Dv head
dims.
"""

from __future__ import annotations

import triton
import triton.language as tl

from prefixtree.kernels.triton_primitives import (
    FOREST_ARGUMENTS,
    LN2,
    LOG2E,
    MASKED,
    MASKED_SCORE,
    absorb,
    chosen_words,
    key_lanes,
    load_keys,
    load_queries,
    only_chosen,
    rows_of_tile,
    scores_of,
    squash,
    store_rows,
    visible,
)


@triton.jit(do_not_specialize=FOREST_ARGUMENTS)
def forward_kernel(
    Q,
    K,
    V,
    SINKS,
    OUT,
    LSE,
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
    num_queries,
    inner,
    outer,
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
    HAS_SINKS: tl.constexpr,
    HAS_CHOSEN: tl.constexpr,
    TMA: tl.constexpr,
    Q_TMA: tl.constexpr,
):
    BLOCKS: tl.constexpr = GROUP // HEADS
    # heads run fastest: the costliest query tiles start first in every head
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

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DV_PADDED], tl.float32)
    # partial tiles first: after the full ones their products would wait for one another (ptxas of
    # CUDA 12.8 moves the sums of a loop after another). If queries choose keys, all tiles count as
    # partial
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
            scores = only_chosen(scores, MASKED_SCORE, words, lane, is_dense, KEYS != DV_PADDED)
            top, total, acc = absorb(scores, outer, v, top, total, acc)
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
            logits = tl.where(seen, scores * outer, MASKED)
            top, total, acc = absorb(logits, 1.0, v, top, total, acc)
    if not HAS_CHOSEN:
        for run in range(tl.load(Q_PTR + tile), tl.load(Q_SPLIT + tile)):
            # full tiles have the full length and are side by side
            begin = tl.load(K_TILES + 2 * tl.load(Q_RUNS + 3 * run))
            for i in range(tl.load(Q_RUNS + 3 * run + 1) - tl.load(Q_RUNS + 3 * run)):
                at = begin + i * KEYS
                k = load_keys(K, at, 0, kv_head, k_token, k_head, KEYS, D, D_WIDTH, TMA, True)
                v = load_keys(V, at, 0, kv_head, v_token, v_head, KEYS, DV, DV_PADDED, TMA, True)[0]
                scores = squash(scores_of(q, k), inner, HAS_SOFTCAP)
                top, total, acc = absorb(scores, outer, v, top, total, acc)
    if HAS_CHOSEN:
        # a query that chose no key has no softmax
        total = tl.where(top > MASKED_SCORE * outer, total, float("nan"))
    row = first_row.to(tl.int64)
    at_lse = (first_head + head).to(tl.int64) * num_queries + (row + token)
    tl.store(LSE + at_lse, (top + tl.log2(total)) * LN2, mask=alive)
    if HAS_SINKS:
        # the sink joins the sum of exponentials but has no value, and is not in lse
        sink = tl.load(SINKS + first_head + head, mask=alive, other=0.0).to(tl.float32)
        total += tl.exp2(sink * LOG2E - top)
    OUT += (row * (KV_HEADS * GROUP) + first_head) * DV
    at_out = (token * (KV_HEADS * GROUP) + head) * DV
    store_rows(OUT, at_out, alive, acc / total[:, None], DV, DV_PADDED)
