"""The order in which one launch carries a recurrence's states over a forest.

Legend: N segments (see `packing.segments`), NC chunks, B branch points (segments with children),
S slots.
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
    """Work in an order in which nothing waits for what comes later. All int32, on one device.

    The first four are those of the device's `SegmentTables`, not copies.

    Attributes:
        start: [N + 1] first packed token of each segment; a `cu_seqlens`.
        first_chunk: [N + 1] chunks before each segment.
        chunk_indices: [NC, 2] the segment of each chunk, and its number in the segment.
        state_of: [N] branch point a segment ends in, -1 where it has no children.
        forward_order: [N] segments by the chunks above them, longest way down first.
        backward_order: [N] segments by the chunks below them, longest way up first.
        parent_state: [N] branch point a segment starts from, -1 at roots.
        slot_of, rank_of: [N] slot a segment adds its gradient to, and how many add before it;
            -1 at roots.
        slot_start: [B + 1] first slot of each branch point.
        slot_count: [S] segments that add to each slot.
    """

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
        """B."""
        return self.slot_start.shape[0] - 1

    @property
    def num_slots(self) -> int:
        """S."""
        return self.slot_count.shape[0]


def order_states(
    parent: np.ndarray, state_row: np.ndarray, first_chunk: np.ndarray
) -> tuple[np.ndarray, ...]:
    """The fields of `StateSchedule` from forward_order on, as numpy arrays.

    Args:
        parent, state_row: as in `Segments`.
        first_chunk: int32 [N + 1], the chunks before each segment.
    """
    chunks, num_states = np.diff(first_chunk), int((state_row >= 0).sum())
    above, below = loops.state_schedule.above_and_below(parent, chunks)
    forward = np.lexsort((-(chunks + below), above)).astype(np.int32)
    backward = np.lexsort((-(chunks + above), below)).astype(np.int32)
    parent_state = np.where(parent >= 0, state_row[parent], -1).astype(np.int32)
    slot_of, rank_of, children = loops.state_schedule.deal_slots(
        backward, parent_state, num_states, MOST_SLOTS
    )
    slot_start = np.concatenate([[0], np.cumsum(np.minimum(children, MOST_SLOTS))])
    slot_of = np.where(slot_of >= 0, slot_of + slot_start[parent_state], -1)
    slot_count = np.bincount(slot_of[slot_of >= 0], minlength=int(slot_start[-1]))
    arrays = (forward, backward, parent_state, slot_of, rank_of, slot_start, slot_count)
    return tuple(array.astype(np.int32) for array in arrays)
