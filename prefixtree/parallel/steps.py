"""Parts of one packed forest in time: keys and values that are borrowed from earlier ones, the
gradients that come back, and the autograd node behind steps. States of recurrent layers are in
`parallel.states`.

Two kinds of parts run so. Trunks of `kept_trunks` run their forward once and keep its graph, until
the micro-batches that borrow from them have run their backwards. Steps run their forwards twice. A
step computes a run of packed tokens and borrows the keys and values of the path above the first
one, which earlier steps computed. In the forward `run_in_steps` runs all steps without a graph, but
the last one, and keeps what steps lend. In the backward it runs them in the reverse order, each
with a graph. What a step's queries give to borrowed keys and values waits for the lender, in
float32.

What a step lends lies on one path, the one above the first token of the next step. So what steps
borrow is a stack: a step adds to its top, and what its successor does not see any more leaves it.
Only the stack is on the device, and what left it waits on the host for the backward. Where a path
does not fit, the stack waits on the host too, and each layer fetches its own.

Legend: t own tokens, K rows of a step (own and borrowed), Hk kv heads, D and Dv head dims, U scored
edges, n steps.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

from prefixtree.errors import UnsupportedError
from prefixtree.packing.copies import move, to_pinned
from prefixtree.parallel.states import LayerStates, StateStore
from prefixtree.planning import schedule
from prefixtree.planning.steps import Steps

_Rows = tuple[torch.Tensor, ...]


@dataclass(eq=False)
class Loan:
    """Rows that one part lends, all of which the same parts borrow.

    Attributes:
        lender: the part that owns the rows.
        borrowers: the parts that borrow them, ascending.
        tokens: int64 [r], their packed tokens, ascending.
        rows: int64 [r] on the device, their rows among the own tokens of the lender, ascending.
        keys_values: by layer, [r, Hk, D] and [r, Hk, Dv], and by indexer [r, D]; on the host while
            no step needs them.
        gradients: by layer, the sums of what borrowers returned so far, float32.
    """

    lender: int
    borrowers: tuple[int, ...]
    tokens: np.ndarray
    rows: torch.Tensor
    keys_values: dict[Hashable, _Rows] = field(default_factory=dict)
    gradients: dict[Hashable, _Rows] = field(default_factory=dict)


def find_loans(steps: Steps) -> list[Loan]:
    """The rows that parts lend, by lender, and ascending in packed order per lender.

    Args:
        steps: parts that borrow from earlier ones.

    Returns:
        The loans. Of runs of packed tokens, as `plan_steps` makes them, those that step i borrows,
        in this order, are the path above its first token.
    """
    loans = []
    for lender, borrowers, tokens in steps.loans():
        rows = np.searchsorted(steps[lender].own_tokens, tokens)
        index = move(torch.from_numpy(rows.astype(np.int64)), steps.packed.device)
        loans.append(Loan(lender, borrowers, tokens, index))
    return loans


class LoanStore:
    """The keys and values that parts lend to later ones, and the gradients that come back.

    Args:
        steps: parts that borrow from earlier ones.
        keeps: whether lent rows are kept for the backward once no forward needs them.
        on_host: whether rows that later steps borrow wait on the host, too.

    Attributes:
        loans: all of them, by lender.
    """

    def __init__(self, steps: Steps, keeps: bool, on_host: bool = False) -> None:
        self.loans = find_loans(steps)
        self._steps = steps
        self._device = steps.packed.device
        self._keeps, self._on_host = keeps, on_host
        self.states = StateStore(steps, keeps, on_host)
        count = len(steps)
        self.of_lender: list[list[Loan]] = [[] for _ in range(count)]
        self.of_borrower: list[list[Loan]] = [[] for _ in range(count)]
        self._ending: list[list[Loan]] = [[] for _ in range(count)]
        for loan in self.loans:
            self.of_lender[loan.lender].append(loan)
            self._ending[loan.borrowers[-1]].append(loan)
            for step in loan.borrowers:
                self.of_borrower[step].append(loan)

    @contextmanager
    def lending(self, step: int) -> Iterator[StepExchanges]:
        """A forward without a graph. Behind it, what no further one needs leaves the device."""
        yield StepExchanges(self, step, lends=True)
        self.states.end_lending(step)
        for loan in self._ending[step]:
            if self._keeps:
                loan.keys_values = {k: to_host(rows) for k, rows in loan.keys_values.items()}
            else:
                loan.keys_values = {}

    def with_graph(self, step: int) -> StepExchanges:
        """For a forward with a graph and its backward; the steps behind it have had theirs."""
        if not self._on_host:
            for loan in self._ending[step]:
                loan.keys_values = {k: self.fetch(rows) for k, rows in loan.keys_values.items()}
        self.states.with_graph(step)
        for loan in self.of_lender[step]:
            # the step computes them again
            loan.keys_values = {}
        return StepExchanges(self, step, lends=False)

    @contextmanager
    def keeping(self, step: int) -> Iterator[StepExchanges]:
        """The one forward of a part that lends, whose graph is kept for its backward."""
        exchanges = StepExchanges(self, step, lends=True)
        yield exchanges
        # layers that are recomputed lend no second time
        exchanges.lends = False

    def borrowing(self, step: int) -> StepExchanges:
        """For a forward that lends nothing, or nothing any more, and its backward."""
        return StepExchanges(self, step, lends=False)

    def end(self, step: int) -> None:
        """All who borrow from a part are done: what it lent is freed."""
        self.states.end(step)
        for loan in self.of_lender[step]:
            loan.keys_values = {}

    def clear(self) -> None:
        """Lets go of all rows, states and gradients."""
        self.states.clear()
        for loan in self.loans:
            loan.keys_values, loan.gradients = {}, {}

    def order_of(self, step: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """How borrowed rows, loan after loan, and then own ones become the rows of a part.

        Returns:
            int64 [K], the place of each row of the part in that order, and the reverse; None where
            the two orders are one, as in steps.
        """
        of_loans = [loan.tokens for loan in self.of_borrower[step]]
        tokens = np.concatenate([*of_loans, self._steps[step].own_tokens])
        if (np.diff(tokens) > 0).all():
            return None
        order = np.argsort(tokens)
        both = move(torch.from_numpy(np.stack([order, np.argsort(order)])), self._device)
        return both[0], both[1]

    def close(self, step: int) -> None:
        """Behind the backward of a step.

        Raises:
            RuntimeError: a layer's backward did not take what borrowers returned for its rows.
        """
        left = {_module_of(key): 0 for loan in self.of_lender[step] for key in loan.gradients}
        if left:
            raise RuntimeError(
                f"the backward of step {step} did not reach the attention of {len(left)} layers "
                f"({next(iter(left))}), whose keys later steps borrowed: their gradients are lost. "
                "A hook or a checkpoint of the model stops gradients there; score without "
                "max_tokens, or without kept_trunks"
            )
        if calls := self.states.left_behind(step):
            raise RuntimeError(
                f"the backward of step {step} did not reach {len(calls)} calls of recurrent layers "
                f"({calls[0]}), whose states later steps borrowed: their gradients are lost. A "
                "hook or a checkpoint of the model stops gradients there; score without "
                "max_tokens, or without kept_trunks"
            )

    def park(self, rows: _Rows) -> _Rows:
        """Where rows wait for the next step that needs them."""
        return to_host(rows) if self._on_host else rows

    def fetch(self, rows: _Rows) -> _Rows:
        """Rows on the device, wherever they waited."""
        return to_device(rows, self._device)

    def held_bytes(self) -> tuple[int, int]:
        """Bytes of keys, values and states, and bytes of gradients, wherever they are."""
        found = (
            sum(x.nbytes for loan in self.loans for pair in of(loan).values() for x in pair)
            for of in (lambda loan: loan.keys_values, lambda loan: loan.gradients)
        )
        values, gradients = map(sum, zip(found, self.states.held_bytes(), strict=True))
        return values, gradients


class StepExchanges:
    """The exchanges of one part's layers: `PartMask.exchange_of` and `states_of`.

    Attributes:
        lends: whether forwards lend rows.
        is_over: whether a backward would come too late, as those lenders have had theirs.
    """

    def __init__(self, store: LoanStore, step: int, lends: bool) -> None:
        self.store = store
        self.borrowed = store.of_borrower[step]
        self.lent = store.of_lender[step]
        self.order = store.order_of(step)
        self.lends = lends
        self.is_over = False
        self.seen: set[Hashable] = set()
        self._step = step

    def __call__(self, layer: Hashable) -> StepExchange:
        """The exchange of a layer, known by its attention module.

        Raises:
            UnsupportedError: a module that attends twice per forward, in a step's first forward.
        """
        if self.lends and layer in self.seen:
            name = type(_module_of(layer)).__name__
            raise UnsupportedError(
                f"{name} attends twice in one forward: the keys of both would be one, so it cannot "
                "lend them from step to step; score without max_tokens, in micro-batches "
                "(plan_micro_batches)"
            )
        self.seen.add(layer)
        return StepExchange(self, layer)

    def states_of(self, layer: nn.Module) -> LayerStates:
        """The keyword that a recurrent layer's forward gets in the place of the mask.

        Raises:
            UnsupportedError: a layer that runs twice per forward, in a step's first forward.
        """
        if self.lends and layer in self.seen:
            raise UnsupportedError(
                f"{type(layer).__name__} runs twice in one forward: the states of both would be "
                "one, so it cannot lend them from step to step; score without max_tokens, in "
                "micro-batches (plan_micro_batches)"
            )
        self.seen.add(layer)
        return LayerStates(self.store.states, self._step, layer, self.lends, self.check_time)

    def check_time(self) -> None:
        """Raises where a backward comes too late."""
        if self.is_over:
            raise RuntimeError(
                "the backward of a micro-batch of kept trunks ran after the next one was asked "
                "for: the trunks that it borrows from may have had their backward, and its "
                "gradients would be lost; call backward() on each micro-batch's loss within its "
                "turn of the loop"
            )


class StepExchange:
    """The exchange of one layer of one step: a `KeyValueExchange`."""

    def __init__(self, of_step: StepExchanges, layer: Hashable) -> None:
        self._step = of_step
        self._layer = layer

    def borrow(self, *own: torch.Tensor) -> _Rows:
        """See `KeyValueExchange`. The borrowed rows stand before the own ones."""
        store, own = self._step.store, tuple(x.detach() for x in own)
        if self._step.lends:
            for loan in self._step.lent:
                # copies of their own memory, which is free again when the loan ends
                rows = tuple(x.index_select(0, loan.rows) for x in own)
                loan.keys_values[self._layer] = store.park(rows)
        if not self._step.borrowed:
            return own
        self._step.check_time()
        waiting = (loan.keys_values[self._layer] for loan in self._step.borrowed)
        joined = tuple(map(torch.cat, zip(*map(store.fetch, waiting), own, strict=True)))
        if (order := self._step.order) is None:
            return joined
        return tuple(x.index_select(0, order[0]) for x in joined)

    def give_back(
        self, dkey: torch.Tensor, dvalue: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `KeyValueExchange`. Borrowers add up in the order of their backwards."""
        row, store = 0, self._step.store
        self._step.check_time()
        if self._step.order is not None:
            dkey, dvalue = (x.index_select(0, self._step.order[1]) for x in (dkey, dvalue))
        for loan in self._step.borrowed:
            end = row + len(loan.rows)
            total: _Rows = dkey[row:end], dvalue[row:end]
            if self._layer in loan.gradients:
                before = store.fetch(loan.gradients[self._layer])
                total = before[0].add_(total[0]), before[1].add_(total[1])
            else:
                total = total[0].clone(), total[1].clone()
            loan.gradients[self._layer] = store.park(total)
            row = end
        own = dkey[row:], dvalue[row:]
        for loan in self._step.lent:
            # none in layers whose borrowers need no gradients
            if (waiting := loan.gradients.pop(self._layer, None)) is not None:
                for rows, returned in zip(own, store.fetch(waiting), strict=True):
                    # each row once
                    rows.index_add_(0, loan.rows, returned)
        return own


# ---- the autograd node ---------------------------------------------------------------------------

#: Runs a step, or with None a dummy that scores nothing, and gives the scores [u, columns] of its
#: edges, and tensors with a row per token of its own, as many of them in every step.
Compute = Callable[[int | None, "StepExchanges | None"], tuple[torch.Tensor, ...]]


class StepRun:
    """One forward and one backward of all steps.

    Args:
        store: of the steps; not used before.
        places: of each step, int64 on the device: the edges that it scores, each of U in one step,
            and its own tokens, each of T in one step.
        compute: runs a step through the model, with a graph where gradients are enabled.
        num_runs: how often the model runs in a forward pass, n or more. The rest are dummies, where
            other ranks have more steps.
        check: raises where a step of the backward would not find what the forward did. Default:
            nothing.
    """

    def __init__(
        self,
        store: LoanStore,
        places: Sequence[tuple[torch.Tensor, torch.Tensor]],
        compute: Compute,
        num_runs: int,
        check: Callable[[], None] | None = None,
    ) -> None:
        self.store = store
        self._places = places
        self._compute = compute
        self._check = check
        self._num_runs = num_runs
        # what is left of the schedule
        self._events: Iterator[schedule.Event] = iter(())
        # what the run with a graph gave whose backward comes next
        self._kept: tuple[torch.Tensor, ...] = ()
        self._is_done = False
        # whether a backward may come, and none has
        self.waits = False

    def __del__(self) -> None:
        if self.waits and not sys.is_finalizing():
            _warn_of_no_backward()

    def forward(self, has_backward: bool) -> tuple[torch.Tensor, ...]:
        """The scores of all edges, [U, columns], and the rows of all tokens, without a graph.

        Args:
            has_backward: whether `backward` follows.
        """
        results = []
        self._events = iter(schedule.steps(self._num_runs, has_backward))
        for kind, step in self._events:
            if kind == schedule.GIVE:
                break
            if kind == schedule.FORWARD:
                results.append(self._without_graph(step))
            else:
                self._kept = self._with_graph(step)
                results.append(tuple(x.detach() for x in self._kept))
        self.waits = has_backward
        return tuple(
            self._joined(kind, of_steps) for kind, of_steps in enumerate(zip(*results, strict=True))
        )

    def without_graph(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The rows of `forward` that depend on no parameter that trains."""
        return [x for x, kept in zip(rows, self._kept, strict=True) if not kept.requires_grad]

    def _joined(self, kind: int, of_steps: Sequence[torch.Tensor]) -> torch.Tensor:
        places = [self._place(step, kind) for step in range(len(self._places))]
        joined = of_steps[0].new_empty(sum(map(len, places)), *of_steps[0].shape[1:])
        # those of dummies are left out
        for place, rows in zip(places, of_steps, strict=False):
            joined[place] = rows
        return joined

    def _place(self, step: int, kind: int) -> torch.Tensor:
        return self._places[step][min(kind, 1)]

    def backward(self, gradients: Sequence[torch.Tensor]) -> None:
        """Adds the gradients of all parameters to theirs, for those of what `forward` gave."""
        if self._is_done:
            raise RuntimeError(
                "the backward of sequence_logprobs(max_tokens=) ran already, and what its steps "
                "lent one another is freed: call sequence_logprobs again for another backward "
                "(retain_graph does not keep it)"
            )
        self._is_done = True
        for kind, step in self._events:
            # an optimizer may run in a hook of the step before
            if kind in (schedule.TAKE, schedule.KEEP) and self._check is not None:
                self._check()
            if kind == schedule.KEEP:
                self._kept = self._with_graph(step)
            elif kind == schedule.BACKWARD:
                self._backward(step, gradients)

    def _backward(self, step: int, gradients: Sequence[torch.Tensor]) -> None:
        rows, self._kept = self._kept, ()
        if self._is_dummy(step):
            of_step = [torch.zeros_like(x) for x in rows]
        else:
            of_step = [g[self._place(step, kind)] for kind, g in enumerate(gradients)]
        # router logits below the first layer that trains have no graph; scores must
        reached = [i for i, x in enumerate(rows) if i == 0 or x.requires_grad]
        torch.autograd.backward([rows[i] for i in reached], [of_step[i] for i in reached])
        if not self._is_dummy(step):
            self.store.close(step)

    def _is_dummy(self, step: int) -> bool:
        return step >= len(self._places)

    def _without_graph(self, step: int) -> tuple[torch.Tensor, ...]:
        if self._is_dummy(step):
            return self._compute(None, None)
        with self.store.lending(step) as exchanges:
            return self._compute(step, exchanges)

    def _with_graph(self, step: int) -> tuple[torch.Tensor, ...]:
        is_dummy = self._is_dummy(step)
        exchanges = None if is_dummy else self.store.with_graph(step)
        with torch.enable_grad():
            return self._compute(None if is_dummy else step, exchanges)


@cache
def _warn_of_no_backward() -> None:
    """Once: the engine of autograd calls nothing of ours where it does not reach it."""
    warnings.warn(
        "scores of sequence_logprobs(max_tokens=) with gradients were let go, and no backward came "
        "to them: torch.autograd.grad and backward(inputs=) do not reach what steps compute again. "
        "Call loss.backward(), which adds to .grad; where no gradients are wanted, score under "
        "torch.no_grad()",
        stacklevel=3,
    )


class _InSteps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, run: StepRun) -> tuple[torch.Tensor, ...]:
        ctx.run = run
        rows = run.forward(has_backward=True)
        ctx.mark_non_differentiable(*run.without_graph(rows))
        return rows

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None]:
        ctx.run.waits = False
        if torch.is_grad_enabled():
            raise RuntimeError(
                "sequence_logprobs(max_tokens=) is differentiable once: its backward adds the "
                "gradients of the parameters step by step, so create_graph=True has no graph to "
                "make; leave it out, or score without max_tokens"
            )
        ctx.run.backward(gradients)
        return None, None


def run_in_steps(
    run: StepRun, device: torch.device, has_backward: bool
) -> tuple[torch.Tensor, ...]:
    """The rows that all steps give, as one node of the graph.

    Args:
        run: not used before.
        device: of the scores.
        has_backward: whether gradients are wanted.

    Returns:
        The scores [U, columns], and the rows of tokens, [T, ...] each.
    """
    if not has_backward:
        with torch.no_grad():
            return run.forward(has_backward=False)
    # no parameter is an input: wrappers count on the steps' own backwards to reach them
    anchor = torch.zeros((), device=device, requires_grad=True)
    rows: tuple[torch.Tensor, ...] = _InSteps.apply(anchor, run)
    return rows


def _module_of(layer: Hashable) -> Hashable:
    """The attention module by which a layer is known, of which groups of heads may be numbered."""
    return layer[0] if isinstance(layer, tuple) else layer


def to_host(rows: _Rows) -> _Rows:
    """Copies in pinned memory, without waiting; what is on the CPU stays where it is."""
    return tuple(map(to_pinned, rows))


def to_device(rows: _Rows, device: torch.device) -> _Rows:
    """Copies on the device, without waiting; what is there already stays."""
    return tuple(move(x, device) for x in rows)
