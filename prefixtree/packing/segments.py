"""Segments of a packed forest, over which recurrences run, and the order that carries states.

A state that enters is a branch point whose state exists before the launch. A state that leaves has
one slot more than its children need: it holds the state's gradient before the launch.

Legend: T packed tokens, N segments, L levels, B segments with children (in the schedule: those
whose final state is read), C tokens of a chunk, NC chunks, W taps of a convolution, I states that
enter, F that leave, S slots.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch

from prefixtree import loops
from prefixtree.packing.copies import lasting, move_all
from prefixtree.packing.host_mask import HostMask

# slots of a branch point: the children of one slot add to it one after another, so few slots make
# children wait; a slot takes one fp32 state per head
MOST_SLOTS = 8


@dataclass(frozen=True)
class StateSchedule:
    """Work in an order in which nothing waits for later work. Tensors are int32, on one device."""

    # the first four tensors are those of the device's `SegmentTables`, not copies

    # I
    num_entries: int
    # the first slot of the states that enter, which are the last branch points
    entered_slot: int
    # [N + 1], the first packed token of each segment; a `cu_seqlens`
    start: torch.Tensor
    # [N + 1], chunks before each segment
    first_chunk: torch.Tensor
    # [NC, 2], the segment of each chunk, and the chunk's number in it
    chunk_indices: torch.Tensor
    # [N], the branch point in which a segment ends, -1 if nothing reads its final state
    state_of: torch.Tensor
    # [N], segments by the chunks above them, longest way down first
    forward_order: torch.Tensor
    # [N], segments by the chunks below them, longest way up first
    backward_order: torch.Tensor
    # [N], the branch point from which a segment starts, -1 at roots that start from zeros; state i
    # of those that enter is branch point B + i
    parent_state: torch.Tensor
    # [N], the slot to which a segment adds its gradient; -1 where parent_state is -1
    slot_of: torch.Tensor
    # [N], how many segments add to that slot before it, likewise
    rank_of: torch.Tensor
    # [B + I + 1], the first slot of each branch point
    slot_start: torch.Tensor
    # [S], how many segments add to each slot
    slot_count: torch.Tensor
    # [F], branch points of the states that leave
    left: torch.Tensor
    # [F], the slots that hold their gradients
    left_slot: torch.Tensor

    @property
    def num_segments(self) -> int:
        """The number of segments, N."""
        return self.forward_order.shape[0]

    @property
    def num_chunks(self) -> int:
        """The number of chunks, NC."""
        return self.chunk_indices.shape[0]

    @property
    def num_states(self) -> int:
        """The number of branch points, B + I."""
        return self.slot_start.shape[0] - 1

    @property
    def num_slots(self) -> int:
        """The number of slots, S."""
        return self.slot_count.shape[0]


def order_states(
    parent: np.ndarray,
    state_row: np.ndarray,
    first_chunk: np.ndarray,
    entry: np.ndarray,
    exits: np.ndarray,
    num_entries: int,
) -> tuple[np.ndarray, ...]:
    """Computes the fields of `StateSchedule` from forward_order to left_slot, as numpy arrays."""
    chunks, num_states = np.diff(first_chunk), int((state_row >= 0).sum())
    above, below = loops.segments.above_and_below(parent, chunks)
    forward = np.lexsort((-(chunks + below), above)).astype(np.int32)
    backward = np.lexsort((-(chunks + above), below)).astype(np.int32)
    parent_state = np.where(entry >= 0, num_states + entry, -1)
    parent_state = np.where(parent >= 0, state_row[parent], parent_state).astype(np.int32)
    slot_of, rank_of, children = loops.segments.deal_slots(
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


# tokens of a run: one program of a convolution's kernel walks it
RUN = 128
# int32, np.ndarray or torch.Tensor
_Array = TypeVar("_Array")


class Chunks(NamedTuple, Generic[_Array]):
    """Segments in chunks of C tokens, the last of one shorter: numpy or torch, int32."""

    # [N + 1], the number of chunks before each segment
    cu_chunks: _Array
    # [NC, 2], (segment, chunk in the segment), in packed order
    chunk_indices: _Array


class Taps(NamedTuple, Generic[_Array]):
    """Tokens that a causal convolution along paths and its gradient read. numpy or torch, int32."""

    # the gradient of x[s] sums over the tokens t with ancestors[j, t] == s; at distance j, one of
    # them is t = s + j, if ancestors[j, s + j] == s; the others reach s over a branch, with other
    # tokens between: the entries start[s] .. start[s + 1] list them; a segment has at most W (W -
    # 1) / 2 entries

    # [W, T], the token 0, 1, .. W - 1 before each on its path; -1 for none
    ancestors: _Array
    # [T + 1], into the entries of each token
    start: _Array
    # [M], the entry's t; ascending within a token's entries
    token: _Array
    # [M], its distance j, 1 .. W - 1
    tap: _Array
    # the tokens that have entries, ascending
    branch_tokens: _Array
    # [R + 1], the first tokens of runs of at most `RUN` tokens in which the predecessor is the
    # token before; run_start[R] = T
    run_start: _Array


@dataclass(frozen=True, eq=False, repr=False)
class Segments:
    """Maximal runs of packed tokens, each the only child of the one before it; numpy int32.

    A sequence that ends inside a run does not end the run; a state that leaves (`StateBorders`)
    does. Segments are numbered in packed order, so a parent comes before its children.
    """

    # [N + 1], the first packed token of each; start[N] = T; a `cu_seqlens`
    start: np.ndarray
    # [N], the segment above, whose last token is the predecessor of the first; -1 at roots
    parent: np.ndarray
    # [N], the number of segments above
    level: np.ndarray
    # bool [N], whether others read a segment's final state: it has children, or its state leaves
    has_children: np.ndarray
    # [N], segments by (level, number); segments with one parent are neighbours
    order: np.ndarray
    # [L + 1], into `order`
    level_start: np.ndarray
    # [N + 1], into `children`
    children_start: np.ndarray
    # the child segments of each, ascending
    children: np.ndarray
    # [N], the row of each segment with children in an array of B final states, numbered along
    # `order`; -1 for the others
    state_row: np.ndarray
    # [T], the token before each on its path, -1 at roots
    predictor: np.ndarray
    # [N], the row of the given states from which a root starts; -1 at roots that start from zeros,
    # and at segments with a parent
    entry: np.ndarray
    # [F], the segments whose final states leave, one per returned row
    exits: np.ndarray
    # the number of given states, I
    num_entries: int
    _chunks: dict[int, Chunks[np.ndarray]] = field(default_factory=dict, init=False)
    _taps: dict[int, Taps[np.ndarray]] = field(default_factory=dict, init=False)

    @property
    def num_segments(self) -> int:
        """The number of segments, N."""
        return len(self.parent)

    @property
    def num_levels(self) -> int:
        """The number of levels, L; 0 without tokens."""
        return len(self.level_start) - 1

    @property
    def num_states(self) -> int:
        """The number of segments with children, B."""
        return int(self.has_children.sum())

    def __repr__(self) -> str:
        return (
            f"Segments({self.num_segments} of {len(self.predictor)} tokens, {self.num_levels} "
            f"levels, {self.num_states} with children)"
        )

    def chunks(self, size: int) -> Chunks[np.ndarray]:
        """Builds the tables for chunks of `size` tokens, as numpy arrays, once."""
        if size not in self._chunks:
            self._chunks[size] = Chunks(*loops.segments.chunks(self.start, size))
        return self._chunks[size]

    def taps(self, width: int) -> Taps[np.ndarray]:
        """Builds the tables of a convolution with `width` taps, as numpy arrays, once."""
        if width not in self._taps:
            ancestors, start, token, tap = loops.segments.taps(self.predictor, width)
            branch_tokens = np.flatnonzero(np.diff(start)).astype(np.int32)
            run_start = loops.segments.runs(self.predictor, RUN)
            self._taps[width] = Taps(ancestors, start, token, tap, branch_tokens, run_start)
        return self._taps[width]

    def ancestors(self, width: int) -> np.ndarray:
        """Lists the token 0 .. width - 1 before each on its path, int32 [width, T], -1 for none."""
        return self.taps(width).ancestors


_NONE = np.empty(0, np.int32)


def find_segments(
    predictor: np.ndarray,
    entries: np.ndarray = _NONE,
    rows: np.ndarray = _NONE,
    exits: np.ndarray = _NONE,
    num_entries: int = 0,
) -> Segments:
    """Finds the segments of `HostMask.predictor`, int32 [T]; int32 borders as in `StateBorders`."""
    start, parent, level, has_children = loops.segments.find(predictor, exits)
    num_levels = int(level.max(initial=-1)) + 1
    order, level_start = loops.segments.sorted_by(level, num_levels)
    children, children_start = loops.segments.sorted_by(parent, len(parent))
    has_children = has_children.astype(bool)
    state_row = np.full(len(parent), -1, np.int32)
    with_children = order[has_children[order]]
    state_row[with_children] = np.arange(len(with_children), dtype=np.int32)
    entry = np.full(len(parent), -1, np.int32)
    entry[np.searchsorted(start, entries)] = rows
    return Segments(
        start=start,
        parent=parent,
        level=level,
        has_children=has_children,
        order=order,
        level_start=level_start,
        children_start=children_start,
        children=children,
        state_row=state_row,
        predictor=predictor,
        entry=entry,
        exits=(np.searchsorted(start, exits, side="right") - 1).astype(np.int32),
        num_entries=num_entries,
    )


class SegmentTables:
    """`Segments` as int32 tensors on a device, moved in one copy."""

    @lasting
    def __init__(self, host: Segments, device: torch.device) -> None:
        # a launch reads its numbers without waiting for the device
        self.host = host
        self.device = device
        names = (
            *("start", "parent", "level", "has_children", "order", "level_start"),
            *("children_start", "children", "state_row"),
        )
        # the row of each segment among the states that leave, -1 for none
        exit_of = np.full(host.num_segments, -1, np.int32)
        exit_of[host.exits] = np.arange(len(host.exits))
        arrays = [getattr(host, name).astype(np.int32) for name in names]
        arrays.append(exit_of)
        views = move_all([torch.from_numpy(array) for array in arrays], device)
        self.start, self.parent, self.level, self.has_children, self.order = views[:5]
        self.level_start, self.children_start, self.children, self.state_row = views[5:9]
        self.exit_of = views[9]
        self._chunks: dict[int, Chunks[torch.Tensor]] = {}
        self._taps: dict[int, Taps[torch.Tensor]] = {}
        self._schedules: dict[int, StateSchedule] = {}

    def chunks(self, size: int) -> Chunks[torch.Tensor]:
        """Moves `Segments.chunks` to the device, once."""
        if size not in self._chunks:
            self._chunks[size] = Chunks(*self._moved(self.host.chunks(size)))
        return self._chunks[size]

    def taps(self, width: int) -> Taps[torch.Tensor]:
        """Moves `Segments.taps` to the device, once."""
        if width not in self._taps:
            self._taps[width] = Taps(*self._moved(self.host.taps(width)))
        return self._taps[width]

    def schedule(self, chunk_size: int) -> StateSchedule:
        """Orders launches that carry states from chunk to chunk, once per size."""
        if chunk_size not in self._schedules:
            host, chunks = self.host, self.chunks(chunk_size)
            first_chunk = host.chunks(chunk_size).cu_chunks
            borders = host.entry, host.exits, host.num_entries
            orders = order_states(host.parent, host.state_row, first_chunk, *borders)
            entry_slots = host.num_entries, int(orders[5][-1 - host.num_entries])
            self._schedules[chunk_size] = StateSchedule(
                *entry_slots, self.start, *chunks, self.state_row, *self._moved(orders)
            )
        return self._schedules[chunk_size]

    @lasting
    def _moved(self, arrays: Iterable[np.ndarray]) -> list[torch.Tensor]:
        return move_all([torch.from_numpy(array) for array in arrays], self.device)


# ---- of a mask -----------------------------------------------------------------------------------


def segments_of(mask: HostMask) -> Segments:
    """Finds the segments along which a recurrence over a mask runs, on the host, once."""
    return mask.kept(Segments, lambda: find_segments(mask.predictor))


def tables_of(mask: HostMask, device: torch.device) -> SegmentTables:
    """Moves the segments of a mask to a device, once."""
    return mask.kept((SegmentTables, device), lambda: SegmentTables(segments_of(mask), device))


def with_borders(
    mask: HostMask, entries: np.ndarray, rows: np.ndarray, exits: np.ndarray, num_entries: int
) -> HostMask:
    """Copies a mask, with segments at whose borders states enter and leave: `StateBorders`."""
    segments = find_segments(mask.predictor, entries, rows, exits, num_entries)
    return mask.with_kept(Segments, segments)
