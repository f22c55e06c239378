"""`Run`: the parts of a forest run forward and backward as a schedule says, for any loss.

Rows that the caller gets of parts (scores, values or router logits) leave through one autograd node
without the graphs that made them. The caller's backward brings the gradients of these rows, and the
schedule says when each part runs backward with them. Rows that parts export to one another are in
`parallel.ledger`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from prefixtree.parallel.ledger import CellExchanges, Ledger
from prefixtree.planning import schedule
from prefixtree.planning.schedule import Schedule

Rows = tuple[torch.Tensor, ...]
#: Runs a part, or a dummy, which has no exchanges, through the model: (part, exchanges, whether it
#: is the last run with a graph) -> rows [u, columns] of its scores, then as many tensors as any
#: other part gives, with a row per token of its own.
Compute = Callable[[int, CellExchanges | None, bool], Rows]


class Run:
    """One forward and one backward of all parts.

    Args:
        events: the schedule. Parts that are not the ledger's are dummies.
        ledger: of the parts and this schedule, not used before; None if all are dummies.
        gives: for each micro-batch, the parts whose rows the caller gets.
        check: raises if a later run would not find what an earlier one did.
        inline: whether the rest of the schedule runs within the caller's backward, as for one loss
            of everything. Otherwise it runs when the next micro-batch is asked for, so that several
            backwards add up. Then gradients of a micro-batch must come within its turn.
    """

    def __init__(
        self,
        events: Schedule,
        ledger: Ledger | None,
        gives: Sequence[Sequence[int]],
        compute: Compute,
        check: Callable[[], None],
        inline: bool,
    ) -> None:
        self.ledger = ledger
        self._parts = 0 if ledger is None else len(ledger.division)
        self._gives, self._compute, self._check, self._inline = gives, compute, check, inline
        self._schedule = events
        # the remaining events, by place
        self._events = iter(enumerate(events))
        keeps = [place for place, (kind, _) in enumerate(events) if kind == schedule.KEEP]
        self._last_graph = max(keeps, default=-1)
        self._last_give = {part: at for at, parts in enumerate(gives) for part in parts}
        # lists by part, as a rank may hold graphs of several dummies
        self._graphs: dict[int, list[Rows]] = {}
        self._rows: dict[int, Rows] = {}
        self._gradients: dict[int, list[torch.Tensor | None]] = {}
        # the last given micro-batch; whether its gradients may come, and whether some came
        self._at = -1
        self._turn: int | None = None
        self._is_taken = False

    def __del__(self) -> None:
        waits = self._turn is not None and self._inline and self.trains and not self._is_taken
        if waits and not sys.is_finalizing():
            _warn_of_no_backward()

    @property
    def trains(self) -> bool:
        """Whether there are backwards."""
        return self._last_graph >= 0

    def give(self) -> list[Rows] | None:
        """Runs up to the next micro-batch: the rows of each of its parts; None after the last."""
        # no gradients for the last one are a RuntimeError
        self.check_turn()
        self._turn = None
        for part in [x for x, last in self._last_give.items() if last <= self._at]:
            self._rows.pop(part, None)
        for place, (kind, at) in self._events:
            if kind == schedule.GIVE:
                return self._given(at)
            if kind in (schedule.FORWARD, schedule.KEEP):
                self._run_forward(place)
            elif kind == schedule.BACKWARD:
                self._run_backward(place)
        return None

    def check_turn(self) -> None:
        """Raises a RuntimeError if the last micro-batch got no gradients or the model changed."""
        self._check()
        if self._turn is not None and self.trains and not self._is_taken:
            raise RuntimeError(
                f"no backward of the scores of micro-batch {self._turn} ran within its turn of the "
                "loop of kept trunks, and a later one would come too late for its trunks: call "
                "loss.backward() for each micro-batch, also where its loss is 0 "
                "(torch.autograd.grad and backward(inputs=) reach no parameter)"
            )

    def take(self, turn: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Takes the gradients of `give`'s rows, part by part, in time; calls add up."""
        if turn != self._turn or (self._inline and self._is_taken):
            raise RuntimeError(_TWICE if self._inline else _LATE)
        self._is_taken = True
        given = iter(gradients)
        for part in self._gives[turn]:
            mine = [next(given) for _ in self._rows[part]]
            if (before := self._gradients.get(part)) is not None:
                mine = [_sum(x, y) for x, y in zip(before, mine, strict=True)]
            self._gradients[part] = mine
        if self._inline:
            self.give()

    def run_dummy(self) -> None:
        """Runs a dummy forward and backward after everything else, as the last graph."""
        with torch.enable_grad():
            _backward(self._compute(schedule.DUMMY, None, True), ())

    def close(self) -> None:
        """Frees everything; later backwards raise."""
        self._turn = None
        if self.ledger is not None:
            self.ledger.clear()
        for held in (self._graphs, self._rows, self._gradients):
            held.clear()

    def _given(self, at: int) -> list[Rows]:
        """The rows of a micro-batch, under one node of the graph if there are backwards."""
        parts = self._gives[at]
        self._turn = self._at = at
        self._is_taken = False
        flat: Rows = tuple(x for part in parts for x in self._rows[part])
        if self.trains and not self._is_reached(parts):
            self._is_taken = True
        elif self.trains:
            # no parameter is an input: wrappers need the parts' own backwards to reach parameters
            anchor = torch.zeros((), device=flat[0].device, requires_grad=True)
            flat = _Give.apply(anchor, self, at, flat)
        given = iter(flat)
        return [tuple(next(given) for _ in self._rows[part]) for part in parts]

    def _is_reached(self, parts: Sequence[int]) -> bool:
        """Whether the rows of a micro-batch depend on something that trains."""
        # they do not if only a vision encoder trains and there are no images; for a trunk that runs
        # again it is not known yet; for steps the last run shows it, which may be a dummy
        held = [*self._graphs.values()] if self._inline else [self._graphs.get(p) for p in parts]
        return any(not kept or any(x.requires_grad for x in kept[-1]) for kept in held)

    def _run_forward(self, place: int) -> None:
        kind, part = self._schedule[place]
        keeps = kind == schedule.KEEP
        with torch.enable_grad() if keeps else torch.no_grad():
            # later forwards of kept trunks would undo what DDP prepared for its last backward
            is_last = self._inline and place == self._last_graph
            if self.ledger is None or not 0 <= part < self._parts:
                rows = self._compute(schedule.DUMMY, None, is_last)
            else:
                with self.ledger.running(place) as exchanges:
                    rows = self._compute(part, exchanges, is_last)
        if self._last_give.get(part, -1) > self._at and part not in self._rows:
            # a second forward gives the same rows
            self._rows[part] = tuple(x.detach() for x in rows)
        if keeps:
            self._graphs.setdefault(part, []).append(rows)

    def _run_backward(self, place: int) -> None:
        part = self._schedule[place].at
        _backward(self._graphs[part].pop(), self._gradients.pop(part, ()))
        if self.ledger is not None and 0 <= part < self._parts:
            self.ledger.end_backward(place)
        # an optimizer may run in a hook
        self._check()


def _backward(rows: Rows, gradients: Sequence[torch.Tensor | None]) -> None:
    """Runs a part backward, also without gradients."""
    # rows that others imported from it have gradients, and ranks must stay in step
    row_gradients = gradients or [None] * len(rows)
    reached = [
        (x, torch.zeros_like(x) if gradient is None else gradient)
        for number, (x, gradient) in enumerate(zip(rows, row_gradients, strict=True))
        # router logits below the first layer that trains have no graph
        if x.requires_grad and (number == 0 or gradient is not None)
    ]
    if reached:
        torch.autograd.backward([x for x, _ in reached], [gradient for _, gradient in reached])


def _sum(x: torch.Tensor | None, y: torch.Tensor | None) -> torch.Tensor | None:
    if x is None or y is None:
        return y if x is None else x
    return x + y


_TWICE = (
    "the backward of a call with max_step_tokens= ran already, and what its steps exported one "
    "another is freed: score again for another backward (retain_graph does not keep it)"
)
_LATE = (
    "the backward of a micro-batch of kept trunks ran after the next one was asked for: the trunks "
    "that it imports from may have had their backward, and its gradients would be lost; call "
    "backward() on each micro-batch's loss within its turn of the loop"
)


@cache
def _warn_of_no_backward() -> None:
    """Warns once: autograd's engine calls nothing of ours if it does not reach it."""
    warnings.warn(
        "scores of max_step_tokens= with gradients were let go, and no backward came to them: "
        "torch.autograd.grad and backward(inputs=) do not reach what steps compute again. Call "
        "loss.backward(), which adds to .grad; where no gradients are wanted, score under "
        "torch.no_grad()",
        stacklevel=3,
    )


class _Give(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, run: Run, turn: int, rows: Rows) -> Rows:
        ctx.run, ctx.turn = run, turn
        ctx.set_materialize_grads(False)
        return tuple(x.detach() for x in rows)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None, None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "scores of max_step_tokens= and of kept trunks are differentiable once: their "
                "backward adds the gradients of the parameters part by part, so create_graph=True "
                "has no graph to make; leave it out, or score without max_step_tokens and "
                "kept_trunks"
            )
        ctx.run.take(ctx.turn, gradients)
        return None, None, None, None
