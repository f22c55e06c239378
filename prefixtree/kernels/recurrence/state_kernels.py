"""Triton kernels for the states of a recurrence along a forest.

Inside a chunk a linear recurrence is local, and chunks need no order. Only the state that one chunk
hands to the next follows the tree. One program walks the chunks of one segment, for one head and
one block of value columns. It starts from the state in which its parent segment ended, and waits
for that state on a flag. Programs take their work from a counter, in an order in which every
segment comes after its parent (backward: after its children). So a program waits only for programs
that already run, and one launch serves the whole forest without a deadlock.

In the backward, the gradient of a segment's final state is the sum over its children. Each branch
point has a few slots. The children of a slot add to it one after another, in a fixed order and in
fp32: the sum does not depend on timing, and its memory does not grow with the number of children.

A segment of a linear recurrence turns its start state into transition @ start + end, where `end` is
the state in which it would end from zeros. Once every segment's end and transition are known, the
states follow from one product per branch point (`hand_down`). Backward, transitions are transposed,
and the gradient of a branch point's state is the sum over its children (`hand_up`). Work is dealt
in the same way, with a flag per branch point, head and block of columns.

Legend: T packed tokens, N segments, NC chunks of BT tokens, H key heads, HV value heads, K and V
head dims, B branch points (segments with children; to hand states on: those whose final state is
read), S slots, F states that leave.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wait_for(flag, value):
    """Spins until the flag reaches `value`; what was stored before it was set is visible then."""
    while tl.atomic_add(flag, 0, sem="acquire") < value:
        pass


@triton.jit
def publish(flag, value):
    """Sets a flag once every thread of the program has stored what the flag stands for."""
    tl.debug_barrier()
    tl.atomic_xchg(flag, value, sem="release")


@triton.jit
def states_forward(
    k,
    w,
    u,
    v_new,
    g,
    gk,
    h,
    states,
    flags,
    segment_start,
    first_chunk,
    order,
    state_of,
    parent_state,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    USE_G: tl.constexpr,
    USE_GK: tl.constexpr,
    USE_W: tl.constexpr,
):
    """Computes states at every chunk's start, and values less the state's predictions.

    k [T, H, K] (with gk: [T, HV, K], gates applied), w [T, HV, K], u [T, HV, V]; g fp32 [T, HV] or
    gk fp32 [T, HV, K]: log2 of the decay, summed along each chunk. Writes v_new [T, HV, V], h
    [NC, HV, K, V], states fp32 [B, HV, K, V]: where branch points end.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    work = tl.atomic_add(flags, 1, sem="relaxed")
    lane = work % (NV * HV)
    i_v = lane % NV
    i_h = (lane // NV).to(tl.int64)
    segment = tl.load(order + work // (NV * HV))
    begin = tl.load(segment_start + segment).to(tl.int64)
    length = tl.load(segment_start + segment + 1) - tl.load(segment_start + segment)
    chunk = tl.load(first_chunk + segment).to(tl.int64)
    parent = tl.load(parent_state + segment).to(tl.int64)

    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    o_c = tl.arange(0, BT)
    in_k = o_k < K
    in_v = o_v < V
    in_h = in_k[:, None] & in_v[None, :]
    tile = i_h * (K * V) + o_k[:, None] * V + o_v[None, :]

    b_h = tl.zeros([BK, BV], dtype=tl.float32)
    if parent >= 0:
        wait_for(flags + 1 + parent * (NV * HV) + lane, 1)
        b_h = tl.load(states + parent * (HV * K * V) + tile, mask=in_h, other=0.0)

    for start in range(0, length, BT):
        in_t = start + o_c < length
        token = begin + start + o_c
        last = begin + tl.minimum(start + BT, length) - 1
        tl.store(h + chunk * (HV * K * V) + tile, b_h.to(h.dtype.element_ty), mask=in_h)
        chunk += 1

        in_tv = in_t[:, None] & in_v[None, :]
        at_v = (token[:, None] * HV + i_h) * V + o_v[None, :]
        b_v = tl.load(u + at_v, mask=in_tv, other=0.0)
        if USE_W:
            at_w = (token[:, None] * HV + i_h) * K + o_k[None, :]
            b_w = tl.load(w + at_w, mask=in_t[:, None] & in_k[None, :], other=0.0)
            b_v = b_v - tl.dot(b_w, b_h.to(b_w.dtype), input_precision="ieee")
            tl.store(v_new + at_v, b_v.to(v_new.dtype.element_ty), mask=in_tv)
        if USE_G:
            g_last = tl.load(g + last * HV + i_h)
            b_g = tl.load(g + token * HV + i_h, mask=in_t, other=0.0)
            b_v = b_v * tl.where(in_t, tl.exp2(g_last - b_g), 0.0)[:, None]
            b_h *= tl.exp2(g_last)
        if USE_GK:
            gk_last = tl.load(gk + (last * HV + i_h) * K + o_k, mask=in_k, other=0.0)
            b_h *= tl.exp2(gk_last)[:, None]
        at_k = (token[None, :] * H + i_h // (HV // H)) * K + o_k[:, None]
        b_k = tl.load(k + at_k, mask=in_k[:, None] & in_t[None, :], other=0.0)
        b_h = tl.dot(b_k, b_v.to(b_k.dtype), b_h, input_precision="ieee")

    own_state = tl.load(state_of + segment).to(tl.int64)
    if own_state >= 0:
        tl.store(states + own_state * (HV * K * V) + tile, b_h, mask=in_h)
        publish(flags + 1 + own_state * (NV * HV) + lane, 1)


@triton.jit
def states_backward(
    q,
    k,
    w,
    do,
    dv,
    g,
    gk,
    dh,
    dstates,
    flags,
    segment_start,
    first_chunk,
    order,
    state_of,
    parent_state,
    slot_of,
    rank_of,
    slot_start,
    slot_count,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    USE_G: tl.constexpr,
    USE_GK: tl.constexpr,
    USE_W: tl.constexpr,
):
    """Computes gradients of the states at every chunk's end.

    q, k, w, g, gk as forward, do [T, HV, V], dv [T, HV, V]: the gradient of v_new inside its chunk,
    to which the gradient through the states is added in place. Writes dh [NC, HV, K, V]. dstates
    fp32 [S, HV, K, V] is scratch: the sums of the children's gradients at branch points.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    work = tl.atomic_add(flags, 1, sem="relaxed")
    lane = work % (NV * HV)
    i_v = lane % NV
    i_h = (lane // NV).to(tl.int64)
    segment = tl.load(order + work // (NV * HV))
    begin = tl.load(segment_start + segment).to(tl.int64)
    length = tl.load(segment_start + segment + 1) - tl.load(segment_start + segment)
    chunk = tl.load(first_chunk + segment + 1).to(tl.int64)
    own_state = tl.load(state_of + segment).to(tl.int64)

    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    o_c = tl.arange(0, BT)
    in_k = o_k < K
    in_v = o_v < V
    in_h = in_k[:, None] & in_v[None, :]
    tile = i_h * (K * V) + o_k[:, None] * V + o_v[None, :]

    b_dh = tl.zeros([BK, BV], dtype=tl.float32)
    if own_state >= 0:
        slots = tl.load(slot_start + own_state + 1) - tl.load(slot_start + own_state)
        slot = tl.load(slot_start + own_state).to(tl.int64)
        for _ in range(0, slots):
            wait_for(flags + 1 + slot * (NV * HV) + lane, tl.load(slot_count + slot))
            b_dh += tl.load(dstates + slot * (HV * K * V) + tile, mask=in_h, other=0.0)
            slot += 1

    chunks = (length + BT - 1) // BT
    for back in range(0, chunks):
        start = (chunks - 1 - back) * BT
        in_t = start + o_c < length
        token = begin + start + o_c
        last = begin + tl.minimum(start + BT, length) - 1
        chunk -= 1
        tl.store(dh + chunk * (HV * K * V) + tile, b_dh.to(dh.dtype.element_ty), mask=in_h)

        in_tk = in_k[:, None] & in_t[None, :]
        at_k = (token[None, :] * H + i_h // (HV // H)) * K + o_k[:, None]
        in_tv = in_t[:, None] & in_v[None, :]
        at_v = (token[:, None] * HV + i_h) * V + o_v[None, :]
        b_q = tl.load(q + at_k, mask=in_tk, other=0.0)
        b_do = tl.load(do + at_v, mask=in_tv, other=0.0)
        if USE_G:
            g_last = tl.load(g + last * HV + i_h)
            b_g = tl.load(g + token * HV + i_h, mask=in_t, other=0.0)
        if USE_W:
            b_k = tl.load(k + at_k, mask=in_tk, other=0.0)
            b_dv = tl.dot(tl.trans(b_k), b_dh.to(b_k.dtype), input_precision="ieee")
            if USE_G:
                b_dv *= tl.where(in_t, tl.exp2(g_last - b_g), 0.0)[:, None]
            b_dv += tl.load(dv + at_v, mask=in_tv, other=0.0)
            tl.store(dv + at_v, b_dv.to(dv.dtype.element_ty), mask=in_tv)
        if USE_G:
            b_dh *= tl.exp2(g_last)
            b_q = (b_q * tl.exp2(b_g)[None, :]).to(b_q.dtype)
        if USE_GK:
            gk_last = tl.load(gk + (last * HV + i_h) * K + o_k, mask=in_k, other=0.0)
            b_dh *= tl.exp2(gk_last)[:, None]
        b_new = tl.dot(b_q, b_do.to(b_q.dtype), input_precision="ieee") * scale
        if USE_W:
            at_w = (token[None, :] * HV + i_h) * K + o_k[:, None]
            b_w = tl.load(w + at_w, mask=in_tk, other=0.0)
            b_new -= tl.dot(b_w, b_dv.to(b_w.dtype), input_precision="ieee")
        b_dh += b_new

    parent = tl.load(parent_state + segment)
    if parent >= 0:
        slot = tl.load(slot_of + segment).to(tl.int64)
        rank = tl.load(rank_of + segment)
        flag = flags + 1 + slot * (NV * HV) + lane
        slot_tile = dstates + slot * (HV * K * V) + tile
        if rank > 0:
            wait_for(flag, rank)
            b_dh += tl.load(slot_tile, mask=in_h, other=0.0)
        tl.store(slot_tile, b_dh, mask=in_h)
        publish(flag, rank + 1)


@triton.jit
def hand_down(
    starts,
    ends,
    transitions,
    states,
    flags,
    order,
    state_of,
    parent_state,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """Computes the state from which each segment starts: writes starts fp32 [N, HV, K, V].

    ends fp32 [N, HV, K, V] and transitions fp32 [N, HV, K, K] are read at branch points alone,
    where states fp32 [B, HV, K, V] is written.
    """
    NV: tl.constexpr = V // BV
    work = tl.atomic_add(flags, 1, sem="relaxed")
    lane = work % (NV * HV)
    head = (lane // NV).to(tl.int64)
    segment = tl.load(order + work // (NV * HV)).to(tl.int64)
    parent = tl.load(parent_state + segment).to(tl.int64)
    own_state = tl.load(state_of + segment).to(tl.int64)

    o_k = tl.arange(0, K)
    o_b = tl.arange(0, BK)
    o_v = (lane % NV) * BV + tl.arange(0, BV)
    tile = head * (K * V) + o_k[:, None] * V + o_v[None, :]
    rows = head * (K * V) + o_b[:, None] * V + o_v[None, :]
    b_start = tl.zeros([K, BV], dtype=tl.float32)
    if parent >= 0:
        wait_for(flags + 1 + parent * (NV * HV) + lane, 1)
        b_start = tl.load(states + parent * (HV * K * V) + tile)
    tl.store(starts + segment * (HV * K * V) + tile, b_start)
    if own_state >= 0:
        b_end = tl.load(ends + segment * (HV * K * V) + tile)
        if parent >= 0:
            at = transitions + (segment * HV + head) * (K * K) + o_k[:, None] * K + o_b[None, :]
            for k in range(0, K, BK):
                b_rows = tl.load(states + parent * (HV * K * V) + rows + k * V)
                b_end = tl.dot(tl.load(at + k), b_rows, b_end, input_precision="ieee")
        tl.store(states + own_state * (HV * K * V) + tile, b_end)
        publish(flags + 1 + own_state * (NV * HV) + lane, 1)


@triton.jit
def hand_up(
    dstarts,
    dends,
    transitions,
    flags,
    order,
    state_of,
    parent_state,
    children_start,
    children,
    dfinal,
    exit_of,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    HAS_FINAL: tl.constexpr,
):
    """Computes the gradient of each segment's end state: the sum over its children, and dfinal.

    Writes dends fp32 [N, HV, K, V], 0 without any. dfinal [F, HV, K, V] is added from row exit_of
    [N] unless that is -1. dstarts fp32 [N, HV, K, V] is the gradient of the start from a segment's
    own outputs; at branch points that through the segment's end is added in place, by transitions
    fp32 [N, HV, K, K].
    """
    NV: tl.constexpr = V // BV
    work = tl.atomic_add(flags, 1, sem="relaxed")
    lane = work % (NV * HV)
    head = (lane // NV).to(tl.int64)
    segment = tl.load(order + work // (NV * HV)).to(tl.int64)
    own_state = tl.load(state_of + segment).to(tl.int64)

    o_k = tl.arange(0, K)
    o_b = tl.arange(0, BK)
    o_v = (lane % NV) * BV + tl.arange(0, BV)
    tile = head * (K * V) + o_k[:, None] * V + o_v[None, :]
    b_end = tl.zeros([K, BV], dtype=tl.float32)
    if own_state >= 0:
        # in the order of the children, whatever the timing
        for i in range(tl.load(children_start + segment), tl.load(children_start + segment + 1)):
            child = tl.load(children + i).to(tl.int64)
            state = tl.load(state_of + child).to(tl.int64)
            if state >= 0:
                wait_for(flags + 1 + state * (NV * HV) + lane, 1)
            b_end += tl.load(dstarts + child * (HV * K * V) + tile)
        if HAS_FINAL:
            leaves = tl.load(exit_of + segment).to(tl.int64)
            if leaves >= 0:
                b_end += tl.load(dfinal + leaves * (HV * K * V) + tile)
    own_end = dends + segment * (HV * K * V)
    tl.store(own_end + tile, b_end)
    if own_state >= 0:
        if tl.load(parent_state + segment) >= 0:
            # other threads of this program stored the rows that are read here
            tl.debug_barrier()
            rows = head * (K * V) + o_b[:, None] * V + o_v[None, :]
            start = dstarts + segment * (HV * K * V) + tile
            b_start = tl.load(start)
            # transposed: its rows are the columns of the product
            at = transitions + (segment * HV + head) * (K * K) + o_k[:, None] + o_b[None, :] * K
            for k in range(0, K, BK):
                b_rows = tl.load(own_end + rows + k * V)
                b_start = tl.dot(tl.load(at + k * K), b_rows, b_start, input_precision="ieee")
            tl.store(start, b_start)
        publish(flags + 1 + own_state * (NV * HV) + lane, 1)
