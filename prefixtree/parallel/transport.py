"""`Transport`: rows that the ranks of a group exchange in one slot, and the gradients that return.

It is one all-to-all-v per call of a layer there, and one back. Own rows are copied meanwhile. All
ranks must call it equally often, in the same order. Sums over ranks are taken in the order of
ranks, so results are the same in every run.

Legend: H rows of earlier slots that this rank holds for the slot, t own tokens of its cell, K rows
that the cell reads (own ones among them).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from prefixtree.packing.copies import RowRuns
from prefixtree.parallel.ranks import start_all_to_all
from prefixtree.planning.division import Division

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Rows = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Lane:
    """Rows that go to another rank: of those held [H], then of the own ones [t]."""

    held: RowRuns
    own: RowRuns

    @property
    def count(self) -> int:
        return self.held.count + self.own.count


class Transport:
    """The exchange of one kind of rows in one slot; held, int64 [H], are packed tokens of rows."""

    def __init__(
        self,
        division: Division,
        kind: int,
        slot: int,
        rank: int,
        held: np.ndarray,
        group: ProcessGroup,
    ) -> None:
        ranks, device, owner = division.ranks, division.packed.device, division.parts.owner
        part = division.cell(slot, rank)
        read_tokens, other_ranks = division.tokens_read(kind, slot, rank), [*range(ranks)]
        other_ranks.remove(rank)
        # int64 [K], merged from two ascending runs
        joined = np.sort(np.concatenate([read_tokens, part.own_tokens]), kind="stable")
        self.kind, self._group = kind, group
        self._num_held, self._num_own, self._num_rows = len(held), part.num_tokens, len(joined)

        def runs(tokens: np.ndarray, among: np.ndarray) -> RowRuns:
            return RowRuns.of(_places(tokens, among), device)

        def lane(of: np.ndarray) -> Lane:
            is_now = owner[of] // ranks == slot
            return Lane(runs(of[~is_now], held), runs(of[is_now], part.own_tokens))

        def arriving(of: np.ndarray) -> RowRuns:
            is_now = owner[of] // ranks == slot
            return runs(np.concatenate([of[~is_now], of[is_now]]), joined)

        # places among the cell's rows: its own, those it holds itself, and those of other ranks
        self._own = runs(part.own_tokens, joined)
        held_here = division.tokens_read(kind, slot, rank, exporter=rank)
        self._held_here = runs(held_here, held), runs(held_here, joined)
        lanes = {r: lane(division.tokens_read(kind, slot, r, exporter=rank)) for r in other_ranks}
        of_ranks = {
            r: arriving(division.tokens_read(kind, slot, rank, exporter=r)) for r in other_ranks
        }
        self._sent, self._received = (
            [of[r].count if r in of else 0 for r in range(ranks)] for of in (lanes, of_ranks)
        )
        self._lanes = [x for x in lanes.values() if x.count]
        self._of_ranks = [x for x in of_ranks.values() if x.count]

    @property
    def exported(self) -> list[RowRuns]:
        """The own rows that go to each rank."""
        return [lane.own for lane in self._lanes if lane.own.count]

    def there(self, held: Rows, own: Rows) -> Rows:
        """Brings rows of others: held [H, ...], own [t, ...] each -> [K, ...] in packed order."""
        exported = self._buffer(own, self._sent, own[0].dtype)
        for lane, pieces in zip(self._lanes, _pieces(exported, own, self._sent), strict=True):
            for number, piece in enumerate(pieces):
                of_held, of_own = piece.split((lane.held.count, lane.own.count))
                if len(of_held):
                    lane.held.take(held[number], of_held)
                lane.own.take(own[number], of_own)
        received, on_its_way = self._exchanged(exported, own, self._sent, self._received)
        joined = tuple(x.new_empty(self._num_rows, *x.shape[1:]) for x in own)
        for out, x in zip(joined, own, strict=True):
            self._own.put(out, x)
        _move(held, self._held_here[0], joined, self._held_here[1])
        on_its_way.wait()
        for rows, pieces in zip(
            self._of_ranks, _pieces(received, own, self._received), strict=True
        ):
            for out, piece in zip(joined, pieces, strict=True):
                rows.put(out, piece)
        return joined

    def back(self, gradients: Rows, in_float32: bool) -> tuple[Rows, Rows, list[Rows]]:
        """Brings gradients [K, ...] of `there`'s rows back to their owners.

        Returns those of the held rows [H, ...] in float32 or wider, summed over ranks; those of the
        own rows [t, ...] from this cell alone; and those that each rank returned for the rows of
        `exported`. With `in_float32`, for a cell that shares rows, they travel in float32 or wider;
        otherwise as they are.
        """
        wide = torch.promote_types(gradients[0].dtype, torch.float32)
        dtype = wide if in_float32 else gradients[0].dtype
        imported = self._buffer(gradients, self._received, dtype)
        of_ranks = _pieces(imported, gradients, self._received)
        for rows, pieces in zip(self._of_ranks, of_ranks, strict=True):
            for x, piece in zip(gradients, pieces, strict=True):
                rows.take(x, piece)
        returned, on_its_way = self._exchanged(imported, gradients, self._received, self._sent)
        own_gradients = tuple(
            self._own.take(x, x.new_empty(self._num_own, *x.shape[1:])) for x in gradients
        )
        held: Rows = ()
        if self._num_held:
            held = tuple(x.new_zeros(self._num_held, *x.shape[1:], dtype=wide) for x in gradients)
            _move(gradients, self._held_here[1], held, self._held_here[0])
        on_its_way.wait()
        of_own = []
        for lane, pieces in zip(self._lanes, _pieces(returned, gradients, self._sent), strict=True):
            split_pieces = [piece.split((lane.held.count, lane.own.count)) for piece in pieces]
            for x, (of_held, _) in zip(held, split_pieces, strict=False):
                lane.held.add(x, of_held.to(wide))
            if lane.own.count:
                of_own.append(tuple(piece for _, piece in split_pieces))
        return held, own_gradients, of_own

    def _buffer(self, both: Rows, counts: list[int], dtype: torch.dtype) -> torch.Tensor:
        """Makes a flat buffer for so many rows for each rank, or of each."""
        return both[0].new_empty(sum(counts) * _row_size(both), dtype=dtype)

    def _exchanged(
        self, numbers: torch.Tensor, both: Rows, sent: list[int], received: list[int]
    ) -> tuple[torch.Tensor, Any]:
        """Exchanges rows; gives the arriving ones, and a handle to wait for before reading them."""
        each = _row_size(both)
        to_ranks, of_ranks = [each * n for n in sent], [each * n for n in received]
        return start_all_to_all(numbers, to_ranks, of_ranks, self._group)


def _places(tokens: np.ndarray, among: np.ndarray) -> np.ndarray:
    """The places, int64, of tokens among others, which hold all of them."""
    if (among[1:] > among[:-1]).all():
        return np.searchsorted(among, tokens)
    order = np.argsort(among, kind="stable")
    return order[np.searchsorted(among, tokens, sorter=order)]


def _move(source: Rows, taken: RowRuns, target: Rows, put: RowRuns) -> None:
    """Writes rows of each source into rows of its target."""
    if taken.count:
        for x, out in zip(source, target, strict=True):
            rows = taken.take(x, x.new_empty(taken.count, *x.shape[1:]))
            put.put(out, rows.to(out.dtype))


def _row_size(both: Rows) -> int:
    """Counts the numbers of a row, such as of a key and its value."""
    return sum(math.prod(x.shape[1:]) for x in both)


def _pieces(numbers: torch.Tensor, both: Rows, counts: list[int]) -> Iterator[list[torch.Tensor]]:
    """Cuts a buffer into keys and values of each rank with rows."""
    # a rank's keys stand before its values, so that either is contiguous
    rows = [(x.shape[1:], math.prod(x.shape[1:])) for x in both]
    at = 0
    for count in filter(None, counts):
        pieces = []
        for shape, size in rows:
            pieces.append(numbers[at : (at := at + count * size)].view(count, *shape))
        yield pieces
