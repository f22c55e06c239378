"""Runs of a model's first layers on fake tensors, and the bytes that are alive in them; and what
these depend on: the model's config, the adapters on it, and what of it trains."""

from __future__ import annotations

import copy
import re
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from prefixtree.errors import UnsupportedError
from prefixtree.experts.products import traced_as
from prefixtree.forest import PrefixForest
from prefixtree.models.families import forward_inputs, router_keywords
from prefixtree.models.layers import decoder_of
from prefixtree.packing.layout import pack
from prefixtree.recompute.layers import Mode, recomputing

try:
    from torch._subclasses.fake_tensor import (  # noqa: F401
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
    )
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_iter
except ImportError as problem:
    raise UnsupportedError(
        "the memory of a model cannot be traced, which recompute='auto', plan_recomputation and "
        f"max_micro_batch_tokens need: torch {torch.__version__} lacks a name that is not public "
        f"({problem}); give recompute as a mode or a RecomputePlan"
    ) from problem


class _Enough(Exception):
    """Ends a forward in front of a layer that need not run."""


class Run(NamedTuple):
    """Bytes of one run, of each layer: held, working, and there behind its forward."""

    held: list[float]
    working: list[float]
    after: list[float]


class Runs:
    """Runs of a traced model's first layers, forward and backward."""

    def __init__(
        self,
        model: Any,
        layers: Sequence[nn.Module],
        fake: FakeTensorMode,
        autocast: torch.dtype | None,
        device: str,
    ) -> None:
        self._model, self._layers, self._fake = model, layers, fake
        self._autocast, self._device = autocast, device

    def begin_with_gradient(self, tokens: int) -> bool:
        """Whether the input of the first layer gets a gradient."""
        found: list[bool] = []

        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            tensors = (x for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor))
            found.append(any(x.requires_grad for x in tensors))
            raise _Enough

        inputs = self._inputs(tokens)
        handle = self._layers[0].register_forward_pre_hook(note, with_kwargs=True)
        with self._fake:
            self._forward(inputs)
        handle.remove()
        return found[0]

    def run(
        self,
        needed: int,
        mode: Mode,
        tokens: int,
        cut: Callable[[Mode, FakeTensorMode], AbstractContextManager[None]] | None,
    ) -> Run:
        """Runs the first `needed` layers.

        Args:
            cut: makes the layers that run compiled ones while it is open. Default: they are not.
        """
        model, layers, fake = self._model, self._layers, self._fake
        known = (x for parameter in model.parameters() for x in (parameter, parameter.grad))
        live = LiveBytes(x for x in known if x is not None)
        entered: list[float] = []
        after: list[float] = []
        # in the forward of each layer, then in the backward of those that have one
        peaks: list[float] = []
        turns: list[int] = []
        last: list[torch.Tensor] = []

        def begin(module: nn.Module, args: Any) -> None:
            # a layer that is recomputed begins again
            if not turns:
                entered.append(live.bytes)
                live.restart()

        def note(module: nn.Module, args: Any, output: Any) -> None:
            if turns:
                return
            hidden = output[0] if isinstance(output, tuple) else output
            layer = len(after)
            after.append(live.bytes)
            peaks.append(live.restart())
            last[:] = [hidden]

            def turn(gradient: torch.Tensor) -> None:
                # the backward of this layer begins, that of the next one is over
                end_turn()
                turns.append(layer)

            if hidden.requires_grad:
                hidden.register_hook(turn)

        def end_turn() -> None:
            peak = live.restart()
            if turns:
                peaks[turns[-1]] = peak

        def stop(module: nn.Module, args: Any) -> None:
            raise _Enough

        inputs = self._inputs(tokens)
        with ExitStack() as open_until_end:
            enter = open_until_end.enter_context
            open_until_end.callback(layers[0].register_forward_pre_hook(begin).remove)
            for layer in layers[:needed]:
                open_until_end.callback(layer.register_forward_hook(note).remove)
            for layer in layers[needed : needed + 1]:
                open_until_end.callback(layer.register_forward_pre_hook(stop).remove)
            enter(fake)
            enter(live)
            if cut is None:
                enter(recomputing(model, [mode] * len(layers)))
            else:
                # the graph of a compiled layer knows what it recomputes
                enter(recomputing(model, ["nothing"] * len(layers)))
                enter(cut(mode, fake))
            self._forward(inputs)
            (hidden,) = last
            if hidden.requires_grad:
                hidden.backward(torch.ones_like(hidden))
            end_turn()
        held = [one - before for before, one in zip([*entered, *after], after, strict=False)]
        working = [peak - below for peak, below in zip(peaks, after, strict=True)]
        return Run(held, working, after)

    def _inputs(self, tokens: int) -> dict[str, Any]:
        """The keywords of a forward over a chain of fake tokens."""
        packed = pack(PrefixForest.from_sequences([np.zeros(tokens, np.int64)])).to(self._device)
        config = self._model.config
        keywords = forward_inputs(packed, config) | router_keywords(config, False)
        return {
            name: self._fake.from_tensor(value) if isinstance(value, torch.Tensor) else value
            for name, value in keywords.items()
        }

    def _forward(self, inputs: dict[str, Any]) -> None:
        autocast = self._autocast
        with (
            torch.autocast(self._device, autocast, enabled=autocast is not None),
            suppress(_Enough),
        ):
            decoder_of(self._model)(**inputs)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operators make while something holds them."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.bytes = self._peak = 0
        self._known: Any = weakref.WeakSet(tensor.untyped_storage() for tensor in known)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor):
                self._count(value.untyped_storage())
        return result

    def restart(self) -> int:
        """The most bytes since the last call."""
        peak, self._peak = self._peak, self.bytes
        return peak

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        self.bytes += size
        self._peak = max(self._peak, self.bytes)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.bytes -= size


# ---- what memory depends on ----------------------------------------------------------------------


@dataclass(frozen=True)
class Adapters:
    """The adapters that PEFT adds to a model.

    Attributes:
        configs: PEFT's configurations by the adapters' names, all of them on the model.
        in_float32: whether their weights are in float32 whatever the model's dtype is.
    """

    configs: dict[str, Any]
    in_float32: bool

    def on(self, model: nn.Module) -> None:
        """Puts them on a model, in place."""
        import peft

        configs = copy.deepcopy(self.configs)
        first, *others = configs
        # what it warns of, it said when the model got them
        with warnings.catch_warnings(action="ignore"):
            adapted = peft.get_peft_model(
                model, configs[first], first, autocast_adapter_dtype=self.in_float32
            )
            for name in others:
                adapted.add_adapter(name, configs[name])

    def __str__(self) -> str:
        said = {name: config.to_dict() for name, config in self.configs.items()}
        return f"{said} {self.in_float32}"


@dataclass(frozen=True)
class Trains:
    """The parts of a model that get gradients.

    Attributes:
        parameters: whether each trains, by its name in the transformers model. Others, as those
            that FSDP1 made one, train as in a model just made. Default: none is known.
        inputs: whether hidden states before the first layer get a gradient whatever the embedding
            does: by a hook, or by pictures. Default: False.
    """

    parameters: Mapping[str, bool] = field(default_factory=dict)
    inputs: bool = False

    def set_on(self, model: nn.Module) -> None:
        """Has the same parameters of a model train."""
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(self.parameters.get(name, parameter.requires_grad))


# fields that trainers set and no memory depends on
_NO_MEMORY = re.compile(r'"(use_cache|_name_or_path|\w+_token_id)": [^\n]*')


class TraceKey:
    """A config, adapters and what trains, which are compared by what they say of memory.

    Attributes:
        experts: how the trace runs experts.
    """

    def __init__(self, config: Any, adapters: Adapters | None, trains: Trains) -> None:
        self.config, self.adapters, self.trains = config, adapters, trains
        self.experts = traced_as(config)
        said = _NO_MEMORY.sub("", config.to_json_string(use_diff=False))
        # without adapters, all parameters of a model just made train
        known = [x for x in trains.parameters.items() if adapters is not None or not x[1]]
        self._said = f"{said} {adapters} {self.experts} {known} {trains.inputs}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TraceKey) and self._said == other._said

    def __hash__(self) -> int:
        return hash(self._said)
