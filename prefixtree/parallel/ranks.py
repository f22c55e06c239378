"""Exchanges of the ranks of a process group: borrowed keys and values, their gradients, scores, and
features of pictures.

Every sum over ranks is taken in the order of ranks, so results are the same in every run.
torch.distributed is imported where a function first needs it. Legend: t own tokens, K rows of the
part, n ranks, Hk kv heads, D and Dv head dims, F features of the distinct pictures of one modality,
N of these pictures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from prefixtree.packing.copies import GatherIndex, RowRuns, gather
from prefixtree.parallel.attention import PartMask
from prefixtree.planning.parts import Part, Parts

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class RankExchange:
    """The exchange of one rank: one all-to-all-v per forward of a layer, and one per backward.

    All layers may share it, as it keeps nothing. Part r of `parts` belongs to the rank that is the
    group's r-th. All ranks must call it as often as one another, in the same order.

    Args:
        parts: the forest divided among the ranks of the group.
        index: this rank's place in the group.
        group: the process group.
    """

    def __init__(self, parts: Parts, index: int, group: ProcessGroup) -> None:
        self.part = parts[index]
        self._group = group
        # known to all ranks
        self._is_needed = bool(parts.borrowed.any())
        exchange = self.part.exchange
        self._sent, self._received = exchange.send_counts.tolist(), exchange.receive_counts.tolist()

    def borrow(self, *own: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not self._is_needed:
            return own
        lent = self._buffer(own, self._sent, own[0].dtype)
        for rows, pieces in zip(self._rows.sent, _pieces(lent, own, self._sent), strict=True):
            for x, piece in zip(own, pieces, strict=True):
                rows.take(x, piece)
        got, on_its_way = self._exchanged(lent, own, self._sent, self._received)
        joined = tuple(x.new_empty(self.part.num_rows, *x.shape[1:]) for x in own)
        for out, x in zip(joined, own, strict=True):
            self._rows.own.put(out, x)
        on_its_way.wait()
        for rows, pieces in zip(
            self._rows.received, _pieces(got, own, self._received), strict=True
        ):
            for out, piece in zip(joined, pieces, strict=True):
                rows.put(out, piece)
        return joined

    def give_back(
        self, dkey: torch.Tensor, dvalue: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._is_needed:
            return dkey, dvalue
        both = dkey, dvalue
        # whoever lends or borrows has them in float32 already
        wide = torch.promote_types(dkey.dtype, torch.float32)
        borrowed = self._buffer(both, self._received, wide)
        of_ranks = _pieces(borrowed, both, self._received)
        for rows, pieces in zip(self._rows.received, of_ranks, strict=True):
            for x, piece in zip(both, pieces, strict=True):
                rows.take(x, piece)
        returned, on_its_way = self._exchanged(borrowed, both, self._received, self._sent)
        key, value = (
            self._rows.own.take(x, x.new_empty(self.part.num_tokens, *x.shape[1:])) for x in both
        )
        on_its_way.wait()
        # rank by rank, so that sums are the same in every run
        for rows, pieces in zip(self._rows.sent, _pieces(returned, both, self._sent), strict=True):
            for x, piece in zip((key, value), pieces, strict=True):
                rows.add(x, piece)
        return key, value

    def _buffer(
        self, both: tuple[torch.Tensor, ...], counts: list[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Numbers [*] of so many rows for each rank, or of each."""
        return both[0].new_empty(sum(counts) * _row_size(both), dtype=dtype)

    def _exchanged(
        self,
        numbers: torch.Tensor,
        both: tuple[torch.Tensor, ...],
        sent: list[int],
        received: list[int],
    ) -> tuple[torch.Tensor, Any]:
        """The rows that arrive, and a handle to wait for before they are read.

        Own rows are copied meanwhile.
        """
        each = _row_size(both)
        to_ranks, of_ranks = [each * n for n in sent], [each * n for n in received]
        return start_all_to_all(numbers, to_ranks, of_ranks, self._group)

    @cached_property
    def _rows(self) -> _Rows:
        return _Rows(self.part)


def _row_size(both: tuple[torch.Tensor, ...]) -> int:
    """Numbers of a row, as of a key and its value."""
    return sum(math.prod(x.shape[1:]) for x in both)


def _pieces(
    numbers: torch.Tensor, both: tuple[torch.Tensor, ...], counts: list[int]
) -> Iterator[list[torch.Tensor]]:
    """Keys and values of each rank with rows in a buffer; a rank's keys stand before its values, so
    that either is contiguous."""
    rows = [(x.shape[1:], math.prod(x.shape[1:])) for x in both]
    at = 0
    for count in filter(None, counts):
        pieces = []
        for shape, size in rows:
            pieces.append(numbers[at : (at := at + count * size)].view(count, *shape))
        yield pieces


class _Rows:
    """Rows of a part: its own, and by rank, where there are any, the own ones that it sends and
    those it receives."""

    def __init__(self, part: Part) -> None:
        exchange, device = part.exchange, part.mask.device

        def by_rank(runs: np.ndarray) -> list[RowRuns]:
            of_ranks = (runs[runs[:, 0] == r] for r in np.unique(runs[:, 0]))
            return [RowRuns(some[:, 1], some[:, 2], device) for some in of_ranks]

        self.own = RowRuns(part.own_runs[:, 1], part.own_runs[:, 2], device)
        self.sent = by_rank(exchange.send_runs)
        self.received = by_rank(exchange.receive_runs)


def rank_mask(
    parts: Parts,
    index: int,
    group: ProcessGroup,
    states_of: Callable[[nn.Module], Any] | None = None,
) -> PartMask:
    """The mask that a model's forward takes on one rank of a group."""
    exchange = RankExchange(parts, index, group)
    return PartMask(exchange.part, lambda module: exchange, states_of)


def divides(heads: int, shared: int, ranks: int) -> bool:
    """Whether heads divide among ranks, and those that several of them share do too. A shared head
    goes to several ranks where there are more ranks than shared heads."""
    return heads % ranks == 0 and (shared % ranks == 0 or ranks % shared == 0)


class TokensForHeads:
    """The exchange between ranks that hold all heads of their tokens and ranks that hold some heads
    of all tokens. All layers may share it, as it keeps nothing of them.

    Args:
        parts: the forest divided among the ranks of the group.
        index: this rank's place in the group.
        group: the process group.

    Attributes:
        ranks: n.
        index, group: as given.
    """

    def __init__(self, parts: Parts, index: int, group: ProcessGroup) -> None:
        self.ranks, self.index, self.group = len(parts), index, group
        self._parts = parts

    @cached_property
    def _counts(self) -> list[int]:
        """The own tokens of each rank."""
        counts: list[int] = self._parts.num_own_tokens.tolist()
        return counts

    @cached_property
    def _runs(self) -> list[RowRuns]:
        """The packed tokens of each rank."""
        owner, device = self._parts.owner, self._parts.packed.device
        first = np.flatnonzero(np.diff(owner, prepend=-1))
        length = np.diff(first, append=len(owner))
        of_runs = owner[first]
        return [
            RowRuns(first[of_runs == rank], length[of_runs == rank], device)
            for rank in range(self.ranks)
        ]

    def _but_own(self, counts: Sequence[int]) -> list[int]:
        """Own rows are copied: through the exchange they would take as long as another rank's."""
        return [0 if rank == self.index else count for rank, count in enumerate(counts)]

    def turns(self, *heads: int) -> int:
        """The number of turns in which so many heads each may be exchanged and computed: while a
        turn's heads are computed, those of the next are on their way, and those of the last on
        their way back. 1 where a rank's heads cannot be halved."""
        return 2 if all(count % (2 * self.ranks) == 0 for count in heads) else 1

    def of_turns(self, rows: Sequence[torch.Tensor], turns: int) -> list[list[torch.Tensor]]:
        """[t, n h, d] each -> per turn [t, n, h / turns, d] each, views; one turn's as they are."""
        if turns == 1:
            return [[*rows]]
        return [
            [x.unflatten(1, (self.ranks, turns, -1))[:, :, turn] for x in rows]
            for turn in range(turns)
        ]

    def joined(self, of_turns: Sequence[torch.Tensor]) -> torch.Tensor:
        """Per turn [t, n h / turns, d] -> [t, n h, d]."""
        if len(of_turns) == 1:
            return of_turns[0]
        return torch.stack([x.unflatten(1, (self.ranks, -1)) for x in of_turns], 2).flatten(1, 3)

    def start_to_heads(self, rows: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """Sends [t, n h, d] or [t, n, h, d] each. Of several dtypes the bits travel.

        Returns:
            A function that waits for what arrives, on a GPU in the stream alone, and returns
            [T, h, d] each of this rank's heads, in packed order.
        """
        ranks, own = self.ranks, self._counts[self.index]
        pieces = [
            (x if x.ndim == 4 else x.unflatten(1, (ranks, -1))).flatten(2)
            for x in _in_one_dtype(rows)
        ]
        widths = [x.shape[2] for x in pieces]
        sent = pieces[0].new_empty(ranks - 1, own, sum(widths))
        others = [rank for rank in range(ranks) if rank != self.index]
        for to_rank, rank in zip(sent, others, strict=True):
            torch.cat([x[:, rank] for x in pieces], 1, out=to_rank)
        to_ranks, of_ranks = self._but_own([own] * ranks), self._but_own(self._counts)
        got, on_its_way = start_all_to_all(sent.flatten(0, 1), to_ranks, of_ranks, self.group)
        found = sent.new_empty(sum(self._counts), sum(widths))
        for x, columns in zip(pieces, found.split(widths, 1), strict=True):
            self._runs[self.index].put(columns, x[:, self.index])

        def arrived() -> list[torch.Tensor]:
            on_its_way.wait()
            for runs, of_rank in zip(self._runs, got.split(of_ranks), strict=True):
                if len(of_rank):
                    runs.put(found, of_rank)
            return [
                _in_its_dtype(y, x.dtype).unflatten(1, (-1, x.shape[-1]))
                for x, y in zip(rows, found.split(widths, 1), strict=True)
            ]

        return arrived

    def start_to_tokens(self, heads: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """The reverse, of [T, h, d] each; the function returns [t, n h, d] each."""
        ranks, own = self.ranks, self._counts[self.index]
        pieces = [x.flatten(1) for x in _in_one_dtype(heads)]
        widths = [x.shape[1] for x in pieces]
        to_ranks, of_ranks = self._but_own(self._counts), self._but_own([own] * ranks)
        sent = pieces[0].new_empty(sum(to_ranks), sum(widths))
        for runs, to_rank in zip(self._runs, sent.split(to_ranks), strict=True):
            if len(to_rank):
                for x, columns in zip(pieces, to_rank.split(widths, 1), strict=True):
                    runs.take(x, columns)
        got, on_its_way = start_all_to_all(sent, to_ranks, of_ranks, self.group)
        found = [x.new_empty(own, ranks, width) for x, width in zip(pieces, widths, strict=True)]
        for x, out in zip(pieces, found, strict=True):
            self._runs[self.index].take(x, out[:, self.index])

        def arrived() -> list[torch.Tensor]:
            on_its_way.wait()
            for rank, of_rank in enumerate(got.split(of_ranks)):
                if len(of_rank):
                    for out, columns in zip(found, of_rank.split(widths, 1), strict=True):
                        out[:, rank] = columns
            return [
                _in_its_dtype(y.flatten(1), x.dtype).unflatten(1, (ranks * x.shape[1], x.shape[2]))
                for x, y in zip(heads, found, strict=True)
            ]

        return arrived


def _in_one_dtype(rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The bits of all rows in the narrowest of their dtypes, which every backend sends."""
    narrow = min((x.dtype for x in rows), key=lambda dtype: dtype.itemsize)
    return [x if x.dtype == narrow else x.contiguous().view(narrow) for x in rows]


def _in_its_dtype(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bits [rows, numbers] in the dtype that they came from."""
    # a copy: what is wider must stand at a multiple of its size
    return bits if bits.dtype == dtype else bits.contiguous().view(dtype)


def gather_rows(
    own: torch.Tensor, counts: Sequence[int], index: int, group: ProcessGroup
) -> torch.Tensor:
    """Gives every rank the rows of all ranks.

    The gradient of a row is the sum, over the ranks, of what each rank's backward gives it. So each
    rank may compute another loss, and the parameters' gradients, averaged over the ranks, are those
    of the mean of the losses.

    Args:
        own: [counts[index], C], this rank's rows.
        counts: the rows of each rank.
        index: this rank's place in the group.
        group: the process group. All ranks must call this, and run its backward.

    Returns:
        [sum(counts), C], rank by rank.
    """
    out: torch.Tensor = _GatherRows.apply(own, list(counts), index, group)
    return out


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, own: torch.Tensor, counts: list[int], index: int, group: ProcessGroup
    ) -> torch.Tensor:
        ctx.counts, ctx.index, ctx.group = counts, index, group
        ranks = len(counts)
        return all_to_all(own.repeat(ranks, 1), [counts[index]] * ranks, counts, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        ranks, own = len(ctx.counts), ctx.counts[ctx.index]
        of_ranks = all_to_all(gradient, ctx.counts, [own] * ranks, ctx.group)
        return of_ranks.view(ranks, own, gradient.shape[1]).sum(0), None, None, None


def exchange_rows(
    rows: torch.Tensor, sent: list[int], received: list[int], group: ProcessGroup
) -> torch.Tensor:
    """`all_to_all` that is differentiable once: gradients of rows go back to where these came from.

    All ranks must run its backward too.
    """
    out: torch.Tensor = _ExchangeRows.apply(rows, sent, received, group)
    return out


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: ProcessGroup
    ) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return all_to_all(rows, sent, received, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return all_to_all(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


def all_to_all(
    rows: torch.Tensor, sent: list[int], received: list[int], group: ProcessGroup
) -> torch.Tensor:
    """Sends rows to all ranks of a group, and receives rows of each.

    Args:
        rows: [sum(sent), ...], rank by rank.
        sent: the rows for each rank.
        received: the rows of each rank.
        group: the process group.

    Returns:
        [sum(received), ...], rank by rank.
    """
    out, on_its_way = start_all_to_all(rows, sent, received, group)
    on_its_way.wait()
    return out


def start_all_to_all(
    rows: torch.Tensor, sent: list[int], received: list[int], group: ProcessGroup
) -> tuple[torch.Tensor, Any]:
    """`all_to_all` that goes on beside what follows.

    Args:
        rows, sent, received, group: as in `all_to_all`.

    Returns:
        What `all_to_all` returns, and what holds the rows sent; wait() on it before the result is
        read. On a GPU the stream waits, not the host.
    """
    import torch.distributed as dist

    out = rows.new_empty(sum(received), *rows.shape[1:])
    work: Any = dist.all_to_all_single(
        out, rows.contiguous(), received, sent, group=group, async_op=True
    )
    return out, work


def arrival(owner: np.ndarray, num_ranks: int) -> tuple[np.ndarray, list[int]]:
    """Where items that ranks hold stand once `gather_rows` has gathered them.

    Args:
        owner: [U] integers, the rank that holds each item; a rank holds its items in ascending
            order.
        num_ranks: n.

    Returns:
        int64 [U], the row of each item; and the number of items of each rank.
    """
    row = np.empty(len(owner), np.int64)
    row[np.argsort(owner, kind="stable")] = np.arange(len(owner))
    return row, np.bincount(owner, minlength=num_ranks).tolist()


# ---- features of pictures: each is encoded on one rank -------------------------------------------


def holders_of(patches: Sequence[int], num_ranks: int) -> np.ndarray:
    """Divides pictures among ranks, largest first to the rank with the fewest patches.

    Args:
        patches: of each picture. num_ranks: n.

    Returns:
        int64 [N], the rank that encodes each picture.
    """
    load = np.zeros(num_ranks, np.int64)
    holder = np.empty(len(patches), np.int64)
    for picture in np.argsort(-np.asarray(patches, np.int64), kind="stable"):
        holder[picture] = load.argmin()
        load[holder[picture]] += patches[picture]
    return holder


class FeatureExchange:
    """The exchange of one modality: one all-to-all-v per forward, and one per backward.

    A feature goes once to each rank whose tokens show it. Its gradient is the sum over these ranks,
    in their order. All ranks must call it as often as one another, in the same order.

    Args:
        holder: int64 [F], the rank that computes each feature, in ascending order of features.
        shown: by rank, the features that its own tokens show, integers [*], also several times.
        index: this rank's place in the group.
        group: the process group.
        device: of the features.

    Attributes:
        fetched: int64 [*], the features that come to this rank, in order of arrival.
    """

    def __init__(
        self,
        holder: np.ndarray,
        shown: Sequence[np.ndarray],
        index: int,
        group: ProcessGroup,
        device: torch.device,
    ) -> None:
        ranks = len(shown)
        row, held = arrival(holder, ranks)
        here = row - np.repeat([0, *np.cumsum(held)[:-1]], held)[row]

        def wanted(features: np.ndarray) -> np.ndarray:
            each = np.unique(features)
            return each[np.argsort(holder[each], kind="stable")]

        sent = [features[holder[features] == index] for features in map(wanted, shown)]
        self.fetched = wanted(shown[index])
        self._sent = [len(features) for features in sent]
        self._received = np.bincount(holder[self.fetched], minlength=ranks).tolist()
        # a rank that holds none has the feature of a blank picture
        count = max(1, held[index])
        rows = here[np.concatenate(sent)].astype(np.int32)
        self._rows, self._group = GatherIndex(rows, count, device), group

    def fetch(self, features: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Brings features to the ranks that show them, differentiable once.

        Args:
            features: [held, H] each, those that this rank computes, of several layers.

        Returns:
            [fetched, H] each.
        """
        rows = gather(torch.cat([*features], 1), self._rows)
        rows = exchange_rows(rows, self._sent, self._received, self._group)
        return list(rows.split([x.shape[1] for x in features], 1))
