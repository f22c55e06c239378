"""The memory of a vision tower, traced on shapes as that of layers is (`trace`).

A tower of the model's configuration runs forward and backward in one checkpoint, as a run of
pictures does, for one picture and for two. What follows from grids alone (lengths, positions,
windows) is computed with real numbers, as towers look at them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from prefixtree.errors import UnsupportedError
from prefixtree.models.encodings import blank_picture
from prefixtree.models.families import ENCODES
from prefixtree.models.tower import features_in, in_few_calls
from prefixtree.models.vision import grid_keyword_of, tower_of
from prefixtree.recompute.layers import checkpoint_of_tower
from prefixtree.recompute.trace import (
    Adapters,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    LiveBytes,
    TorchDispatchMode,
    TraceKey,
    make_fake,
    tree_iter,
)

try:
    from torch.utils._python_dispatch import _disable_current_modes
except ImportError as problem:
    raise UnsupportedError(
        "the memory of a vision tower cannot be traced, which recompute='auto' needs with "
        f"pictures: torch {torch.__version__} lacks a name that is not public ({problem}); give "
        "recompute as a mode or a RecomputePlan"
    ) from problem

# placeholders a side of the traced picture
_SIDE = 8


@dataclass(frozen=True)
class TowerMemory:
    """Bytes of a vision tower in training.

    Attributes:
        patch: of a run, per patch: the most that is alive in its backward, in which it is computed
            again whole, beside its pixels and features.
        fixed: of a run, whatever its patches.
        feature: of the features of one placeholder, all that the model reads.
        dtype: of pixels as the tower takes them.
        gradients: of its parameters, which those of the first run wait in until the last one.
    """

    patch: float
    fixed: float
    feature: int
    dtype: torch.dtype
    gradients: int

    def run(self, patches: int) -> float:
        """The bytes of a run."""
        return self.patch * patches + self.fixed

    def patches_that_fit(self, available: float) -> int:
        """The most patches of a run of `available` bytes."""
        return max(0, math.floor((available - self.fixed) / max(self.patch, 1e-9)))


def trace_tower(
    config: Any,
    dtype: torch.dtype,
    autocast: torch.dtype | None,
    adapters: Adapters | None,
    trains: bool,
) -> TowerMemory:
    """Traces the vision tower of a config; a trace of the same arguments is kept.

    Args:
        config: of a model that takes pictures.
        dtype, autocast, adapters: as `trace_memory` takes them.
        trains: whether a parameter of the tower gets a gradient.

    Raises:
        UnsupportedError: a tower with eager attention, or one that looks at numbers of pixels.
    """
    if config.vision_config._attn_implementation == "eager":
        raise UnsupportedError(
            "recompute='auto' does not know the memory of eager attention in a vision tower, which "
            "grows with the square of a picture: give it sdpa (attn_implementation "
            '{"": "prefixtree", "text_config": "prefixtree", "vision_config": "sdpa"}), or give '
            "recompute as a mode"
        )
    try:
        return _traced(TraceKey(config, adapters), dtype, autocast, trains)
    except (DataDependentOutputException, DynamicOutputShapeException) as problem:
        raise UnsupportedError(
            f"the memory of the vision tower of {config.model_type} cannot be traced: it looks at "
            f"numbers ({problem.func}); give recompute as a mode or a RecomputePlan"
        ) from None


@lru_cache(maxsize=16)
def _traced(
    key: TraceKey,
    dtype: torch.dtype,
    autocast: torch.dtype | None,
    trains: bool,
) -> TowerMemory:
    from transformers import AutoModelForImageTextToText

    fake = FakeTensorMode(allow_non_fake_inputs=True)
    config = copy.deepcopy(key.config)
    # flash kernels keep as much as "sdpa"
    encodes = config.vision_config._attn_implementation == "prefixtree"
    attention = "prefixtree" if encodes else "sdpa"
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(
            config, dtype=dtype, attn_implementation=attention
        )
        if key.adapters is not None:
            key.adapters.on(model)
    tower = tower_of(model)
    # sizes are those of every device; torch chooses kernels of a CPU without asking it
    make_fake(tower, fake, torch.device("cpu"))
    tower.train()
    tower.forward = in_few_calls(tower)
    if not trains:
        tower.requires_grad_(False)
    with fake:
        for parameter in tower.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    pixels, grids = blank_picture(config, _SIDE)
    keyword = grid_keyword_of(config)
    runs = []
    for count in (1, 2):
        shown = fake.from_tensor(torch.cat([pixels] * count).to(dtype))

        def run(shown: torch.Tensor, count: int = count) -> dict[str, Any]:
            keywords = {keyword: torch.cat([grids] * count)} | ({ENCODES: True} if encodes else {})
            return features_in(tower(shown, **keywords))

        runs.append(_run(tower, run, shown, fake, autocast))
    (few, size, rows), (many, _, _) = runs
    patches = pixels[..., 0].numel()
    slope = (many - few) / patches
    gradients = sum(p.nbytes for p in tower.parameters() if p.requires_grad)
    return TowerMemory(slope, max(0.0, few - slope * patches), size // rows, dtype, gradients)


def _run(
    tower: Any,
    run: Callable[..., dict[str, Any]],
    shown: torch.Tensor,
    fake: FakeTensorMode,
    autocast: torch.dtype | None,
) -> tuple[int, int, int]:
    """The most bytes of a run, those of its features, and their rows."""
    known = (x for parameter in tower.parameters() for x in (parameter, parameter.grad))
    live = LiveBytes(x for x in (shown, *known) if x is not None)
    around = checkpoint_of_tower(tower, "all")
    assert around is not None
    with fake, live, _RealNumbers():
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            found = around(run, shown)
        features = [x for x in tree_iter(found) if isinstance(x, torch.Tensor)]
        del found
        size = sum(x.nbytes for x in features)
        most = live.restart() - size
        if features[0].requires_grad:
            gradients = [torch.ones_like(x) for x in features]
            live.restart()
            torch.autograd.backward(features, gradients)
            most = max(most, live.restart() - 2 * size)
    return most, size, len(features[0])


class _RealNumbers(TorchDispatchMode):
    """Computes what reads no fake tensor with real ones: what follows from grids."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(x, FakeTensor) for x in tree_iter((args, kwargs))):
            if func in _INDEXED:
                # fake tensors do not know how many rows a mask picks
                args = args[0], [part for x in args[1] for part in _indices(x)], *args[2:]
            return func(*args, **kwargs)
        with _disable_current_modes():
            return func(*args, **kwargs)


_aten = torch.ops.aten
_INDEXED = (
    _aten.index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
)


def _indices(index: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
    """The integers that an index with real numbers stands for, one tensor per dimension."""
    if index is None or index.dtype != torch.bool or isinstance(index, FakeTensor):
        return [index]
    with _disable_current_modes():
        return index.nonzero().unbind(1)
