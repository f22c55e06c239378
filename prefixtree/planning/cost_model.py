"""`CostModel`: FLOPs per token and per visible pair in an update, for the planner's balance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from prefixtree._numbers import integer, number
from prefixtree._picture_inputs import PictureRule
from prefixtree.errors import UnsupportedError
from prefixtree.packing.host_mask import pairs_per_run
from prefixtree.planning.model_cost import ModelCost, model_cost, tower_weights


@dataclass(frozen=True)
class CostModel:
    """FLOPs of an update (forward and backward) by distinct tokens and visible pairs:

        linear x tokens + attention x pairs + windowed x pairs within `window`

    where a token at position p sees p + 1 keys, or at most `window` of them. Only the ratios matter
    to a plan. The defaults are those of a model like Qwen3-8B, without gradient checkpointing. For
    layers with windows of several sizes, `windowed` and `window` are tuples, one entry per size.

    Attributes:
        linear: FLOPs per distinct token, all layers and the lm_head.
        attention: FLOPs per visible (query, key) pair, all layers with full attention.
        windowed: FLOPs per visible (query, key) pair, all layers with this sliding window.
        window: the sliding window, in tokens; it counts the token itself. None where no layer has
            one.
        picture: FLOPs per token of a picture in the vision tower, without its attention; plans of
            micro-batches count it.
        first_picture: the first token id that stands for a picture. None: there are none.

    Raises:
        ValueError: costs that are no numbers, negative, not finite or all 0; windows or ids that
            are no integers; `windowed` without a window, or of another number than the windows.
    """

    linear: float = 4.7e10
    attention: float = 2.1e6
    windowed: float | tuple[float, ...] = 0.0
    window: int | tuple[int, ...] | None = None
    picture: float = 0.0
    first_picture: int | None = None

    def __post_init__(self) -> None:
        for name in ("linear", "attention", "windowed", "picture"):
            object.__setattr__(self, name, _each(getattr(self, name), _cost, name))
        object.__setattr__(self, "window", _each(self.window, _window, "window"))
        if self.first_picture is not None:
            first = integer("first_picture", self.first_picture, 0, or_none=True)
            object.__setattr__(self, "first_picture", first)
        windowed, windows = _entries(self.windowed), _entries(self.window)
        if sum((self.linear, self.attention, *windowed)) == 0:
            raise ValueError(f"costs must not all be 0, got {self}")
        if self.window is None and not any(windowed):
            return
        fit = len(windowed) == len(windows) > 0 and all(part > 0 for part in windowed)
        if not fit or any(window is None or window < 1 for window in windows):
            raise ValueError(f"windowed goes with a window >= 1, and only with it, got {self}")

    @classmethod
    def from_config(
        cls, config: Any, *, gradient_checkpointing: bool = False, scored_share: float = 1.0
    ) -> CostModel:
        """The coefficients of a Hugging Face model, from its config alone:

            picture    3 x 2 x (weights that the patches of a placeholder meet in the tower)
            linear     3 x 2 x (weights a token meets in linear layers, and its cost in states)
                       + 4 x 2 x (weights of the lm_head) x scored_share
            attention  3.5 x 2 x (query heads) x (D + Dv), summed over layers

        A backward costs 2 forwards in matrix products and 2.5 in attention; checkpointing adds one
        more forward of both; prefixtree makes the logits once more in backward. See
        `prefixtree.planning.model_cost` for what counts; the model is built on the meta device.

        Args:
            config: of a causal language model, or of a model that has a text config.
            gradient_checkpointing: whether every layer is checkpointed. Default: False.
            scored_share: scored tokens divided by distinct tokens, 0 .. 1. Default: 1.0, every
                token is scored.

        Returns:
            The cost model, in FLOPs per update.

        Raises:
            ValueError: a config that transformers builds no language model from, or a scored_share
                out of its range.
        """
        scored_share = number("scored_share", scored_share, 0, most=1)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        names = ["hidden_size", "num_hidden_layers", "vocab_size"]
        if not hasattr(text, "per_layer_config"):
            names.insert(2, "num_attention_heads")
        missing = [name for name in names if getattr(text, name, None) is None]
        instead = "give CostModel(linear=..., attention=...) instead"
        if hasattr(config, "config"):
            instead = "give model.config"
        if missing:
            raise ValueError(
                f"{type(config).__name__} does not say {', '.join(missing)}; {instead}"
            )
        try:
            cost = model_cost(config)
        except ValueError as problem:
            raise ValueError(f"{problem}; {instead}") from None
        of_text = cost_model_of(
            cost, gradient_checkpointing=gradient_checkpointing, scored_share=scored_share
        )
        try:
            rule = PictureRule(config)
        except UnsupportedError:
            return of_text
        passes = 4 if gradient_checkpointing else 3
        picture = passes * 2 * tower_weights(config)
        return replace(of_text, picture=picture, first_picture=rule.first_id)

    def cost(
        self, position: np.ndarray, length: np.ndarray, pictured: np.ndarray | None = None
    ) -> np.ndarray:
        """Computes the FLOPs of runs of tokens.

        Args:
            position: int64 [N], the position of each run's first token in its sequences.
            length: int64 [N], the number of tokens of each run.
            pictured: int64 [N], how many of them stand for pictures. Default: none.

        Returns:
            float64 [N].
        """
        flops = self.linear * length + self.attention * pairs_per_run(position, length, None)
        for windowed, window in zip(_entries(self.windowed), _entries(self.window), strict=True):
            if windowed:
                flops = flops + windowed * pairs_per_run(position, length, window)
        return flops if pictured is None else flops + self.picture * pictured


def cost_model_of(
    cost: ModelCost, *, gradient_checkpointing: bool = False, scored_share: float = 1.0
) -> CostModel:
    """The coefficients of a model whose costs are known: see `CostModel.from_config`.

    Args:
        cost: of the model, from `prefixtree.planning.model_cost.model_cost`.
        gradient_checkpointing, scored_share: as in `CostModel.from_config`.

    Returns:
        The cost model, in FLOPs per update.
    """
    passes, attention_passes = (4, 4.5) if gradient_checkpointing else (3, 3.5)
    per_pair: dict[int | None, float] = {None: 0.0}
    for layer in cost.layers:
        if layer.per_pair:
            flops = attention_passes * 2 * layer.per_pair + 2 * layer.index_per_pair
            per_pair[layer.window] = per_pair.get(layer.window, 0.0) + flops
    full = per_pair.pop(None)
    windows: Any = tuple(per_pair) or (None,)
    windowed: Any = tuple(per_pair.values()) or (0.0,)
    if len(windows) == 1:
        (windows,), (windowed,) = windows, windowed
    return CostModel(
        linear=passes * 2 * (cost.token_weights + cost.token_states)
        + 4 * 2 * cost.lm_head_weights * scored_share,
        attention=full,
        windowed=windowed,
        window=windows,
    )


def _cost(name: str, value: Any) -> float:
    return number(name, value, 0)


def _window(name: str, value: Any) -> int | None:
    return None if value is None else integer(name, value, or_none=True)


def _each(value: Any, read: Callable[[str, Any], Any], name: str) -> Any:
    """`read` of one value, or of each of a tuple's values."""
    if isinstance(value, tuple):
        return tuple(read(name, entry) for entry in value)
    return read(name, value)


def _entries(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
