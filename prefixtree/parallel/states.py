"""Recurrent layers of a forest that is divided, among steps or ranks.

A cell imports the states of tokens of earlier slots, from which its own tokens go on, and exports
those of its own tokens that later slots continue. States never pass between ranks. In a group,
`Division.computes_above` chooses one of two ways. If few tokens of others stand above a rank's own,
the rank gets these and computes its own after them, all heads. Otherwise each rank computes some
heads: ranks exchange tokens for heads before a recurrence, and heads for tokens after it. A
convolution stays with the tokens, because the layer's code splits its channels afterwards. A cell
imports the W - 1 tokens above each place where other tokens of its own begin (tails). States are
float32, tails of the dtype of the layer's inputs. Both wait in `parallel.ledger`, and tails travel
as keys do.

Legend: t own tokens of a cell, D channels, W taps, H heads, I states that enter, F that leave.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch

from prefixtree.kernels.operators import as_one_call, uncompiled
from prefixtree.kernels.recurrence import tree_conv, tree_delta_rule, tree_ssd
from prefixtree.packing.mask import TreeMask
from prefixtree.parallel.attention import ByHeads, PartMask
from prefixtree.parallel.compiled import CellMask
from prefixtree.parallel.heads import in_turns, state_heads_problem
from prefixtree.parallel.ledger import CellExchanges, Exchange
from prefixtree.planning.part_states import KEYS, STATES
from prefixtree.wings import DividedStates

# (tensors, a mask or the borders of states, options) -> out, or out and final states
_Rule = Callable[..., Any]


def part_mask(exchanges: CellExchanges, by_heads: bool = False) -> PartMask:
    """Makes the stand-in for the mask in a forward of a cell; `by_heads` as in `Divided`."""
    if by_heads:
        return HeadsMask(exchanges)
    return CellMask(exchanges.part, exchanges, partial(LayerStates, exchanges))


class HeadsMask(PartMask):
    """The stand-in for the mask if every rank computes some heads of all tokens of the slot."""

    def __init__(self, exchanges: CellExchanges) -> None:
        whole = exchanges.of_heads.part.mask
        states_of = partial(LayerStates, exchanges, counted=whole)
        # every rank chooses keys for its own tokens, as all heads of a query choose the same
        super().__init__(exchanges.part, exchanges, states_of)
        self._exchanges, self._whole = exchanges, whole

    @property
    def attended(self) -> TreeMask:
        return self._whole

    def exchange_in(self, layer: Hashable) -> ByHeads:
        of_heads = self._exchanges.of_heads
        of_heads.note(layer, "attends", "keys")
        flight = self._exchanges.flight
        assert flight is not None

        def exchange_of(turn: int) -> Exchange:
            return of_heads.exchange(KEYS, ((layer, turn), 1), in_place=True)

        return ByHeads(flight, of_heads.part, exchange_of)


class LayerStates(DividedStates):
    """The stand-in for the mask in a recurrent layer's forward over a cell.

    `counted` is the mask by which the forward counts its calls, by default that of the cell. All
    ranks of a group must make the same calls, in the same order. A layer runs once per forward.
    """

    # a layer may call its functions several times (Kimi's has three convolutions); the calls of a
    # forward are told apart by their order, which is that of the layer's code

    def __init__(
        self, exchanges: CellExchanges, layer: Any, counted: TreeMask | None = None
    ) -> None:
        exchanges.note(layer, "runs", "states")
        self._exchanges, self._layer, self._calls = exchanges, layer, 0
        self._states = exchanges.states
        self._counted = (exchanges.part.mask if counted is None else counted).host
        self.num_tokens = exchanges.part.num_tokens

    # Dynamo is kept out: ranks communicate, and exported rows are kept outside the graph
    @uncompiled
    def conv(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None,
    ) -> torch.Tensor:
        """`tree_conv` of the own tokens: x [t, D] -> [t, D]."""
        self._calls += 1
        width = weight.shape[1]
        with as_one_call(self._counted, "recurrence"):
            rows, is_joined = self._joined(width, self._layer, x)
            if not is_joined:
                return tree_conv(rows, weight, bias, self._states.borders.mask, activation)
            tails = self._states.tails(width)
            return tails.own(tree_conv(rows, weight, bias, tails.mask, activation))

    @uncompiled
    def delta_rule(self, *rows: torch.Tensor, **options: Any) -> torch.Tensor:
        """`tree_delta_rule` of own tokens: query, key [t, Hk, K], value [t, H, V] -> [t, H, V]."""
        rule = partial(tree_delta_rule, **options)
        return self._compute(rows, lambda of_all: rule, (), rows[2].shape[1], rows[1].shape[1])

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
        """`tree_ssd` of the own tokens: [t, H, P], .. -> [t, H, P]; A, D, dt_bias of all heads."""
        # the gradients of these [H, ..] are of the tokens and heads that this rank computes: ranks'
        # gradients add up

        def rule_of(of_all: Sequence[Any]) -> _Rule:
            A, D, dt_bias = of_all

            def rule(C: Any, x: Any, dt: Any, B: Any, where: Any, **more: Any) -> Any:
                return tree_ssd(x, dt, A, B, C, where, D=D, dt_bias=dt_bias, **options, **more)

            return rule

        return self._compute((C, x, dt, B), rule_of, (A, D, dt_bias), x.shape[1], B.shape[1])

    def _compute(
        self,
        rows: tuple[torch.Tensor, ...],
        rule_of: Callable[[Sequence[Any]], _Rule],
        parameters: tuple[torch.Tensor | None, ...],
        heads: int,
        shared: int,
    ) -> torch.Tensor:
        """Computes a rule over the own tokens.

        Args:
            rows: [t, H, ..] each; the first shapes only a token's own result, the others states.
            rule_of: parameters -> the rule: (rows.., mask) -> out, or (rows.., borders of states,
                initial=) -> out, final.
            parameters: [H, ..] each, or None.
            heads: H. shared: the heads of keys, or groups of Mamba-2, that they share.
        """
        self._calls += 1
        flight = self._exchanges.flight
        with as_one_call(self._counted, "recurrence"):
            if flight is None:
                return self._scan(
                    self._exchanges, self._layer, rows, rule_of(parameters), parameters
                )
            if self._exchanges.ledger.division.computes_above:
                tails, (asking, *others) = self._states.tails(None), rows
                blank = asking.new_zeros(len(tails.tokens), *asking.shape[1:])
                above = [self._joined(KEYS, (self._layer, i), x)[0] for i, x in enumerate(others)]
                out = rule_of(parameters)(tails.join(blank, asking), *above, tails.mask)
                return tails.own(out)
            if (problem := state_heads_problem(heads, shared, flight.ranks)) is not None:
                raise ValueError(problem)

            def of_turn(some: Sequence[torch.Tensor], turn: int, turns: int) -> torch.Tensor:
                own = tuple(flight.of_rank(parameter, turn, turns) for parameter in parameters)
                layer = self._layer, turn
                return self._scan(self._exchanges.of_heads, layer, some, rule_of(own), own)

            return in_turns(flight, rows, of_turn)

    def _scan(
        self,
        exchanges: CellExchanges,
        layer: Hashable,
        rows: Sequence[torch.Tensor],
        rule: _Rule,
        parameters: Sequence[torch.Tensor | None],
    ) -> torch.Tensor:
        """Computes all tokens of a cell, from the states that enter."""
        exchange = exchanges.exchange(STATES, (layer, self._calls))
        borders = exchanges.states.borders
        if not (exchange.read or exchange.exported):
            return rule(*rows, borders.mask)
        # dt_bias shapes states too
        shaped_by = *rows, *(x for x in parameters if x is not None)
        initial = _Imported.apply(exchange, *shaped_by) if exchange.read else None
        out, final = rule(*rows, borders, initial=initial)
        exchange.export(final)
        return _Exported.apply(out, final, exchange) if exchange.exported else out

    def _joined(self, kind: int, layer: Hashable, x: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Joins own rows [t, ..] with others' that the cell reads; says whether a rank has any."""
        exchange = self._exchanges.exchange(kind, (layer, self._calls))
        if exchange.reads or exchange.exported:
            x = _Joined.apply(x, exchange)
        return x, exchange.reads


class _Imported(torch.autograd.Function):
    """Gives the rows that a call imports; their gradient goes back to the exporters."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *tensors: torch.Tensor) -> torch.Tensor:
        """Imports rows, which need a gradient if any tensor needs one that shapes the exports."""
        ctx.exchange, ctx.count = exchange, len(tensors)
        (rows,) = exchange.import_rows()
        return rows

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, ...]:
        ctx.exchange.give_back(gradient)
        return (None,) * (1 + ctx.count)


class _Exported(torch.autograd.Function):
    """Passes `out` on; gradients from importers become the gradient of the states that leave."""

    @staticmethod
    def forward(
        ctx: Any, out: torch.Tensor, final: torch.Tensor, exchange: Exchange
    ) -> torch.Tensor:
        ctx.exchange, ctx.num_states = exchange, len(final)
        return out.view_as(out)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        total = None
        for rows, (returned,) in ctx.exchange.take():
            if total is None:
                total = returned.new_zeros(ctx.num_states, *returned.shape[1:])
            rows.put(total, returned)
        return dout, total, None


class _Joined(torch.autograd.Function):
    """Joins own rows [t, ..] and those that the cell reads, in packed order: [K, ..]."""

    # it is one node, which every rank reaches, so that all take part in the exchange of gradients

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        (rows,) = exchange.import_rows(x)
        return rows.view_as(rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (own,) = ctx.exchange.give_back(gradient)
        return own, None
