"""Launches of the kernels that hand states from segment to segment.

Legend: N segments, HV value heads, K and V head dims: powers of two, at least 16.
"""

from __future__ import annotations

import torch
import triton

from prefixtree.kernels.recurrence.handover_kernels import hand_down, hand_up
from prefixtree.packing.segments import SegmentTables
from prefixtree.packing.state_schedule import StateSchedule

# columns of a state that one program carries, and rows of a product's step
COLUMNS, ROWS, WARPS = 32, 32, 8


def starts_of(
    schedule: StateSchedule, ends: torch.Tensor, transitions: torch.Tensor
) -> torch.Tensor:
    """The state each segment starts from, fp32 [N, HV, K, V]; zeros at roots.

    Args:
        schedule: on the device of ends.
        ends: fp32 [N, HV, K, V], the state each segment would end in from zeros.
        transitions: fp32 [N, HV, K, K]; from start S a segment ends in transition @ S + end. Both
            are read at segments with children alone.
    """
    starts = torch.empty_like(ends)
    states = ends.new_empty(schedule.num_states, *ends.shape[1:])
    sizes, programs = _sizes(schedule, ends)
    hand_down[(programs,)](
        starts,
        ends,
        transitions,
        states,
        _flags(schedule, ends),
        schedule.forward_order,
        schedule.state_of,
        schedule.parent_state,
        **sizes,
    )
    return starts


def gradients_of_ends(
    tables: SegmentTables,
    schedule: StateSchedule,
    dstarts: torch.Tensor,
    transitions: torch.Tensor,
) -> torch.Tensor:
    """The gradient of the state each segment ends in, fp32 [N, HV, K, V]; zeros without children.

    Args:
        tables, schedule: on the device of dstarts.
        dstarts: fp32 [N, HV, K, V], the gradient of each segment's start from its own outputs;
            changed in place: at segments with children, what comes through the end is added.
        transitions: as in `starts_of`.
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
        **sizes,
    )
    return dends


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
