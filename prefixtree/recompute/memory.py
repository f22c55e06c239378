"""Bytes of a model's layers in training, as measured (`measured`, `probes`), for plans (`plan`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from prefixtree.planning.model_cost import ModelCost
from prefixtree.recompute.layers import Mode


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of one layer in one mode: [bytes per token, bytes whatever the number of tokens]."""

    # kept from its forward until its backward
    held: tuple[float, float]
    # the most that is alive in its backward in addition to what it and the layers before it hold:
    # what is computed again, gradients of activations, a weight's gradient on its way
    working: tuple[float, float]


@dataclass(frozen=True)
class ModelMemory:
    """Bytes of activations of a causal language model in training."""

    # by mode, first layer to last
    layers: dict[Mode, tuple[LayerMemory, ...]]
    # bytes per token that are held from before the first layer, the embedding's
    before: float
    # bytes per token that the last norm holds until the backward of the layers begins
    after: float
    # the cost of a token; its element_bytes are those of activations
    cost: ModelCost
    # additional bytes per token of the backward of the last norm
    norm: float = 0.0
    # bytes of the gradient that an lm_head with the embedding's weight leaves: it waits for the
    # embedding's
    tied: float = 0.0
    # the number of first layers that no gradient reaches; they hold nothing and compute nothing
    # again, and work only in their forward
    frozen: int = 0

    def peak(
        self,
        tokens: int,
        modes: Mode | Sequence[Mode],
        scoring: float = 0.0,
        waiting: float = 0.0,
    ) -> int:
        """Predicts the most bytes that are alive at once, of packed tokens.

        scoring are bytes that the lm_head takes while all layers hold theirs; waiting those that
        wait through the backward of all layers.
        """
        count = len(next(iter(self.layers.values())))
        layer_modes = [modes] * count if isinstance(modes, str) else modes
        below = peak = self.before * tokens
        for layer, mode in enumerate(layer_modes):
            of_layer = self.layers[mode][layer]
            below += of_layer.held[0] * tokens + of_layer.held[1]
            working = of_layer.working[0] * tokens + of_layer.working[1]
            peak = max(peak, below + working + waiting)
        return round(max(peak, below + scoring))

    def scaled(self, factor: float, element_bytes: int) -> ModelMemory:
        """Scales layers to `factor` times the bytes, and keys and values of `element_bytes`."""

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


@dataclass(frozen=True)
class EncoderMemory:
    """Bytes of a vision encoder in training."""

    # bytes of a run per patch: the most that is alive in its backward, in which it is computed
    # again whole, without its pixels and features
    patch: float
    # bytes of a run, whatever its patches
    fixed: float
    # bytes of all features of one placeholder that the model reads
    feature: int
    # the dtype of pixels as the vision encoder takes them
    dtype: torch.dtype
    # bytes of its parameters' gradients, which wait from the first run to the last
    gradients: int
    # bytes of a run that is not computed again, from its forward until its backward: [per patch,
    # whatever its patches]
    held: tuple[float, float] = (0.0, 0.0)
    # multiply-adds of a forward per patch, without attention
    products: float = 0.0
    # multiply-adds of attention, per pair of patches of a frame
    pairs: float = 0.0
    # whether a plan may let it keep anything; a vision encoder without gradients has nothing to
    # keep and computes nothing again
    may_keep: bool = True

    def run(self, patches: int) -> float:
        """The bytes of a run."""
        return self.patch * patches + self.fixed

    def kept(self, patches: int) -> float:
        """Bytes that a run keeps if it is not computed again."""
        return self.held[0] * patches + self.held[1]

    def again(self, patches: int, frames: int = 1) -> float:
        """Multiply-adds of a forward of an image, or of a video whose frames attend apart."""
        return self.products * patches + self.pairs * patches**2 / frames

    def patches_that_fit(self, available: float) -> int:
        """The most patches of a run of `available` bytes."""
        return max(0, math.floor((available - self.fixed) / max(self.patch, 1e-9)))
