"""The order in which one launch carries a recurrence's states over a forest.

A state that enters is a branch point whose state is there before the launch. One that leaves has a
slot more than its children need, which holds its gradient before the launch.

Legend: N segments (see `packing.segments`), NC chunks, B branch points (segments whose final state
is read), I states that enter, F that leave, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from prefixtree import loops

# Slots of a branch point. The children of one slot add to it one after the other, so few slots
# make children wait; each slot takes one fp32 state per head.
MOST_SLOTS = 8


@dataclass(frozen=True)
class StateSchedule:
    """Work in an order in which nothing waits for what comes later. Tensors are int32, on one
    device; the first four are those of the device's `SegmentTables`, not copies.

    Attributes:
        num_entries: I.
        entered_slot: the first slot of the states that enter, which are the last branch points.
        start: [N + 1] first packed token of each segment; a `cu_seqlens`.
        first_chunk: [N + 1] chunks before each segment.
        chunk_indices: [NC, 2] the segment of each chunk, and its number in the segment.
        state_of: [N] branch point a segment ends in, -1 where nothing reads its final state.
        forward_order: [N] segments by the chunks above them, longest way down first.
        backward_order: [N] segments by the chunks below them, longest way up first.
        parent_state: [N] branch point a segment starts from, -1 at roots that start from zeros.
            State i of those that enter is branch point B + i.
        slot_of, rank_of: [N] slot a segment adds its gradient to, and how many add before it;
            -1 where parent_state is.
        slot_start: [B + I + 1] first slot of each branch point.
        slot_count: [S] how many add to each slot.
        left: [F] branch points of the states that leave.
        left_slot: [F] the slots that hold their gradients.
    """

    num_entries: int
    entered_slot: int
    start: torch.Tensor
    first_chunk: torch.Tensor
    chunk_indices: torch.Tensor
    state_of: torch.Tensor
    forward_order: torch.Tensor
    backward_order: torch.Tensor
    parent_state: torch.Tensor
    slot_of: torch.Tensor
    rank_of: torch.Tensor
    slot_start: torch.Tensor
    slot_count: torch.Tensor
    left: torch.Tensor
    left_slot: torch.Tensor

    @property
    def num_segments(self) -> int:
        """N."""
        return self.forward_order.shape[0]

    @property
    def num_chunks(self) -> int:
        """NC."""
        return self.chunk_indices.shape[0]

    @property
    def num_states(self) -> int:
        """B + I."""
        return self.slot_start.shape[0] - 1

    @property
    def num_slots(self) -> int:
        """S."""
        return self.slot_count.shape[0]


def order_states(
    parent: np.ndarray,
    state_row: np.ndarray,
    first_chunk: np.ndarray,
    entry: np.ndarray,
    exits: np.ndarray,
    num_entries: int,
) -> tuple[np.ndarray, ...]:
    """The fields of `StateSchedule` from forward_order to left_slot, as numpy arrays.

    Args:
        parent, state_row, entry, exits, num_entries: as in `Segments`.
        first_chunk: int32 [N + 1], the chunks before each segment.
    """
    chunks, num_states = np.diff(first_chunk), int((state_row >= 0).sum())
    above, below = loops.state_schedule.above_and_below(parent, chunks)
    forward = np.lexsort((-(chunks + below), above)).astype(np.int32)
    backward = np.lexsort((-(chunks + above), below)).astype(np.int32)
    parent_state = np.where(entry >= 0, num_states + entry, -1)
    parent_state = np.where(parent >= 0, state_row[parent], parent_state).astype(np.int32)
    slot_of, rank_of, children = loops.state_schedule.deal_slots(
        backward, parent_state, num_states + num_entries, MOST_SLOTS
    )
    left = state_row[exits]
    slots = np.minimum(children, MOST_SLOTS)
    slots[left] += 1
    slot_start = np.concatenate([[0], np.cumsum(slots)])
    slot_of = np.where(slot_of >= 0, slot_of + slot_start[parent_state], -1)
    slot_count = np.bincount(slot_of[slot_of >= 0], minlength=int(slot_start[-1]))
    left_slot = slot_start[left + 1] - 1
    slot_count[left_slot] = 1
    of_slots = (slot_of, rank_of, slot_start, slot_count, left, left_slot)
    arrays = (forward, backward, parent_state, *of_slots)
    return tuple(array.astype(np.int32) for array in arrays)
