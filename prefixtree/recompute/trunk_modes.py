"""Modes of kept trunks and of their micro-batches, as the caller said or as planned.

With "auto" both recompute by one plan (`plan_kept`). A trunk's graph is held during every
micro-batch that runs before the trunk's backward, so each of these has less memory for its own. All
trunks follow one plan; or they hold no graph, and their forward runs again before their backward.
Each micro-batch follows the plan that recomputes least in the remaining memory. Of all choices for
the trunks, the one with which the fewest FLOPs run again is taken.

Legend: C choices for the trunks: all plans [a, b] of `peaks_of`, with images also those in which
vision encoders keep all, and the forward again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from prefixtree.errors import Refusal, refuse
from prefixtree.kernels.lm_head.logprobs import ScoreOptions
from prefixtree.kernels.lm_head.measures import measure_bytes
from prefixtree.planning.costs import import_cost_of
from prefixtree.planning.part_states import KEYS, STATES
from prefixtree.planning.parts import Parts
from prefixtree.planning.schedule import graphs_beside, kept
from prefixtree.planning.steps import Steps
from prefixtree.planning.trunks import Span, Trunks
from prefixtree.recompute.choose import (
    Recompute,
    encoder_memory_of,
    first_plan,
    learnt_so_far,
    least_plan,
    left_for_activations,
    lm_head_trains,
    measured_plan,
    memory_of,
)
from prefixtree.recompute.image_work import EncoderChoice, ImageWork
from prefixtree.recompute.plan import (
    PartWork,
    RecomputePlan,
    cheapest,
    held_by_plans,
    layer_products,
    peaks_of,
    place_of,
    plan_at,
    recomputed_by,
    spare_beside,
    spare_bytes,
    too_large,
    waiting_bytes,
)
from prefixtree.recompute.recorder import meter_of

if TYPE_CHECKING:
    from prefixtree.parallel.ledger import Ledger
    from prefixtree.recompute.memory import EncoderMemory, ModelMemory

from prefixtree.wings import CallWing

# choices of the images that a vision encoder keeps
_CHOICES = 8


@dataclass(frozen=True)
class KeptPlan:
    """The plans of trunks and micro-batches."""

    # plans in the order of forwards; a peak counts what is held while the part runs
    of_part: tuple[RecomputePlan, ...]
    # whether trunks hold no graph; their plans are those of the second forward
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
    encoder: EncoderMemory | None = None,
    with_spare: bool = False,
    waiting: np.ndarray | None = None,
) -> KeptPlan:
    """Plans trunks and micro-batches, in the order of forwards, within `available` bytes.

    Args:
        available: for activations, exported rows, states, and their returned gradients.
        on_host: whether exports of trunks wait on the host.
        runs_again: whether trunks hold no graph in any case. Default: where that costs less.
        waiting: bytes that other parts than trunks, such as steps, leave waiting while each part
            runs.

    Raises:
        torch.OutOfMemoryError: a part does not fit with every layer recomputed.
    """
    parts = [_PartPlans(memory, work, encoder, with_spare) for work in works]
    costs = [part.costs for part in parts]
    trunks = [part for part, span in enumerate(spans) if span.is_trunk]
    imports = replace(import_cost_of(memory.cost), on_host=on_host)
    row, gradient = (
        imports.held_layers * x for x in (imports.row_bytes, imports.gradient_row_bytes)
    )
    # vision encoders keep nothing of trunks' images, or all
    ways = [0, -1] if any(len(parts[part].encoders) > 1 for part in trunks) else [0]
    plans = costs[0].size
    # [C] each: bytes that a trunk holds while others run, and that wait for its own layers
    holds, waits = {}, dict(enumerate(np.zeros(len(works)) if waiting is None else waiting))
    for part in trunks:
        work = works[part]
        layers = held_by_plans(memory, work).ravel() + parts[part].shown
        graphs = [layers + parts[part].encoders[way].held for way in ways]
        states = work.states * imports.held_state_bytes
        holds[part] = (
            np.append(np.concatenate(graphs), 0.0) + work.exported * (row + gradient) + states
        )
        waits[part] = work.exported * max(row, gradient) + states
    nothing = np.zeros(plans * len(ways) + 1)
    # exported rows are held as long as graphs, also where trunks keep none
    held = graphs_beside(kept(spans, 1 + max(span.last for span in spans), trains=True))
    beside = [
        waits[part]
        + np.maximum.reduce([sum((holds[t] for t in sorted(each)), nothing) for each in held[part]])
        for part in range(len(works))
    ]
    total = np.zeros_like(nothing)
    for part, span in enumerate(spans):
        room = available - beside[part]
        if span.is_trunk:
            for i, way in enumerate(ways):
                of_way = slice(i * plans, (i + 1) * plans)
                _, needs, cost = parts[part].with_encoder(way)
                total[of_way] += np.where(needs.ravel() <= room[of_way], cost.ravel(), np.inf)
            again = parts[part].least(room[-1:])
            total[-1] += again[0] + parts[part].forward()
        else:
            total += parts[part].least(room)
    if runs_again and trunks:
        total[:-1] = np.inf
    best = np.flatnonzero(total == total.min())
    if not np.isfinite(total.min()):
        peaks = [part.with_encoder(0)[0] for part in parts]
        raise torch.OutOfMemoryError(_message(memory, works, peaks, beside, available))
    choice = int(best[sum((h[best] for h in holds.values()), nothing[best]).argmin()])
    keeps_graphs = choice < len(total) - 1
    chosen_plans = []
    for part, span in enumerate(spans):
        held_bytes = float(beside[part][choice])
        if span.is_trunk and keeps_graphs:
            way, place = divmod(choice, plans)
            chosen_plans.append(parts[part].plan(held_bytes, available, ways[way], place))
        else:
            chosen_plans.append(parts[part].plan(held_bytes, available))
    return KeptPlan(tuple(chosen_plans), not keeps_graphs)


class _PartPlans:
    """The plans of one part, and its vision encoder's choices: one if it has no images.

    Attributes:
        costs: multiply-adds computed again by layers, for all plans [a, b].
        shown: bytes of images, from the vision encoder's forward to its backward, which comes last.
    """

    def __init__(
        self, memory: ModelMemory, work: PartWork, encoder: EncoderMemory | None, with_spare: bool
    ) -> None:
        self._memory, self._work, self._encoder = memory, work, encoder
        self._images = work.images if encoder is not None else None
        self._peaks, self.costs = peaks_of(memory, work), recomputed_by(memory, work)
        self._spare = spare_bytes(memory, work, with_spare)
        # during the vision encoder's backward the gradients of the embedding and of an lm_head with
        # its weight are alive
        self._ends = memory.before * work.num_tokens + waiting_bytes(memory, work)
        self.shown, self.encoders = 0.0, [EncoderChoice(0, 0, 0.0, 0.0, 0.0)]
        if self._images is not None and encoder is not None:
            self.shown = self._images.held(encoder)
            self.encoders = self._images.choices(encoder, _CHOICES)

    def with_encoder(self, way: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Peaks, bytes that must be free, and multiply-adds of all plans [a, b]."""
        choice = self.encoders[way]
        free = spare_beside(choice, self._spare)
        of_layers = self._peaks + choice.held
        last = self._ends + choice.needs
        peaks = np.maximum(of_layers, last) + self.shown
        needs = np.maximum(of_layers + np.maximum(self._spare, free), last + free) + self.shown
        return peaks, needs, self.costs + choice.again

    def least(self, room: np.ndarray) -> np.ndarray:
        """Multiply-adds of the cheapest plan in each room, [len(room)]; infinite if none fits."""
        each = [_least(*self.with_encoder(way)[1:], room) for way in range(len(self.encoders))]
        return np.minimum.reduce(each)

    def forward(self) -> float:
        """Multiply-adds of a forward."""
        cost = self._memory.cost
        outside = cost.outside_weights * self._work.num_tokens
        outside += cost.lm_head_weights * self._work.scored
        layers = sum(map(np.sum, layer_products(self._memory, self._work)))
        return float(layers + outside + self.encoders[0].again)

    def plan(
        self, others: float, available: float, way: int | None = None, place: int = 0
    ) -> RecomputePlan:
        """The cheapest plan, or that at (way, place), while others hold `others` bytes."""
        if way is None:
            room = np.array([available - others])
            least = [_least(*self.with_encoder(i)[1:], room)[0] for i in range(len(self.encoders))]
            way = int(np.argmin(least))
            _, needs, costs = self.with_encoder(way)
            cheap = cheapest(needs, costs, float(room[0]))
            assert cheap is not None
            a, b = place_of(cheap)
            place = a * self.costs.shape[1] + b
        plan = plan_at(self.with_encoder(way)[0] + others, place)
        if self._images is None or self._encoder is None:
            return plan
        choice = self.encoders[way]
        outside = others + self.shown + self._ends
        left = available - outside - spare_beside(choice, self._spare)
        patches, run = self._images.runs(self._encoder, left, choice)
        peak = max(plan.peak_bytes, round(outside + run))
        return replace(plan, peak_bytes=peak, patches=patches, kept=choice.kept)


def _least(peaks: np.ndarray, costs: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Costs of the cheapest plan [a, b] per room of bytes, [len(room)]; infinite if none fits."""
    order = np.argsort(peaks, axis=None)
    least = np.append(np.inf, np.minimum.accumulate(costs.ravel()[order]))
    return least[np.searchsorted(peaks.ravel()[order], room, side="right")]


def _message(
    memory: ModelMemory,
    works: Sequence[PartWork],
    peaks: Sequence[np.ndarray],
    beside: Sequence[np.ndarray],
    available: float,
) -> str:
    needed = [peak[-1, -1] + others[-1] for peak, others in zip(peaks, beside, strict=True)]
    worst = int(np.argmax(needed))
    words = f", beside what trunks export ({beside[worst][-1] / 2**30:.1f} GiB)"
    if works[worst].images is not None:
        words += ", its images included"
    return too_large(memory, works[worst], available, needed[worst], words)


# ---- modes of parts ------------------------------------------------------------------------------

#: Values of `kept_trunks(recompute_trunks=)`.
RecomputeTrunks = Recompute | Literal["again"]


class Asked(Protocol):
    """The rows asked of parts: options of a language model's edges, and the call's wings."""

    options: ScoreOptions
    wings: Mapping[str, CallWing]


class PartModes(NamedTuple):
    """The modes of the forwards of `kept_trunks`."""

    of_part: Sequence[Recompute]
    # the mode of a dummy token
    of_dummy: Recompute
    # whether trunks hold no graph and run forward again
    runs_again: bool


#: Refusals of two modes of recompute for kept trunks with images.
KEPT_IMAGES = (
    Refusal(
        "recompute_trunks",
        lambda model: any(isinstance(m, FSDPModule) for m in model.modules()),
        "ranks of FSDP2 gather the vision encoder together, so kept trunks recompute as "
        "micro-batches do: leave recompute_trunks out, or give 'again'",
    ),
)


def check_modes(
    model: nn.Module, recompute: Recompute, recompute_trunks: RecomputeTrunks, sees: bool
) -> None:
    """Refuses modes that do not go together; `sees` says whether there are images."""
    # "auto" would plan only one of trunks and micro-batches; FSDP2 with images takes one mode
    if recompute_trunks == "auto" or (
        recompute == "auto" and recompute_trunks not in (None, "again")
    ):
        raise ValueError(
            "recompute='auto' plans trunks and micro-batches together, so recompute_trunks goes "
            f"with it only as None or 'again', got recompute={recompute!r} and recompute_trunks="
            f"{recompute_trunks!r}: leave recompute_trunks out, or name a mode for both"
        )
    if sees and recompute_trunks not in (None, "again", recompute):
        refuse(KEPT_IMAGES, model)


def modes_of(
    model: nn.Module,
    trunks: Trunks | None,
    steps: Steps | None,
    num_scored: Sequence[int],
    recompute: Recompute,
    recompute_trunks: RecomputeTrunks,
    asked: Asked,
    trains: bool,
    held_bytes: int,
) -> PartModes:
    """The modes of all parts; those of "auto" for the memory that is available now.

    num_scored are the edges that each part scores; held_bytes are held by a loss of routers. trunks
    are None where the rank has no sequence; steps are their parts.
    """
    again = recompute_trunks == "again"
    if recompute == "auto":
        if trunks is None or steps is None or not trains:
            # planned ranks of FSDP2 recompute their vision encoders, also for dummies
            return PartModes([None] * len(num_scored), "all" if trains else None, again)
        plan = _planned(
            *(model, steps, num_scored, trunks.exported_states(), trunks.spans, asked, held_bytes),
            on_host=trunks.stats.on_host,
            runs_again=again,
        )
        return PartModes(plan.of_part, "all", plan.runs_again)
    again |= recompute_trunks is None and trunks is not None and trunks.stats.again
    of_trunks: Recompute = recompute
    if recompute_trunks is not None and recompute_trunks != "again":
        of_trunks = recompute_trunks
    spans = () if trunks is None else trunks.spans
    modes = [of_trunks if span.is_trunk else recompute for span in spans]
    return PartModes(modes, recompute, again)


def modes_of_steps(
    model: nn.Module,
    ledger: Ledger,
    num_scored: Sequence[int],
    recompute: Recompute,
    asked: Asked,
    trains: bool,
) -> PartModes:
    """The modes of steps, each while exports wait on the device for others; see `modes_of`."""
    steps = ledger.division.parts
    if recompute != "auto" or not trains:
        mode = None if recompute == "auto" else recompute
        return PartModes([mode] * len(steps), mode, False)
    # steps hold one graph at a time
    spans = [Span(step, step, is_trunk=False) for step in range(len(steps))]
    no_states = np.zeros(len(steps))
    held_bytes = sum(wing.held_bytes for wing in asked.wings.values())
    given = model, steps, num_scored, no_states, spans, asked, held_bytes
    return PartModes(_planned(*given, ledger=ledger).of_part, "all", False)


def _planned(
    model: nn.Module,
    steps: Parts,
    num_scored: Sequence[int],
    states: np.ndarray,
    spans: Sequence[Span],
    asked: Asked,
    held_bytes: int,
    ledger: Ledger | None = None,
    **more: Any,
) -> KeptPlan:
    """Plans all parts for the memory that is available now."""
    # states are own tokens after which each trunk exports states; a ledger is of parts that are no
    # trunks, and export
    causal_lm, available = left_for_activations(model, steps.packed.device)
    available -= held_bytes
    placed: Any = asked.wings.get("images")
    if asked.options.measure is not None:
        vocabulary = causal_lm.config.get_text_config().vocab_size
        available -= measure_bytes(max(num_scored, default=0), vocabulary)
    trains_head = lm_head_trains(causal_lm)
    # values have no lm_head, and their rows are those of the last norm
    counts = num_scored if trains_head is not None else [0] * len(num_scored)
    parts = zip(steps, counts, states, strict=True)
    works = [PartWork.of(part, n, bool(trains_head), int(exported)) for part, n, exported in parts]
    device, learnt = steps.packed.device, learnt_so_far(causal_lm, steps.packed.device)
    available -= round(learnt.margin)
    measures = meter_of(device) is not None
    memory = learnt.memory() if measures else None
    if measures and memory is None:
        # the first part tells of all others
        largest = max(work.num_tokens for work in works)
        first = first_plan(model, causal_lm, device, works[0], available, largest)
        if first is not None:
            least = least_plan(len(first.modes))
            return KeptPlan((first, *[least] * (len(works) - 1)), runs_again=True)
        memory = learnt.memory()
    if memory is None:
        memory = memory_of(model, causal_lm, device)
    waiting = None
    if ledger is not None:
        cost = import_cost_of(memory.cost)
        row = cost.held_layers * np.array([cost.row_bytes, cost.gradient_row_bytes])
        waiting = ledger.most_waiting(KEYS) @ row
        if cost.held_state_bytes:
            waiting = waiting + ledger.most_waiting(STATES).max(1) * cost.held_state_bytes
    encoder = None
    if placed is not None and len(placed.placements.number):
        encoder = encoder_memory_of(model, causal_lm, device)
        if any(isinstance(module, FSDPModule) for module in model.modules()):
            # a backward may meet that of any forward of another rank: all compute again
            encoder = replace(encoder, may_keep=False)
        shown = [
            ImageWork.of(
                placed.placements.shown_by(part.own_tokens, placed.images),
                placed.images,
                encoder.dtype,
                moved=False,
            )
            for part in steps
        ]
        works = [replace(work, images=x) for work, x in zip(works, shown, strict=True)]
    more |= {"encoder": encoder, "with_spare": True, "waiting": waiting}
    plan = plan_kept(memory, works, spans, available, **more)
    if not measures:
        return plan
    of_part = [measured_plan(x, learnt, y) for x, y in zip(plan.of_part, works, strict=True)]
    return replace(plan, of_part=tuple(of_part))
