"""The backward's first pass: what each row of queries needs of out and its gradient."""

from __future__ import annotations

import triton
import triton.language as tl

from prefixtree.kernels.triton_primitives import FOREST_ARGUMENTS, LOG2E, load_rows


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
    """ROW_VALUES [2 or 3, rows] float32, top and delta: p = exp2(logit - top), ds = p (dp - delta).

    Rows lie in the order of a tile's, [Hk, blocks of heads, tokens_a_block, HEADS]; beyond Tq they
    hold inf and 0, so that a tile's dead rows have p = ds = 0. With sinks and a gradient of lse
    there is a third, share = p / softmax over the keys: p is then share exp2(logit - top) and
    ds = exp2(logit - top) (share dp - delta), so that no factor can overflow. DSINKS [programs, H]
    holds each program's share of the sinks' gradient.
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
