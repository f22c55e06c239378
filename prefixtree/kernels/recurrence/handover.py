"""Launches of the kernels that hand states from segment to segment.

Legend: N segments, HV value heads, K and V head dims: powers of two, at least 16, I states
that enter, F that leave.
"""

from __future__ import annotations

import torch
import triton

from prefixtree.kernels.recurrence.handover_kernels import hand_down, hand_up
from prefixtree.kernels.recurrence.states import enter, leaving
from prefixtree.packing.segments import SegmentTables
from prefixtree.packing.state_schedule import StateSchedule

# columns of a state that one program carries, and rows of a product's step
COLUMNS, ROWS, WARPS = 32, 32, 8


def starts_of(
    schedule: StateSchedule,
    ends: torch.Tensor,
    transitions: torch.Tensor,
    initial: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The state each segment starts from, fp32 [N, HV, K, V], and the states that leave, fp32
    [F, HV, K, V].

    Args:
        schedule: on the device of ends.
        ends: fp32 [N, HV, K, V], the state each segment would end in from zeros.
        transitions: fp32 [N, HV, K, K]; from start S a segment ends in transition @ S + end. Both
            are read at branch points alone.
        initial: fp32 [I, HV, K, V], the states that enter; None where all roots start from zeros.
    """
    starts = torch.empty_like(ends)
    states = ends.new_empty(schedule.num_states, *ends.shape[1:])
    sizes, programs = _sizes(schedule, ends)
    flags = _flags(schedule, ends)
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
    """The gradient of the state each segment ends in, fp32 [N, HV, K, V], zeros where nothing reads
    it; and of the states that enter, fp32 [I, HV, K, V].

    Args:
        tables, schedule: on the device of dstarts.
        dstarts: fp32 [N, HV, K, V], the gradient of each segment's start from its own outputs;
            changed in place: at branch points, what comes through the end is added.
        transitions: as in `starts_of`.
        dfinal: fp32 [F, HV, K, V], the gradients of the states that leave; None for zeros.
    """
    dends = torch.empty_like(dstarts)
    sizes, programs = _sizes(schedule, dstarts)
    hand_up[(programs,)](
        dstarts,
        dends,
        transitions,
        _flags(schedule, dstarts),
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


def _sizes(schedule: StateSchedule, states: torch.Tensor) -> tuple[dict[str, int], int]:
    """The sizes that the kernels are compiled for, and the number of programs."""
    segments, heads, key_dim, value_dim = states.shape
    columns, rows = min(COLUMNS, value_dim), min(ROWS, key_dim)
    sizes = {"HV": heads, "K": key_dim, "V": value_dim, "BK": rows, "BV": columns}
    return sizes | {"num_warps": WARPS}, segments * heads * triton.cdiv(value_dim, columns)


def _flags(schedule: StateSchedule, states: torch.Tensor) -> torch.Tensor:
    """The counter that deals out work, and a flag per (branch point, head, block of columns)."""
    _, heads, _, value_dim = states.shape
    lanes = heads * triton.cdiv(value_dim, min(COLUMNS, value_dim))
    return torch.zeros(1 + schedule.num_states * lanes, dtype=torch.int32, device=states.device)
