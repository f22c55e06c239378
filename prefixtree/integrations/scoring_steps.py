"""A packed forest scored in steps through a model: `sequence_logprobs(max_tokens=)`.

Here stands what steps need of the model: how large they may be, which wrappers run them, and how
ranks agree on their number. How steps borrow from one another is in `parallel.steps`.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from prefixtree.errors import ForestError, UnsupportedError
from prefixtree.forest import PrefixForest
from prefixtree.integrations.families import family_of, forward_inputs
from prefixtree.integrations.model_checks import runs_deepspeed
from prefixtree.integrations.recompute.forward import Recompute, memory_of, recomputed_forward
from prefixtree.integrations.recompute.layers import Mode, layers_of
from prefixtree.integrations.recompute.plan import RecomputePlan
from prefixtree.integrations.scored_units import ScoredUnits, Units, units_on_device
from prefixtree.integrations.shares import Share
from prefixtree.packing.arguments import at_least_one
from prefixtree.packing.borrow_cost import BorrowCost, borrow_cost_of
from prefixtree.packing.layout import PackedForest, pack
from prefixtree.packing.mask import TreeMask
from prefixtree.packing.parts import Part
from prefixtree.packing.steps import Steps, plan_any_steps
from prefixtree.packing.transfers import move
from prefixtree.parallel.attention import PartMask
from prefixtree.parallel.steps import LoanStore, StepExchanges, StepRun, run_in_steps

#: Calls the model once: (mask, keywords, units) -> scores [u, columns].
Forward = Callable[[TreeMask, dict[str, Any], Units], torch.Tensor]

# what a rank whose steps cannot be planned tells the others
_FAILED = 1 << 40
# tokens between which the memory of a token is read off
_FEW, _MANY = 1 << 12, 1 << 13


def check_steps(model: nn.Module, causal_lm: Any, recompute: Recompute) -> None:
    """Refuses what is not verified to run in steps.

    Raises:
        UnsupportedError: with what stands in the way and the way to mend it.
        ValueError: recompute="auto".
    """
    config = causal_lm.config.get_text_config()
    instead = "score without max_tokens, in micro-batches (plan_micro_batches)"
    if family_of(config).rules:
        raise UnsupportedError(
            f"{config.model_type} has recurrent layers, whose states are not handed from step to "
            f"step: {instead}"
        )
    for module in model.modules():
        if isinstance(module, DistributedDataParallel) and module.static_graph:
            raise UnsupportedError(
                "DistributedDataParallel with static_graph=True expects one backward per update, "
                f"and steps have several: leave static_graph at False, or {instead}"
            )
    if runs_deepspeed(model):
        raise UnsupportedError(
            "DeepSpeed counts one backward per micro-batch, and steps have several: use FSDP2, or "
            f"{instead}"
        )
    if recompute == "auto":
        raise ValueError(
            "recompute='auto' plans for a forest in one forward; with max_tokens the budget bounds "
            "the memory: give recompute='all', 'all_but_attention', 'nothing' or a RecomputePlan"
        )


def step_cost_of(
    model: nn.Module, causal_lm: Any, device: torch.device, recompute: Recompute
) -> BorrowCost:
    """What a borrowed token takes beside an own one, as the model trains now.

    Raises:
        UnsupportedError: a family whose memory cannot be traced.
    """
    try:
        memory = memory_of(model, causal_lm, device)
        modes = _modes(model, causal_lm, recompute)
    except UnsupportedError as problem:
        raise UnsupportedError(
            f"{problem}; for max_tokens give borrow_cost=BorrowCost(...) with the bytes of a token"
        ) from None
    peaks = [memory.peak(tokens, modes) for tokens in (_FEW, _MANY)]
    cost = borrow_cost_of(memory.cost, (peaks[1] - peaks[0]) / (_MANY - _FEW))
    # a layer that is not recomputed whole holds its rows from its forward to its backward
    kept = sum(mode != "all" for mode in modes) / len(modes)
    return replace(cost, kept_copies=kept)


def _modes(model: nn.Module, causal_lm: Any, recompute: Recompute) -> tuple[Mode, ...]:
    """What each layer recomputes: as asked for, or as the model is set."""
    if isinstance(recompute, RecomputePlan):
        return recompute.modes
    layers = layers_of(causal_lm)
    if recompute is not None and torch.is_grad_enabled():
        mode: Any = recompute
        return (mode,) * len(layers)
    wrapped = any(isinstance(module, CheckpointWrapper) for module in model.modules())
    return tuple(
        "all" if wrapped or (layer.training and layer.gradient_checkpointing) else "nothing"
        for layer in layers
    )


def scores_in_steps(
    forward: Forward,
    model: nn.Module,
    causal_lm: Any,
    packed: PackedForest,
    found: ScoredUnits,
    share: Share,
    max_tokens: int,
    borrow_cost: BorrowCost | None,
    recompute: Recompute,
) -> torch.Tensor:
    """The scores of all units, computed in steps of at most `max_tokens`.

    Args:
        forward: calls the model once.
        model, causal_lm, packed, found: as `sequence_logprobs` has them.
        share: of the whole forest.
        max_tokens: of one step, borrowed tokens weighed.
        borrow_cost: what a borrowed token weighs. Default: read from the model.
        recompute: as in `sequence_logprobs`.

    Returns:
        [U, columns], with one node of the graph behind it where gradients are enabled.

    Raises:
        UnsupportedError, ValueError: see `check_steps`.
        ForestError: a path that fits no steps, on this rank or another.
    """
    device = packed.device
    steps, problem = None, None
    try:
        max_tokens = at_least_one("max_tokens", max_tokens)
        check_steps(model, causal_lm, recompute)
        # what each forward would refuse
        recomputed_forward(model, causal_lm, packed, 0, recompute)
        if packed.num_tokens > max_tokens:
            cost = borrow_cost or step_cost_of(model, causal_lm, device, recompute)
            steps = plan_any_steps(packed, max_tokens, borrow_cost=cost)
    except Exception as failure:
        # raised once the others know
        problem = failure
    count = _FAILED if problem is not None else 1 if steps is None else len(steps)
    num_runs = _most_of_all_ranks(model, count, device)
    if problem is not None:
        raise problem
    if num_runs == _FAILED:
        raise ForestError(
            f"another rank cannot compute its forest in steps of max_tokens {max_tokens}, and no "
            "rank can go on without it; its own message says what it needs"
        )
    if num_runs == 1:
        return forward(share.mask, share.inputs, share.units)
    on_host = steps is not None and steps.stats.on_host
    if steps is None:
        # other ranks have more than one
        steps = Steps(packed, np.zeros(packed.num_tokens, np.int64), 1)
    scored = [part.scored(found.predictor) for part in steps]
    which = [move(torch.from_numpy(units), device) for units, _ in scored]
    trains = torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters())
    wrapped = _Wrapped(model, device)

    def compute(step: int | None, exchanges: StepExchanges | None) -> torch.Tensor:
        with wrapped.as_in_the_forward(is_last=step == 0):
            if step is None or exchanges is None:
                dummy = _dummy(packed)
                rows = np.empty(0, np.int64)
                nothing = units_on_device(packed, found, rows, rows)
                return forward(dummy.mask, forward_inputs(dummy, causal_lm.config), nothing)
            part = steps[step]
            inputs = part_inputs(share.inputs, part, PartMask(part, exchanges))
            return forward(part.mask, inputs, units_on_device(packed, found, *scored[step]))

    store = LoanStore(steps, trains, on_host)
    run = StepRun(store, which, compute, num_runs, wrapped.check_parameters)
    return run_in_steps(run, device, trains)


# ---- a part through a model ----------------------------------------------------------------------


def part_inputs(inputs: dict[str, Any], part: Part, mask: PartMask) -> dict[str, Any]:
    """The keywords of a forward over a part, from those of the whole forest."""
    own = part.tables().own_tokens
    rows = {name: inputs[name].index_select(-1, own) for name in ("input_ids", "position_ids")}
    return {**inputs, **rows, "tree_mask": mask}


def _dummy(packed: PackedForest) -> PackedForest:
    """One token that the model is sure to know: what a rank runs while others have a step more."""
    tokens = packed.forest.tokens
    assert tokens is not None
    return pack(PrefixForest.from_parents([-1], [1], tokens[:1])).to(packed.device)


# ---- wrappers and ranks --------------------------------------------------------------------------


class _Wrapped:
    """What a backward must find as its forward did: weights, autocast, and DDP's synchronisation.

    The gradients of all steps but the last stay local under DDP. FSDP reduces those of every step
    where it is set to: a whole gradient that waits would take the memory of all its shards.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._type = device.type
        self._autocast = (
            torch.get_autocast_dtype(device.type),
            torch.is_autocast_enabled(device.type),
            torch.is_autocast_cache_enabled(),
        )
        ddp = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
        self._ddp = [(module, module.require_backward_grad_sync) for module in ddp]
        # tensors made in inference mode have no versions, and no backward
        versioned = ((name, p) for name, p in model.named_parameters() if not p.is_inference())
        self._found = [(name, p, p._version, p.requires_grad) for name, p in versioned]
        # fused optimizers change parameters and leave their versions as they are (torch 2.13)
        updated = self._updated = set[int]()
        hook = register_optimizer_step_post_hook(
            lambda optimizer, *_: updated.update(
                id(p)
                for group in optimizer.param_groups
                for p in group["params"]
                if p.grad is not None
            )
        )
        weakref.finalize(self, hook.remove)

    def check_parameters(self) -> None:
        """Before each step of the backward.

        Raises:
            RuntimeError: a parameter changed since the forward, or whether it is trained.
        """
        for name, parameter, version, is_trained in self._found:
            is_updated = is_trained and id(parameter) in self._updated
            if parameter._version != version or is_updated:
                raise RuntimeError(
                    f"{name} changed between sequence_logprobs(max_tokens=) and its backward, "
                    "which runs the steps again: call backward() before optimizer.step(), or "
                    "score again after it"
                )
            if parameter.requires_grad != is_trained:
                raise RuntimeError(
                    f"requires_grad of {name} is {parameter.requires_grad}, and was {is_trained} "
                    "in sequence_logprobs(max_tokens=), whose backward runs the steps again: call "
                    "backward() with the same adapters and frozen parameters as the forward"
                )

    @contextmanager
    def as_in_the_forward(self, is_last: bool) -> Iterator[None]:
        """A context for every forward of a step.

        Raises:
            RuntimeError: a parameter changed since the first pass.
        """
        if not torch.is_grad_enabled():
            with warnings.catch_warnings():
                # reentrant checkpointing, which has nothing to recompute here
                warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
                yield
            return
        self.check_parameters()
        before = [module.require_backward_grad_sync for module, _ in self._ddp]
        for module, synchronises in self._ddp:
            module.require_backward_grad_sync = synchronises and is_last
        try:
            with torch.autocast(self._type, *self._autocast):
                yield
        finally:
            for (module, _), value in zip(self._ddp, before, strict=True):
                module.require_backward_grad_sync = value


def _most_of_all_ranks(model: nn.Module, count: int, device: torch.device) -> int:
    """The most steps of any rank: those that shard or copy the model run it equally often."""
    if not (groups := groups_of(model)):
        return count
    most = torch.tensor(count, device=device)
    for group in groups:
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    return int(most)


def groups_of(model: nn.Module) -> list[Any]:
    """The groups of ranks that run the model in lockstep, in an order that all ranks share."""
    kinds = DistributedDataParallel, FullyShardedDataParallel
    groups = [m.process_group for m in model.modules() if isinstance(m, kinds)]
    meshes = (getattr(parameter, "device_mesh", None) for parameter in model.parameters())
    for mesh in dict.fromkeys(meshes):
        groups += [] if mesh is None else mesh.get_all_groups()
    return list(dict.fromkeys(groups))
