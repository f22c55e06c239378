"""Segments of a packed forest: what a recurrence along the tree runs over, and the order in which
one launch carries its states.

In that order a state that enters is a branch point whose state is there before the launch. One that
leaves has a slot more than its children need, which holds its gradient before the launch.

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


# tokens of a run, which one program of a convolution's kernel walks
RUN = 128
# int32, np.ndarray or torch.Tensor
_Array = TypeVar("_Array")


class Chunks(NamedTuple, Generic[_Array]):
    """A segment's tokens in chunks of C, the last of a segment shorter. numpy or torch, int32.

    Attributes:
        cu_chunks: [N + 1], the number of chunks before each segment.
        chunk_indices: [NC, 2], (segment, chunk in the segment) of every chunk, in packed order.
    """

    cu_chunks: _Array
    chunk_indices: _Array


class Taps(NamedTuple, Generic[_Array]):
    """Tokens that a causal convolution along paths and its gradient read. numpy or torch,
    int32.

    The gradient of x[s] sums over the tokens t with ancestors[j, t] == s. At distance j that is
    t = s + j, if ancestors[j, s + j] == s, and those that the entries start[s] .. start[s + 1]
    list: tokens which reach s over a branch with other tokens between. At most W (W - 1) / 2
    entries per segment.

    Attributes:
        ancestors: [W, T], the token 0, 1, .. W - 1 before each on its path; -1 where there is none.
        start: [T + 1] into the entries of each token.
        token: [M], the entry's t; ascending within a token's entries.
        tap: [M], its distance j, 1 .. W - 1.
        branch_tokens: the tokens that have entries, ascending.
        run_start: [R + 1], the first tokens of runs in which each token's predecessor is the token
            before it, at most `RUN` tokens each; run_start[R] = T.
    """

    ancestors: _Array
    start: _Array
    token: _Array
    tap: _Array
    branch_tokens: _Array
    run_start: _Array


@dataclass(frozen=True, eq=False, repr=False)
class Segments:
    """Maximal runs of packed tokens, each the only child of the one before it.

    A sequence that ends inside a run does not end the run; a state that leaves (`StateBorders`)
    does. Segments are numbered in packed order, so a parent comes before its children. Arrays are
    numpy int32 but `has_children`.

    Attributes:
        start: [N + 1], the first packed token of each; start[N] = T. A `cu_seqlens`.
        parent: [N], the segment above, whose last token is the predecessor of the first; -1 at
            roots.
        level: [N], the number of segments above.
        has_children: bool [N], whether a segment's final state is read by others: it has children,
            or its state leaves.
        order: [N], segments by (level, number). Those of one parent are neighbours in it.
        level_start: [L + 1] into `order`.
        children_start: [N + 1] into `children`.
        children: the child segments of each, ascending.
        state_row: [N], a row of its own in an array of B final states for each segment with
            children, numbered along `order`; -1 for the others.
        predictor: [T], the token before each on its path, -1 at roots.
        entry: [N], the row of the given states that a root starts from; -1 at those that start from
            zeros, and at segments with a parent.
        exits: [F], the segments whose final states leave, one per row of what is returned.
        num_entries: the given states, I.
    """

    start: np.ndarray
    parent: np.ndarray
    level: np.ndarray
    has_children: np.ndarray
    order: np.ndarray
    level_start: np.ndarray
    children_start: np.ndarray
    children: np.ndarray
    state_row: np.ndarray
    predictor: np.ndarray
    entry: np.ndarray
    exits: np.ndarray
    num_entries: int
    _chunks: dict[int, Chunks[np.ndarray]] = field(default_factory=dict, init=False)
    _taps: dict[int, Taps[np.ndarray]] = field(default_factory=dict, init=False)

    @property
    def num_segments(self) -> int:
        """N."""
        return len(self.parent)

    @property
    def num_levels(self) -> int:
        """L; 0 without tokens."""
        return len(self.level_start) - 1

    @property
    def num_states(self) -> int:
        """B, the number of segments with children."""
        return int(self.has_children.sum())

    def __repr__(self) -> str:
        return (
            f"Segments({self.num_segments} of {len(self.predictor)} tokens, {self.num_levels} "
            f"levels, {self.num_states} with children)"
        )

    def chunks(self, size: int) -> Chunks[np.ndarray]:
        """The chunk tables for chunks of `size` tokens, as numpy arrays; built once and kept."""
        if size not in self._chunks:
            self._chunks[size] = Chunks(*loops.segments.chunks(self.start, size))
        return self._chunks[size]

    def taps(self, width: int) -> Taps[np.ndarray]:
        """The tables of a convolution with `width` taps, as numpy arrays; built once and kept."""
        if width not in self._taps:
            ancestors, start, token, tap = loops.segments.taps(self.predictor, width)
            branch_tokens = np.flatnonzero(np.diff(start)).astype(np.int32)
            run_start = loops.segments.runs(self.predictor, RUN)
            self._taps[width] = Taps(ancestors, start, token, tap, branch_tokens, run_start)
        return self._taps[width]

    def ancestors(self, width: int) -> np.ndarray:
        """int32 [width, T]: the token 0, 1, .. width - 1 before each on its path, -1 for none."""
        return self.taps(width).ancestors


_NONE = np.empty(0, np.int32)


def find_segments(
    predictor: np.ndarray,
    entries: np.ndarray = _NONE,
    rows: np.ndarray = _NONE,
    exits: np.ndarray = _NONE,
    num_entries: int = 0,
) -> Segments:
    """The segments of a packed forest.

    Args:
        predictor: int32 [T], -1 at roots: `HostMask.predictor`.
        entries, rows, exits, num_entries: int32, as in `StateBorders`.
    """
    start, parent, level, has_children = loops.segments.find(predictor, exits)
    num_levels = int(level.max(initial=-1)) + 1
    order, level_start = loops.segments.sorted_by(level, num_levels)
    children, children_start = loops.segments.sorted_by(parent, len(parent))
    has_children = has_children.astype(bool)
    state_row = np.full(len(parent), -1, np.int32)
    inner = order[has_children[order]]
    state_row[inner] = np.arange(len(inner), dtype=np.int32)
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
    """`Segments` as int32 tensors on a device, moved in one copy: `tables_of`.

    Attributes:
        host: the Segments, whose numbers a launch reads without waiting for the device.
        start, parent, level, has_children, order, level_start, children_start, children,
            state_row: as in `Segments`, all int32.
        exit_of: [N], the row of the states that leave of each segment, -1 for none.
    """

    @lasting
    def __init__(self, host: Segments, device: torch.device) -> None:
        self.host = host
        self.device = device
        names = (
            *("start", "parent", "level", "has_children", "order", "level_start"),
            *("children_start", "children", "state_row"),
        )
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
        """`Segments.chunks` on the device; moved once and kept."""
        if size not in self._chunks:
            self._chunks[size] = Chunks(*self._moved(self.host.chunks(size)))
        return self._chunks[size]

    def taps(self, width: int) -> Taps[torch.Tensor]:
        """`Segments.taps` on the device; moved once and kept."""
        if width not in self._taps:
            self._taps[width] = Taps(*self._moved(self.host.taps(width)))
        return self._taps[width]

    def schedule(self, chunk_size: int) -> StateSchedule:
        """The order of launches that carry states from chunk to chunk; built once and kept."""
        if chunk_size not in self._schedules:
            host, chunks = self.host, self.chunks(chunk_size)
            first_chunk = host.chunks(chunk_size).cu_chunks
            borders = host.entry, host.exits, host.num_entries
            orders = order_states(host.parent, host.state_row, first_chunk, *borders)
            entered = host.num_entries, int(orders[5][-1 - host.num_entries])
            self._schedules[chunk_size] = StateSchedule(
                *entered, self.start, *chunks, self.state_row, *self._moved(orders)
            )
        return self._schedules[chunk_size]

    @lasting
    def _moved(self, arrays: Iterable[np.ndarray]) -> list[torch.Tensor]:
        return move_all([torch.from_numpy(array) for array in arrays], self.device)


# ---- of a mask ---------------------------------------------------------------------------------


def segments_of(mask: HostMask) -> Segments:
    """The segments that a recurrence over a mask runs along, on the host; found once."""
    return mask.kept(Segments, lambda: find_segments(mask.predictor))


def tables_of(mask: HostMask, device: torch.device) -> SegmentTables:
    """The same on a device, moved once."""
    return mask.kept((SegmentTables, device), lambda: SegmentTables(segments_of(mask), device))


def with_borders(
    mask: HostMask, entries: np.ndarray, rows: np.ndarray, exits: np.ndarray, num_entries: int
) -> HostMask:
    """The same mask with segments at whose borders states enter and leave: `StateBorders`."""
    found = find_segments(mask.predictor, entries, rows, exits, num_entries)
    return mask.with_kept(Segments, found)
