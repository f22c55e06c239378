"""Triton kernels that hand states from segment to segment, where each segment's own part is known.

A segment of a linear recurrence turns the state it starts from into transition @ start + end, where
`end` is the state it would end in from zeros. So once every segment's end and transition are known,
the states follow from one product per branch point. Backward it is the same with transposed
transitions, and the gradient of a branch point's state is the sum over its children.

Work is dealt as in `state_kernels`: from a counter, parents before children (backward: after), with
a flag per branch point, head and block of columns.

Legend: N segments, HV value heads, K and V head dims, B branch points (segments whose final state
is read), F states that leave.
"""

import triton
import triton.language as tl

from prefixtree.kernels.recurrence.state_kernels import publish, wait_for


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
    """The state each segment starts from.

    ends fp32 [N, HV, K, V] and transitions fp32 [N, HV, K, K], read at branch points alone
    -> starts fp32 [N, HV, K, V], and states fp32 [B, HV, K, V]: where branch points end.
    """
    NV: tl.constexpr = V // BV
    work = tl.atomic_add(flags, 1, sem="relaxed")
    lane = work % (NV * HV)
    head = (lane // NV).to(tl.int64)
    segment = tl.load(order + work // (NV * HV)).to(tl.int64)
    parent = tl.load(parent_state + segment).to(tl.int64)
    own = tl.load(state_of + segment).to(tl.int64)

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
    if own >= 0:
        b_end = tl.load(ends + segment * (HV * K * V) + tile)
        if parent >= 0:
            at = transitions + (segment * HV + head) * (K * K) + o_k[:, None] * K + o_b[None, :]
            for k in range(0, K, BK):
                b_rows = tl.load(states + parent * (HV * K * V) + rows + k * V)
                b_end = tl.dot(tl.load(at + k), b_rows, b_end, input_precision="ieee")
        tl.store(states + own * (HV * K * V) + tile, b_end)
        publish(flags + 1 + own * (NV * HV) + lane, 1)


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
    """The gradient of the state each segment ends in: the sum over its children, and dfinal
    [F, HV, K, V] at row exit_of [N] where that is not -1; 0 without any.

    dstarts fp32 [N, HV, K, V]: the gradient of the start from a segment's own outputs; grows in
    place, at branch points, by what comes through the segment's end. transitions fp32
    [N, HV, K, K], read at branch points alone -> dends fp32 [N, HV, K, V].
    """
    NV: tl.constexpr = V // BV
    work = tl.atomic_add(flags, 1, sem="relaxed")
    lane = work % (NV * HV)
    head = (lane // NV).to(tl.int64)
    segment = tl.load(order + work // (NV * HV)).to(tl.int64)
    own = tl.load(state_of + segment).to(tl.int64)

    o_k = tl.arange(0, K)
    o_b = tl.arange(0, BK)
    o_v = (lane % NV) * BV + tl.arange(0, BV)
    tile = head * (K * V) + o_k[:, None] * V + o_v[None, :]
    b_end = tl.zeros([K, BV], dtype=tl.float32)
    if own >= 0:
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
    here = dends + segment * (HV * K * V)
    tl.store(here + tile, b_end)
    if own >= 0:
        if tl.load(parent_state + segment) >= 0:
            # other threads of this program stored the rows that are read here
            tl.debug_barrier()
            rows = head * (K * V) + o_b[:, None] * V + o_v[None, :]
            start = dstarts + segment * (HV * K * V) + tile
            b_start = tl.load(start)
            # transposed: its rows are the columns of the product
            at = transitions + (segment * HV + head) * (K * K) + o_k[:, None] + o_b[None, :] * K
            for k in range(0, K, BK):
                b_rows = tl.load(here + rows + k * V)
                b_start = tl.dot(tl.load(at + k * K), b_rows, b_start, input_precision="ieee")
            tl.store(start, b_start)
        publish(flags + 1 + own * (NV * HV) + lane, 1)
