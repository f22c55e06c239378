"""The cost of tokens: `CostModel`, FLOPs of an update for the planner's balance, and `ImportCost`,
bytes and time of a token that a part imports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from prefixtree._numbers import integer, number
from prefixtree.packing.layout import PackedForest
from prefixtree.packing.visible import pairs_per_run
from prefixtree.planning.model_cost import ModelCost, model_cost
from prefixtree.wings import load


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
        image: FLOPs per token of an image in the vision encoder, without its attention; plans of
            micro-batches count it.
        first_image: the first token id that stands for an image. None: there are none.

    Raises:
        ValueError: costs that are no numbers, negative, not finite or all 0; windows or ids that
            are no integers; `windowed` without a window, or of another number than the windows.
    """

    linear: float = 4.7e10
    attention: float = 2.1e6
    windowed: float | tuple[float, ...] = 0.0
    window: int | tuple[int, ...] | None = None
    image: float = 0.0
    first_image: int | None = None

    def __post_init__(self) -> None:
        for name in ("linear", "attention", "windowed", "image"):
            object.__setattr__(self, name, _each(getattr(self, name), _cost, name))
        object.__setattr__(self, "window", _each(self.window, _window, "window"))
        if self.first_image is not None:
            first = integer("first_image", self.first_image, 0, or_none=True)
            object.__setattr__(self, "first_image", first)
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
        """Computes the coefficients of a Hugging Face model from its config alone:

            image    3 x 2 x (weights that the patches of a placeholder meet in the vision encoder)
            linear     3 x 2 x (weights a token meets in linear layers, and its cost in states)
                       + 4 x 2 x (weights of the lm_head) x scored_share
            attention  3.5 x 2 x (query heads) x (D + Dv), summed over layers

        A backward costs 2 forwards in matrix products and 2.5 in attention. Checkpointing adds one
        more forward of both. prefixtree computes the logits again in the backward. The model
        is built on the meta device; `prefixtree.planning.model_cost` says what counts.

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
        if getattr(config, "vision_config", None) is None:
            return of_text
        with_encoder: CostModel = load("images").with_images(
            of_text, config, passes=4 if gradient_checkpointing else 3
        )
        return with_encoder

    def cost(
        self, position: np.ndarray, length: np.ndarray, image_of: np.ndarray | None = None
    ) -> np.ndarray:
        """Computes the FLOPs of runs of tokens.

        Args:
            position: int64 [N], the position of each run's first token in its sequences.
            length: int64 [N], the number of tokens of each run.
            image_of: int64 [N], how many tokens of each run stand for images. Default: none.

        Returns:
            float64 [N].
        """
        flops = self.linear * length + self.attention * pairs_per_run(position, length, None)
        for windowed, window in zip(_entries(self.windowed), _entries(self.window), strict=True):
            if windowed:
                flops = flops + windowed * pairs_per_run(position, length, window)
        return flops if image_of is None else flops + self.image * image_of


def cost_model_of(
    cost: ModelCost, *, gradient_checkpointing: bool = False, scored_share: float = 1.0
) -> CostModel:
    """Computes the coefficients of a model from its costs, as `CostModel.from_config` does."""
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
    """Reads one value, or each value of a tuple."""
    if isinstance(value, tuple):
        return tuple(read(name, entry) for entry in value)
    return read(name, value)


def _entries(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


# ---- imported tokens -----------------------------------------------------------------------------


@dataclass(frozen=True)
class ImportCost:
    """The cost of a token that a part imports, in addition to its cost in a `CostModel`.

    The defaults are those of a model like Qwen3-8B in bfloat16, with gradient checkpointing, on
    GPUs of one host that are joined by NVLink and as fast as an H100 or H200. The time of an update
    on n ranks is predicted as

        max over ranks (linear FLOPs / linear_rate + attention FLOPs / attention_rate)
        + layers x (3 latency + busiest x (2 row_bytes + gradient_row_bytes) / link_rate)

    where busiest is the most rows that any rank sends, or receives, per layer. Keys and values are
    sent twice, in the forward and again in the backward. Their gradients return in fp32. The
    prediction assumes no overlap. It counts only the exchange of imported rows, without sharding of
    weights and without an optimizer. It compares divisions with one another, and is no measurement.

    Attributes:
        layers: layers with keys and values.
        kv_heads: Hk, the kv heads of a layer.
        head_dim: D, of keys.
        value_dim: Dv, of values.
        element_bytes: bytes per element of keys and values.
        token_bytes: bytes of memory per own token of a step, in all layers. None where it is not
            known: then there is no `weight`, which `plan_steps` needs.
        graph_bytes: bytes that the graph of an own token holds from its forward to its backward, in
            all layers. A token of a kept trunk takes them in addition to its keys and values.
        kept_copies: the share of layers, 0 .. 1, that are not recomputed whole. They hold a copy of
            a step's imported keys and values from their forward to their backward.
        on_host: whether imported rows and their gradients wait on the host of a GPU until their
            layer runs, so that one layer's are on the device at once. Otherwise all layers' are.
        state_layers: recurrent layers.
        state_bytes: bytes of a layer's recurrent state after a token, float32. States that later
            steps need are held, and so are their gradients.
        lm_head: FLOPs per scored edge. It is a part of `CostModel.linear`, which counts every token
            as scored; a token that predicts no scored edge costs so much less.
        linear_rate: FLOPs per second in linear layers.
        attention_rate: FLOPs per second in attention, forward and backward.
        link_rate: bytes per second that a rank sends while it receives as many.
        latency: seconds per exchange without a byte.

    Raises:
        ValueError: counts and bytes per element that are no integers; a number that is negative or
            not finite, or a rate, `layers` or `token_bytes` of 0.
    """

    layers: int = 36
    kv_heads: int = 8
    head_dim: int = 128
    value_dim: int = 128
    element_bytes: int = 2
    token_bytes: float | None = 559_928
    graph_bytes: float = 311_824
    kept_copies: float = 0.0
    on_host: bool = False
    state_layers: int = 0
    state_bytes: int = 0
    lm_head: float = 4.98e9
    linear_rate: float = 6e14
    attention_rate: float = 4.2e14
    link_rate: float = 3.3e11
    latency: float = 4e-5

    def __post_init__(self) -> None:
        read: dict[str, float] = {"layers": integer("layers", self.layers, 1)}
        for name in (
            "kv_heads",
            "head_dim",
            "value_dim",
            "element_bytes",
            "state_layers",
            "state_bytes",
        ):
            read[name] = integer(name, getattr(self, name), 0)
        read["kept_copies"] = number("kept_copies", self.kept_copies, 0, most=1)
        for name in ("graph_bytes", "lm_head", "latency"):
            read[name] = number(name, getattr(self, name), 0)
        for name in ("linear_rate", "attention_rate", "link_rate"):
            read[name] = number(name, getattr(self, name), above=0)
        if self.token_bytes is not None:
            read["token_bytes"] = number("token_bytes", self.token_bytes, above=0, or_none=True)
        for name, value in read.items():
            object.__setattr__(self, name, value)

    @property
    def row_bytes(self) -> int:
        """Bytes of the key and the value of a token in a layer."""
        return self.kv_heads * (self.head_dim + self.value_dim) * self.element_bytes

    @property
    def gradient_row_bytes(self) -> int:
        """Bytes of the fp32 gradients of a token's key and value in a layer."""
        return self.kv_heads * (self.head_dim + self.value_dim) * 4

    @property
    def update_row_bytes(self) -> int:
        """Bytes that an imported token sends per update, all layers: rows twice, gradients once."""
        return self.layers * (2 * self.row_bytes + self.gradient_row_bytes)

    @property
    def held_layers(self) -> int:
        """Layers whose imported rows, and their gradients, are on the device at once."""
        # the layer that runs has a second copy, next to its own rows
        return 2 if self.on_host else self.layers

    @property
    def weight(self) -> float:
        """Memory of an imported token over that of an own token: its keys, values and gradients.

        Raises:
            ValueError: token_bytes are not known.
        """
        if self.token_bytes is None:
            raise ValueError(
                "the weight of an imported token needs token_bytes, the memory per own token; got "
                "None: give ImportCost token_bytes=..., or leave import_cost out"
            )
        kept = self.layers * self.kept_copies * self.row_bytes
        rows = self.held_layers * (self.row_bytes + self.gradient_row_bytes)
        return (kept + rows) / self.token_bytes

    @property
    def trunk_weight(self) -> float:
        """Memory of a kept trunk's token over that of an own token: its graph and its exports.

        Raises:
            ValueError: token_bytes are not known.
        """
        return self.weight + self.graph_bytes / float(self.token_bytes or 1)

    @property
    def returned_weight(self) -> float:
        """Memory of gradients that importers return to a trunk's token, over that of an own token.

        Raises:
            ValueError: token_bytes are not known.
        """
        held = self.held_layers * self.gradient_row_bytes
        return self.weight and held / float(self.token_bytes or 1)

    @property
    def held_state_bytes(self) -> int:
        """Bytes of the states after a token, and of their gradients, on the device at once."""
        # the layer that runs has a second copy
        layers = min(2, self.state_layers) if self.on_host else self.state_layers
        return 2 * layers * self.state_bytes

    @property
    def state_weight(self) -> float:
        """Memory of the states after a token, and of their gradients, over that of an own token.

        Raises:
            ValueError: token_bytes are not known.
        """
        if not self.held_state_bytes:
            return 0.0
        if self.token_bytes is None:
            raise ValueError(
                "the weight of a state needs token_bytes, the memory per own token; got None: give "
                "ImportCost token_bytes=..., or leave import_cost out"
            )
        return self.held_state_bytes / self.token_bytes

    def compute_seconds(self, tokens: np.ndarray, flops: np.ndarray, cost: CostModel) -> np.ndarray:
        """Predicts the time to compute own tokens, all of them scored.

        Args:
            tokens: [N], numbers of tokens.
            flops: [N], their FLOPs by the cost model.
            cost: the cost model.

        Returns:
            float64 [N], seconds.
        """
        linear = cost.linear * tokens
        return linear / self.linear_rate + (flops - linear) / self.attention_rate

    def exchange_seconds(self, rows: np.ndarray) -> float:
        """Predicts the time of all exchanges of an update.

        Args:
            rows: int64 [n, n], the rows that each part imports from each, as `Parts.imported`.

        Returns:
            Seconds; 0 where no part imports.
        """
        if not rows.any():
            return 0.0
        busiest = int(max(rows.sum(0).max(), rows.sum(1).max()))
        return 3 * self.layers * self.latency + busiest * self.update_row_bytes / self.link_rate


def import_cost_of(cost: ModelCost, token_bytes: float | None = None) -> ImportCost:
    """The bytes of a model whose costs are known; the rates stay the defaults."""
    layers = sum(1 for layer in cost.layers if layer.per_pair)
    if not layers:
        raise ValueError(
            f"{cost.model_type} has no layer with softmax attention, so it has no keys and values "
            "to import"
        )
    states = [layer.state_numbers for layer in cost.layers if layer.state_numbers]
    return ImportCost(
        layers=layers,
        kv_heads=cost.kv_heads,
        head_dim=cost.head_dim,
        value_dim=cost.value_dim,
        element_bytes=cost.element_bytes,
        token_bytes=token_bytes,
        state_layers=len(states),
        state_bytes=4 * max(states, default=0),
        lm_head=4 * 2 * cost.lm_head_weights,
    )


def run_flops(packed: PackedForest, border: np.ndarray, cost_model: CostModel) -> np.ndarray:
    """FLOPs of an update, float64 [B], of tokens border[i] .. border[i + 1] - 1 for each i."""
    forest = packed.forest
    # each piece lies within a node or in padding, which has no tokens above it
    cuts = np.unique(np.concatenate([border, forest.node_start, [forest.num_tokens]]))
    start, length = cuts[:-1], np.diff(cuts)
    node = np.searchsorted(forest.node_start, start, side="right") - 1
    position = forest.node_position[node] + start - forest.node_start[node]
    flops = cost_model.cost(position, length)
    padding = start >= forest.num_tokens
    if padding.any():
        alone = cost_model.cost(np.zeros(1, np.int64), np.ones(1, np.int64))
        flops = np.where(padding, alone * length, flops)
    return np.add.reduceat(flops, np.searchsorted(cuts, border[:-1]))
