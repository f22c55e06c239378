"""States of recurrent layers, and the tails of their convolutions, handed from step to step.

Kept trunks and the micro-batches that borrow from them are steps here, too.

A step borrows the states behind tokens of earlier steps, from which its own tokens go on, and lends
those behind its own tokens that later steps continue. A convolution borrows the W - 1 tokens above
each such place: its tail. Both stay in float32 (tails in the dtype of the layer's inputs) and are
known by the module and the number of its call: checkpointing runs layers again in another order.
What borrowers' backwards give is summed in float32, in the order of the backwards, until the
lender's own backward takes it.

Legend: t own tokens of a step, D channels, W taps, I states that enter, F states that leave.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from prefixtree.kernels.operators import note_call, uncompiled
from prefixtree.kernels.recurrence import tree_conv, tree_delta_rule, tree_ssd
from prefixtree.packing.copies import move, to_pinned
from prefixtree.packing.mask import StateBorders
from prefixtree.planning.part_states import PartStates
from prefixtree.planning.steps import Steps

# a layer, and the number of the call in its forward
_Key = tuple[nn.Module, int]
# of loans: states, or the tails of convolutions with so many taps
_STATES = 0


@dataclass(eq=False)
class _Loan:
    """Rows (states, or tokens of tails) that one step lends, and whose last borrower is one step.

    Attributes:
        last: the last step that borrows any of them.
        rows: int64 [r] on the device, their places among all rows that the lender lends.
        values: by layer and call, [r, ...]; on the host while no step needs them.
        gradients: by layer and call, the sums of what borrowers returned so far, float32.
    """

    last: int
    rows: torch.Tensor
    values: dict[_Key, torch.Tensor] = field(default_factory=dict)
    gradients: dict[_Key, torch.Tensor] = field(default_factory=dict)


class _Loans:
    """All loans of states, or of the tails of one width.

    Args:
        steps: of the forest.
        borrowed: per step, the packed tokens whose rows it borrows, ascending.
    """

    def __init__(self, steps: Steps, borrowed: list[np.ndarray]) -> None:
        device = steps.packed.device

        def on_device(rows: np.ndarray) -> torch.Tensor:
            return move(torch.from_numpy(rows.astype(np.int64)), device)

        last = np.full(steps.packed.num_tokens, -1)
        for step, tokens in enumerate(borrowed):
            last[tokens] = step
        # per step: its loans; the rows of what it borrows in them, and how these are put in order
        self.of_lender: list[list[_Loan]] = [[] for _ in range(len(steps))]
        self.of_borrower: list[list[tuple[_Loan, torch.Tensor]]] = [[] for _ in range(len(steps))]
        self.order: list[torch.Tensor] = []
        # per step: the places of what it lends among its own tokens
        self.lent: list[torch.Tensor] = []
        self.ending: list[list[_Loan]] = [[] for _ in range(len(steps))]
        places: list[list[np.ndarray]] = [[] for _ in range(len(steps))]
        for lender, part in enumerate(steps):
            lent = np.flatnonzero(last[part.own_tokens] >= 0)
            self.lent.append(on_device(lent))
            tokens = part.own_tokens[lent]
            for end in np.unique(last[tokens]).tolist():
                rows = np.flatnonzero(last[tokens] == end)
                loan = _Loan(end, on_device(rows))
                self.of_lender[lender].append(loan)
                self.ending[end].append(loan)
                for step in range(lender + 1, end + 1):
                    mine = np.isin(tokens[rows], borrowed[step])
                    if mine.any():
                        self.of_borrower[step].append((loan, on_device(np.flatnonzero(mine))))
                        places[step].append(np.searchsorted(borrowed[step], tokens[rows][mine]))
        for found in places:
            none = np.empty(0, np.int64)
            self.order.append(on_device(np.argsort(np.concatenate([none, *found]))))


class StateStore:
    """The states and tails that steps lend to later ones, and the gradients that come back.

    It holds nothing until a recurrent layer asks.

    Args:
        steps: runs of packed tokens, as `plan_steps` makes them.
        keeps: whether what is lent is kept for the backward once no forward needs it.
        on_host: whether what later steps borrow waits on the host, too.
    """

    def __init__(self, steps: Steps, keeps: bool, on_host: bool) -> None:
        self._steps, self._keeps, self._on_host = steps, keeps, on_host
        self._device = steps.packed.device
        self._states: dict[int, PartStates] = {}
        self._loans: dict[int, _Loans] = {}

    def states_of(self, step: int) -> PartStates:
        """Where states enter and leave a step."""
        if step not in self._states:
            self._states[step] = PartStates(self._steps[step])
        return self._states[step]

    def loans(self, width: int) -> _Loans:
        """The loans of tails of a width, or of states for 0."""
        if width not in self._loans:
            of_steps = [self.states_of(step) for step in range(len(self._steps))]
            borrowed = [x.tails(width).tokens if width else x.entered for x in of_steps]
            self._loans[width] = _Loans(self._steps, borrowed)
        return self._loans[width]

    def end_lending(self, step: int) -> None:
        """Behind the forward of a step without a graph."""
        for loan in self._of("ending", step):
            loan.values = (
                {key: to_pinned(x) for key, x in loan.values.items()} if self._keeps else {}
            )

    def with_graph(self, step: int) -> None:
        """Before the forward of a step with a graph, whose successors had their backwards."""
        if not self._on_host:
            for loan in self._of("ending", step):
                loan.values = {key: self.fetch(x) for key, x in loan.values.items()}
        for loan in self._of("of_lender", step):
            # the step computes them again
            loan.values = {}

    def end(self, step: int) -> None:
        """All who borrow from a part are done: what it lent is freed."""
        for loan in self._of("of_lender", step):
            loan.values = {}

    def clear(self) -> None:
        """Lets go of everything."""
        self._loans.clear()

    def left_behind(self, step: int) -> list[str]:
        """Behind the backward of a step: the layers that did not take what borrowers returned."""
        loans = self._of("of_lender", step)
        return [f"{type(layer).__name__}, call {n}" for x in loans for layer, n in x.gradients]

    def park(self, x: torch.Tensor) -> torch.Tensor:
        """Where rows wait for the next step that needs them."""
        return to_pinned(x) if self._on_host else x

    def fetch(self, x: torch.Tensor) -> torch.Tensor:
        """Rows on the device, wherever they waited."""
        return move(x, self._device)

    def held_bytes(self) -> tuple[int, int]:
        """Bytes of states and tails, and bytes of gradients, wherever they are."""
        every = [
            loan for loans in self._loans.values() for found in loans.of_lender for loan in found
        ]
        values = sum(x.nbytes for loan in every for x in loan.values.values())
        return values, sum(x.nbytes for loan in every for x in loan.gradients.values())

    def _of(self, name: str, step: int) -> list[_Loan]:
        return [loan for loans in self._loans.values() for loan in getattr(loans, name)[step]]


class _Exchange:
    """The exchange of one call of one layer in one step."""

    def __init__(
        self,
        store: StateStore,
        step: int,
        width: int,
        key: _Key,
        check_time: Callable[[], None],
    ) -> None:
        self._store, self._loans, self._step, self._key = store, store.loans(width), step, key
        self._check_time = check_time

    @property
    def lent(self) -> torch.Tensor:
        """int64 [r], the places of what is lent among the own tokens."""
        return self._loans.lent[self._step]

    @property
    def borrows(self) -> bool:
        return bool(self._loans.of_borrower[self._step])

    def lend(self, rows: torch.Tensor) -> None:
        """rows [r, ...]: all that the step lends."""
        for loan in self._loans.of_lender[self._step]:
            # copies of their own memory, which is free again when the loan ends
            loan.values[self._key] = self._store.park(rows.index_select(0, loan.rows))

    def borrow(self) -> torch.Tensor:
        """[I, ...]: all that the step borrows, ascending in packed order."""
        self._check_time()
        found = []
        for loan, rows in self._loans.of_borrower[self._step]:
            found.append(self._store.fetch(loan.values[self._key]).index_select(0, rows))
        return torch.cat(found).index_select(0, self._loans.order[self._step])

    def give_back(self, gradient: torch.Tensor) -> None:
        """gradient [I, ...] of what `borrow` gave. Borrowers add up in the order of their
        backwards."""
        self._check_time()
        store = self._store
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        # the reverse of the order
        wide = torch.empty_like(wide).index_copy_(0, self._loans.order[self._step], wide)
        first = 0
        for loan, rows in self._loans.of_borrower[self._step]:
            mine = wide[first : first + len(rows)]
            first += len(rows)
            if self._key in loan.gradients:
                total = store.fetch(loan.gradients[self._key])
            else:
                total = wide.new_zeros(len(loan.rows), *wide.shape[1:])
            # each row once
            loan.gradients[self._key] = store.park(total.index_add_(0, rows, mine))

    def take(self) -> torch.Tensor | None:
        """[r, ...] float32: what borrowers returned for all that the step lends; None for
        nothing."""
        found = None
        for loan in self._loans.of_lender[self._step]:
            # none in layers whose borrowers need no gradients
            if (waiting := loan.gradients.pop(self._key, None)) is not None:
                if found is None:
                    found = waiting.new_zeros(
                        len(self.lent), *waiting.shape[1:], device=loan.rows.device
                    )
                found.index_copy_(0, loan.rows, self._store.fetch(waiting))
        return found


class LayerStates:
    """In the place of the mask among the keywords of a recurrent layer's forward, in a step.

    A layer may call its functions several times (Kimi's has three convolutions). The calls of a
    forward are told apart by their order, which is that of the layer's code.

    Attributes:
        num_tokens: t.
    """

    query_tokens = None

    def __init__(
        self,
        store: StateStore,
        step: int,
        layer: nn.Module,
        lends: bool,
        check_time: Callable[[], None],
    ) -> None:
        self._store, self._step, self._layer, self._lends = store, step, layer, lends
        self._check_time = check_time
        self._calls = 0
        self._part = store.states_of(step).part
        self.num_tokens = self._part.num_tokens

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
        if self._lends:
            exchange.lend(x.detach().index_select(0, exchange.lent))
        if len(exchange.lent):
            x = _LentRows.apply(x, exchange)
        if not exchange.borrows:
            mask = self._store.states_of(self._step).borders.mask
            return tree_conv(x, weight, bias, mask, activation)
        tails = self._store.states_of(self._step).tails(weight.shape[1])
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
        exchange = self._exchange(_STATES)
        borders: StateBorders = self._store.states_of(self._step).borders
        # dt_bias shapes states too
        shaped_by = *tensors, *(x for x in options.values() if isinstance(x, torch.Tensor))
        initial = _Borrowed.apply(exchange, *shaped_by) if exchange.borrows else None
        out, final = rule(*tensors, borders, initial=initial, **options)
        if self._lends:
            exchange.lend(final.detach())
        return _Lent.apply(out, final, exchange) if len(exchange.lent) else out

    def _exchange(self, width: int) -> _Exchange:
        self._calls += 1
        # the counter of calls knows the part's mask
        note_call(self._part.mask.host, "recurrence")
        key = self._layer, self._calls
        return _Exchange(self._store, self._step, width, key, self._check_time)


class _Borrowed(torch.autograd.Function):
    """Gives what a call borrows; its gradient goes back to the lenders."""

    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, *tensors: torch.Tensor) -> torch.Tensor:
        """tensors: that shape what is lent. What is borrowed needs a gradient if any of them
        does."""
        ctx.exchange, ctx.count = exchange, len(tensors)
        return exchange.borrow()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, ...]:
        ctx.exchange.give_back(gradient)
        return (None,) * (1 + ctx.count)


class _Lent(torch.autograd.Function):
    """Hands out on; what borrowers returned is the gradient of the states that leave."""

    @staticmethod
    def forward(
        ctx: Any, out: torch.Tensor, final: torch.Tensor, exchange: _Exchange
    ) -> torch.Tensor:
        ctx.exchange = exchange
        return out.view_as(out)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return dout, ctx.exchange.take(), None


class _LentRows(torch.autograd.Function):
    """Hands x on; adds what borrowers returned to the gradients of the rows that are lent."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchange: _Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dx: torch.Tensor) -> tuple[torch.Tensor, None]:
        returned = ctx.exchange.take()
        if returned is None:
            return dx, None
        rows = ctx.exchange.lent
        total = dx.index_select(0, rows).to(returned.dtype) + returned
        return dx.index_copy(0, rows, total.to(dx.dtype)), None
