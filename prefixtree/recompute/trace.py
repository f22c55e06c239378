"""The memory of a model's layers, traced on shapes without numbers.

A decoder of the model's configuration runs forward and backward on fake tensors, once per mode that
is asked for and for two numbers of tokens. Every storage counts from the operator that makes it
until nothing holds it any more. So a family needs no formula of its own: what its operators keep is
what is counted, or what is kept where torch cuts a compiled layer's graph (`partitioned`).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from prefixtree.errors import UnsupportedError
from prefixtree.experts.products import set_experts
from prefixtree.models.layers import decoder_of, layers_of
from prefixtree.models.prepared import prepare_layers
from prefixtree.models.rope import as_default_rope
from prefixtree.planning.model_cost import ModelCost, auto_class, model_cost
from prefixtree.recompute.layers import MODES, Mode
from prefixtree.recompute.traced_runs import (
    Adapters,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    LiveBytes,
    Runs,
    TraceKey,
    Trains,
)

# tokens of the two traces: multiples of what recurrent kernels take at once
_TOKENS = (512, 2048)
_Memory = TypeVar("_Memory")


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of one layer in one mode: [bytes per token, bytes whatever the number of tokens].

    Attributes:
        held: what is kept from its forward until its backward.
        working: the most that is alive in its backward beside what it and the layers before it
            hold: what is computed again, gradients of activations, a weight's gradient on its way.
    """

    held: tuple[float, float]
    working: tuple[float, float]


@dataclass(frozen=True)
class ModelMemory:
    """Bytes of activations of a causal language model in training.

    Attributes:
        layers: by mode that was traced, first layer to last.
        before: bytes per token that are held from before the first layer, the embedding's.
        after: bytes per token that the last norm holds until the backward of the layers begins.
        cost: of a token; its element_bytes are those of activations.
        norm: bytes per token that the backward of the last norm takes beside these.
        tied: bytes of the gradient that an lm_head with the embedding's weight leaves: it waits for
            the embedding's.
        frozen: layers, the first ones, that no gradient reaches. They hold nothing and compute
            nothing again, and what they work with is that of their forward.
    """

    layers: dict[Mode, tuple[LayerMemory, ...]]
    before: float
    after: float
    cost: ModelCost
    norm: float = 0.0
    tied: float = 0.0
    frozen: int = 0

    def peak(
        self,
        tokens: int,
        modes: Mode | Sequence[Mode],
        scoring: float = 0.0,
        waiting: float = 0.0,
    ) -> int:
        """The most bytes that are alive at once.

        Args:
            tokens: packed ones.
            modes: one per layer, or one for all.
            scoring: bytes that the lm_head takes while all layers hold theirs. Default: 0.0.
            waiting: bytes that wait through the backward of all layers. Default: 0.0.
        """
        count = len(next(iter(self.layers.values())))
        each = [modes] * count if isinstance(modes, str) else modes
        below = most = self.before * tokens
        for layer, mode in enumerate(each):
            of_layer = self.layers[mode][layer]
            below += of_layer.held[0] * tokens + of_layer.held[1]
            working = of_layer.working[0] * tokens + of_layer.working[1]
            most = max(most, below + working + waiting)
        return round(max(most, below + scoring))

    def scaled(self, factor: float, element_bytes: int) -> ModelMemory:
        """For layers that hold `factor` times the bytes, and keys and values of `element_bytes`."""

        def times(layer: LayerMemory) -> LayerMemory:
            held, working = ((a * factor, b * factor) for a, b in (layer.held, layer.working))
            return LayerMemory(held, working)

        return ModelMemory(
            {mode: tuple(map(times, layers)) for mode, layers in self.layers.items()},
            self.before * factor,
            self.after * factor,
            replace(self.cost, element_bytes=element_bytes),
            self.norm * factor,
            self.tied * factor,
            self.frozen,
        )


def trace_memory(
    config: Any,
    dtype: torch.dtype,
    autocast: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    adapters: Adapters | None = None,
    compiled: bool = False,
    modes: tuple[Mode, ...] | None = None,
    trains: Trains | None = None,
) -> ModelMemory:
    """Traces the model of a config; a trace of the same arguments is kept.

    Args:
        config: of a causal language model, or of a model with a text config.
        dtype: of the weights. autocast: the dtype of autocast, None where it is off.
        device: where the model trains; recurrent layers keep other things on a GPU.
        adapters: of PEFT, on the model. Default: None.
        compiled: whether the layers are compiled (`compile_layers`). Default: False. Families whose
            layers cannot be cut one by one are traced as if they were not.
        modes: those to trace; each takes as long. Default: None, which is all.
        trains: what gets gradients. Default: all parameters, or with adapters theirs.

    Raises:
        UnsupportedError: a family that transformers does not checkpoint, or one whose layers look
            at numbers, so that shapes alone do not run.
    """
    key = TraceKey(config, adapters, trains or Trains())
    try:
        # it says what training takes, also to those who ask before a forward without gradients
        with torch.inference_mode(False), torch.enable_grad():
            modes = MODES if modes is None else modes
            return _trace(key, dtype, autocast, torch.device(device).type, modes, compiled)
    except (DataDependentOutputException, DynamicOutputShapeException) as problem:
        raise UnsupportedError(
            f"the memory of {config.model_type} cannot be traced: it looks at numbers "
            f"({problem.func}); give recompute as a mode or a RecomputePlan"
        ) from None


@lru_cache(maxsize=16)
def _trace(
    key: TraceKey,
    dtype: torch.dtype,
    autocast: torch.dtype | None,
    device: str,
    modes: tuple[Mode, ...],
    compiled: bool,
) -> ModelMemory:
    traced = partial(_traced, key, dtype, autocast, device, modes)
    if not compiled:
        return traced()
    return traced_as_cut(traced, partial(_trace, key, dtype, autocast, device, modes, False))


def traced_as_cut(traced: Callable[[Any], _Memory], uncut: Callable[[], _Memory]) -> _Memory:
    """The memory of compiled code; where that cannot be cut, of code that is not compiled.

    Args:
        traced: from the module `partitioned` to the one; it builds on what is not public in torch,
            so it is imported here. uncut: gives the other.
    """
    try:
        return traced(import_module("prefixtree.recompute.partitioned"))
    except (DataDependentOutputException, DynamicOutputShapeException):
        raise
    except (ImportError, AttributeError, TypeError) as problem:
        # torch's partitioner is not public, so any version may change it
        warnings.warn(
            "the memory of compiled layers is predicted as if they were not compiled, which is "
            "more than they take, so recompute='auto' recomputes more than it has to: torch "
            f"{torch.__version__} does not cut a layer's graph as expected ({problem})",
            stacklevel=2,
        )
    except RuntimeError:
        # a layer that changes what other layers read (Gemma 3n) cannot be cut by itself
        pass
    # what a layer keeps without being compiled is more
    return uncut()


def _traced(
    key: TraceKey,
    dtype: torch.dtype,
    autocast: torch.dtype | None,
    device: str,
    modes: tuple[Mode, ...],
    cut: Any = None,
) -> ModelMemory:
    """Traces the model, its layers cut by `cut`, the module `partitioned`, if it is compiled."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    # making a model sets its attention and dtype in the config
    config = copy.deepcopy(key.config)
    set_experts(config, key.experts)
    # whose frequencies look at numbers, and keep no other memory
    as_default_rope(config.get_text_config())
    with torch.device("meta"):
        model = auto_class(config).from_config(
            config, dtype=dtype, attn_implementation="prefixtree"
        )
        if key.adapters is not None:
            key.adapters.on(model)
    key.trains.set_on(model)
    make_fake(model, fake, torch.device(device))
    layers = layers_of(model)
    if dtype != torch.bfloat16 and _has_grouped_experts(layers):
        # torch knows the shapes of grouped products in bfloat16 alone, and autocast leaves them in
        # the weights' dtype; what is kept in float32 there counts as more than it is
        half = _trace(key, torch.bfloat16, None, device, modes, cut is not None)
        return half.scaled(dtype.itemsize / 2, (autocast or dtype).itemsize)
    model.train()
    prepare_layers(model)
    parameters = list(model.parameters())
    with fake:
        for parameter in parameters:
            # as in the second micro-batch of an update: gradients are there and are added to
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    if key.trains.inputs:
        model.get_input_embeddings().register_forward_hook(lambda *of: of[-1].requires_grad_())
    runs_of = Runs(model, layers, fake, autocast, device)
    signatures = _signatures(layers, runs_of.begin_with_gradient(_TOKENS[0]))
    # what the first two hold is not all their own
    needed = min(len(layers), max(map(signatures.index, signatures)) + 3)
    cut_layers = cut and partial(cut.partitioned, layers[:needed], signatures[:needed])
    by_mode: dict[Mode, tuple[LayerMemory, ...]] = {}
    before = 0.0
    frozen = sum(not x.reached for x in signatures)
    # behind it stands what is there before any layer holds something
    first = max(0, min(frozen, needed) - 1)
    for mode in modes:
        runs = [runs_of.run(needed, mode, tokens, cut_layers) for tokens in _TOKENS]
        of_kind = {
            # the last of a kind
            signatures[at]: LayerMemory(
                _line([run.held[at] for run in runs]),
                _line([run.working[at] for run in runs]),
            )
            for at in range(needed)
        }
        by_mode[mode] = tuple(of_kind[s] for s in signatures)
        there = _line([run.after[first] for run in runs])[0]
        before = max(before, there - sum(x.held[0] for x in by_mode[mode][: first + 1]))
    cost = model_cost(model, (autocast or dtype).itemsize)
    return ModelMemory(
        layers=by_mode,
        before=before,
        # its input in float32, and its output
        after=(4 + cost.element_bytes) * cost.hidden,
        cost=cost,
        norm=_norm_working(model, fake, autocast, device),
        tied=_tied(model),
        frozen=frozen,
    )


def _tied(model: Any) -> int:
    """Bytes of the weight that lm_head and embedding share."""
    weight: torch.Tensor = model.get_output_embeddings().weight
    return weight.nbytes if weight is model.get_input_embeddings().weight else 0


def _norm_working(
    model: Any, fake: FakeTensorMode, autocast: torch.dtype | None, device: str
) -> float:
    """The bytes per token of the backward of the norm behind the layers, beside what it holds."""
    norms = [m for m in decoder_of(model).children() if _shapes(m) in ([1], [1, 1])]
    if not norms:
        return 0.0
    norm, tokens = norms[-1], _TOKENS[0]
    weight = next(norm.parameters())
    live = LiveBytes(x for p in norm.parameters() for x in (p, p.grad) if x is not None)
    meta = torch.empty(1, tokens, len(weight), dtype=autocast or weight.dtype, device="meta")
    with fake, live, torch.autocast(device, autocast, enabled=autocast is not None):
        shown = norm(FakeTensor(fake, meta, torch.device(device)).requires_grad_())
        held = live.bytes
        live.restart()
        shown.backward(torch.ones_like(shown))
    return (live.restart() - held) / tokens


def _shapes(module: nn.Module) -> list[int]:
    """The numbers of dimensions of a module's parameters."""
    return [p.ndim for p in module.parameters()]


def make_fake(model: nn.Module, fake: FakeTensorMode, device: torch.device) -> None:
    """Gives a model on the meta device fake tensors that say they are on `device`."""
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        tensors = (
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
        )
        for name, tensor in tensors:
            # a tied weight stays one
            if id(tensor) not in made:
                new: torch.Tensor = FakeTensor(fake, tensor.detach().to("meta"), device)
                if isinstance(tensor, nn.Parameter):
                    new = nn.Parameter(new, requires_grad=tensor.requires_grad)
                made[id(tensor)] = new
            setattr(module, name, made[id(tensor)])


def _has_grouped_experts(layers: Sequence[nn.Module]) -> bool:
    modules = (module for layer in layers for module in layer.modules())
    # a convolution's weight has three dimensions too
    return any(
        p.ndim == 3
        for module in modules
        if not isinstance(module, nn.Conv1d)
        for p in module.parameters(recurse=False)
    )


class _Signature(NamedTuple):
    """Equal for layers that hold as much.

    Attributes:
        kind: the class, and what its configuration calls it.
        parameters: their names and shapes, and whether they train.
        entered: whether its input gets a gradient.
        reached: whether its output does.
    """

    kind: tuple[str, Any]
    parameters: tuple[tuple[Any, ...], ...]
    entered: bool
    reached: bool


def _signatures(layers: Sequence[nn.Module], reached: bool) -> list[_Signature]:
    """Those of all layers.

    Args:
        reached: whether the input of the first one gets a gradient.
    """
    found = []
    for layer in layers:
        kind = type(layer).__name__, getattr(layer, "layer_type", None)
        named = layer.named_parameters()
        parameters = tuple((name, tuple(p.shape), p.requires_grad) for name, p in named)
        entered, reached = reached, reached or any(trains for *_, trains in parameters)
        found.append(_Signature(kind, parameters, entered, reached))
    return found


def _line(values: Sequence[float]) -> tuple[float, float]:
    """The bytes per token and the fixed bytes of what was measured for both of _TOKENS."""
    (few, many), (a, b) = _TOKENS, values
    slope = (b - a) / (many - few)
    return slope, max(0.0, a - slope * few)
