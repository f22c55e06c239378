"""The plan of one forward: what a caller asked for, in what memory is available now."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from prefixtree._numbers import integer, number
from prefixtree.errors import UnsupportedError, with_hints
from prefixtree.images.placements import place
from prefixtree.images.tower import has_compiled_blocks
from prefixtree.images.vision import pictures_train, tower_of
from prefixtree.models.families import checkpoint_wrappers
from prefixtree.models.layers import device_of, fsdp2_units, layers_of
from prefixtree.models.low_precision import is_quantised
from prefixtree.packing.layout import PackedForest
from prefixtree.parallel.agreement import agree
from prefixtree.planning.micro_batch import MicroBatch, packed_of
from prefixtree.recompute.layers import MODES, Mode, recomputing
from prefixtree.recompute.picture_work import PictureWork
from prefixtree.recompute.plan import (
    PartWork,
    RecomputePlan,
    Work,
    modes_at,
    place_of,
    plan_for,
    reserve,
    tokens_that_fit,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from prefixtree.images.pictures import Pictures
    from prefixtree.images.vision import EncodedPictures
    from prefixtree.recompute.trace import ModelMemory
    from prefixtree.recompute.trace_tower import TowerMemory
    from prefixtree.recompute.traced_runs import Adapters, Trains

#: What `sequence_logprobs(recompute=)` and `sequence_values(recompute=)` take.
Recompute = Literal["auto"] | Mode | RecomputePlan | None
# from the dtype in which a tower takes pixels to the pictures of a forward
Shown = Callable[[torch.dtype], PictureWork | None]
# of torch.compile and FSDP1, in the names of parameters
_WRAPPERS = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module)\.")


@with_hints
def plan_recomputation(
    model: nn.Module,
    packed: PackedForest | MicroBatch,
    memory: int | None = None,
    scored: int | None = None,
    *,
    pictures: Pictures | None = None,
) -> RecomputePlan:
    """Plans what the layers of a model recompute in the backward of a packed forest.

    As few FLOPs as possible are computed again: as many of the last layers as fit recompute
    nothing, as many of the others as fit keep the outputs of attention and of recurrences, and the
    rest recompute all. The memory that this takes is traced on the model's configuration, without
    computing anything, of compiled layers (`compile_layers`) as torch cuts their graphs. Liger
    Kernel's layers take less than is predicted.

    With pictures, the vision tower keeps its activations of the last ones where that saves more
    FLOPs than layers would with these bytes, and computes the others again in the backward, as many
    at once as fit.

    Args:
        model: as `sequence_logprobs` or `sequence_values` takes it.
        packed: the packed forest, on the model's device, or a MicroBatch.
        memory: bytes for activations. Default: what is free on the device now, less gradients that
            are not there yet and 5 % of the device's memory (1 GiB at least). A plan that keeps
            anything then leaves half of what the backward of a layer takes, for what fragments.
        scored: edges whose log-probability is computed. Default: one per token; none of a
            classifier.
        pictures: as `sequence_logprobs` gets them. Default: text alone.

    Returns:
        RecomputePlan: for `sequence_logprobs(recompute=)` and `sequence_values(recompute=)`.

    Raises:
        TypeError: anything but a packed forest or a MicroBatch.
        ValueError: memory or scored that is no such number.
        UnsupportedError: a family whose memory cannot be traced, or layers that a wrapper
            recomputes by itself.
        torch.OutOfMemoryError: the forest does not fit with every layer recomputed, or its largest
            picture does not fit.
    """
    packed = packed_of(packed, "plan_recomputation", lambda: device_of(_transformer(model)))
    memory = None if memory is None else _bytes(memory)
    if scored is not None:
        scored = integer("scored", scored, 0, or_none=True)
    shown: Shown | None = None
    if pictures is not None and len((placements := place(packed, pictures)[0]).number):
        shown = partial(PictureWork.of, placements, pictures, moved=False)
    return _planned(model, packed, memory, scored, shown)


def _planned(
    model: nn.Module,
    packed: PackedForest,
    memory: int | None,
    scored: int | None,
    shown: Shown | None,
    held: int = 0,
    share: GroupShare | None = None,
) -> RecomputePlan:
    """As `plan_recomputation`; held, share: as in `recomputed_forward`."""
    causal_lm = _transformer(model)
    scored = packed.num_tokens if scored is None else scored
    trains = lm_head_trains(causal_lm)
    # of a classifier nothing is scored: its rows are those of the last norm
    scored = 0 if trains is None else scored
    work: Work | PartWork = Work(packed.forest, scored, bool(trains))
    if share is not None:
        work = replace(share.work, scored=scored, trains_lm_head=bool(trains))
    traced = memory_of(model, causal_lm, packed.device)
    with_spare = memory is None
    if memory is None:
        memory = _left_for_activations(model, causal_lm, packed.device) - held
    if shown is None:
        return plan_for(traced, work, memory, with_spare=with_spare)
    tower = tower_memory_of(model, causal_lm, packed.device)
    if share is not None:
        # features travel between ranks behind the tower, all of whose runs are computed again
        tower = replace(tower, may_keep=False)
    work = replace(work, pictures=shown(tower.dtype))
    return plan_for(traced, work, memory, tower, with_spare=with_spare)


@dataclass(frozen=True)
class GroupShare:
    """A part of a forest that "auto" plans on a rank of a group, whose ranks recompute the same
    layers.

    Attributes:
        work: of the part, before its scored edges are known.
        group: the process group.
    """

    work: PartWork
    group: ProcessGroup

    def agreed(self, device: torch.device, plan: Callable[[], RecomputePlan]) -> RecomputePlan:
        """The plan of this rank, with as much recomputation in each layer as any rank needs.

        Args:
            device: where the group's collectives take tensors. plan: plans for this rank.

        Raises:
            RuntimeError: on the other ranks, if `plan` raised on one.
        """
        import torch.distributed as dist

        own = agree(self.group, device, lambda: (plan(), {}), {})
        # layers that recompute all stand first, and those that recompute nothing last
        most = torch.tensor(place_of(own), device=device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
        first, kept = most.tolist()
        return replace(own, modes=modes_at(first, kept, len(own.modes)))


@with_hints
def max_micro_batch_tokens(
    model: nn.Module, memory: int | None = None, scored_share: float = 1.0
) -> int:
    """The most distinct tokens of one micro-batch, for `plan_micro_batches(max_tokens=)`.

    Every layer is recomputed then; micro-batches with fewer tokens recompute less with
    `recompute="auto"`.

    Args:
        model: as `plan_recomputation` takes it, on the device it trains on.
        memory: bytes for activations. Default: as for `plan_recomputation`.
        scored_share: scored edges divided by distinct tokens; none of a classifier. Default: 1.0.

    Returns:
        A number of tokens; 0 where not even one fits.

    Raises:
        ValueError: memory that is no number, or a scored_share below 0.
        UnsupportedError: a family whose memory cannot be traced.
    """
    memory = None if memory is None else _bytes(memory)
    scored_share = number("scored_share", scored_share, 0)
    from prefixtree.models.checks import check_loaded

    causal_lm = _transformer(model)
    check_loaded(causal_lm)
    device = device_of(causal_lm)
    if memory is None:
        memory = _left_for_activations(model, causal_lm, device)
    traced, trains = memory_of(model, causal_lm, device, ("all",)), lm_head_trains(causal_lm)
    return tokens_that_fit(
        traced, memory, 0.0 if trains is None else scored_share, trains_lm_head=bool(trains)
    )


def _bytes(memory: Any) -> int:
    """A number of bytes; below 0 where nothing is free."""
    return int(number("memory", memory, or_none=True, note=" of bytes, as 40 * 2**30"))


def _transformer(model: nn.Module) -> Any:
    from prefixtree.models.checks import find_causal_lm, transformer_of

    transformer = transformer_of(model)
    _check_unwrapped(model)
    # what AutoModel gives is no classifier either
    return find_causal_lm(model) if transformer.base_model is transformer else transformer


def lm_head_trains(transformer: Any) -> bool | None:
    """Whether the lm_head's weight gets a gradient; None of a classifier, which has no lm_head."""
    head = transformer.get_output_embeddings()
    return None if head is None else any(p.requires_grad for p in head.parameters())


def _check_unwrapped(model: nn.Module) -> None:
    if checkpoint_wrappers(model):
        raise UnsupportedError(
            "its layers are inside torch's CheckpointWrapper (activation_checkpointing of "
            "accelerate's FSDP), which recomputes them whatever is planned: leave it off"
        )


def left_for_activations(model: nn.Module, device: torch.device) -> tuple[Any, int]:
    """The causal language model or classifier, and the bytes of a device that its activations may
    take now.

    Raises:
        UnsupportedError: layers that a wrapper recomputes by itself.
    """
    transformer = _transformer(model)
    return transformer, _left_for_activations(model, transformer, device)


def _left_for_activations(model: nn.Module, causal_lm: Any, device: torch.device) -> int:
    return available_bytes(device) - _missing_gradients(model) - gathered_bytes(causal_lm)


def chosen_modes(
    model: nn.Module,
    causal_lm: Any,
    packed: PackedForest,
    scored: int,
    recompute: Recompute,
    held: int = 0,
    shown: EncodedPictures | None = None,
    share: GroupShare | None = None,
) -> Mode | RecomputePlan:
    """Chooses what the layers of one forward, and its vision tower, compute again.

    Args:
        scored: edges whose log-probability is computed.
        recompute: not None.
        held: bytes that are held until the backward beside activations of layers. Default: 0.
        shown: the pictures that the forward encodes. Default: text alone.
        share: of a rank of a group, which computes a part of the forest. Default: all of it.

    Raises:
        ValueError: an unknown mode, or a plan for another number of layers.
        UnsupportedError: a model in eval mode, or what `plan_recomputation` refuses.
        torch.OutOfMemoryError: see `plan_recomputation`.
    """
    if not causal_lm.training:
        raise UnsupportedError(
            f"recompute={recompute!r}: transformers recomputes layers in training mode alone; call "
            "model.train() (dropout is refused anyway), or leave recompute=None"
        )
    layers = len(layers_of(causal_lm))
    if recompute == "auto":
        of_pictures: Shown | None = None
        if shown is not None and len(shown.placed.placements.number):
            placed = shown.placed
            if share is None:
                shown_by = placed.placements, placed.pictures
                of_pictures = partial(PictureWork.of, *shown_by, moved=True)
            else:
                of_pictures = partial(PictureWork.of_rank, shown.encodings)
        plan = partial(_planned, model, packed, None, scored, of_pictures, held, share)
        return plan() if share is None else share.agreed(packed.device, plan)
    if isinstance(recompute, RecomputePlan):
        if len(recompute.modes) != layers:
            raise ValueError(
                f"recompute is a plan for {len(recompute.modes)} layers, and the model has "
                f"{layers}: plan with this model"
            )
        return recompute
    if recompute is not None and recompute in MODES:
        return recompute
    raise ValueError(
        f"recompute must be None, 'auto', {', '.join(map(repr, MODES))} or a RecomputePlan, "
        f"got {recompute!r}"
    )


def recomputing_as(causal_lm: Any, chosen: Mode | RecomputePlan) -> AbstractContextManager[None]:
    """A context for one forward, in which layers compute again what was chosen."""
    if isinstance(chosen, RecomputePlan):
        return recomputing(causal_lm, chosen.modes)
    return recomputing(causal_lm, [chosen] * len(layers_of(causal_lm)))


def memory_of(
    model: nn.Module,
    causal_lm: Any,
    device: torch.device,
    modes: tuple[Mode, ...] | None = None,
) -> ModelMemory:
    """The memory model of a model as it trains now, with autocast or FSDP2's mixed precision, with
    PEFT's adapters, and with layers as they are compiled; of these modes alone. None: of all."""
    from prefixtree.recompute.trace import trace_memory

    if is_quantised(causal_lm):
        raise UnsupportedError(
            "the memory of a quantised model is not that of its configuration, which would be "
            "traced: recompute='auto' and plan_recomputation are refused; give 'all', "
            "'all_but_attention' or 'nothing'"
        )
    dtypes = _dtypes(causal_lm, device)
    adapters = _adapters_of(model, causal_lm, dtypes[0])
    layer = layers_of(causal_lm)[0]
    compiled = vars(layer).get("_compiled_call_impl") is not None
    trains = _trains_of(causal_lm, _begins_with_gradient(causal_lm))
    return trace_memory(causal_lm.config, *dtypes, device, adapters, compiled, modes, trains)


def tower_memory_of(model: nn.Module, causal_lm: Any, device: torch.device) -> TowerMemory:
    """The same of its vision tower."""
    from prefixtree.recompute.trace_tower import trace_tower

    dtypes = _dtypes(causal_lm, device)
    adapters = _adapters_of(model, causal_lm, dtypes[0])
    compiled = has_compiled_blocks(tower_of(causal_lm))
    return trace_tower(causal_lm.config, *dtypes, adapters, _trains_of(causal_lm), compiled)


def _trains_of(causal_lm: Any, inputs: bool = False) -> Trains:
    """The parameters that train; `inputs` as in `Trains`, which says nothing of towers."""
    from prefixtree.recompute.traced_runs import Trains

    named = causal_lm.named_parameters()
    return Trains({_WRAPPERS.sub("", name): p.requires_grad for name, p in named}, inputs)


def _begins_with_gradient(causal_lm: Any) -> bool:
    """Whether hidden states may get a gradient where the embedding does not train: of a hook, as
    `enable_input_require_grads` adds one, or of pictures."""
    hooks = causal_lm.get_input_embeddings()._forward_hooks.values()
    # FSDP2's need none
    hooked = any(not hook.__module__.startswith("torch.distributed.") for hook in hooks)
    return hooked or pictures_train(causal_lm)


def _dtypes(causal_lm: Any, device: torch.device) -> tuple[torch.dtype, torch.dtype | None]:
    """Of weights, and of autocast."""
    layer = layers_of(causal_lm)[0]
    # FSDP1 takes a layer's parameters away
    dtype = next(causal_lm.parameters()).dtype
    if isinstance(layer, FSDPModule):
        dtype = layer._get_fsdp_state()._mp_policy.param_dtype or dtype
    autocast = None
    if torch.is_autocast_enabled(device.type):
        autocast = torch.get_autocast_dtype(device.type)
    return dtype, autocast


def _adapters_of(model: nn.Module, causal_lm: Any, dtype: torch.dtype) -> Adapters | None:
    # wrappers come before what they wrap
    for module in itertools.takewhile(lambda module: module is not causal_lm, model.modules()):
        configs = getattr(module, "peft_config", None)
        # a PeftModel
        if isinstance(configs, dict) and hasattr(module, "get_base_model"):
            trained = (p for p in module.parameters() if p.requires_grad)
            wide = dtype != torch.float32 and any(p.dtype == torch.float32 for p in trained)
            from prefixtree.recompute.traced_runs import Adapters

            return Adapters(dict(configs), wide)
    return None


def available_bytes(device: torch.device) -> int:
    """Free bytes of a device, those that torch's allocator holds unused too, less a reserve."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    else:
        facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free, total = (int(facts[k].split()[0]) << 10 for k in ("MemAvailable", "MemTotal"))
    return int(free - reserve(total))


def _missing_gradients(model: nn.Module) -> int:
    """Bytes of the gradients that the backward will leave where there are none yet."""
    return sum(
        # of a sharded parameter this rank's part
        getattr(p, "_local_tensor", p).nbytes
        for p in model.parameters()
        if p.requires_grad and p.grad is None
    )


def gathered_bytes(causal_lm: Any) -> int:
    """Bytes that FSDP2 takes for whole parameters, their gradients and their exchange."""
    units: dict[Any, int] = defaultdict(int)
    kept = 0
    for layer in layers_of(causal_lm):
        if isinstance(layer, FSDPModule):
            # layers that were given together share it, and travel together
            state: Any = layer._get_fsdp_state()
            units[state] += sum(p.nbytes for p in layer.parameters())
            # of reshard_after_forward=False: whole until its backward
            if any(unit.post_forward_mesh_info is None for unit in fsdp2_units(layer)):
                narrow = state._mp_policy.param_dtype
                kept += sum(p.numel() * (narrow or p.dtype).itemsize for p in layer.parameters())
    # two units on their way in, one at work, and a unit's gradients on their way out
    return kept + 4 * max(units.values(), default=0)
