"""Recurrent layers of a forest whose tokens are divided among ranks.

States pass within one rank, in one of two ways that `MOST_ABOVE` chooses between. Where few tokens
of other ranks stand above a rank's own, it gets these and computes its own behind them, all heads.
Else each rank computes some heads: ranks exchange tokens for heads before a recurrence, and heads
for tokens after it, as `parallel.heads` does for attention, whatever the forest is and whoever owns
its tokens. A convolution stays with the tokens, because the layer's code splits its channels
afterwards: ranks exchange the W - 1 tokens above each place where another rank's tokens begin
(tails). Sums over ranks are taken in float32, in the order of ranks. Legend: T packed tokens, t own
tokens, n ranks, D channels, W taps, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from prefixtree.kernels.operators import as_one_call, note_call, uncompiled
from prefixtree.kernels.recurrence import tree_conv, tree_delta_rule, tree_ssd
from prefixtree.packing.copies import move
from prefixtree.packing.mask import TreeMask
from prefixtree.parallel.ranks import TokensForHeads, all_to_all, divides
from prefixtree.planning.part_states import PartStates, tail_tokens
from prefixtree.planning.parts import Parts

# The tokens above its own that a rank computes again, at most, as a share of its own. A rule is a
# tenth of a recurrent layer of Qwen3.5-9B, and the exchange of all tokens for heads took as long.
MOST_ABOVE = 0.5
#: of rows, -> a function that waits for what arrives
_Start = Callable[[Sequence[torch.Tensor]], Callable[[], list[torch.Tensor]]]


def state_heads_problem(heads: int, shared: int, ranks: int) -> str | None:
    """Says why the heads of a recurrence cannot be divided among ranks; None where they can.

    Args:
        heads: of values, each with a state. shared: heads of keys, or groups of Mamba-2, that
            several of them share. ranks: n.
    """
    if divides(heads, shared, ranks):
        return None
    return (
        f"the {heads} heads of a recurrent layer, which share {shared} heads of keys (groups of "
        f"Mamba-2), do not divide among {ranks} ranks: expected a number of ranks that divides the "
        "heads, and divides or is a multiple of those that they share; take another size of the "
        "group"
    )


class StatesOfRanks:
    """In the place of the mask among the keywords of a recurrent layer's forward, on one rank of a
    group. All layers may share it, as it keeps nothing of them.

    All ranks must call it as often as one another, in the same order.

    Args:
        parts: the forest divided among the ranks of the group.
        exchange: of tokens for heads.
        counted: the mask by which the forward counts its calls.

    Attributes:
        num_tokens: t.
    """

    query_tokens = None

    def __init__(self, parts: Parts, exchange: TokensForHeads, counted: TreeMask) -> None:
        self._parts, self._exchange, self._counted = parts, exchange, counted.host
        self._whole = parts.packed.mask
        self.num_tokens = parts[exchange.index].num_tokens
        self._tails: dict[int | None, _Tails] = {}

    @cached_property
    def computes_above(self) -> bool:
        """Whether ranks compute the tokens above their own again; known to all of them."""
        above, own = self._parts.borrowed.sum(1), self._parts.num_own_tokens
        return bool((above <= MOST_ABOVE * own).all())

    # Dynamo is kept out: ranks talk to one another
    @uncompiled
    def conv(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None,
    ) -> torch.Tensor:
        """`tree_conv` of the own tokens: x [t, D] -> [t, D]."""
        tails = self._tails_of(weight.shape[1])
        note_call(self._counted, "recurrence")
        (rows,) = tails.above(x)
        return tails.own(tree_conv(rows, weight, bias, tails.mask, activation))

    @uncompiled
    def delta_rule(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        """`tree_delta_rule` of the own tokens: [t, Hk, K], .. -> [t, H, V]."""
        rows = query, key, value, g, beta
        rule: Callable[..., torch.Tensor] = tree_delta_rule
        if self.computes_above:
            return self._below(query, rows[1:], lambda *rows: rule(*rows, **options))
        self._check(value.shape[1], key.shape[1])
        return self._in_turns(rows, lambda rows, *_: rule(*rows, self._whole, **options))

    @uncompiled
    def ssd(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        *,
        D: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """`tree_ssd` of the own tokens: [t, H, P], .. -> [t, H, P]. A, D and dt_bias [H, ..] are
        those of all heads, and their gradients of what this rank computes: ranks' add up."""
        rule: Callable[..., torch.Tensor] = tree_ssd
        if self.computes_above:
            of_all = {"D": D, "dt_bias": dt_bias, **options}
            return self._below(
                C, (x, dt, B), lambda C, x, dt, B, mask: rule(x, dt, A, B, C, mask, **of_all)
            )
        self._check(x.shape[1], B.shape[1])

        def of_turn(rows: Sequence[torch.Tensor], turn: int, turns: int) -> torch.Tensor:
            x, dt, B, C = rows
            own = (self._of_rank(parameter, turn, turns) for parameter in (A, D, dt_bias))
            own_A, own_D, own_bias = own
            return rule(x, dt, own_A, B, C, self._whole, D=own_D, dt_bias=own_bias, **options)

        return self._in_turns((x, dt, B, C), of_turn)

    def _below(
        self,
        asking: torch.Tensor,
        rows: Sequence[torch.Tensor],
        compute: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        """[t, ..] each -> [t, H, V], computed behind the tokens above.

        Args:
            asking: what shapes a token's own result alone. rows: what shapes states, too.
            compute: of all [b + t, ..] and their mask: [b + t, H, V].
        """
        tails = self._tails_of(None)
        note_call(self._counted, "recurrence")
        return tails.own(compute(tails.blank(asking), *tails.above(*rows), tails.mask))

    def _tails_of(self, width: int | None) -> _Tails:
        if width not in self._tails:
            self._tails[width] = _Tails(self._parts, self._exchange, width)
        return self._tails[width]

    def _in_turns(
        self,
        rows: Sequence[torch.Tensor],
        compute: Callable[[Sequence[torch.Tensor], int, int], torch.Tensor],
    ) -> torch.Tensor:
        """[t, H] or [t, H, d] each -> [t, H, V].

        Args:
            compute: of a turn's [T, h] or [T, h, d] each, the turn and their number: [T, h, V].
        """
        exchange = self._exchange
        turns = exchange.turns(*(x.shape[1] for x in rows))
        with_size = [x if x.ndim == 3 else x[..., None] for x in rows]
        there, back = [], []
        # all of them before any is waited for; autograd runs the backward in the reverse order
        for some in exchange.of_turns(with_size, turns):
            flight = _Flight(exchange.start_to_heads, exchange.start_to_tokens)
            there.append((flight, _Sent.apply(flight, exchange.ranks, *some)))
        with as_one_call(self._counted, "recurrence"):
            for turn, last in enumerate(there):
                arrived = zip(rows, _Arrived.apply(*last), strict=True)
                of_heads = [y if x.ndim == 3 else y[..., 0] for x, y in arrived]
                out = compute(of_heads, turn, turns)
                flight = _Flight(exchange.start_to_tokens, exchange.start_to_heads)
                back.append((flight, _Sent.apply(flight, 1, out)))
        return exchange.joined([_Arrived.apply(*last)[0] for last in back])

    def _check(self, heads: int, shared: int) -> None:
        if (problem := state_heads_problem(heads, shared, self._exchange.ranks)) is not None:
            raise ValueError(problem)

    def _of_rank(self, parameter: Any, turn: int, turns: int) -> Any:
        """The heads of a turn on this rank, of [H, ..], or None."""
        if parameter is None:
            return None
        own = parameter.chunk(self._exchange.ranks)[self._exchange.index]
        return own.chunk(turns)[turn]


class _Flight:
    """Rows on their way in a forward, and their gradients on their way back in its backward.

    Args:
        there: sends them, and returns a function that waits for what arrives. back: the reverse.

    Attributes:
        waited: what to wait for, while something is on its way.
    """

    def __init__(self, there: _Start, back: _Start) -> None:
        self.there, self.back = there, back
        self.waited: Callable[[], list[torch.Tensor]] | None = None

    def take(self) -> list[torch.Tensor]:
        assert self.waited is not None
        arrived, self.waited = self.waited(), None
        return arrived


class _Sent(torch.autograd.Function):
    """Starts a flight; -> a token [0] that orders what waits for it behind it. The backward waits
    for the gradients. Heads [t, H, d] that are fewer than ranks go to several, and get the sum of
    their gradients."""

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
    """Ends a flight; -> what arrived. The backward starts that of the gradients, so that it goes on
    beside the backward of another turn."""

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
    """[t, H, copies, d] -> [t, H, d]."""
    return x.sum(2, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)


class _Tails:
    """The exchange of tails of one width, or of all tokens above.

    Attributes:
        mask: over [b + t] rows, the tails that this rank reads and its own tokens.
        own: [b + t, ..] -> [t, ..].
    """

    def __init__(self, parts: Parts, exchange: TokensForHeads, width: int | None) -> None:
        index, ranks, owner = exchange.index, exchange.ranks, parts.owner
        self._group = exchange.group
        part = parts[index]
        self._read = read = PartStates(part).tails(width)
        self.mask, self.own = read.mask, read.own

        def wanted_by(rank: int) -> np.ndarray:
            if rank == index:
                return read.tokens
            if width is None:
                return np.sort(parts[rank].borrowed_tokens)
            return tail_tokens(part.host.predictor, owner == rank, width)

        wanted = list(map(wanted_by, range(ranks)))
        # known to all ranks: one that reads none takes part where others do
        self._is_needed = any(map(len, wanted))
        lent = [tokens[owner[tokens] == index] for tokens in wanted]
        lenders = owner[read.tokens]
        self._sent = [len(tokens) for tokens in lent]
        self._received: list[int] = np.bincount(lenders, minlength=ranks).tolist()
        sent_rows = np.searchsorted(part.own_tokens, np.concatenate(lent))
        lent_rows, places = np.unique(sent_rows, return_inverse=True)
        # rows arrive lender by lender
        order = np.argsort(lenders, kind="stable")
        tail_rows = np.arange(len(order)) + np.searchsorted(part.own_tokens, read.tokens)

        def on_device(numbers: np.ndarray) -> torch.Tensor:
            return move(torch.from_numpy(numbers.astype(np.int64)), self.mask.device)

        # rows of x as they are sent; each of these once, and where each rank's piece adds to them
        self._sent_rows, self._lent_rows = on_device(sent_rows), on_device(lent_rows)
        self._places: Sequence[torch.Tensor] = on_device(places).split(self._sent)
        # of the tails in packed order the places among those that arrived, and the reverse: the
        # rows of those that arrived
        self._arrived, self._tail_rows = on_device(np.argsort(order)), on_device(tail_rows[order])

    def above(self, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[t, ..] each -> [b + t, ..] each, in packed order."""
        return tuple(_WithTails.apply(x, self) for x in rows) if self._is_needed else rows

    def blank(self, x: torch.Tensor) -> torch.Tensor:
        """[t, ..] -> [b + t, ..], of the tails zeros."""
        return self._read.join(x.new_zeros(len(self._read.tokens), *x.shape[1:]), x)

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """[t, ..] -> [b + t, ..]."""
        sent = x.index_select(0, self._sent_rows)
        got = all_to_all(sent, self._sent, self._received, self._group)
        return self._read.join(got.index_select(0, self._arrived), x)

    def part(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of x [t, ..], from that of all rows [b + t, ..]."""
        tails = gradient.index_select(0, self._tail_rows)
        got = all_to_all(tails, self._received, self._sent, self._group)
        dx = self.own(gradient)
        if not len(self._lent_rows):
            return dx
        total = dx.index_select(0, self._lent_rows)
        total = total.to(torch.promote_types(dx.dtype, torch.float32))
        for place, piece in zip(self._places, got.split(self._sent), strict=True):
            # each row once, and ranks in their order
            total.index_add_(0, place, piece.to(total.dtype))
        return dx.index_copy(0, self._lent_rows, total.to(dx.dtype))


class _WithTails(torch.autograd.Function):
    """Own rows x [t, ..] and the tails that other ranks hold, in packed order: [b + t, ..]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tails: _Tails) -> torch.Tensor:
        ctx.tails = tails
        return tails.join(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.tails.part(gradient), None
