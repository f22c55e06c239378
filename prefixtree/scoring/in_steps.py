"""Steps of a packed forest (`max_step_tokens=`): how large they are, how ranks agree on their
number.

How steps run is in `parallel.run`, each one's call of the model in `scoring.part_runs`, and what
they hand on in `parallel.ledger`.
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

# the number that a rank sends the others if its steps cannot be planned
_FAILED = 1 << 40
# forest sizes whose difference in memory gives the bytes of a token
_FEW, _MANY = 1 << 12, 1 << 13


def _refusal(model: nn.Module) -> UnsupportedError | None:
    """The reason why a model cannot compute a forest in several steps; None where it can."""
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
    """Measures the bytes per token that plans with trunks need, for a model as it trains now.

        plan = plan_micro_batches(rollouts, max_tokens, trunks=True, import_cost=import_cost(model))

    Args:
        model: as in `sequence_logprobs` or `sequence_values`, on the device it trains on; in
            training mode if layers are recomputed.
        recompute: the `recompute` that `kept_trunks` will get. "auto" counts as the least memory it
            can reach: all layers recomputed, and no graph of a trunk.
        recompute_trunks: the `recompute_trunks` that `kept_trunks` will get.

    Returns:
        ImportCost: the bytes of an own token, of an imported token and of a kept trunk's token.

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
    """Measures the memory of imported and own tokens, as the model trains now.

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
    # a layer that is not recomputed as a whole holds its rows from its forward to its backward;
    # frozen layers have no backward
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
        max_step_tokens: what a process may hold of one step, in own tokens; imported ones are
            weighed.
        import_cost: the weight of an imported token. Default: read from the model.

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
        """The steps of this process: one where the forest fits, as another rank's may not fit."""
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
        """Plans steps that fit `ranks` ranks; None where one step holds the forest."""
        limit = at_least_one("max_step_tokens", self._most)
        # applies however large the forest is
        refuse(STEPS, self._model)
        if packed.num_tokens <= limit * ranks:
            return None
        refuse(SEVERAL_STEPS, self._model)
        check_rope(transformer, packed.mask.host, divided="each step of max_step_tokens")
        cost = self._cost or step_cost_of(self._model, transformer, packed.device, self._recompute)
        # a rank owns its share of a step's tokens and may import the rest; where ranks divide
        # heads, it imports no larger share than it owns
        share = 1 / ranks
        if ranks > 1 and not by_heads:
            share += cost.weight * (1 - share)
            cost = replace(cost, token_bytes=share * (cost.token_bytes or 0.0))
        return plan_any_steps(packed, max(1, int(limit / share)), import_cost=cost)


def with_at_least(border: np.ndarray, least: int) -> np.ndarray:
    """Moves and drops borders of slots so that `least` tokens or more lie between two."""
    kept = [int(border[-1])]
    for start in border[-2:0:-1].tolist():
        if least <= (start := min(start, kept[-1] - least)):
            kept.append(start)
    return np.array([0, *kept[::-1]])


def rows_in_steps(
    model: nn.Module,
    transformer: Any,
    forward: PartForward,
    recompute: Recompute,
    divide: Callable[[], Divided],
) -> Rows | None:
    """Computes the rows of all units and tokens in steps; None where every rank's forest fits one.

    Args:
        forward: calls the model over a step.
        divide: gives the steps of this process, or raises, which the other ranks then learn. In a
            group all ranks have agreed on them.

    Returns:
        Rows as `forward` gives them, of all units and tokens (in a group: of this rank's), with one
        node of autograd's graph for all steps.

    Raises:
        UnsupportedError: a model refused by `SEVERAL_STEPS`; and what `divide` raises.
        ForestError: another rank's steps are refused or do not fit.
    """
    packed = forward.packed
    device = packed.device
    trains = torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters())
    problem, undivided, modes, divided = None, None, None, None
    scored: list[tuple[np.ndarray, np.ndarray]] = []
    try:
        # raises what each forward would refuse
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
        # a forest that fits is divided too if another rank's is
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
    rows_of_steps = Run(events, ledger, gives, runs, check, inline=True).give()
    assert rows_of_steps is not None
    runs.settle("each step of max_step_tokens=")
    units = np.concatenate([units for units, _ in scored])
    tokens = np.concatenate([part.own_tokens for part in divided.cells])
    return tuple(
        _in_order(torch.cat(rows), units if kind == 0 else tokens)
        for kind, rows in enumerate(zip(*rows_of_steps, strict=True))
    )


def _in_order(rows: torch.Tensor, place: np.ndarray) -> torch.Tensor:
    """Sorts rows by the number of their unit: a step may score units whose tokens others own."""
    if (np.diff(place) > 0).all():
        return rows
    return rows.index_select(0, move(torch.from_numpy(np.argsort(place)), rows.device))
