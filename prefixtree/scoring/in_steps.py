"""A packed forest in steps through a model: `sequence_logprobs(max_tokens=)`, and of values.

Here stands what steps need of the model: how large they may be, which wrappers run them, and how
ranks agree on their number. How steps run is in `parallel.steps`, and what they hand on in
`parallel.ledger`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from prefixtree.errors import ForestError, UnsupportedError, refuse, with_hints
from prefixtree.models.changes import ModelStamp, changing
from prefixtree.models.checks import check_loaded, transformer_of, warn_of_hooks
from prefixtree.models.families import checkpoint_wrappers, forward_inputs
from prefixtree.models.layers import device_of, layers_of, most_of_all_ranks
from prefixtree.models.rope import check_rope
from prefixtree.packing.arguments import at_least_one
from prefixtree.packing.copies import move
from prefixtree.packing.layout import PackedForest, pack
from prefixtree.packing.mask import TreeMask
from prefixtree.parallel.ledger import Ledger, PartExchanges
from prefixtree.parallel.states import part_mask
from prefixtree.parallel.steps import StepRun, run_in_steps
from prefixtree.planning import schedule
from prefixtree.planning.costs import BorrowCost, borrow_cost_of
from prefixtree.planning.steps import Steps, plan_any_steps
from prefixtree.recompute.forward import Recompute, memory_of, recomputed_forward
from prefixtree.recompute.layers import MODES, Mode
from prefixtree.recompute.plan import RecomputePlan
from prefixtree.scoring.in_groups import Rows, of_tokens, part_inputs
from prefixtree.scoring.refusals import SEVERAL_STEPS, STEPS

#: Calls the model once: (mask, keywords, units [u] that get a row, the own token that gives each,
#: own packed tokens) -> `Rows`.
Forward = Callable[[TreeMask, dict[str, Any], np.ndarray, np.ndarray, np.ndarray], Rows]

# what a rank whose steps cannot be planned tells the others
_FAILED = 1 << 40
# tokens between which the memory of a token is read off
_FEW, _MANY = 1 << 12, 1 << 13


def check_arguments(max_tokens: int | None, borrow_cost: BorrowCost | None, group: Any) -> None:
    """Refuses arguments that do not go together.

    Raises:
        ValueError: a borrow_cost without max_tokens; max_tokens with a group.
    """
    if borrow_cost is not None and max_tokens is None:
        raise ValueError("borrow_cost goes with max_tokens, and only with it")
    if max_tokens is not None and group is not None:
        raise ValueError(
            "a forest is divided among the ranks of a group or into steps, not both: give group or "
            "max_tokens"
        )


def check_call(model: nn.Module, recompute: Recompute) -> None:
    """Refuses what does not go with `max_tokens`, however large the forest is.

    Raises:
        UnsupportedError: with what stands in the way and the way to mend it.
        ValueError: recompute="auto".
    """
    refuse(STEPS, model)
    if recompute == "auto":
        raise ValueError(
            "recompute='auto' plans for a forest in one forward; with max_tokens the budget bounds "
            "the memory: give recompute='all', 'all_but_attention', 'nothing' or a RecomputePlan"
        )


def _refusal(model: nn.Module) -> UnsupportedError | None:
    """Why a forest cannot be computed in several steps; None where it can."""
    try:
        refuse(SEVERAL_STEPS, model)
    except UnsupportedError as refusal:
        return refusal
    return None


@with_hints
def borrow_cost(
    model: nn.Module,
    recompute: Recompute = None,
    recompute_trunks: Recompute | Literal["again"] = None,
) -> BorrowCost:
    """The bytes of a model for plans with trunks, as it trains now.

        plan = plan_micro_batches(rollouts, max_tokens, trunks=True, borrow_cost=borrow_cost(model))

    Args:
        model: as `sequence_logprobs` or `sequence_values` takes it, on the device it trains on, in
            training mode if layers are recomputed.
        recompute: as `kept_trunks` will get it; of "auto" the least that it may take counts: all
            layers recomputed, and no graph of a trunk.
        recompute_trunks: as `kept_trunks` will get it.

    Returns:
        The bytes of an own token, of a borrowed one and of a kept trunk's.

    Raises:
        UnsupportedError: a family whose memory cannot be traced.
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
) -> BorrowCost:
    """The memory of a borrowed token beside that of an own one, as the model trains now.

    Raises:
        UnsupportedError: a family whose memory cannot be traced.
    """
    try:
        of_trunks = modes = _modes(model, causal_lm, recompute)
        if recompute_trunks is not None and recompute_trunks != "again":
            of_trunks = _modes(model, causal_lm, recompute_trunks)
        needed = tuple(mode for mode in MODES if mode in modes + of_trunks)
        memory = memory_of(model, causal_lm, device, needed)
    except UnsupportedError as problem:
        raise UnsupportedError(
            f"{problem}; for max_tokens give borrow_cost=BorrowCost(...) with the bytes of a token"
        ) from None
    peaks = [memory.peak(tokens, modes) for tokens in (_FEW, _MANY)]
    cost = borrow_cost_of(memory.cost, (peaks[1] - peaks[0]) / (_MANY - _FEW))
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


def rows_in_steps(
    forward: Forward,
    model: nn.Module,
    transformer: Any,
    packed: PackedForest,
    predictor: np.ndarray,
    inputs: dict[str, Any],
    pixels: dict[str, torch.Tensor],
    max_tokens: int,
    borrow_cost: BorrowCost | None,
    recompute: Recompute,
) -> Rows | None:
    """The scores or values of all units, and what else `forward` gives, in steps of at most
    `max_tokens`.

    Args:
        forward: calls the model once.
        model: what is called. transformer: the transformers model inside it.
        packed: the packed forest.
        predictor: int64 [U], the packed token that gives each unit its row.
        inputs: keywords of a forward over all of it.
        pixels: of its pictures, by a name.
        max_tokens: of one step, borrowed tokens weighed.
        borrow_cost: what a borrowed token weighs. Default: read from the model.
        recompute: as in `sequence_logprobs`.

    Returns:
        As `forward`, of all units and tokens, with one node of the graph behind them where
        gradients are enabled. None where the forests of all ranks fit one forward.

    Raises:
        UnsupportedError, ValueError: see `check_call`; a forest of several steps, see
            `SEVERAL_STEPS`.
        ForestError: steps that are refused or do not fit, on another rank.
    """
    device = packed.device
    steps, problem, undivided = None, None, None
    count = 1
    try:
        max_tokens = at_least_one("max_tokens", max_tokens)
        check_call(model, recompute)
        # what each forward would refuse
        recomputed_forward(model, transformer, packed, 0, recompute)
        undivided = _refusal(model)
        if packed.num_tokens > max_tokens:
            count = 2
            if undivided is None:
                check_rope(transformer, packed.mask.host, divided="each step of max_tokens")
                cost = borrow_cost or step_cost_of(model, transformer, device, recompute)
                steps = plan_any_steps(packed, max_tokens, borrow_cost=cost)
                count = len(steps)
    except Exception as failure:
        # raised once the others know
        problem, count = failure, _FAILED
    num_runs, refuses = most_of_all_ranks(model, [count, undivided is not None], device)
    if problem is None and 1 < num_runs < _FAILED:
        # a forest that fits is divided too where that of another rank is
        problem = undivided
    if problem is not None:
        raise problem
    if num_runs == _FAILED or (num_runs > 1 and refuses):
        raise ForestError(
            f"another rank cannot compute its forest in steps of max_tokens {max_tokens}, and no "
            "rank can go on without it; its own message says what it needs"
        )
    if num_runs == 1:
        return None
    on_host = steps is not None and steps.stats.on_host
    if steps is None:
        # other ranks have more than one
        steps = Steps(packed, np.zeros(packed.num_tokens, np.int64), 1)
    scored = [part.scored(predictor) for part in steps]
    places = [
        (move(torch.from_numpy(units), device), part.tables().own_tokens)
        for part, (units, _) in zip(steps, scored, strict=True)
    ]
    trains = torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters())
    wrapped = Wrapped(model, device)
    # what the second forward of a step reads
    read = {f"packed.{n}, or what shares its memory,": x for n, _, x in of_tokens(inputs)}
    stamp = ModelStamp(model, read | pixels, for_backward=True) if trains else None

    def compute(step: int | None, exchanges: PartExchanges | None) -> Rows:
        with wrapped.as_in_the_forward(is_last=step == 0):
            if step is None or exchanges is None:
                dummy, nothing = dummy_of(packed), np.empty(0, np.int64)
                of_dummy = forward_inputs(dummy, transformer.config)
                return forward(dummy.mask, of_dummy, nothing, nothing, nothing)
            part = steps[step]
            of_part = part_inputs(inputs, part, part_mask(exchanges))
            return forward(part.mask, of_part, *scored[step], part.own_tokens)

    def check() -> None:
        if stamp is not None and (change := stamp.change()) is not None:
            raise RuntimeError(
                f"{change} between a call with max_tokens= and its backward, which runs the steps "
                "again: call backward() before such a change (before optimizer.step(), "
                "within the same adapters and mode), or score again after it"
            )

    events = schedule.steps(num_runs, trains)
    ledger = Ledger(steps, events, parks=True, on_host=on_host)
    run = StepRun(ledger, places, compute, check)
    rows = run_in_steps(run, device, trains)
    if stamp is not None:
        stamp.settle()
        warn_of_hooks(model, "each step of max_tokens=")
    return rows


def dummy_of(packed: PackedForest) -> PackedForest:
    """A dummy, which a rank runs while others have a step more."""
    return pack(packed.forest.dummy()).to(packed.device)


# ---- wrappers and ranks --------------------------------------------------------------------------


class Wrapped:
    """Gives each step the autocast of the forward, and DDP's synchronisation to the last alone.

    The gradients of all steps but the last stay local under DDP. FSDP reduces those of every step
    where it is set to: a whole gradient that waits would take the memory of all its shards.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._type = model, device.type
        self._autocast = (
            torch.get_autocast_dtype(device.type),
            torch.is_autocast_enabled(device.type),
            torch.is_autocast_cache_enabled(),
        )
        self.synchronise_as_now()

    def synchronise_as_now(self) -> None:
        """From now on the last step synchronises where DDP now does: not within no_sync."""
        ddp = [m for m in self._model.modules() if isinstance(m, DistributedDataParallel)]
        self._ddp = [(module, module.require_backward_grad_sync) for module in ddp]

    @contextmanager
    def as_in_the_forward(self, is_last: bool) -> Iterator[None]:
        """A context for every forward of a step."""
        if not torch.is_grad_enabled():
            with warnings.catch_warnings():
                # reentrant checkpointing, which has nothing to recompute here
                warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
                yield
            return
        with changing(self._model) as changes, torch.autocast(self._type, *self._autocast):
            for module, synchronises in self._ddp:
                changes.set(module, require_backward_grad_sync=synchronises and is_last)
            yield
