"""`plan_steps`: divides a packed forest into steps that are computed one after another.

A step is a run of packed tokens. It borrows the tokens above its first one, which earlier steps
computed, so a trunk is computed once however many steps it takes. Forwards run in the order of the
steps and backwards in the reverse order: what a step lends gets its gradients before its own
backward. A sequence may be longer than a step. Legend: T packed tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from prefixtree import loops
from prefixtree.errors import ForestError
from prefixtree.packing.arguments import at_least_one, check_packed
from prefixtree.packing.borrow_cost import BorrowCost, run_flops
from prefixtree.packing.cost_model import CostModel
from prefixtree.packing.layout import PackedForest
from prefixtree.packing.parts import Parts

# a step may end early by at most this share of its room
_SLACK = 0.5


@dataclass(frozen=True)
class StepStats:
    """Tokens, memory and work of steps.

    Attributes:
        max_tokens: the budget.
        borrow_weight: what a borrowed token counts of it.
        own_tokens: tokens that each step computes.
        borrowed_tokens: tokens that each step borrows.
        lent_tokens: tokens that any later step borrows.
        lent_bytes: bytes of these keys and values in all layers, if all are kept from the forwards
            to the backwards.
        again: FLOPs of a second forward of the lent tokens, over those of an update of the forest
            in one piece. It is paid where the lent keys are made before the steps; with a forward
            of all steps first, as with gradient checkpointing, nothing is computed again.
    """

    max_tokens: int
    borrow_weight: float
    own_tokens: tuple[int, ...]
    borrowed_tokens: tuple[int, ...]
    lent_tokens: int
    lent_bytes: int
    again: float

    @property
    def peak(self) -> float:
        """The most that a step holds, in own tokens; at most max_tokens."""
        weighed = np.array(self.own_tokens) + self.borrow_weight * np.array(self.borrowed_tokens)
        return float(weighed.max())

    def __str__(self) -> str:
        tokens = sum(self.own_tokens)
        return (
            f"{tokens:,} tokens in {len(self.own_tokens):,} steps of at most {self.max_tokens:,}: "
            f"a step borrows at most {max(self.borrowed_tokens):,} tokens, "
            f"{self.borrow_weight:.2f} each; {self.lent_tokens:,} tokens are lent "
            f"({self.lent_tokens / tokens:.1%}, {self.lent_bytes / 2**30:,.2f} GiB), "
            f"{self.again:.1%} of the work if computed again"
        )


class Steps(Parts):
    """A packed forest divided into steps, each of which borrows from earlier ones. See `Parts`.

    `plan_steps` makes them. The constructor takes any owners that keep the order: no token may
    belong to an earlier step than a token above it.

    Attributes:
        stats: tokens, memory and work, where `plan_steps` made them.

    Raises:
        TypeError, ForestError, ValueError: as `Parts`; a ForestError too where a step borrows from
            a later one.
    """

    stats: StepStats

    def _init(
        self, packed: PackedForest, start: np.ndarray, part: np.ndarray, num_parts: int
    ) -> None:
        super()._init(packed, start, part, num_parts)
        for bad in np.flatnonzero(self._pieces[:, 2] > self._borrower)[:1]:
            token, _, lender = self._pieces[bad].tolist()
            borrower = int(self._borrower[bad])
            raise ForestError(
                f"step {borrower} borrows packed token {token} from step {lender}, which comes "
                "later; expected every token in the step of the tokens above it, or in a later one"
            )


def plan_steps(
    packed: PackedForest,
    max_tokens: int,
    cost_model: CostModel | None = None,
    *,
    borrow_cost: BorrowCost | None = None,
) -> Steps:
    """Divides a packed forest into steps that fit a budget, and computes every token in one step.

    A step ends early, by up to half of its room, at the end of a branch where the next step borrows
    fewer tokens, by at least as many as are given up.

    Args:
        packed: the packed forest.
        max_tokens: what a step may hold, in own tokens. A borrowed token counts
            `borrow_cost.weight`, the bytes of its keys, values and their gradients over those of an
            own token. A sequence may be longer.
        cost_model: FLOPs per token and visible pair, for the stats. Default: `CostModel()`.
        borrow_cost: the bytes. Default: `BorrowCost()`.

    Returns:
        The steps, in the order of their forwards.

    Raises:
        TypeError: anything but a PackedForest.
        ForestError: a path that fits no steps, because of the bytes of what they borrow, or a
            packed forest whose mask holds a subset of the queries.
        ValueError: max_tokens that is no integer >= 1, or a borrow_cost without token_bytes.
    """
    check_packed(packed, "plan_steps")
    max_tokens = at_least_one("max_tokens", max_tokens)
    cost_model = CostModel() if cost_model is None else cost_model
    borrow_cost = BorrowCost() if borrow_cost is None else borrow_cost
    weight, host = borrow_cost.weight, packed.mask.host
    start, stuck = loops.parts.cut_steps(host.position, host.predictor, max_tokens, weight, _SLACK)
    if stuck >= 0:
        enough = math.ceil(weight * (host.deepest - 1)) + 1
        raise ForestError(
            f"max_tokens {max_tokens} is too little for packed token {stuck}, whose path has "
            f"{host.position[stuck] + 1} tokens: wherever the path is cut, what a step borrows "
            f"of it counts {weight:.2f} per token, by its bytes; {enough} is enough for every path "
            "of this forest"
        )
    steps = Steps.__new__(Steps)
    steps._init(packed, start, np.arange(len(start)), len(start))
    steps.stats = _stats(steps, max_tokens, cost_model, borrow_cost)
    return steps


def _stats(
    steps: Steps, max_tokens: int, cost_model: CostModel, borrow_cost: BorrowCost
) -> StepStats:
    border, lent = steps.lent_runs()
    own = steps.num_own_tokens
    flops = run_flops(steps.packed, border, cost_model)
    lent_tokens = int(np.diff(border)[lent].sum())
    linear = cost_model.linear * lent_tokens
    # a forward is a third of an update in matrix products and 1 of 3.5 in attention
    again = linear / 3 + (float(flops[lent].sum()) - linear) / 3.5
    return StepStats(
        max_tokens=max_tokens,
        borrow_weight=borrow_cost.weight,
        own_tokens=tuple(own.tolist()),
        borrowed_tokens=tuple((steps.num_rows - own).tolist()),
        lent_tokens=lent_tokens,
        lent_bytes=lent_tokens * borrow_cost.row_bytes * borrow_cost.layers,
        again=again / float(flops.sum()),
    )
