"""`plan_kept`: kept trunks and the micro-batches that borrow from them recompute by one plan.

A trunk's graph is held beside every micro-batch that runs before the trunk's backward, so each of
these has less memory for its own. All trunks follow one plan; or they hold no graph, and their
forward runs again before their backward. Each micro-batch follows the plan that recomputes least in
what is left. Of all choices for the trunks, the one with which the fewest FLOPs run again is taken.

Legend: C choices for the trunks: all plans [a, b] of `peaks_of`, and the forward again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from prefixtree.planning.borrow_cost import borrow_cost_of
from prefixtree.planning.trunks import Span
from prefixtree.recompute.plan import (
    PartWork,
    RecomputePlan,
    cheapest,
    held_by_plans,
    peaks_of,
    plan_at,
    recomputed_by,
    spare_bytes,
    too_large,
    waiting_bytes,
)

if TYPE_CHECKING:
    from prefixtree.recompute.trace import ModelMemory
    from prefixtree.recompute.trace_tower import TowerMemory


@dataclass(frozen=True)
class KeptPlan:
    """The plans of trunks and micro-batches.

    Attributes:
        of_part: per part, in the order of forwards. A peak counts what is held beside the part.
        runs_again: whether trunks hold no graph. Their plans are those of the second forward.
    """

    of_part: tuple[RecomputePlan, ...]
    runs_again: bool

    @property
    def peak_bytes(self) -> int:
        """The most bytes that are alive at once, as predicted."""
        return max(plan.peak_bytes for plan in self.of_part)


def plan_kept(
    memory: ModelMemory,
    works: Sequence[PartWork],
    spans: Sequence[Span],
    available: float,
    *,
    on_host: bool = False,
    runs_again: bool = False,
    tower: TowerMemory | None = None,
    with_spare: bool = False,
) -> KeptPlan:
    """Plans trunks and micro-batches within `available` bytes.

    Args:
        memory: of the model.
        works: per part, in the order of forwards.
        spans: of the same parts.
        available: bytes for activations, lent rows, states, and what is returned to them.
        on_host: whether what trunks lend waits on the host.
        runs_again: whether trunks hold no graph in any case. Default: where that costs less.
        tower: the memory of the tower, where parts have pictures. It is always recomputed, in runs
            of as many patches as fit.
        with_spare: as in `plan_for`.

    Raises:
        torch.OutOfMemoryError: a part does not fit with every layer recomputed.
        ValueError: a model without a layer of softmax attention.
    """
    peaks = [peaks_of(memory, work) for work in works]
    # of pictures: what waits for the tower's backward, which comes last, beside the gradients of
    # the embedding and of an lm_head with its weight
    shown = [0.0] * len(works)
    ends = [memory.before * work.num_tokens + waiting_bytes(memory, work) for work in works]
    costs = [recomputed_by(memory, work) for work in works]
    spare = [spare_bytes(memory, work, with_spare) for work in works]
    needs = [peak + more for peak, more in zip(peaks, spare, strict=True)]
    for part, work in enumerate(works):
        if work.pictures is not None and tower is not None:
            shown[part] = work.pictures.held(tower)
            last = ends[part] + work.pictures.least(tower)
            # layers fragment memory, not the tower behind them
            for of_text in (peaks, needs):
                of_text[part] = np.maximum(of_text[part], last) + shown[part]
    trunks = [part for part, span in enumerate(spans) if span.is_trunk]
    borrow = replace(borrow_cost_of(memory.cost), on_host=on_host)
    row, gradient = (borrow.held_layers * x for x in (borrow.row_bytes, borrow.gradient_row_bytes))
    # [C] each: what a trunk holds while others run, and what waits for its own layers
    holds, waits = {}, dict.fromkeys(range(len(works)), 0.0)
    for part in trunks:
        work = works[part]
        graph = np.append(held_by_plans(memory, work).ravel() + shown[part], 0.0)
        states = work.states * borrow.held_state_bytes
        holds[part] = graph + work.lent * (row + gradient) + states
        waits[part] = work.lent * max(row, gradient) + states
    nothing = np.zeros(peaks[0].size + 1)
    beside = [
        waits[part]
        + np.maximum.reduce(
            [sum((holds[t] for t in each), nothing) for each in _alive(spans, part)]
        )
        for part in range(len(works))
    ]
    total = np.zeros_like(nothing)
    for part, span in enumerate(spans):
        if span.is_trunk:
            fits = needs[part].ravel() + beside[part][:-1] <= available
            total[:-1] += np.where(fits, costs[part].ravel(), np.inf)
            again = _least(needs[part], costs[part], available - beside[part][-1:])
            total[-1] += again[0] + _forward(memory, works[part], costs[part])
        else:
            total += _least(needs[part], costs[part], available - beside[part])
    if runs_again and trunks:
        total[:-1] = np.inf
    best = np.flatnonzero(total == total.min())
    if not np.isfinite(total.min()):
        raise torch.OutOfMemoryError(_message(memory, works, peaks, beside, available))
    choice = int(best[sum((h[best] for h in holds.values()), nothing[best]).argmin()])
    keeps_graphs = choice < peaks[0].size
    found = []
    for part, span in enumerate(spans):
        around = peaks[part] + beside[part][choice]
        plan = plan_at(around, choice) if span.is_trunk and keeps_graphs else None
        plan = plan or cheapest(around, costs[part], available - spare[part])
        assert plan is not None
        if (pictures := works[part].pictures) is not None and tower is not None:
            outside = beside[part][choice] + shown[part] + ends[part]
            patches, run = pictures.runs(tower, available - outside)
            peak = max(plan.peak_bytes, round(outside + run))
            plan = replace(plan, peak_bytes=peak, patches=patches)
        found.append(plan)
    return KeptPlan(tuple(found), not keeps_graphs)


def _alive(spans: Sequence[Span], part: int) -> list[list[int]]:
    """The trunks that are held beside a part: of a trunk in its forward, and in its backward."""
    span = spans[part]
    others = [t for t, other in enumerate(spans) if other.is_trunk and t != part]
    forward = [t for t in others if t < part and spans[t].last >= span.first]
    if not span.is_trunk:
        return [forward]
    # the latest of those that end together goes first
    behind = (span.last, -part)
    starts = [t for t in others if spans[t].first <= span.last]
    return [forward, [t for t in starts if (spans[t].last, -t) > behind]]


def _least(peaks: np.ndarray, costs: np.ndarray, room: np.ndarray) -> np.ndarray:
    """The cost of the cheapest plan in each room, [len(room)]; infinite where none fits.

    Args:
        peaks, costs: of all plans [a, b]. room: in bytes.
    """
    order = np.argsort(peaks, axis=None)
    least = np.append(np.inf, np.minimum.accumulate(costs.ravel()[order]))
    return least[np.searchsorted(peaks.ravel()[order], room, side="right")]


def _forward(memory: ModelMemory, work: PartWork, costs: np.ndarray) -> float:
    """Multiply-adds of a forward."""
    cost = memory.cost
    outside = cost.outside_weights * work.num_tokens + cost.lm_head_weights * work.scored
    return float(costs[-1, -1] + outside)


def _message(
    memory: ModelMemory,
    works: Sequence[PartWork],
    peaks: Sequence[np.ndarray],
    beside: Sequence[np.ndarray],
    available: float,
) -> str:
    needed = [peak[-1, -1] + others[-1] for peak, others in zip(peaks, beside, strict=True)]
    worst = int(np.argmax(needed))
    words = f", beside what trunks lend ({beside[worst][-1] / 2**30:.1f} GiB)"
    if works[worst].pictures is not None:
        words += ", its pictures included"
    return too_large(memory, works[worst], available, needed[worst], words)
