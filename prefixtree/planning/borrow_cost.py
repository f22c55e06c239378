"""`BorrowCost`: what a borrowed token costs, in bytes to send and to hold, and in time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prefixtree._numbers import integer, number
from prefixtree.packing.layout import PackedForest
from prefixtree.planning.cost_model import CostModel
from prefixtree.planning.model_cost import ModelCost


@dataclass(frozen=True)
class BorrowCost:
    """The cost of a token that a part borrows, beside what a `CostModel` counts.

    The defaults are those of a model like Qwen3-8B in bfloat16, with gradient checkpointing, on
    GPUs of one host that are joined by NVLink and as fast as an H100 or H200. The time of an update
    on n ranks is predicted as

        max over ranks (linear FLOPs / linear_rate + attention FLOPs / attention_rate)
        + layers x (3 latency + busiest x (2 row_bytes + gradient_row_bytes) / link_rate)

    where busiest is the most rows that any rank sends, or receives, per layer. The keys and values
    are sent twice, in the forward and again in the backward, and their gradients return in fp32.
    Nothing is taken to overlap, and only the exchange of borrowed rows is counted: no sharding of
    weights, no optimizer. It compares divisions with one another, and is no measurement.

    Attributes:
        layers: layers with keys and values.
        kv_heads: Hk, the kv heads of a layer.
        head_dim: D, of keys.
        value_dim: Dv, of values.
        element_bytes: bytes per element of keys and values.
        token_bytes: bytes of memory per own token of a step, in all layers. None where it is not
            known: then there is no `weight`, which `plan_steps` needs.
        graph_bytes: bytes that the graph of an own token holds from its forward to its backward, in
            all layers: what a token of a kept trunk takes, beside its keys and values.
        kept_copies: the share of layers that hold a copy of a step's borrowed keys and values from
            their forward to their backward, 0 .. 1: those that are not recomputed whole.
        on_host: whether borrowed rows and their gradients wait on the host of a GPU until their
            layer runs, so that one layer's are on the device at once. Else all layers' are.
        state_layers: recurrent layers.
        state_bytes: bytes of the state of such a layer behind a token, float32. Those that later
            steps need are held, and their gradients.
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
        """Bytes per borrowed token of an update, in all layers: sent twice, gradients once."""
        return self.layers * (2 * self.row_bytes + self.gradient_row_bytes)

    @property
    def held_layers(self) -> int:
        """Layers whose borrowed rows, and their gradients, are on the device at once."""
        # with a second copy, beside own rows, while the layer runs
        return 2 if self.on_host else self.layers

    @property
    def weight(self) -> float:
        """Memory of a borrowed token over that of an own one: its keys, values and gradients.

        Raises:
            ValueError: token_bytes are not known.
        """
        if self.token_bytes is None:
            raise ValueError(
                "the weight of a borrowed token needs token_bytes, the memory per own token; got "
                "None: give BorrowCost token_bytes=..., or leave borrow_cost out"
            )
        kept = self.layers * self.kept_copies * self.row_bytes
        rows = self.held_layers * (self.row_bytes + self.gradient_row_bytes)
        return (kept + rows) / self.token_bytes

    @property
    def trunk_weight(self) -> float:
        """Memory of a kept trunk's token over that of an own one: its graph, and what it lends.

        Raises:
            ValueError: token_bytes are not known.
        """
        return self.weight + self.graph_bytes / float(self.token_bytes or 1)

    @property
    def returned_weight(self) -> float:
        """The same of the gradients that borrowers returned to a token, in a trunk's backward.

        Raises:
            ValueError: token_bytes are not known.
        """
        held = self.held_layers * self.gradient_row_bytes
        return self.weight and held / float(self.token_bytes or 1)

    @property
    def held_state_bytes(self) -> int:
        """Bytes of the states behind a token, and of their gradients, on the device at once."""
        # with a second copy while the layer runs
        layers = min(2, self.state_layers) if self.on_host else self.state_layers
        return 2 * layers * self.state_bytes

    @property
    def state_weight(self) -> float:
        """Memory of the states behind a token, and of their gradients, over that of an own one.

        Raises:
            ValueError: token_bytes are not known.
        """
        if not self.held_state_bytes:
            return 0.0
        if self.token_bytes is None:
            raise ValueError(
                "the weight of a state needs token_bytes, the memory per own token; got None: give "
                "BorrowCost token_bytes=..., or leave borrow_cost out"
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
            rows: int64 [n, n], the rows that each part borrows from each, as `Parts.borrowed`.

        Returns:
            Seconds; 0 where no part borrows.
        """
        if not rows.any():
            return 0.0
        busiest = int(max(rows.sum(0).max(), rows.sum(1).max()))
        return 3 * self.layers * self.latency + busiest * self.update_row_bytes / self.link_rate


def borrow_cost_of(cost: ModelCost, token_bytes: float | None = None) -> BorrowCost:
    """The bytes of a model; the rates stay the defaults.

    Args:
        cost: of the model, from `prefixtree.planning.model_cost.model_cost`.
        token_bytes: as in `BorrowCost`; it depends on what layers recompute. Default: not known.

    Returns:
        The costs.

    Raises:
        ValueError: a model without a layer of softmax attention, which has no keys to borrow.
    """
    layers = sum(1 for layer in cost.layers if layer.per_pair)
    if not layers:
        raise ValueError(
            f"{cost.model_type} has no layer with softmax attention, so it has no keys and values "
            "to borrow"
        )
    states = [layer.state_numbers for layer in cost.layers if layer.state_numbers]
    return BorrowCost(
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
    """Computes the FLOPs of runs of packed tokens.

    Args:
        packed: the packed forest.
        border: int64 [B + 1], ascending from 0 to T; run i is border[i] .. border[i + 1] - 1.
        cost_model: FLOPs per token and visible pair.

    Returns:
        float64 [B], FLOPs of an update.
    """
    forest = packed.forest
    # pieces within a node, or of padding, which has no tokens above it
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
