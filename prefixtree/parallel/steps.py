"""The autograd node behind steps: a forest computed part after part, for any loss.

A step computes a run of packed tokens and borrows the path above the first one, which earlier steps
computed. In the forward `run_in_steps` runs all steps without a graph, but the last one, and
`parallel.ledger` keeps what they lend. In the backward it runs them in the reverse order, each with
a graph.

Legend: t own tokens, U scored edges (of values tokens), T packed tokens.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch

from prefixtree.parallel.ledger import Ledger, PartExchanges
from prefixtree.planning import schedule

#: Runs a step, or with None a dummy that scores nothing, and gives the scores [u, columns] of its
#: edges, and tensors with a row per token of its own, as many of them in every step.
Compute = Callable[[int | None, PartExchanges | None], tuple[torch.Tensor, ...]]


class StepRun:
    """One forward and one backward of all steps.

    Args:
        ledger: of the steps and their schedule; not used before. Parts of the schedule that are no
            steps are dummies, where other ranks have more steps.
        places: of each step, int64 on the device: the edges that it scores, each of U in one step,
            and its own tokens, each of T in one step.
        compute: runs a step through the model, with a graph where gradients are enabled.
        check: raises where a step of the backward would not find what the forward did. Default:
            nothing.
    """

    def __init__(
        self,
        ledger: Ledger,
        places: Sequence[tuple[torch.Tensor, torch.Tensor]],
        compute: Compute,
        check: Callable[[], None] | None = None,
    ) -> None:
        self.ledger = ledger
        self._places = places
        self._compute = compute
        self._check = check
        # what is left of the schedule, by place
        self._events: Iterator[tuple[int, schedule.Event]] = iter(enumerate(ledger.schedule))
        # what the run with a graph gave whose backward comes next
        self._kept: tuple[torch.Tensor, ...] = ()
        self._is_done = False
        # whether a backward may come, and none has
        self.waits = False

    def __del__(self) -> None:
        if self.waits and not sys.is_finalizing():
            _warn_of_no_backward()

    def forward(self) -> tuple[torch.Tensor, ...]:
        """The scores of all edges, [U, columns], and the rows of all tokens, without a graph."""
        results = []
        for place, (kind, _) in self._events:
            if kind == schedule.GIVE:
                break
            results.append(self._run(place))
        self.waits = bool(self._kept)
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
                "the backward of a call with max_tokens= ran already, and what its steps lent one "
                "another is freed: score again for another backward "
                "(retain_graph does not keep it)"
            )
        self._is_done = True
        for place, (kind, _) in self._events:
            # an optimizer may run in a hook of the step before
            if kind in (schedule.TAKE, schedule.KEEP) and self._check is not None:
                self._check()
            if kind == schedule.KEEP:
                self._run(place)
            elif kind == schedule.BACKWARD:
                self._run_backward(place, gradients)

    def _run(self, place: int) -> tuple[torch.Tensor, ...]:
        """A forward; what it gives, without a graph."""
        kind, step = self.ledger.schedule[place]
        keeps = kind == schedule.KEEP
        with torch.enable_grad() if keeps else torch.no_grad():
            if self._is_dummy(step):
                rows = self._compute(None, None)
            else:
                with self.ledger.running(place) as exchanges:
                    rows = self._compute(step, exchanges)
        if keeps:
            self._kept = rows
        return tuple(x.detach() for x in rows)

    def _run_backward(self, place: int, gradients: Sequence[torch.Tensor]) -> None:
        rows, self._kept = self._kept, ()
        step = self.ledger.schedule[place].at
        if self._is_dummy(step):
            of_step = [torch.zeros_like(x) for x in rows]
        else:
            of_step = [g[self._place(step, kind)] for kind, g in enumerate(gradients)]
        # router logits below the first layer that trains have no graph; scores must
        reached = [i for i, x in enumerate(rows) if i == 0 or x.requires_grad]
        torch.autograd.backward([rows[i] for i in reached], [of_step[i] for i in reached])
        if not self._is_dummy(step):
            self.ledger.end_backward(place)

    def _is_dummy(self, step: int) -> bool:
        return step >= len(self._places)


@cache
def _warn_of_no_backward() -> None:
    """Once: the engine of autograd calls nothing of ours where it does not reach it."""
    warnings.warn(
        "scores of max_tokens= with gradients were let go, and no backward came to them: "
        "torch.autograd.grad and backward(inputs=) do not reach what steps compute again. Call "
        "loss.backward(), which adds to .grad; where no gradients are wanted, score under "
        "torch.no_grad()",
        stacklevel=3,
    )


class _InSteps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, run: StepRun) -> tuple[torch.Tensor, ...]:
        ctx.run = run
        rows = run.forward()
        ctx.mark_non_differentiable(*run.without_graph(rows))
        return rows

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None]:
        ctx.run.waits = False
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a call with max_tokens= is differentiable once: its backward adds the gradients "
                "of the parameters step by step, so create_graph=True has no graph to make; leave "
                "it out, or score without max_tokens"
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
        has_backward: whether gradients are wanted, as the schedule of the run has it.

    Returns:
        The scores [U, columns], and the rows of tokens, [T, ...] each.
    """
    if not has_backward:
        with torch.no_grad():
            return run.forward()
    # no parameter is an input: wrappers count on the steps' own backwards to reach them
    anchor = torch.zeros((), device=device, requires_grad=True)
    rows: tuple[torch.Tensor, ...] = _InSteps.apply(anchor, run)
    return rows
