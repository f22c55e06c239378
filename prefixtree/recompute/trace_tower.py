"""The memory of a vision tower, traced on shapes as that of layers is (`trace`).

A tower of the model's configuration runs forward and backward in one checkpoint, as a run of
pictures does, for one picture and for two. What follows from grids alone (lengths, positions,
windows) is computed with real numbers, as towers look at them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from prefixtree.errors import UnsupportedError
from prefixtree.images.encodings import blank_picture
from prefixtree.images.tower import compile_blocks, features_in, in_few_calls
from prefixtree.images.vision import grid_keyword_of, tower_of
from prefixtree.models.families import ENCODES
from prefixtree.recompute.layers import IN_TOWERS, checkpoint_of_tower, keeping_in_tower
from prefixtree.recompute.trace import make_fake, traced_as_cut
from prefixtree.recompute.traced_runs import (
    Adapters,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    LiveBytes,
    TorchDispatchMode,
    TraceKey,
    Trains,
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
        held: of a run that is not computed again, [bytes per patch, bytes whatever its patches]:
            what it keeps from its forward until its backward.
        products: multiply-adds of a forward per patch, attention's left out.
        pairs: attention's, per pair of patches of a frame.
        may_keep: whether a plan may let it keep anything. A tower without gradients has nothing to
            keep and computes nothing again.
    """

    patch: float
    fixed: float
    feature: int
    dtype: torch.dtype
    gradients: int
    held: tuple[float, float] = (0.0, 0.0)
    products: float = 0.0
    pairs: float = 0.0
    may_keep: bool = True

    def run(self, patches: int) -> float:
        """The bytes of a run."""
        return self.patch * patches + self.fixed

    def kept(self, patches: int) -> float:
        """The bytes that a run keeps which is not computed again."""
        return self.held[0] * patches + self.held[1]

    def again(self, patches: int, frames: int = 1) -> float:
        """The multiply-adds of a forward of a picture, which are those of computing it again.

        Args:
            frames: in which its patches are; towers attend within a frame. Default: an image's.
        """
        return self.products * patches + self.pairs * patches**2 / frames

    def patches_that_fit(self, available: float) -> int:
        """The most patches of a run of `available` bytes."""
        return max(0, math.floor((available - self.fixed) / max(self.patch, 1e-9)))


def trace_tower(
    config: Any,
    dtype: torch.dtype,
    autocast: torch.dtype | None,
    adapters: Adapters | None,
    trains: Trains | None = None,
    compiled: bool = False,
) -> TowerMemory:
    """Traces the vision tower of a config; a trace of the same arguments is kept.

    Args:
        config: of a model that takes pictures.
        dtype, autocast, adapters, trains: as `trace_memory` takes them.
        compiled: whether its blocks are compiled (`compile_layers`). Default: False.

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
        # it says what training takes, also to those who ask before a forward without gradients
        with torch.inference_mode(False), torch.enable_grad():
            key = TraceKey(config, adapters, trains or Trains())
            return _trace(key, dtype, autocast, compiled)
    except (DataDependentOutputException, DynamicOutputShapeException) as problem:
        raise UnsupportedError(
            f"the memory of the vision tower of {config.model_type} cannot be traced: it looks at "
            f"numbers ({problem.func}); give recompute as a mode or a RecomputePlan"
        ) from None


@lru_cache(maxsize=16)
def _trace(
    key: TraceKey, dtype: torch.dtype, autocast: torch.dtype | None, compiled: bool
) -> TowerMemory:
    traced = partial(_traced, key, dtype, autocast)
    if not compiled:
        return traced()
    return traced_as_cut(traced, partial(_trace, key, dtype, autocast, False))


def _traced(
    key: TraceKey,
    dtype: torch.dtype,
    autocast: torch.dtype | None,
    cut: Any = None,
) -> TowerMemory:
    """Traces the tower, its blocks cut by `cut`, the module `partitioned`, if they are compiled."""
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
    key.trains.set_on(model)
    tower = tower_of(model)
    # sizes are those of every device; torch chooses kernels of a CPU without asking it
    make_fake(tower, fake, torch.device("cpu"))
    tower.train()
    if cut is not None:
        compile_blocks(tower, partial(cut.cut_function, fake))
    tower.forward = in_few_calls(tower)
    trains = any(p.requires_grad for p in tower.parameters())
    with fake:
        for parameter in tower.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    pixels, grids = blank_picture(config, _SIDE)
    keyword = grid_keyword_of(config)
    # a graph is cut as it runs first, which is no part of a checkpoint
    around = checkpoint_of_tower(tower, "all")
    assert around is not None
    held, again = [], []
    counted = _Products(pixels[..., 0].numel())
    for count in (1, 2):
        shown = fake.from_tensor(torch.cat([pixels] * count).to(dtype))

        def run(shown: torch.Tensor, count: int = count) -> dict[str, Any]:
            keywords = {keyword: torch.cat([grids] * count)} | ({ENCODES: True} if encodes else {})
            return features_in(tower(shown, **keywords))

        given = tower, shown, fake, autocast
        with counted if count == 1 else nullcontext():
            held.append(_run(partial(keeping_in_tower(tower), run), *given, goes_back=False))
        again.append(_run(partial(around, run), *given))
    patches, first = pixels[..., 0].numel(), again[0]
    per_patch, fixed = _line([x.most for x in again], patches)
    gradients = sum(p.nbytes for p in tower.parameters() if p.requires_grad)
    return TowerMemory(
        per_patch,
        fixed,
        first.features // first.rows,
        dtype,
        gradients,
        _line([x.held for x in held], patches) if trains else (0.0, 0.0),
        counted.products / patches,
        counted.pairs / patches**2,
        may_keep=trains,
    )


def _line(values: Sequence[int], patches: int) -> tuple[float, float]:
    """The bytes per patch and the fixed bytes of what was measured for one picture and for two."""
    few, many = values
    slope = (many - few) / patches
    return slope, max(0.0, few - slope * patches)


class _Bytes(NamedTuple):
    """Of a run: the most that is alive beside features and their gradients, what is held between
    forward and backward, features, and their rows."""

    most: int
    held: int
    features: int
    rows: int


def _run(
    run: Callable[[torch.Tensor], dict[str, Any]],
    tower: Any,
    shown: torch.Tensor,
    fake: FakeTensorMode,
    autocast: torch.dtype | None,
    goes_back: bool = True,
) -> _Bytes:
    known = (x for parameter in tower.parameters() for x in (parameter, parameter.grad))
    live = LiveBytes(x for x in (shown, *known) if x is not None)
    with fake, live, _RealNumbers():
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            found = run(shown)
        features = [x for x in tree_iter(found) if isinstance(x, torch.Tensor)]
        del found
        size = sum(x.nbytes for x in features)
        most, held = live.restart() - size, live.bytes - size
        # some come from blocks below the first that trains
        reached = [x for x in features if x.requires_grad]
        if goes_back and reached:
            gradients = [torch.ones_like(x) for x in reached]
            live.restart()
            torch.autograd.backward(reached, gradients)
            most = max(most, live.restart() - 2 * size)
    return _Bytes(most, held, size, len(features[0]))


class _Products(TorchDispatchMode):
    """Counts the multiply-adds of a forward over one picture.

    Attributes:
        products: those that grow with its patches, attention within windows among them.
        pairs: those that grow with its pairs of patches.
    """

    def __init__(self, patches: int) -> None:
        super().__init__()
        self._patches = patches
        self.products = self.pairs = 0.0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in IN_TOWERS:
            query, key = args[:2]
            pairs = 2.0 * query.numel() * key.shape[-2]
            if key.shape[-2] == self._patches:
                self.pairs += pairs
            else:
                self.products += pairs
        elif func in _PRODUCTS:
            # a bias stands before the factors
            left, right = args[-2:]
            self.products += float(left.numel() * right.shape[-1])
        return result


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
_PRODUCTS = (_aten.mm.default, _aten.addmm.default, _aten.bmm.default)
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
