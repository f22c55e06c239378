"""States of recurrent layers, and the tails of their convolutions, handed from part to part.

A part borrows the states behind tokens of earlier parts, from which its own tokens go on, and lends
those behind its own tokens that later parts continue. A convolution borrows the W - 1 tokens above
each such place: its tail. States are float32, tails of the dtype of the layer's inputs. Both wait
in `parallel.ledger`.

Legend: t own tokens of a part, D channels, W taps, I states that enter, F states that leave.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from prefixtree.kernels.operators import note_call, uncompiled
from prefixtree.kernels.recurrence import tree_conv, tree_delta_rule, tree_ssd
from prefixtree.packing.mask import StateBorders
from prefixtree.parallel.attention import PartMask
from prefixtree.parallel.ledger import Exchange, PartExchanges
from prefixtree.planning.part_states import STATES


def part_mask(exchanges: PartExchanges) -> PartMask:
    """The stand-in for the mask in a forward of a part."""
    part = exchanges.ledger.steps[exchanges.part]
    return PartMask(part, exchanges, partial(LayerStates, exchanges))


class LayerStates:
    """In the place of the mask among the keywords of a recurrent layer's forward, in a part.

    A layer may call its functions several times (Kimi's has three convolutions). The calls of a
    forward are told apart by their order, which is that of the layer's code.

    Args:
        exchanges: of the part.
        layer: the module.

    Attributes:
        num_tokens: t.

    Raises:
        UnsupportedError: a layer that runs twice per forward, in a part's first forward.
    """

    query_tokens = None

    def __init__(self, exchanges: PartExchanges, layer: nn.Module) -> None:
        exchanges.note(layer, "runs", "states")
        self._exchanges, self._layer = exchanges, layer
        self._states = exchanges.ledger.states_of(exchanges.part)
        self._calls = 0
        self.num_tokens = self._states.part.num_tokens

    # Dynamo is kept out: what is lent is kept beside the graph
    @uncompiled
    def conv(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None,
    ) -> torch.Tensor:
        """`tree_conv` of the own tokens: x [t, D] -> [t, D]."""
        exchange = self._exchange(weight.shape[1])
        exchange.lend(x)
        if exchange.lent:
            x = _LentRows.apply(x, exchange)
        if not exchange.read:
            return tree_conv(x, weight, bias, self._states.borders.mask, activation)
        tails = self._states.tails(weight.shape[1])
        # what it lends is x alone: its gradient goes no further where x has none
        borrowed = _Borrowed.apply(exchange, x)
        return tails.own(tree_conv(tails.join(borrowed, x), weight, bias, tails.mask, activation))

    @uncompiled
    def delta_rule(self, *tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        """`tree_delta_rule` of the own tokens: query, key, value, g, beta."""
        return self._scan(tree_delta_rule, tensors, options)

    @uncompiled
    def ssd(self, *tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        """`tree_ssd` of the own tokens: x, dt, A, B, C."""
        return self._scan(tree_ssd, tensors, options)

    def _scan(
        self,
        rule: Callable[..., Any],
        tensors: tuple[torch.Tensor, ...],
        options: dict[str, Any],
    ) -> torch.Tensor:
        """rule: (tensors.., borders, initial=) -> out, final."""
        exchange = self._exchange(STATES)
        borders: StateBorders = self._states.borders
        # dt_bias shapes states too
        shaped_by = *tensors, *(x for x in options.values() if isinstance(x, torch.Tensor))
        initial = _Borrowed.apply(exchange, *shaped_by) if exchange.read else None
        out, final = rule(*tensors, borders, initial=initial, **options)
        exchange.lend(final)
        return _Lent.apply(out, final, exchange) if exchange.lent else out

    def _exchange(self, kind: int) -> Exchange:
        self._calls += 1
        # the counter of calls knows the part's mask
        note_call(self._states.part.mask.host, "recurrence")
        return self._exchanges.exchange(kind, (self._layer, self._calls))


class _Borrowed(torch.autograd.Function):
    """Gives what a call borrows; its gradient goes back to the lenders."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *tensors: torch.Tensor) -> torch.Tensor:
        """tensors: that shape what is lent. What is borrowed needs a gradient if any of them
        does."""
        ctx.exchange, ctx.count = exchange, len(tensors)
        (rows,) = exchange.borrow()
        return rows

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, ...]:
        ctx.exchange.give_back(gradient.to(torch.promote_types(gradient.dtype, torch.float32)))
        return (None,) * (1 + ctx.count)


class _Lent(torch.autograd.Function):
    """Hands out on; what borrowers returned is the gradient of the states that leave."""

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
            total.index_copy_(0, rows, returned)
        return dout, total, None


class _LentRows(torch.autograd.Function):
    """Hands x on; adds what borrowers returned to the gradients of the rows that are lent."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dx: torch.Tensor) -> tuple[torch.Tensor, None]:
        taken = ctx.exchange.take()
        total = dx.clone() if taken else dx
        for rows, (returned,) in taken:
            both = dx.index_select(0, rows).to(returned.dtype) + returned
            total.index_copy_(0, rows, both.to(dx.dtype))
        return total, None
