"""A packed forest in steps through a model: `sequence_logprobs(max_step_tokens=)`, and of values.

Here stands how large steps may be, and how ranks agree on their number. How they run is in
`parallel.run`, through what in `scoring.part_runs`, and what they hand on in `parallel.ledger`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from prefixtree.errors import ForestError, UnsupportedError, refuse, with_hints
from prefixtree.images.images import Images
from prefixtree.models.checks import check_loaded, transformer_of
from prefixtree.models.families import checkpoint_wrappers
from prefixtree.models.layers import device_of, layers_of, most_of_all_ranks
from prefixtree.models.rope import check_rope
from prefixtree.packing.arguments import at_least_one
from prefixtree.packing.copies import move
from prefixtree.packing.layout import PackedForest
from prefixtree.parallel.ledger import Divided
from prefixtree.parallel.run import Rows, Run
from prefixtree.planning import schedule
from prefixtree.planning.costs import ImportCost, import_cost_of
from prefixtree.planning.division import Division
from prefixtree.planning.steps import Steps, plan_any_steps
from prefixtree.recompute.choose import Recompute, memory_of
from prefixtree.recompute.layers import MODES, Mode
from prefixtree.recompute.plan import RecomputePlan
from prefixtree.recompute.trunk_modes import modes_of_steps
from prefixtree.scoring.forward import recomputed
from prefixtree.scoring.in_groups import SplitInSlots
from prefixtree.scoring.part_runs import PartForward, PartRuns
from prefixtree.scoring.refusals import SEVERAL_STEPS, STEPS, STEPS_IN_GROUPS

# what a rank whose steps cannot be planned tells the others
_FAILED = 1 << 40
# tokens between which the memory of a token is read off
_FEW, _MANY = 1 << 12, 1 << 13


def _refusal(model: nn.Module) -> UnsupportedError | None:
    """Why a forest cannot be computed in several steps; None where it can."""
    try:
        refuse(SEVERAL_STEPS, model)
    except UnsupportedError as refusal:
        return refusal
    return None


@with_hints
def import_cost(
    model: nn.Module,
    recompute: Recompute = None,
    recompute_trunks: Recompute | Literal["again"] = None,
) -> ImportCost:
    """The bytes of a model for plans with trunks, as it trains now.

        plan = plan_micro_batches(rollouts, max_tokens, trunks=True, import_cost=import_cost(model))

    Args:
        model: as `sequence_logprobs` or `sequence_values` takes it, on the device it trains on, in
            training mode if layers are recomputed.
        recompute: as `kept_trunks` will get it; of "auto" the least that it may take counts: all
            layers recomputed, and no graph of a trunk.
        recompute_trunks: as `kept_trunks` will get it.

    Returns:
        The bytes of an own token, of an imported one and of a kept trunk's.

    Raises:
        UnsupportedError: layers whose memory is not known and cannot be probed (FSDP1).
        ValueError: a model without a layer of softmax attention, or on the meta device.
    """
    transformer = transformer_of(model)
    check_loaded(transformer)
    device = device_of(transformer)
    return step_cost_of(model, transformer, device, recompute, recompute_trunks)


def step_cost_of(
    model: nn.Module,
    causal_lm: Any,
    device: torch.device,
    recompute: Recompute,
    recompute_trunks: Recompute | Literal["again"] = None,
) -> ImportCost:
    """The memory of an imported token beside that of an own one, as the model trains now.

    Raises:
        UnsupportedError: layers whose memory is not known and cannot be probed (FSDP1).
    """
    try:
        of_trunks = modes = _modes(model, causal_lm, recompute)
        if recompute_trunks is not None and recompute_trunks != "again":
            of_trunks = _modes(model, causal_lm, recompute_trunks)
        needed = tuple(mode for mode in MODES if mode in modes + of_trunks)
        memory = memory_of(model, causal_lm, device, needed)
    except UnsupportedError as problem:
        raise UnsupportedError(
            f"{problem}; for max_step_tokens give import_cost=ImportCost(...) with the bytes of a "
            "token"
        ) from None
    peaks = [memory.peak(tokens, modes) for tokens in (_FEW, _MANY)]
    cost = import_cost_of(memory.cost, (peaks[1] - peaks[0]) / (_MANY - _FEW))
    # a layer that is not recomputed whole holds its rows from its forward to its backward, if it
    # has one
    kept = sum(mode != "all" for mode in modes[memory.frozen :]) / len(modes)
    if recompute == "auto" or recompute_trunks == "again":
        return replace(cost, kept_copies=kept, graph_bytes=0)
    graph = sum(memory.layers[mode][i].held[0] for i, mode in enumerate(of_trunks))
    return replace(cost, kept_copies=kept, graph_bytes=memory.before + graph)


def _modes(model: nn.Module, causal_lm: Any, recompute: Recompute) -> tuple[Mode, ...]:
    """The mode of recomputation of each layer: as asked for, or as the model is set."""
    if isinstance(recompute, RecomputePlan):
        return recompute.modes
    layers = layers_of(causal_lm)
    if recompute == "auto" or (recompute is not None and torch.is_grad_enabled()):
        mode: Any = "all" if recompute == "auto" else recompute
        return (mode,) * len(layers)
    wrapped = bool(checkpoint_wrappers(model))
    return tuple(
        "all" if wrapped or (layer.training and layer.gradient_checkpointing) else "nothing"
        for layer in layers
    )


class Dividing:
    """Divides a forest into steps, each of which one process or the ranks of a group compute.

    Args:
        model: what is called.
        max_step_tokens: what a process may hold of one step, in own tokens; imported ones are
            weighed.
        import_cost: what an imported token weighs. Default: read from the model.
        recompute, images: as in `sequence_logprobs`.

    Its methods raise an UnsupportedError (`STEPS`, `SEVERAL_STEPS`, `STEPS_IN_GROUPS`), or a
    ForestError for a path that fits no steps.
    """

    def __init__(
        self,
        model: nn.Module,
        max_step_tokens: int,
        import_cost: ImportCost | None,
        recompute: Recompute,
        images: Images | None = None,
    ) -> None:
        self._model, self._most, self._cost = model, max_step_tokens, import_cost
        self._recompute, self._images = recompute, images

    def alone(self, transformer: Any, packed: PackedForest) -> Divided:
        """The steps of this process. One where the forest fits: that of another rank may not."""
        steps = self._steps(transformer, packed)
        if steps is None:
            return Divided(Division(Steps(packed, np.zeros(packed.num_tokens, np.int64), 1)))
        return Divided(Division(steps), steps.stats.on_host)

    def in_group(self, transformer: Any, split: SplitInSlots) -> Divided:
        """The steps of a group, each divided among its ranks: a `Divide`."""
        refuse(STEPS_IN_GROUPS, {"recompute": self._recompute, "images": self._images})
        steps = self._steps(transformer, split.packed, split.ranks, split.by_heads)
        if steps is None:
            return split(np.array([0, split.packed.num_tokens]))
        return split(with_at_least(steps.runs[0], split.ranks), steps.stats.on_host)

    def _steps(
        self, transformer: Any, packed: PackedForest, ranks: int = 1, by_heads: bool = False
    ) -> Steps | None:
        """The steps that fit so many ranks; None where one does."""
        most = at_least_one("max_step_tokens", self._most)
        # however large the forest is
        refuse(STEPS, self._model)
        if packed.num_tokens <= most * ranks:
            return None
        refuse(SEVERAL_STEPS, self._model)
        check_rope(transformer, packed.mask.host, divided="each step of max_step_tokens")
        cost = self._cost or step_cost_of(self._model, transformer, packed.device, self._recompute)
        # of a token of a step a rank owns its share, and may import the rest; of some heads of all
        # tokens it imports no larger share than it owns
        share = 1 / ranks
        if ranks > 1 and not by_heads:
            share += cost.weight * (1 - share)
            cost = replace(cost, token_bytes=share * (cost.token_bytes or 0.0))
        return plan_any_steps(packed, max(1, int(most / share)), import_cost=cost)


def with_at_least(border: np.ndarray, least: int) -> np.ndarray:
    """Borders of slots between which at least so many tokens lie, as each rank needs one."""
    found = [int(border[-1])]
    for start in border[-2:0:-1].tolist():
        if least <= (start := min(start, found[-1] - least)):
            found.append(start)
    return np.array([0, *found[::-1]])


def rows_in_steps(
    model: nn.Module,
    transformer: Any,
    forward: PartForward,
    recompute: Recompute,
    divide: Callable[[], Divided],
) -> Rows | None:
    """The rows of all units and tokens, in steps.

    Args:
        model: what is called. transformer: the transformers model inside it.
        forward: calls it over a step.
        recompute: as in `sequence_logprobs`.
        divide: gives the steps of this process, or raises, which the other ranks then learn. In a
            group all ranks have agreed on them.

    Returns:
        As `forward`, of all units and tokens (in a group: those of this rank), with one node of the
        graph behind them where gradients are enabled. None where the forests of all ranks fit one
        forward.

    Raises:
        UnsupportedError: a forest of several steps, see `SEVERAL_STEPS`; and what `divide` raises.
        ForestError: steps that are refused or do not fit, on another rank.
    """
    packed = forward.packed
    device = packed.device
    trains = torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters())
    problem, undivided, modes, divided = None, None, None, None
    scored: list[tuple[np.ndarray, np.ndarray]] = []
    try:
        # what each forward would refuse
        recomputed(model, transformer, packed, 0, recompute)
        undivided = _refusal(model)
        divided = divide()
        count = len(divided.division)
        scored = [part.scored(forward.units.predictor) for part in divided.cells]
        counts = [len(units) for units, _ in scored]
        ledger = divided.ledger(schedule.steps(len(scored), trains), parks=True)
        modes = modes_of_steps(model, ledger, counts, recompute, forward, trains)
    except Exception as failure:
        # raised once the others know
        problem, count = failure, _FAILED
    num_runs, refuses = most_of_all_ranks(model, [count, undivided is not None], device)
    if problem is None and num_runs > 1:
        # a forest that fits is divided too where that of another rank is
        problem = undivided
    if problem is not None:
        raise problem
    if num_runs == _FAILED or (num_runs > 1 and refuses):
        raise ForestError(
            "another rank cannot compute its forest in steps of max_step_tokens, and no rank can "
            "go on without it; its own message says what it needs"
        )
    if num_runs == 1:
        return None
    assert modes is not None and divided is not None
    runs = PartRuns(model, transformer, forward, divided, scored, modes, trains, "packed.{}")

    def check() -> None:
        if (change := runs.change()) is not None:
            raise RuntimeError(
                f"{change} between a call with max_step_tokens= and its backward, which runs the "
                "steps again: call backward() before such a change (before optimizer.step(), "
                "within the same adapters and mode), or score again after it"
            )

    events = schedule.steps(num_runs, trains)
    ledger, gives = divided.ledger(events, parks=True), [range(len(scored))]
    found = Run(events, ledger, gives, runs, check, inline=True).give()
    assert found is not None
    runs.settle("each step of max_step_tokens=")
    units = np.concatenate([units for units, _ in scored])
    tokens = np.concatenate([part.own_tokens for part in divided.cells])
    return tuple(
        _in_order(torch.cat(rows), units if kind == 0 else tokens)
        for kind, rows in enumerate(zip(*found, strict=True))
    )


def _in_order(rows: torch.Tensor, place: np.ndarray) -> torch.Tensor:
    """Rows as they are numbered: units by their tokens, which others than their steps may own."""
    if (np.diff(place) > 0).all():
        return rows
    return rows.index_select(0, move(torch.from_numpy(np.argsort(place)), rows.device))
