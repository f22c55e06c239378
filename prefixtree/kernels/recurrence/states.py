"""The launches of the kernels that carry states over a forest, or from segment to segment.

A state that enters is written into the scratch of the branch points before the launch, and its flag
is set; so is the gradient of a state that leaves. The kernels know neither.

Legend: T packed tokens, N segments, NC chunks, H key heads, HV value heads, K and V head dims (to
hand states on: powers of two, at least 16), I states that enter, F that leave.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from prefixtree.kernels.recurrence.state_kernels import (
    hand_down,
    hand_up,
    states_backward,
    states_forward,
)
from prefixtree.packing.segments import SegmentTables, StateSchedule

CHUNK = 64
INTERPRETED = not isinstance(states_forward, triton.JITFunction)


@dataclass(frozen=True)
class Config:
    """Value columns of a program, its warps, and the pipeline stages of its loads."""

    columns: int
    warps: int
    stages: int


# the best of 16 measured on an H200, 32 heads of 128 x 128 (benchmarks/notebook.md)
FORWARD = Config(columns=64, warps=4, stages=2)
BACKWARD = Config(columns=64, warps=8, stages=3)


def carry_states(
    schedule: StateSchedule,
    k: torch.Tensor,
    u: torch.Tensor,
    w: torch.Tensor | None = None,
    *,
    g: torch.Tensor | None = None,
    gk: torch.Tensor | None = None,
    initial: torch.Tensor | None = None,
    config: Config = FORWARD,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes the state from which every chunk starts; a backward calls it again.

    k [T, H, K], u [T, HV, V], w [T, HV, K], without which nothing is subtracted from u. g fp32
    [T, HV] or gk fp32 [T, HV, K] is log2 of the decay, summed along each chunk. initial fp32
    [I, HV, K, V] are the states that enter. Returns h [NC, HV, K, V], v_new [T, HV, V] (u itself
    without w), and the states that leave, fp32 [F, HV, K, V].
    """
    key_dim = k.shape[2]
    value_heads, value_dim = u.shape[1:]
    chunks = schedule.num_chunks
    h = k.new_empty(chunks, value_heads, key_dim, value_dim)
    v_new = u if w is None else torch.empty_like(u)
    states = k.new_empty(schedule.num_states, value_heads, key_dim, value_dim, dtype=torch.float32)
    lanes = value_heads * triton.cdiv(value_dim, config.columns)
    flags = _flags(schedule.num_states * lanes, k.device)
    enter(schedule, states, flags, initial)
    states_forward[(schedule.num_segments * lanes,)](
        k,
        w,
        u,
        v_new,
        g,
        gk,
        h,
        states,
        flags,
        schedule.start,
        schedule.first_chunk,
        schedule.forward_order,
        schedule.state_of,
        schedule.parent_state,
        **_sizes(k, value_heads, value_dim, config),
        USE_G=g is not None,
        USE_GK=gk is not None,
        USE_W=w is not None,
    )
    return h, v_new, leaving(schedule, states)


def carry_gradients(
    schedule: StateSchedule,
    q: torch.Tensor,
    k: torch.Tensor,
    do: torch.Tensor,
    *,
    w: torch.Tensor | None = None,
    dv: torch.Tensor | None = None,
    g: torch.Tensor | None = None,
    gk: torch.Tensor | None = None,
    scale: float,
    dfinal: torch.Tensor | None = None,
    config: Config = BACKWARD,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes gradients of the states at every chunk's end, and of those that enter.

    q, k [T, H, K], do [T, HV, V]; w, g, gk as in `carry_states`. dv [T, HV, V], with w, is the
    gradient of v_new inside each chunk; that through the states is added in place. dfinal fp32
    [F, HV, K, V] is of the states that leave; None for zeros. Returns dh [NC, HV, K, V] and fp32
    [I, HV, K, V].
    """
    key_dim = k.shape[2]
    value_heads, value_dim = do.shape[1:]
    dh = q.new_empty(schedule.num_chunks, value_heads, key_dim, value_dim)
    lanes = value_heads * triton.cdiv(value_dim, config.columns)
    sums = q.new_empty(schedule.num_slots, value_heads, key_dim, value_dim, dtype=torch.float32)
    flags = _flags(schedule.num_slots * lanes, q.device)
    if len(schedule.left):
        slots = schedule.left_slot.long()
        sums[slots] = 0 if dfinal is None else dfinal
        flags[1:].view(-1, lanes)[slots] = 1
    states_backward[(schedule.num_segments * lanes,)](
        q,
        k,
        w,
        do,
        dv,
        g,
        gk,
        dh,
        sums,
        flags,
        schedule.start,
        schedule.first_chunk,
        schedule.backward_order,
        schedule.state_of,
        schedule.parent_state,
        schedule.slot_of,
        schedule.rank_of,
        schedule.slot_start,
        schedule.slot_count,
        scale,
        **_sizes(k, value_heads, value_dim, config),
        USE_G=g is not None,
        USE_GK=gk is not None,
        USE_W=w is not None,
    )
    return dh, _entered(schedule, sums)


def enter(
    schedule: StateSchedule,
    states: torch.Tensor,
    flags: torch.Tensor,
    initial: torch.Tensor | None,
) -> None:
    """Writes the states that enter after those of the branch points, and sets their flags."""
    if schedule.num_entries:
        assert initial is not None
        first = schedule.num_states - schedule.num_entries
        states[first:] = initial
        flags[1 + first * ((len(flags) - 1) // schedule.num_states) :] = 1


def leaving(schedule: StateSchedule, states: torch.Tensor) -> torch.Tensor:
    """Selects those of the branch points' states that leave."""
    return states.index_select(0, schedule.left)


def _entered(schedule: StateSchedule, sums: torch.Tensor) -> torch.Tensor:
    """Sums the slots of each state that enters, one after another: their gradients."""
    entries = schedule.num_entries
    if not entries:
        return sums[:0]
    lengths = schedule.slot_start[-1 - entries :].diff().long()
    total: torch.Tensor = torch.segment_reduce(
        sums[schedule.entered_slot :], "sum", lengths=lengths, axis=0, unsafe=True, initial=0
    )
    return total


def _sizes(k: torch.Tensor, value_heads: int, value_dim: int, config: Config) -> dict[str, int]:
    """Names the sizes for which both kernels are compiled."""
    heads, key_dim = k.shape[1:]
    return {
        "H": heads,
        "HV": value_heads,
        "K": key_dim,
        "V": value_dim,
        "BT": CHUNK,
        "BK": _padded(key_dim),
        "BV": config.columns,
        "num_warps": config.warps,
        "num_stages": config.stages,
    }


def _flags(count: int, device: torch.device) -> torch.Tensor:
    """Makes the counter that deals out work, and flags per (state or slot, head, columns)."""
    return torch.zeros(1 + count, dtype=torch.int32, device=device)


def _padded(dim: int) -> int:
    """The power of two that holds a head dim; a matrix product takes at least 16."""
    return max(16, triton.next_power_of_2(dim))


# columns of a state that a program carries, and rows of a product's step
COLUMNS, ROWS, WARPS = 32, 32, 8


def starts_of(
    schedule: StateSchedule,
    ends: torch.Tensor,
    transitions: torch.Tensor,
    initial: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the start state of each segment, [N, HV, K, V], and the states that leave, [F, ...].

    ends [N, HV, K, V] are the states in which segments would end from zeros. From start S a segment
    ends in transition @ S + end, of transitions [N, HV, K, K]. Both are read at branch points
    alone. initial [I, HV, K, V] are the states that enter. All are fp32.
    """
    starts = torch.empty_like(ends)
    states = ends.new_empty(schedule.num_states, *ends.shape[1:])
    sizes, programs = _hand_sizes(schedule, ends)
    flags = _hand_flags(schedule, ends)
    enter(schedule, states, flags, initial)
    hand_down[(programs,)](
        starts,
        ends,
        transitions,
        states,
        flags,
        schedule.forward_order,
        schedule.state_of,
        schedule.parent_state,
        **sizes,
    )
    return starts, leaving(schedule, states)


def gradients_of_ends(
    tables: SegmentTables,
    schedule: StateSchedule,
    dstarts: torch.Tensor,
    transitions: torch.Tensor,
    dfinal: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes gradients of segments' end states, [N, HV, K, V], and of states that enter.

    dstarts [N, HV, K, V] is the gradient of each start from its segment's own outputs; at branch
    points the gradient through the end is added in place. dfinal [F, HV, K, V] is of the states
    that leave; None for zeros. All are fp32, and ends that nothing reads have zeros.
    """
    dends = torch.empty_like(dstarts)
    sizes, programs = _hand_sizes(schedule, dstarts)
    hand_up[(programs,)](
        dstarts,
        dends,
        transitions,
        _hand_flags(schedule, dstarts),
        schedule.backward_order,
        schedule.state_of,
        schedule.parent_state,
        tables.children_start,
        tables.children,
        None if dfinal is None else dfinal.contiguous(),
        tables.exit_of,
        **sizes,
        HAS_FINAL=dfinal is not None,
    )
    dinitial = dstarts.new_zeros(schedule.num_entries, *dstarts.shape[1:])
    # roots one after another: several may start from one state
    for segment, row in enumerate(tables.host.entry.tolist()):
        if row >= 0:
            dinitial[row] += dstarts[segment]
    return dends, dinitial


def _hand_sizes(schedule: StateSchedule, states: torch.Tensor) -> tuple[dict[str, int], int]:
    """Names the sizes for which the kernels are compiled, and counts the programs."""
    segments, heads, key_dim, value_dim = states.shape
    columns, rows = min(COLUMNS, value_dim), min(ROWS, key_dim)
    sizes = {"HV": heads, "K": key_dim, "V": value_dim, "BK": rows, "BV": columns}
    return sizes | {"num_warps": WARPS}, segments * heads * triton.cdiv(value_dim, columns)


def _hand_flags(schedule: StateSchedule, states: torch.Tensor) -> torch.Tensor:
    """Makes the counter that deals out work, and flags per (branch point, head, columns)."""
    _, heads, _, value_dim = states.shape
    lanes = heads * triton.cdiv(value_dim, min(COLUMNS, value_dim))
    return torch.zeros(1 + schedule.num_states * lanes, dtype=torch.int32, device=states.device)
