"""What one update of a model would cost on a file of rollouts, replicated and packed.

FLOPs of an update, forward and backward:

    linear     3 x 2 x (weights a token meets in linear layers) x tokens
    attention  3.5 x 2 x (query heads) x (D + Dv) x (visible query-key pairs), summed over layers
    head       3 x 2 x hidden size x vocabulary x (scored edges); packed 4 x 2 x, because
               prefixtree makes the logits once more in backward rather than keep them

tokens, pairs and scored edges are the replicated batch's or the packed forest's; a layer with a
sliding window counts the pairs inside it; a token meets the experts it is routed to. Backward costs
2 forwards in matrix products and 2.5 in attention; gradient checkpointing adds one more forward of
both, not of the head. The speed-up is the ratio of the FLOPs: both sides are taken to run at the
same rate, which short sequences and memory-bound layers do not.

Memory of an update, without optimizer states, b bytes an element:

    fixed        2 b x parameters (weights and gradients)
    activations  tokens x (layers + 1) x A, with checkpointing tokens x (layers x b h + 2 A)
    A            2 (4 + 2 b) h + b (H + Hk) (D + Dv) + 4 b I
                 + (4 + b) (H + Hk) D where queries and keys are normalised

for hidden size h, H query and Hk kv heads of D and Dv, and I intermediate features a token (of
the experts it meets): norms keep a float32 and two short copies, attention keeps q, k, v and its
output, a gated MLP four times I. The one A more are the gradients of the layer that backward works
on. All tokens at once: micro-batches divide both sides alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prefixtree.errors import InputError
from prefixtree.forest import PrefixForest
from prefixtree.hub import explain, load_config
from prefixtree.rollouts import Rollouts

_KINDS = {"full_attention", "sliding_attention"}
# the projection back to the hidden size, which every family's MLPs end in: dense, shared, routed
_MLP_END = ("down_proj", "output_linear", "dense_4h_to_h", "mlp.c_proj", "fc2", "w2")


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that the formulas take; I is per token, over the experts it meets.

    `windows` holds each layer's sliding window, None for full attention; `token_weights` the
    linear weights a token meets outside embedding and head.
    """

    model_type: str
    parameters: int
    token_weights: int
    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    intermediate: int
    windows: tuple[int | None, ...]
    normalised_queries: bool
    element_bytes: int

    @property
    def layer_bytes(self) -> int:
        """A: what a layer keeps of a token for backward."""
        b, h = self.element_bytes, self.hidden
        heads = self.heads + self.kv_heads
        norms = 2 * (4 + 2 * b) * h
        attention = b * heads * (self.head_dim + self.value_dim)
        if self.normalised_queries:
            attention += (4 + b) * heads * self.head_dim
        return norms + attention + 4 * b * self.intermediate

    def activation_bytes(self, tokens: int, checkpointing: bool) -> int:
        """What all layers keep of `tokens` for backward, and its own gradients."""
        layers = len(self.windows)
        if checkpointing:
            return tokens * (layers * self.element_bytes * self.hidden + 2 * self.layer_bytes)
        return tokens * (layers + 1) * self.layer_bytes


def read_shape(path: str | Path, dtype: str | None = None) -> ModelShape:
    """The shape of the model of a folder, a config.json or a name; its weights are not read.

    Args:
        path: a model folder, its config.json, or its name on the Hugging Face hub.
        dtype: torch's name of it; the config's own, or bfloat16, where it is None.

    Raises:
        InputError: no config, one that no causal language model is built from, or a model with
            layers that the formulas do not describe.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = load_config(path)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as problem:
        raise InputError(explain("--model", path, problem)) from None
    text = config.get_text_config()
    experts = _first(text, "num_experts", "num_local_experts", "n_routed_experts") or 0
    active = _first(text, "num_experts_per_tok", "num_experts_per_token") or 0
    outside = {
        id(layer.weight)
        for layer in (model.get_input_embeddings(), model.get_output_embeddings())
        if layer is not None
    }
    token_weights = intermediate = 0.0
    for name, weight in model.named_parameters():
        if weight.ndim < 2 or id(weight) in outside:
            continue
        met = weight.numel()
        if ".experts." in name and experts:
            met = met * active / experts
        token_weights += met
        if name.removesuffix(".weight").endswith(_MLP_END):
            intermediate += met / text.hidden_size
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    value_dim = getattr(text, "v_head_dim", None) or head_dim
    if nope := getattr(text, "qk_nope_head_dim", None):
        head_dim = nope + text.qk_rope_head_dim
    layers = text.num_hidden_layers
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        slides = window is not None and getattr(text, "use_sliding_window", True)
        kinds = ["sliding_attention" if slides else "full_attention"] * layers
    if unknown := set(kinds) - _KINDS:
        raise InputError(
            f"--model {path}: has layers of {', '.join(sorted(unknown))}; the estimate knows full "
            "and sliding attention"
        )
    if not intermediate:
        raise InputError(
            f"--model {path}: the estimate does not know the MLPs of {config.model_type}; none of "
            f"its weights is named {', '.join(_MLP_END)}"
        )
    element = getattr(torch, dtype) if dtype else getattr(config, "dtype", None) or torch.bfloat16
    return ModelShape(
        model_type=config.model_type,
        parameters=sum(p.numel() for p in model.parameters()),
        token_weights=round(token_weights),
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        value_dim=value_dim,
        intermediate=round(intermediate / layers),
        windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        normalised_queries=any(".q_norm." in name for name, _ in model.named_parameters()),
        element_bytes=element.itemsize,
    )


def estimate(
    forest: PrefixForest, rollouts: Rollouts, shape: ModelShape, *, checkpointing: bool = False
) -> dict[str, Any]:
    """The formulas of the module for one update over all sequences, ready for JSON.

    Args:
        forest: of `rollouts.sequences`.
        rollouts: loss masks tell the scored edges, all where there are none.
        shape: of the model.
        checkpointing: gradient checkpointing of every layer.
    """
    edges = _scored_edges(forest, rollouts)
    lengths = forest.sequence_lengths
    zeros = np.zeros_like(lengths)
    depth = forest.node_depth.astype(np.int64)
    sides = {
        "replicated": (int(lengths.sum()), (zeros, lengths), edges[0], 3.0),
        "packed": (forest.num_tokens, (depth, forest.node_length.astype(np.int64)), edges[1], 4.0),
    }
    passes, attention_passes = (4.0, 4.5) if checkpointing else (3.0, 3.5)
    b = shape.element_bytes
    facts: dict[str, Any] = {
        "model_type": shape.model_type,
        "parameters": shape.parameters,
        "element_bytes": b,
        "gradient_checkpointing": checkpointing,
        "fixed_bytes": 2 * b * shape.parameters,
    }
    for name, (tokens, spans, scored, head_passes) in sides.items():
        pairs = {window: visible_pairs(*spans, window) for window in set(shape.windows)}
        per_pair = 2 * shape.heads * (shape.head_dim + shape.value_dim)
        linear = passes * 2 * shape.token_weights * tokens
        attention = attention_passes * per_pair * sum(pairs[window] for window in shape.windows)
        head = head_passes * 2 * shape.hidden * shape.vocabulary * scored
        facts[name] = {
            "scored": scored,
            "linear_flops": linear,
            "attention_flops": attention,
            "head_flops": head,
            "flops": linear + attention + head,
            "activation_bytes": shape.activation_bytes(tokens, checkpointing),
        }
    facts["speedup"] = facts["replicated"]["flops"] / facts["packed"]["flops"]
    return facts


def visible_pairs(depth: np.ndarray, length: np.ndarray, window: int | None) -> int:
    """Query-key pairs of runs of tokens at positions depth .. depth + length - 1, int64 [N] each.

    A token at position p sees p + 1 keys, or `window` of them where that is less.
    """

    def up_to(n: np.ndarray) -> np.ndarray:
        if window is None:
            return n * (n + 1) // 2
        near = np.minimum(n, window)
        return near * (near + 1) // 2 + (n - near) * window

    return int((up_to(depth + length) - up_to(depth)).sum())


def _scored_edges(forest: PrefixForest, rollouts: Rollouts) -> tuple[int, int]:
    """Scored tokens of all sequences, and distinct ones; a first token is never scored."""
    from prefixtree.packing.layout import pack

    masks = rollouts.loss_masks
    distinct = len(pack(forest).edges(masks).token)
    if masks is None:
        return forest.num_replicated_tokens - forest.num_sequences, distinct
    return sum(int(mask[1:].sum()) for mask in masks), distinct


def _first(config: Any, *names: str) -> Any:
    return next((v for name in names if (v := getattr(config, name, None)) is not None), None)
