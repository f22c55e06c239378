"""Reads bytes at the borders of layers as a forward and its backward run.

They are read after each layer's forward, and where the gradient of its output arrives. A layer
keeps what the bytes grow by from one border to the next. Its backward works with the peak above the
bytes at its beginning. So what others gather, prefetch or have left there cancels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import nn
from torch.autograd import Variable

from prefixtree.errors import UnsupportedError
from prefixtree.models.changes import changing
from prefixtree.models.layers import decoder_of, layers_of
from prefixtree.recompute.layers import Mode


class Meter(Protocol):
    """Counts bytes: `bytes` alive now, `most` the most so far, or since anyone's reset."""

    @property
    def bytes(self) -> int: ...
    @property
    def most(self) -> int: ...

    def restart(self) -> int:
        """The most bytes since the last call."""


class AllocatedBytes:
    """A `Meter` of CUDA's allocator. `restart` resets torch.cuda.max_memory_allocated."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def bytes(self) -> int:
        """Bytes that are allocated now."""
        return torch.cuda.memory_allocated(self._device)

    @property
    def most(self) -> int:
        """The most bytes since anyone's reset."""
        return torch.cuda.max_memory_allocated(self._device)

    def restart(self) -> int:
        """The most bytes since the last call."""
        peak = self.most
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak


#: open meters of devices without an allocator's count
counting: list[Meter] = []


def meter_of(device: torch.device) -> Meter | None:
    """Finds what counts bytes now, also in a backward that others run; None if nothing does."""
    if device.type == "cuda":
        return AllocatedBytes(device)
    return counting[-1] if counting else None


class NotMeasuredError(UnsupportedError):
    """Signals that nothing is known of a model's layers, and that no probe can tell."""


class Run(NamedTuple):
    """Bytes of one forward and its backward."""

    # tokens that each layer computed
    tokens: np.ndarray
    # those of all layers or of the first ones
    modes: Sequence[Mode]
    # bytes that the first layer was called with
    before: float
    # held by each layer, then by the norm after them, if there is one
    held: list[float]
    # likewise, alive in the backward; layers that no gradient reaches work in their forward
    working: list[float]
    # the number of first layers that no gradient reaches
    frozen: int


class Recorder:
    """Reads bytes at the borders of the first `count` layers; `done` follows the backward."""

    def __init__(
        self,
        causal_lm: Any,
        meter: Meter,
        done: Callable[[Recorder], None] | None = None,
        count: int | None = None,
    ) -> None:
        self._layers, norm = layers_of(causal_lm)[:count], norm_of(causal_lm)
        self._places = [*self._layers, *([] if norm is None else [norm])]
        self._meter, self._done = meter, done
        self._start = self._base = 0.0
        self._after: dict[int, float] = {}
        self._working: dict[int, float] = {}
        self._reached: set[int] = set()
        self._turn: int | None = None
        self._over = False
        self.before = 0.0

    @contextmanager
    def open(self) -> Iterator[None]:
        """Records a forward while open; its backward may come later."""
        with changing(self._layers[0]) as changes:
            for place, module in enumerate(self._places):
                if (compiled := vars(module).get("_compiled_call_impl")) is not None:
                    # hooks would become part of a compiled layer's graph
                    of_place = partial(self._around, place, compiled)
                    changes.set(module, _compiled_call_impl=of_place)
                    continue
                if place == 0:
                    register = module.register_forward_pre_hook
                    changes.hook(register, lambda _, *given: self._begin(given), with_kwargs=True)
                end = partial(self._end_of, place)
                changes.hook(module.register_forward_hook, end)
            yield
        if self._done is not None and not self._reached:
            self.finish()

    def finish(self) -> None:
        """Ends the record after the backward."""
        if not self._over:
            self._end_turn()
            self._over = True
            if self._done is not None:
                self._done(self)

    def run(self, tokens: np.ndarray, modes: Sequence[Mode]) -> Run | None:
        """The record; None if a layer did not run."""
        places = range(len(self._places))
        if any(place not in self._after or place not in self._working for place in places):
            return None
        after = np.array([self._start, *(self._after[place] for place in places)])
        frozen = sum(place not in self._reached for place in range(len(self._layers)))
        working = [self._working[place] for place in places]
        return Run(tokens, modes, self.before, np.diff(after).tolist(), working, frozen)

    def _around(self, place: int, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if place == 0:
            self._begin((args, kwargs))
        output = call(*args, **kwargs)
        self._end(place, output)
        return output

    def _end_of(self, place: int, module: nn.Module, args: Any, output: Any) -> None:
        self._end(place, output)

    def _begin(self, given: Any) -> None:
        # a layer that is recomputed begins again
        if self._turn is None:
            storages = [x.untyped_storage() for x in _tensors(given) if x.is_floating_point()]
            self.before = sum({id(x): x.nbytes() for x in storages}.values())
            self._start = self._meter.bytes
            self._meter.restart()

    def _end(self, place: int, output: Any) -> None:
        if self._turn is not None:
            return
        hidden = output[0] if isinstance(output, tuple) else output
        self._after[place] = self._meter.bytes
        self._working[place] = self._meter.restart() - self._after[place]
        if hidden.requires_grad:
            self._reached.add(place)
            hidden.register_hook(partial(self._begin_turn, place))

    def _begin_turn(self, place: int, gradient: torch.Tensor) -> None:
        """Begins the backward of this layer and ends that of the layer after it."""
        if self._turn is None and self._done is not None:
            Variable._execution_engine.queue_callback(self.finish)
        self._end_turn()
        self._turn = place
        self._base = self._meter.bytes - gradient.untyped_storage().nbytes()

    def _end_turn(self) -> None:
        peak = self._meter.restart()
        if self._turn is not None:
            self._working[self._turn] = peak - self._base


def _tensors(given: Any) -> Iterator[torch.Tensor]:
    """Finds tensors in tuples, lists and dictionaries."""
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, tuple | list | dict):
        for one in given.values() if isinstance(given, dict) else given:
            yield from _tensors(one)


def norm_of(causal_lm: Any) -> nn.Module | None:
    """Finds the norm after the layers."""

    def shapes(module: nn.Module) -> list[int]:
        return [p.ndim for p in module.parameters()]

    norms = [m for m in decoder_of(causal_lm).children() if shapes(m) in ([1], [1, 1])]
    return norms[-1] if norms else None
