"""Chooses what one forward recomputes: what the caller said, or what the free memory asks for."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from prefixtree._numbers import integer, number
from prefixtree.errors import UnsupportedError, with_hints
from prefixtree.images.placements import place
from prefixtree.images.vision import images_train
from prefixtree.models.families import checkpoint_wrappers
from prefixtree.models.layers import device_of, fsdp2_units, layers_of
from prefixtree.packing.layout import PackedForest
from prefixtree.parallel.agreement import agree
from prefixtree.planning.micro_batch import MicroBatch, packed_of
from prefixtree.recompute.image_work import ImageWork
from prefixtree.recompute.layers import (
    MODES,
    Mode,
    recomputing,
)
from prefixtree.recompute.measured import Learnt, MeasuredPlan, learning, learnt_of
from prefixtree.recompute.plan import (
    PartWork,
    RecomputePlan,
    Work,
    modes_at,
    place_of,
    plan_for,
    reserve,
    scoring_bytes,
    tokens_that_fit,
    waiting_bytes,
)
from prefixtree.recompute.recorder import NotMeasuredError, meter_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from prefixtree.images.images import Images
    from prefixtree.recompute.memory import EncoderMemory, ModelMemory
    from prefixtree.wings import ForwardWing

#: What `sequence_logprobs(recompute=)` and `sequence_values(recompute=)` take.
Recompute = Literal["auto"] | Mode | RecomputePlan | None
# (dtype in which a vision encoder takes pixels) -> the images of a forward
Shown = Callable[[torch.dtype], ImageWork | None]
# share of the memory left free by forests that only a probe sized
_OF_PROBES = 0.08
# patches per run of a vision encoder while nothing is known of the layers
_FEW_PATCHES = 1 << 12


@with_hints
def plan_recomputation(
    model: nn.Module,
    packed: PackedForest | MicroBatch,
    memory: int | None = None,
    scored: int | None = None,
    *,
    images: Images | None = None,
) -> RecomputePlan:
    """Plans what the layers of a model recompute in the backward of a packed forest.

    As few FLOPs as possible are computed again. As many of the last layers as fit recompute
    nothing. As many of the others as fit keep the outputs of attention and of recurrences. The rest
    recompute all. The memory of layers is known from micro-batches with recompute="auto". Before
    any of these, a copy of the first layers runs a few tokens; it shares the weights' memory and
    nothing else.

    With images, the vision encoder keeps its activations of the last images where that saves more
    FLOPs than layers would with these bytes. It computes the others again in the backward, as many
    at once as fit.

    Args:
        model: as `sequence_logprobs` or `sequence_values` takes it.
        packed: the packed forest, on the model's device, or a MicroBatch.
        memory: bytes for activations. Default: what is free on the device now, less gradients that
            are not there yet and 5 % of the device's memory (1 GiB at least). A plan that keeps
            anything then leaves half of what the backward of a layer takes, against fragmentation.
        scored: edges whose log-probability is computed. Default: one per token; none for a
            classifier.
        images: as `sequence_logprobs` gets them. Default: text alone.

    Returns:
        RecomputePlan: for `sequence_logprobs(recompute=)` and `sequence_values(recompute=)`.

    Raises:
        TypeError: anything but a packed forest or a MicroBatch.
        ValueError: memory or scored that is no such number.
        UnsupportedError: layers that a wrapper recomputes by itself, or whose memory is not known
            and cannot be probed (FSDP1).
        torch.OutOfMemoryError: the forest does not fit with every layer recomputed, or its largest
            image does not fit.
    """
    packed = packed_of(packed, "plan_recomputation", lambda: device_of(_transformer(model)))
    memory = None if memory is None else _bytes(memory)
    if scored is not None:
        scored = integer("scored", scored, 0, or_none=True)
    shown: Shown | None = None
    if images is not None and len((placements := place(packed, images)[0]).number):
        shown = partial(ImageWork.of, placements, images, moved=False)
    return _planned(model, packed, memory, scored, shown)


def _planned(
    model: nn.Module,
    packed: PackedForest,
    memory: int | None,
    scored: int | None,
    shown: Shown | None,
    held: int = 0,
    share: GroupShare | None = None,
    learns: bool = False,
) -> RecomputePlan:
    """Plans as `plan_recomputation`; held and share as in `recomputed_forward`."""
    # with `learns` its forward runs now, so that layers may be measured in it
    causal_lm, device = _transformer(model), packed.device
    scored = packed.num_tokens if scored is None else scored
    trains = lm_head_trains(causal_lm)
    # a classifier scores nothing: its rows are those of the last norm
    scored = 0 if trains is None else scored
    work: Work | PartWork = Work(packed.forest, scored, bool(trains))
    if share is not None:
        work = replace(share.work, scored=scored, trains_lm_head=bool(trains))
    learnt = learnt_so_far(causal_lm, device)
    learns = learns and meter_of(device) is not None
    with_spare = memory is None
    if memory is None:
        memory = _left_for_activations(model, causal_lm, device) - held - round(learnt.margin)
    if learns and learnt.memory() is None:
        first = first_plan(model, causal_lm, device, work, memory)
        if first is not None:
            return first
    of_layers = learnt.memory() if learns else None
    if of_layers is None:
        of_layers = memory_of(model, causal_lm, device)
    if shown is None:
        plan = plan_for(of_layers, work, memory, with_spare=with_spare)
    else:
        encoder = encoder_memory_of(model, causal_lm, device)
        if share is not None:
            # features travel between ranks after the vision encoder, all of whose runs are
            # computed again
            encoder = replace(encoder, may_keep=False)
        work = replace(work, images=shown(encoder.dtype))
        plan = plan_for(of_layers, work, memory, encoder, with_spare=with_spare)
    if not learns:
        return plan
    if share is None:
        ends = scoring_bytes(of_layers, work), waiting_bytes(of_layers, work)

        def peak(modes: Sequence[Mode]) -> int:
            more = of_layers.peak(work.num_tokens, modes, *ends)
            return plan.peak_bytes + more - of_layers.peak(work.num_tokens, plan.modes, *ends)

        compiled = _is_compiled(causal_lm)
        modes = learnt.more_modes(plan.modes, compiled, lambda x: peak(x) <= memory)
        plan = replace(plan, modes=modes, peak_bytes=peak(modes))
    return measured_plan(plan, learnt, work)


def measured_plan(plan: RecomputePlan, learnt: Learnt, work: Work | PartWork) -> RecomputePlan:
    """Marks a plan to be measured, if that tells something new."""
    if not learnt.tells(plan.modes, work.num_tokens):
        return plan
    return MeasuredPlan(plan.modes, plan.peak_bytes, plan.patches, plan.kept, work=work)


def first_plan(
    model: nn.Module,
    causal_lm: Any,
    device: torch.device,
    work: Work | PartWork,
    available: float,
    tokens: int = 0,
) -> MeasuredPlan | None:
    """Plans a forward before anything is known of layers; None if memory needs a probe first."""
    # `tokens` are of the largest forward that runs so, if that is not `work`
    learnt = learnt_so_far(causal_lm, device)
    modes = _first_modes(causal_lm, device)
    if learnt.needs_at_most(max(tokens, work.num_tokens)) > available:
        with suppress(NotMeasuredError):
            memory_of(model, causal_lm, device)
            return None
        modes = least_plan(len(modes)).modes
    return MeasuredPlan(modes, 0, _FEW_PATCHES, 0, work=work, first=True)


def least_plan(layers: int) -> RecomputePlan:
    """Makes the plan that keeps least."""
    return RecomputePlan(modes_at(layers, layers, layers), 0, _FEW_PATCHES, 0)


def _first_modes(causal_lm: Any, device: torch.device) -> tuple[Mode, ...]:
    return learnt_so_far(causal_lm, device).first_modes(_is_compiled(causal_lm))


@dataclass(frozen=True)
class GroupShare:
    """A rank's part of a forest under "auto"; ranks of the group recompute the same layers."""

    # the work of the part, before its scored edges are known
    work: PartWork
    group: ProcessGroup

    def agreed(
        self,
        device: torch.device,
        plan: Callable[[], RecomputePlan],
        first_modes: Callable[[], Sequence[Mode]] | None = None,
    ) -> RecomputePlan:
        """The plan of this rank, with as much recomputation in each layer as any rank needs.

        device is where the group's collectives take tensors. first_modes gives the modes of all
        ranks if none knows its layers; if only some know theirs, all recompute every layer. If
        `plan` raises on one rank, the others raise a RuntimeError.
        """
        import torch.distributed as dist

        rank_plan = agree(self.group, device, lambda: (plan(), {}), {})
        # layers that recompute all stand first, and those that recompute nothing last
        knows_nothing = isinstance(rank_plan, MeasuredPlan) and rank_plan.first
        reduced = torch.tensor(
            [*place_of(rank_plan), knows_nothing, not knows_nothing], device=device
        )
        dist.all_reduce(reduced, dist.ReduceOp.MAX, group=self.group)
        first, kept, any_knows_nothing, any_knows = reduced.tolist()
        if any_knows_nothing and any_knows:
            first = kept = len(rank_plan.modes)
        elif any_knows_nothing and first_modes is not None:
            return replace(rank_plan, modes=tuple(first_modes()))
        return replace(rank_plan, modes=modes_at(first, kept, len(rank_plan.modes)))


@with_hints
def max_micro_batch_tokens(
    model: nn.Module, memory: int | None = None, scored_share: float = 1.0
) -> int:
    """Predicts the most distinct tokens of a micro-batch, for `plan_micro_batches(max_tokens=)`.

    With that many tokens, every layer is recomputed. Micro-batches with fewer tokens recompute less
    with `recompute="auto"`.

    Args:
        model: as `plan_recomputation` takes it, on the device it trains on.
        memory: bytes for activations. Default: as for `plan_recomputation`.
        scored_share: scored edges divided by distinct tokens; ignored for a classifier. Default:
            1.0.

    Returns:
        A number of tokens; 0 where not even one fits.

    Raises:
        ValueError: memory that is no number, or a scored_share below 0.
        UnsupportedError: as `plan_recomputation`.
    """
    memory = None if memory is None else _bytes(memory)
    scored_share = number("scored_share", scored_share, 0)
    from prefixtree.models.checks import check_loaded

    causal_lm = _transformer(model)
    check_loaded(causal_lm)
    device = device_of(causal_lm)
    if memory is None:
        memory = _left_for_activations(model, causal_lm, device)
    of_layers, trains = memory_of(model, causal_lm, device, ("all",)), lm_head_trains(causal_lm)
    if not learnt_so_far(causal_lm, device).tokens:
        # on an H200 a forest of 90,303 tokens took 6 % more than a probe of 2,048 had told
        memory -= round(_OF_PROBES * memory)
    return tokens_that_fit(
        of_layers, memory, 0.0 if trains is None else scored_share, trains_lm_head=bool(trains)
    )


def _bytes(memory: Any) -> int:
    """A number of bytes; below 0 if nothing is free."""
    return int(number("memory", memory, or_none=True, note=" of bytes, as 40 * 2**30"))


def _transformer(model: nn.Module) -> Any:
    from prefixtree.models.checks import find_causal_lm, transformer_of

    transformer = transformer_of(model)
    _check_unwrapped(model)
    # a model of AutoModel is no classifier either
    return find_causal_lm(model) if transformer.base_model is transformer else transformer


def lm_head_trains(transformer: Any) -> bool | None:
    """Whether the lm_head's weight gets a gradient; None for a classifier, which has no lm_head."""
    head = transformer.get_output_embeddings()
    return None if head is None else any(p.requires_grad for p in head.parameters())


def _check_unwrapped(model: nn.Module) -> None:
    if checkpoint_wrappers(model):
        raise UnsupportedError(
            "its layers are inside torch's CheckpointWrapper (activation_checkpointing of "
            "accelerate's FSDP), which recomputes them whatever is planned: leave it off"
        )


def left_for_activations(model: nn.Module, device: torch.device) -> tuple[Any, int]:
    """The causal language model or classifier, and the bytes that its activations may take now."""
    transformer = _transformer(model)
    return transformer, _left_for_activations(model, transformer, device)


def _left_for_activations(model: nn.Module, causal_lm: Any, device: torch.device) -> int:
    return available_bytes(device) - _missing_gradients(model) - gathered_bytes(causal_lm)


def recomputed_forward(
    model: nn.Module,
    causal_lm: Any,
    packed: PackedForest,
    scored: int,
    recompute: Recompute,
    held: int = 0,
    forwards: Mapping[str, ForwardWing] = MappingProxyType({}),
    share: GroupShare | None = None,
) -> tuple[Mode | RecomputePlan, AbstractContextManager[None]]:
    """Chooses what layers and vision encoder compute again; gives a context for the forward too.

    held are bytes held until the backward in addition to activations of layers; forwards the wings
    of the forward, by name. share is of a rank of a group, which computes a part of the forest.
    """
    if not causal_lm.training:
        raise UnsupportedError(
            f"recompute={recompute!r}: transformers recomputes layers in training mode alone; call "
            "model.train() (dropout is refused anyway), or leave recompute=None"
        )
    layers = len(layers_of(causal_lm))
    choice: Mode | RecomputePlan
    modes: Sequence[Mode]
    if recompute == "auto":
        of_images: Shown | None = None
        shown: Any = forwards.get("images")
        if shown is not None and len(shown.placed.placements.number):
            placed = shown.placed
            if share is None:
                shown_by = placed.placements, placed.images
                of_images = partial(ImageWork.of, *shown_by, moved=True)
            else:
                of_images = partial(ImageWork.of_rank, shown.encodings)
        planned = partial(_auto, model, causal_lm, packed, scored, of_images, held, share)
        first = partial(_first_modes, causal_lm, packed.device)
        plan = planned() if share is None else share.agreed(packed.device, planned, first)
        choice, modes = plan, plan.modes
    elif isinstance(recompute, RecomputePlan):
        choice, modes = recompute, recompute.modes
        if len(modes) != layers:
            raise ValueError(
                f"recompute is a plan for {len(modes)} layers, and the model has {layers}: plan "
                "with this model"
            )
    elif recompute is not None and recompute in MODES:
        choice, modes = recompute, [recompute] * layers
    else:
        raise ValueError(
            f"recompute must be None, 'auto', {', '.join(map(repr, MODES))} or a RecomputePlan, "
            f"got {recompute!r}"
        )
    context = recomputing(causal_lm, modes)
    meter = meter_of(packed.device)
    measured = isinstance(choice, MeasuredPlan)
    watched = recompute == "auto" and isinstance(choice, RecomputePlan) and choice.peak_bytes
    if meter and isinstance(choice, RecomputePlan) and (measured or watched):
        learnt = learnt_so_far(causal_lm, packed.device)
        allowed = choice.peak_bytes + held + _missing_gradients(causal_lm)
        allowed += gathered_bytes(causal_lm)
        context = _both(context, learning(learnt, causal_lm, meter, choice, allowed))
    return choice, context


@contextmanager
def _both(*contexts: AbstractContextManager[None]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _auto(
    model: nn.Module,
    causal_lm: Any,
    packed: PackedForest,
    scored: int,
    shown: Shown | None,
    held: int,
    share: GroupShare | None,
) -> RecomputePlan:
    """The plan of "auto"; it recomputes all if nothing can be known of the layers."""
    try:
        return _planned(model, packed, None, scored, shown, held, share, learns=True)
    except NotMeasuredError as problem:
        warnings.warn(f"recompute='auto' recomputes every layer: {problem}", stacklevel=2)
        return least_plan(len(layers_of(causal_lm)))


def memory_of(
    model: nn.Module,
    causal_lm: Any,
    device: torch.device,
    modes: tuple[Mode, ...] = MODES,
) -> ModelMemory:
    """The memory model of a model as it trains now, from micro-batches or else from a probe.

    `modes` must have been measured; others may count as more than they take.
    """
    # autocast, FSDP2's mixed precision, adapters and compiled layers count as they are now
    learnt = learnt_so_far(causal_lm, device)
    missing = [mode for mode in modes if not learnt.knows((mode,))]
    if missing:
        try:
            from prefixtree.recompute.probes import probe
        except ImportError as problem:
            raise NotMeasuredError(
                "nothing is known of the layers of this model, and they cannot be probed: torch "
                f"{torch.__version__} lacks a name that is not public ({problem}); give recompute "
                "as a mode or a RecomputePlan"
            ) from problem
        for run in probe(causal_lm, device, _dtypes(causal_lm, device)[0], missing):
            learnt.add(run)
    memory = learnt.memory()
    assert memory is not None
    return memory


def learnt_so_far(causal_lm: Any, device: torch.device) -> Learnt:
    """Finds what is known of a model's layers, as it trains now."""
    dtype, autocast = _dtypes(causal_lm, device)
    facts = dtype, autocast, device.type, _is_compiled(causal_lm), _begins_with_gradient(causal_lm)
    return learnt_of(causal_lm, (autocast or dtype).itemsize, *facts)


def _is_compiled(causal_lm: Any) -> bool:
    return vars(layers_of(causal_lm)[0]).get("_compiled_call_impl") is not None


def encoder_memory_of(model: nn.Module, causal_lm: Any, device: torch.device) -> EncoderMemory:
    """The memory of a model's vision encoder as it trains now, always by a probe."""
    from prefixtree.recompute.encoder_memory import encoder_memory

    return encoder_memory(causal_lm, device, *_dtypes(causal_lm, device))


def _begins_with_gradient(causal_lm: Any) -> bool:
    """Whether hidden states may get a gradient though the embedding does not train."""
    # a hook gives one (`enable_input_require_grads`), or images do
    hooks = causal_lm.get_input_embeddings()._forward_hooks.values()
    # FSDP2's hooks ask for none
    hooked = any(not hook.__module__.startswith("torch.distributed.") for hook in hooks)
    return hooked or images_train(causal_lm)


def _dtypes(causal_lm: Any, device: torch.device) -> tuple[torch.dtype, torch.dtype | None]:
    """The dtypes of weights and of autocast."""
    layer = layers_of(causal_lm)[0]
    # FSDP1 takes a layer's parameters away, and quantised parameters have their storage's dtype
    dtypes = [p.dtype for p in causal_lm.parameters() if p.is_floating_point()]
    dtype = dtypes[0]
    if isinstance(layer, FSDPModule):
        dtype = layer._get_fsdp_state()._mp_policy.param_dtype or dtype
    autocast = None
    if torch.is_autocast_enabled(device.type):
        autocast = torch.get_autocast_dtype(device.type)
    return dtype, autocast


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
        # this rank's part of a sharded parameter
        getattr(p, "_local_tensor", p).nbytes
        for p in model.parameters()
        if p.requires_grad and p.grad is None
    )


def gathered_bytes(causal_lm: Any) -> int:
    """Bytes that FSDP2 takes for whole parameters, their gradients and their exchange."""
    units: dict[Any, int] = defaultdict(int)
    whole_bytes = 0
    for layer in layers_of(causal_lm):
        if isinstance(layer, FSDPModule):
            # layers that were wrapped together share the state, and travel together
            state: Any = layer._get_fsdp_state()
            units[state] += sum(p.nbytes for p in layer.parameters())
            # with reshard_after_forward=False a layer is whole until its backward
            if any(unit.post_forward_mesh_info is None for unit in fsdp2_units(layer)):
                narrow = state._mp_policy.param_dtype
                whole_bytes += sum(
                    p.numel() * (narrow or p.dtype).itemsize for p in layer.parameters()
                )
    # two units on their way in, one at work, and a unit's gradients on their way out
    return whole_bytes + 4 * max(units.values(), default=0)
