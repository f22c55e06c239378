"""`CostModel`: what a token and a visible pair cost in an update, for the planner's balance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from prefixtree.cost import model_cost, pairs_per_run


@dataclass(frozen=True)
class CostModel:
    """FLOPs of an update (forward and backward) by distinct tokens and visible pairs:

        linear x tokens + attention x pairs + windowed x pairs within `window`

    where a token at position p sees p + 1 keys, or at most `window` of them. Only the ratios matter
    to a plan. The defaults are those of a model like Qwen3-8B, without gradient checkpointing.

    Attributes:
        linear: FLOPs a distinct token, all layers and the head.
        attention: FLOPs a visible (query, key) pair, all layers with full attention.
        windowed: likewise, all layers with a sliding window.
        window: their window, None where there is none; it counts the token itself.
    """

    linear: float = 4.7e10
    attention: float = 2.1e6
    windowed: float = 0.0
    window: int | None = None

    def __post_init__(self) -> None:
        parts = (self.linear, self.attention, self.windowed)
        if not all(np.isfinite(part) and part >= 0 for part in parts) or sum(parts) == 0:
            raise ValueError(f"costs must be finite, >= 0 and not all 0, got {self}")
        if (self.windowed > 0) != (self.window is not None and self.window >= 1):
            raise ValueError(f"windowed goes with a window >= 1, and only with it, got {self}")

    @classmethod
    def from_config(
        cls, config: Any, *, gradient_checkpointing: bool = False, scored_share: float = 1.0
    ) -> CostModel:
        """The coefficients of a Hugging Face model, from its config alone:

            linear     3 x 2 x (weights a token meets in linear layers)
                       + 4 x 2 x (weights of the language model's head) x scored_share
            attention  3.5 x 2 x (query heads) x (D + Dv), summed over layers

        A backward costs 2 forwards in matrix products and 2.5 in attention; checkpointing adds one
        more forward of both; prefixtree makes the logits once more in backward. See
        `prefixtree.cost` for what counts; the model is built on the meta device.

        Args:
            config: of a causal language model, or of a model that has a text config.
            gradient_checkpointing: whether every layer is checkpointed.
            scored_share: scored tokens over distinct tokens, where the loss mask is known.

        Raises:
            ValueError: a config that transformers builds no language model from.
        """
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        missing = [name for name in names if getattr(text, name, None) is None]
        instead = "give CostModel(linear=..., attention=...) instead"
        if missing:
            raise ValueError(
                f"{type(config).__name__} does not say {', '.join(missing)}; {instead}"
            )
        try:
            cost = model_cost(config)
        except ValueError as problem:
            raise ValueError(f"{problem}; {instead}") from None
        passes, attention_passes = (4, 4.5) if gradient_checkpointing else (3, 3.5)
        pairs = {
            slides: sum(x.per_pair for x in cost.layers if (x.window is not None) == slides)
            for slides in (False, True)
        }
        return cls(
            linear=passes * 2 * cost.token_weights + 4 * 2 * cost.head_weights * scored_share,
            attention=attention_passes * 2 * pairs[False],
            windowed=attention_passes * 2 * pairs[True],
            window=next((w for w in cost.windows if w is not None), None),
        )

    def cost(self, depth: np.ndarray, length: np.ndarray) -> np.ndarray:
        """FLOPs of runs of tokens at positions depth .. depth + length - 1 (int64), float64."""

        flops = self.linear * length + self.attention * pairs_per_run(depth, length, None)
        if self.windowed:
            flops = flops + self.windowed * pairs_per_run(depth, length, self.window)
        return flops
