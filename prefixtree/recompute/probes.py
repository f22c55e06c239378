"""Layers measured before any micro-batch ran: a copy of a model's first layers runs a few tokens.

The copy shares the memory of the weights and nothing else: parameters without hooks and gradients,
buffers of its own, no hooks of others. So a probe leaves no trace in the model, its optimizer or
the random generators. Without weights (`memory_of_config`) the same code runs on fake tensors.
"""

from __future__ import annotations

import copy
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from prefixtree.errors import UnsupportedError
from prefixtree.experts.products import set_experts, traced_as
from prefixtree.forest import PrefixForest
from prefixtree.models.checks import KNOWN_PACKAGES, foreign_module
from prefixtree.models.compiled import compile_alike
from prefixtree.models.families import forward_inputs, router_keywords
from prefixtree.models.layers import decoder_of, layers_of
from prefixtree.models.prepared import prepare_layers
from prefixtree.models.rope import as_default_rope, fixed_lengths
from prefixtree.packing.layout import pack
from prefixtree.planning.model_cost import auto_class
from prefixtree.recompute.counted import LiveBytes
from prefixtree.recompute.layers import MODES, Mode, recomputing
from prefixtree.recompute.measured import Learnt, kinds_of
from prefixtree.recompute.memory import ModelMemory
from prefixtree.recompute.recorder import AllocatedBytes, NotMeasuredError, Recorder, Run

# tokens of the probes, multiples of recurrent kernels' chunks, as CUDA's allocator rounds
_TOKENS = {"cuda": (512, 2048)}
_FEW_TOKENS = (128, 512)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_PARTS = ("_parameters", "_buffers", "_modules", *_HOOKS)
# (a parameter or a buffer) -> the tensor that stands for it
Made = Callable[[torch.Tensor], torch.Tensor]


def probe(
    causal_lm: Any, device: torch.device, dtype: torch.dtype, modes: Sequence[Mode]
) -> Iterator[Run]:
    """Runs a copy of a model's first layers forward and backward, once per mode of all of them.

    Autocast is the caller's; FSDP2 gathers a layer's weights in `dtype`.
    """
    # FSDP1, DeepSpeed ZeRO-3, or layers that do not run one by one, raise a NotMeasuredError
    in_pieces = any(p.numel() == 0 for p in causal_lm.parameters())
    if in_pieces or any(isinstance(m, FullyShardedDataParallel) for m in causal_lm.modules()):
        raise NotMeasuredError(
            "layers under FSDP1 or DeepSpeed ZeRO-3 cannot be probed, as their weights are not "
            'there: run a micro-batch with recompute="auto" on a GPU first, which measures them, '
            "give recompute as a mode, or shard with FSDP2"
        )
    with untouched(device):
        copied = twin(causal_lm, standing_for(device, dtype))
        if device.type == "cuda":
            # on other devices compiled code hides its memory, and counts as if it were not compiled
            compile_alike(causal_lm, copied)
        yield from _runs(copied, device, modes)


@contextmanager
def untouched(device: torch.device) -> Iterator[None]:
    """Switches gradients on, and restores random generators afterwards."""
    devices = [device] if device.type == "cuda" else []
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.random.fork_rng(devices=devices),
    ):
        yield


def standing_for(device: torch.device, dtype: torch.dtype) -> Made:
    """Makes what a copy has in the place of a tensor."""
    # a weight that trains shares its memory; one that does not is the model's own; a sharded one is
    # zeros in one piece

    def made(tensor: torch.Tensor) -> torch.Tensor:
        trains = tensor.requires_grad
        if hasattr(tensor, "device_mesh"):
            stand_in = torch.zeros(tensor.shape, dtype=dtype, device=device)
        elif isinstance(tensor, nn.Parameter):
            if not trains:
                return tensor
            stand_in = tensor.detach()
        else:
            return tensor.clone()
        return nn.Parameter(stand_in, requires_grad=trains)

    return made


def twin(model: nn.Module, made: Made) -> Any:
    """Copies a module with the same classes and attributes, and other tensors."""
    # the copy has only hooks of known packages, and FSDP2 does not know it
    modules: dict[int, nn.Module] = {}
    tensors: dict[int, torch.Tensor] = {}

    def of_tensor(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        # a tied weight stays one tensor
        if id(tensor) not in tensors:
            tensors[id(tensor)] = made(tensor)
        return tensors[id(tensor)]

    def of_module(module: nn.Module | None) -> nn.Module | None:
        if module is None or id(module) in modules:
            return None if module is None else modules[id(module)]
        kind = next(k for k in type(module).__mro__ if not issubclass(k, FSDPModule))
        new: Any = kind.__new__(kind)
        modules[id(module)] = new
        held, attributes = vars(new), vars(module)
        held |= {name: x for name, x in attributes.items() if name not in _PARTS}
        held.pop("_compiled_call_impl", None)
        if isinstance(forward := held.get("forward"), types.MethodType):
            held["forward"] = types.MethodType(forward.__func__, new)
        for name in ("_parameters", "_buffers"):
            held[name] = {key: of_tensor(tensor) for key, tensor in attributes[name].items()}
        for name in _HOOKS:
            held[name] = OrderedDict((k, h) for k, h in attributes[name].items() if _is_needed(h))
        others = [name for name in held if "hook" in name and not name.startswith("_forward")]
        held |= {name: OrderedDict() for name in others if isinstance(held[name], dict)}
        held["_modules"] = {key: of_module(child) for key, child in attributes["_modules"].items()}
        return new

    return of_module(model)


def _is_needed(hook: Any) -> bool:
    """Whether a forward needs a hook: one of a known package that shards nothing."""
    shards = str(getattr(hook, "__module__", "")).startswith("torch.distributed.")
    return not shards and foreign_module(hook, (*KNOWN_PACKAGES, "prefixtree")) is None


# ---- runs ----------------------------------------------------------------------------------------


def _runs(
    model: Any,
    device: torch.device,
    modes: Sequence[Mode],
    fake: Any = None,
    autocast: AbstractContextManager[Any] | None = None,
) -> Iterator[Run]:
    """Runs a model whose tensors stand for others; `fake` is their mode, autocast the forwards'."""
    model.train()
    prepare_layers(model)
    layers = layers_of(model)
    kinds = kinds_of(layers)
    # the first two layers count more than their own: rotary tables, or what is made once
    count = min(len(layers), max(map(kinds.index, kinds)) + 3)
    _skip(layers[:count], layers[count:])
    drop_gradients(model)
    numbers = _TOKENS.get(device.type, _FEW_TOKENS)
    # a first run counts memory that allocators and libraries need once
    if device.type == "cuda" and fake is None:
        _run(model, count, device, modes[0], numbers[0], fake, autocast)
    for mode in modes:
        for tokens in numbers:
            yield _run(model, count, device, mode, tokens, fake, autocast)


def drop_gradients(model: nn.Module) -> None:
    """Has parameters drop their gradients as these come."""

    def drop(parameter: torch.Tensor) -> None:
        parameter.grad = None

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(drop)


def _skip(first: Sequence[nn.Module], others: Sequence[nn.Module]) -> None:
    """Has the other layers hand on their input, as the first ones return it."""
    in_tuples: list[bool] = []

    def note(layer: nn.Module, args: Any, output: Any) -> None:
        in_tuples.append(isinstance(output, tuple))

    first[0].register_forward_hook(note)

    def forward(hidden_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        return (hidden_states,) if in_tuples[-1] else hidden_states

    for layer in others:
        vars(layer).pop("_compiled_call_impl", None)
        vars(layer)["forward"] = forward


def _forest(tokens: int, config: Any) -> PrefixForest:
    """Makes a forest of so many tokens, with paths for which the model's RoPE is exact."""
    longest = min((limit for _, limit in fixed_lengths(config)), default=tokens)
    if tokens > longest:
        lengths = [longest] * (tokens // longest) + [tokens % longest] * (tokens % longest > 0)
        chains = [np.zeros(length, np.int64) for length in lengths]
        return PrefixForest.from_sequences(chains, namespaces=range(len(chains)))
    # kernels differ for a chain and for branches
    trunk, rest = np.zeros(tokens // 2, np.int64), tokens // 4
    branches = [np.append(trunk, np.full(rest, number, np.int64)) for number in (1, 2)]
    return PrefixForest.from_sequences(branches)


def _run(
    model: Any,
    count: int,
    device: torch.device,
    mode: Mode,
    tokens: int,
    fake: Any,
    autocast: AbstractContextManager[Any] | None,
) -> Run:
    packed = pack(_forest(tokens, model.config.get_text_config())).to(device)
    inputs = forward_inputs(packed, model) | router_keywords(model.config, False)
    with ExitStack() as stack:
        if fake is not None:
            inputs = {
                name: fake.from_tensor(x) if isinstance(x, torch.Tensor) else x
                for name, x in inputs.items()
            }
            stack.enter_context(fake)
        meter: Any = AllocatedBytes(device)
        if device.type != "cuda" or fake is not None:
            meter = LiveBytes([*model.parameters(), *model.buffers()])
            stack.enter_context(meter)
        recorder = Recorder(model, meter, count=count)
        modes = [mode] * len(layers_of(model))
        with recomputing(model, modes), recorder.open(), autocast or nullcontext():
            output = decoder_of(model)(**inputs)
        hidden = output[0]
        del output
        if hidden.requires_grad:
            # nothing else in the graph gets a gradient
            trained = [p for p in model.parameters() if p.requires_grad]
            hidden.backward(torch.ones_like(hidden), inputs=trained or None)
        recorder.finish()
    run = recorder.run(np.full(count, tokens), modes[:count])
    if run is None:
        raise NotMeasuredError(
            f"the layers of {type(model).__name__} do not run one after another, so their memory "
            "is not known: give recompute as a mode or a RecomputePlan"
        )
    return run


# ---- models without weights ----------------------------------------------------------------------


@lru_cache(maxsize=16)
def _of_config(key: _Config, dtype: torch.dtype, autocast: torch.dtype | None) -> ModelMemory:
    # making a model sets its attention and dtype in the config
    config = copy.deepcopy(key.config)
    set_experts(config, traced_as(config))
    # other RoPEs look at numbers for their frequencies, and keep no other memory
    as_default_rope(config.get_text_config())
    with torch.device("meta"):
        model = auto_class(config).from_config(
            config, dtype=dtype, attn_implementation="prefixtree"
        )
    return memory_on_shapes(model, dtype, autocast)


class _Config:
    """A config, compared by its content."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self._said = f"{config.to_json_string(use_diff=False)} {traced_as(config)}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Config) and self._said == other._said

    def __hash__(self) -> int:
        return hash(self._said)


def memory_of_config(
    config: Any, dtype: torch.dtype, autocast: torch.dtype | None = None
) -> ModelMemory:
    """The memory of the model of a config, all of whose weights train; nothing is computed.

    dtype is of the weights; autocast its dtype, or None: off. A family that transformers does not
    checkpoint, or whose layers look at numbers, is refused (UnsupportedError).
    """
    # layers count as if they were not compiled
    return _of_config(_Config(config), dtype, autocast)


def memory_on_shapes(
    model: Any, dtype: torch.dtype, autocast: torch.dtype | None = None
) -> ModelMemory:
    """The memory of a model on the meta device, as it trains; it raises as `memory_of_config`."""
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
    )

    cpu = torch.device("cpu")
    if dtype != torch.bfloat16 and _has_grouped_experts(layers_of(model)):
        # torch knows the shapes of grouped products only in bfloat16, and autocast leaves them in
        # the weights' dtype; tensors kept in float32 then count as more than they are
        half = memory_on_shapes(model.to(torch.bfloat16), torch.bfloat16)
        return half.scaled(dtype.itemsize / 2, (autocast or dtype).itemsize)
    fake = FakeTensorMode(allow_non_fake_inputs=True)

    def made(tensor: torch.Tensor) -> torch.Tensor:
        new = FakeTensor(fake, tensor.detach().to("meta"), cpu)
        if not isinstance(tensor, nn.Parameter):
            return new
        return nn.Parameter(new, requires_grad=tensor.requires_grad)

    learnt = Learnt(model, (autocast or dtype).itemsize)
    cast = torch.autocast("cpu", autocast, enabled=autocast is not None)
    try:
        with untouched(cpu):
            for run in _runs(twin(model, made), cpu, MODES, fake, cast):
                learnt.add(run)
    except (DataDependentOutputException, DynamicOutputShapeException) as problem:
        raise UnsupportedError(
            f"the memory of {model.config.model_type} is not known without its weights: it looks "
            f"at numbers ({problem.func})"
        ) from None
    memory = learnt.memory()
    assert memory is not None
    return memory


def _has_grouped_experts(layers: Sequence[nn.Module]) -> bool:
    modules = (module for layer in layers for module in layer.modules())
    # a convolution's weight has three dimensions too, so names are compared
    return any(
        p.ndim == 3
        for module in modules
        if not isinstance(module, nn.Conv1d)
        for p in module.parameters(recurse=False)
    )
