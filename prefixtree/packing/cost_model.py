"""`CostModel`: what a token and a visible pair cost in an update, for the planner's balance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


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

            linear     3 x 2 x (weights a token meets in the layers)
                       + 4 x 2 x hidden size x vocabulary x scored_share
            attention  3.5 x 2 x (query heads) x (D + Dv), summed over layers

        A backward costs 2 forwards in matrix products and 2.5 in attention; checkpointing adds one
        more forward of both; prefixtree makes the logits once more in backward. Weights are those
        of attention (grouped, or latent with low-rank projections) and of gated MLPs with three
        matrices; of routed experts those a token is sent to, in every layer that has them.

        Args:
            config: of a causal language model, or of a model that has a text config.
            gradient_checkpointing: whether every layer is checkpointed.
            scored_share: scored tokens over distinct tokens, where the loss mask is known.

        Raises:
            ValueError: a config without the sizes that the formula takes.
        """
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        missing = [name for name in names if getattr(text, name, None) is None]
        if missing or not (_mlp_layers(text)):
            missing = missing or ["intermediate_size"]
            raise ValueError(
                f"{type(config).__name__} does not say {', '.join(missing)}; give "
                "CostModel(linear=..., attention=...) instead"
            )
        hidden, layers = text.hidden_size, text.num_hidden_layers
        weights, per_pair = _attention(text)
        token_weights = layers * weights + sum(3 * hidden * i for i in _mlp_layers(text))
        passes, attention_passes = (4, 4.5) if gradient_checkpointing else (3, 3.5)
        head = 4 * 2 * hidden * text.vocab_size * scored_share
        sliding, window = _sliding(text)
        pair = attention_passes * 2 * per_pair
        return cls(
            linear=passes * 2 * token_weights + head,
            attention=pair * (layers - sliding),
            windowed=pair * sliding,
            window=window,
        )

    def cost(self, depth: np.ndarray, length: np.ndarray) -> np.ndarray:
        """FLOPs of runs of tokens at positions depth .. depth + length - 1 (int64), float64."""

        def pairs(window: int | None) -> np.ndarray:
            return _pairs_up_to(depth + length, window) - _pairs_up_to(depth, window)

        flops = self.linear * length + self.attention * pairs(None)
        return flops + self.windowed * pairs(self.window) if self.windowed else flops


def _pairs_up_to(n: np.ndarray, window: int | None) -> np.ndarray:
    """Pairs that the first n tokens of a sequence see."""
    near = n if window is None else np.minimum(n, window)
    return near * (near + 1) // 2 + (n - near) * (0 if window is None else window)


def _attention(text: Any) -> tuple[int, int]:
    """Weights of one attention layer, and its query heads x (D + Dv)."""
    hidden, heads = text.hidden_size, text.num_attention_heads
    dim = getattr(text, "head_dim", None) or hidden // heads
    if rank := getattr(text, "kv_lora_rank", None):
        rope, nope, value = text.qk_rope_head_dim, text.qk_nope_head_dim, text.v_head_dim
        queries = heads * (nope + rope)
        low = getattr(text, "q_lora_rank", None)
        weights = hidden * queries if low is None else low * (hidden + queries)
        weights += hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
        return weights, heads * (nope + rope + value)
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    value = getattr(text, "v_head_dim", None) or dim
    return hidden * (heads + kv_heads) * (dim + value), heads * (dim + value)


def _mlp_layers(text: Any) -> list[int]:
    """Intermediate features that a token meets in each layer; empty where the config says none."""
    layers = getattr(text, "num_hidden_layers", None) or 0
    dense = getattr(text, "intermediate_size", None)
    active = getattr(text, "num_experts_per_tok", None)
    if not active:
        return [dense] * layers if dense else []
    width = getattr(text, "moe_intermediate_size", None) or dense
    if not width:
        return []
    shared = getattr(text, "shared_expert_intermediate_size", None) or width * (
        getattr(text, "n_shared_experts", None) or 0
    )
    kinds = getattr(text, "mlp_layer_types", None)
    if kinds is not None:
        plain = {i for i, kind in enumerate(kinds) if kind == "dense"}
    else:
        plain = set(getattr(text, "mlp_only_layers", None) or ())
        plain |= set(range(getattr(text, "first_k_dense_replace", None) or 0))
    return [
        dense if dense and layer in plain else active * width + shared for layer in range(layers)
    ]


def _sliding(text: Any) -> tuple[int, int | None]:
    """Layers with a sliding window, and the window."""
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    if window is None:
        return 0, None
    if kinds is not None:
        count = sum(kind == "sliding_attention" for kind in kinds)
    else:
        count = text.num_hidden_layers if getattr(text, "use_sliding_window", True) else 0
    return count, window if count else None
