"""The exchange between ranks that hold all heads of their tokens and ranks that hold some heads of
all tokens.

Ranks exchange tokens for heads before an attention or a recurrence, and heads for tokens after it
(DeepSpeed Ulysses, arXiv 2309.14509). Every query moves, while `parallel.transport` moves only
imported keys. The work is even for any forest and any owners. Legend: T tokens of a slot in packed
order, t own tokens, n ranks, H query heads, Hk kv heads, D and Dv head dims.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from prefixtree.packing.copies import RowRuns
from prefixtree.parallel.ranks import start_all_to_all

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: rows -> a function that waits for the arriving rows
_Start = Callable[[Sequence[torch.Tensor]], Callable[[], list[torch.Tensor]]]


def divides(heads: int, shared: int, ranks: int) -> bool:
    """Whether heads, and the heads that several of them share, divide among ranks."""
    # a shared head goes to several ranks if there are more ranks than shared heads
    return heads % ranks == 0 and (shared % ranks == 0 or ranks % shared == 0)


class TokensForHeads:
    """The exchange of tokens for heads among n ranks; owner, int [T], is the rank of each token."""

    # all layers may share it, as it keeps nothing

    def __init__(
        self, owner: np.ndarray, index: int, group: ProcessGroup, device: torch.device
    ) -> None:
        import torch.distributed as dist

        self.ranks, self.index, self.group = dist.get_world_size(group), index, group
        self._owner, self._device = owner, device

    @cached_property
    def _counts(self) -> list[int]:
        """Own tokens of each rank."""
        counts: list[int] = np.bincount(self._owner, minlength=self.ranks).tolist()
        return counts

    @cached_property
    def _runs(self) -> list[RowRuns]:
        """The tokens of each rank, ascending."""
        of_ranks = (np.flatnonzero(self._owner == rank) for rank in range(self.ranks))
        return [RowRuns.of(tokens, self._device) for tokens in of_ranks]

    def of_rank(self, parameter: Any, turn: int, turns: int) -> Any:
        """Selects the heads of a turn on this rank, of [H, ..] or None."""
        if parameter is None:
            return None
        return parameter.chunk(self.ranks)[self.index].chunk(turns)[turn]

    def all_ranks(self, own: torch.Tensor) -> torch.Tensor:
        """Puts a gradient [H / n] of this rank's heads into zeros [H]; ranks' gradients add up."""
        out = own.new_zeros(self.ranks, len(own))
        out[self.index] = own
        return out.flatten()

    def _but_own(self, counts: Sequence[int]) -> list[int]:
        """Drops this rank's count: an exchange of own rows takes as long as of another rank's."""
        return [0 if rank == self.index else count for rank, count in enumerate(counts)]

    def turns(self, *heads: int) -> int:
        """The number of turns in which so many heads each may be exchanged and computed."""
        # while a turn's heads are computed, those of the next travel here, and those of the last
        # travel back; 1 if a rank's heads cannot be halved
        return 2 if all(count % (2 * self.ranks) == 0 for count in heads) else 1

    def of_turns(self, rows: Sequence[torch.Tensor], turns: int) -> list[list[torch.Tensor]]:
        """Cuts [t, n h, d] each into turns, [t, n, h / turns, d] views; one turn's as they are."""
        if turns == 1:
            return [[*rows]]
        return [
            [x.unflatten(1, (self.ranks, turns, -1))[:, :, turn] for x in rows]
            for turn in range(turns)
        ]

    def joined(self, of_turns: Sequence[torch.Tensor]) -> torch.Tensor:
        """Joins the turns' [t, n h / turns, d] to [t, n h, d]."""
        if len(of_turns) == 1:
            return of_turns[0]
        return torch.stack([x.unflatten(1, (self.ranks, -1)) for x in of_turns], 2).flatten(1, 3)

    def start_to_heads(self, rows: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """Sends [t, n h, d] or [t, n, h, d] each; returns a function that waits for the rows.

        They are [T, h, d] each of this rank's heads, in packed order. On a GPU the stream alone
        waits.
        """
        # rows of several dtypes travel as bits
        ranks, own_count = self.ranks, self._counts[self.index]
        pieces = [
            (x if x.ndim == 4 else x.unflatten(1, (ranks, -1))).flatten(2)
            for x in _in_one_dtype(rows)
        ]
        widths = [x.shape[2] for x in pieces]
        sent = pieces[0].new_empty(ranks - 1, own_count, sum(widths))
        other_ranks = [rank for rank in range(ranks) if rank != self.index]
        for to_rank, rank in zip(sent, other_ranks, strict=True):
            torch.cat([x[:, rank] for x in pieces], 1, out=to_rank)
        to_ranks, of_ranks = self._but_own([own_count] * ranks), self._but_own(self._counts)
        received, on_its_way = start_all_to_all(sent.flatten(0, 1), to_ranks, of_ranks, self.group)
        arriving = sent.new_empty(sum(self._counts), sum(widths))
        for x, columns in zip(pieces, arriving.split(widths, 1), strict=True):
            self._runs[self.index].put(columns, x[:, self.index])

        def arrived() -> list[torch.Tensor]:
            on_its_way.wait()
            for runs, of_rank in zip(self._runs, received.split(of_ranks), strict=True):
                if len(of_rank):
                    runs.put(arriving, of_rank)
            return [
                _in_its_dtype(y, x.dtype).unflatten(1, (-1, x.shape[-1]))
                for x, y in zip(rows, arriving.split(widths, 1), strict=True)
            ]

        return arrived

    def start_to_tokens(self, heads: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """Sends [T, h, d] each back; the returned function gives [t, n h, d] each."""
        ranks, own_count = self.ranks, self._counts[self.index]
        pieces = [x.flatten(1) for x in _in_one_dtype(heads)]
        widths = [x.shape[1] for x in pieces]
        to_ranks, of_ranks = self._but_own(self._counts), self._but_own([own_count] * ranks)
        sent = pieces[0].new_empty(sum(to_ranks), sum(widths))
        for runs, to_rank in zip(self._runs, sent.split(to_ranks), strict=True):
            if len(to_rank):
                for x, columns in zip(pieces, to_rank.split(widths, 1), strict=True):
                    runs.take(x, columns)
        received, on_its_way = start_all_to_all(sent, to_ranks, of_ranks, self.group)
        arriving = [
            x.new_empty(own_count, ranks, width) for x, width in zip(pieces, widths, strict=True)
        ]
        for x, out in zip(pieces, arriving, strict=True):
            self._runs[self.index].take(x, out[:, self.index])

        def arrived() -> list[torch.Tensor]:
            on_its_way.wait()
            for rank, of_rank in enumerate(received.split(of_ranks)):
                if len(of_rank):
                    for out, columns in zip(arriving, of_rank.split(widths, 1), strict=True):
                        out[:, rank] = columns
            return [
                _in_its_dtype(y.flatten(1), x.dtype).unflatten(1, (ranks * x.shape[1], x.shape[2]))
                for x, y in zip(heads, arriving, strict=True)
            ]

        return arrived


def _in_one_dtype(rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views all rows as bits of their narrowest dtype, which every backend sends."""
    narrow = min((x.dtype for x in rows), key=lambda dtype: dtype.itemsize)
    return [x if x.dtype == narrow else x.contiguous().view(narrow) for x in rows]


def _in_its_dtype(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Views bits [rows, numbers] in their original dtype."""
    # a copy, as a wider dtype must stand at a multiple of its size
    return bits if bits.dtype == dtype else bits.contiguous().view(dtype)


def heads_problem(heads: int, kv_heads: int, ranks: int) -> str | None:
    """Says why heads cannot be divided among ranks; None if they can."""
    # a kv head goes to several ranks if there are more ranks than kv heads
    if divides(heads, kv_heads, ranks):
        return None
    return (
        f"{heads} query heads and {kv_heads} kv heads do not divide among {ranks} ranks: expected "
        "a number of ranks that divides the query heads, and divides or is a multiple of the kv "
        'heads; take another size of the group, or group_mode="parts"'
    )


def state_heads_problem(heads: int, shared: int, ranks: int) -> str | None:
    """Says why the heads of a recurrence cannot be divided among ranks; None if they can."""
    # `heads` are of values, each with a state; `shared` of keys, or groups of Mamba-2
    if divides(heads, shared, ranks):
        return None
    return (
        f"the {heads} heads of a recurrent layer, which share {shared} heads of keys (groups of "
        f"Mamba-2), do not divide among {ranks} ranks: expected a number of ranks that divides the "
        "heads, and divides or is a multiple of those that they share; take another size of the "
        "group"
    )


def in_turns(
    exchange: TokensForHeads,
    rows: Sequence[torch.Tensor],
    compute: Callable[[Sequence[torch.Tensor], int, int], torch.Tensor],
) -> torch.Tensor:
    """Computes with some heads of all tokens: [t, H] or [t, H, d] each -> [t, H, V].

    compute takes a turn's [T, h] or [T, h, d] each, the turn and their number, and gives [T, h, V].
    """
    turns = exchange.turns(*(x.shape[1] for x in rows))
    with_size = [x if x.ndim == 3 else x[..., None] for x in rows]
    flights, back = [], []
    # all start before any is waited for; autograd runs the backward in the reverse order
    for turn_rows in exchange.of_turns(with_size, turns):
        flight = _Flight(exchange.start_to_heads, exchange.start_to_tokens)
        flights.append((flight, _Sent.apply(flight, exchange.ranks, *turn_rows)))
    for turn, last in enumerate(flights):
        arrived = zip(rows, _Arrived.apply(*last), strict=True)
        of_heads = [y if x.ndim == 3 else y[..., 0] for x, y in arrived]
        out = compute(of_heads, turn, turns)
        flight = _Flight(exchange.start_to_tokens, exchange.start_to_heads)
        back.append((flight, _Sent.apply(flight, 1, out)))
    return exchange.joined([_Arrived.apply(*last)[0] for last in back])


class _Flight:
    """Rows on their way in a forward, and their gradients on their way back in its backward."""

    # `there`, or `back`, starts a flight, and returns a function that waits for the arrival

    def __init__(self, there: _Start, back: _Start) -> None:
        self.there, self.back = there, back
        self.waited: Callable[[], list[torch.Tensor]] | None = None

    def take(self) -> list[torch.Tensor]:
        assert self.waited is not None
        arrived, self.waited = self.waited(), None
        return arrived


class _Sent(torch.autograd.Function):
    """Starts a flight, and returns a token [0] on which the waiting depends."""

    # the backward waits for the gradients; heads [t, H, d] that are fewer than ranks go to several
    # ranks, and get the sum of their gradients

    @staticmethod
    def forward(ctx: Any, flight: _Flight, ranks: int, *rows: torch.Tensor) -> torch.Tensor:
        ctx.flight, ctx.shapes = flight, [x.shape for x in rows]
        ctx.copies = [max(1, ranks // x.shape[1]) for x in rows]
        flight.waited = flight.there(
            [
                x if copies == 1 else x.repeat_interleave(copies, 1)
                for x, copies in zip(rows, ctx.copies, strict=True)
            ]
        )
        return rows[0].new_empty(0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, token: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = (
            (x if copies == 1 else _sum_of_copies(x.unflatten(1, (-1, copies)))).view(shape)
            for x, copies, shape in zip(ctx.flight.take(), ctx.copies, ctx.shapes, strict=True)
        )
        return None, None, *gradients


class _Arrived(torch.autograd.Function):
    """Ends a flight, and returns the rows that arrived."""

    # the backward starts the flight of the gradients, which overlaps the backward of another turn

    @staticmethod
    def forward(ctx: Any, flight: _Flight, token: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.flight = flight
        ctx.save_for_backward(token)
        return tuple(flight.take())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor]:
        ctx.flight.waited = ctx.flight.back(gradients)
        (token,) = ctx.saved_tensors
        return None, torch.zeros_like(token)


def _sum_of_copies(x: torch.Tensor) -> torch.Tensor:
    """Sums the copies: [t, H, copies, d] -> [t, H, d]."""
    return x.sum(2, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)
