"""Estimates the cost of one update of a model on a file of rollouts, replicated and packed.

FLOPs of an update, forward and backward:

    linear     3 x 2 x (weights a token meets in linear layers) x tokens
    attention  3.5 x 2 x (query heads) x (D + Dv) x (visible query-key pairs), summed over layers
    states     3 x 2 x (multiply-adds of a token with the states, `prefixtree.cost`) x tokens
    lm_head    3 x 2 x hidden size x vocabulary x (scored edges); packed 4 x 2 x, because
               prefixtree makes the logits once more in backward rather than keep them

tokens, pairs and scored edges are the replicated batch's or the packed forest's; a layer with a
sliding window counts the pairs inside it; a token meets the experts it is routed to. Backward costs
2 forwards in matrix products and 2.5 in attention; gradient checkpointing adds one more forward of
all, not of the lm_head. The speed-up is the ratio of the FLOPs: both sides are taken to run at the
same rate, which short sequences and memory-bound layers do not.

Memory of an update, without optimizer states, b bytes per element:

    fixed        2 b x parameters (weights and gradients)
    activations  tokens x (the sum of A over layers + the largest A), with checkpointing
                 tokens x (layers x b h + 2 times the largest A)
    A            2 (4 + 2 b) h + 4 b I
                 + b (H + Hk) (D + Dv) where a layer attends
                 + (4 + b) (H + Hk) D where queries and keys are normalised besides
                 + 2 b C + (8 + 5 b) V + (12 + 64 b) Hs where a layer carries a state

for hidden size h, H query and Hk kv heads of D and Dv, and I intermediate features per token (of
the experts it meets): norms keep a float32 and two short copies, attention keeps q, k, v and its
output, a gated MLP four times I. A layer with a state keeps the C channels of its convolution
before and after it, the V columns of all heads of its recurrence, their gate and the steps of the
gated norm between, and per head of a delta rule (Hs) a float32 gate, its step and its sum, and a
row of a triangle of 64 tokens. The largest A once more are the gradients of the layer that backward
works on. All tokens at once: micro-batches divide both sides alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from prefixtree.cost import FEED_FORWARD, MLP_END, SOFTMAX, ModelCost, model_cost, visible_pairs
from prefixtree.errors import InputError
from prefixtree.forest import PrefixForest
from prefixtree.hub import explain, load_config
from prefixtree.rollouts import Rollouts


def read_cost(path: str | Path, dtype: str | None = None) -> ModelCost:
    """The cost of a token in the model of a folder, a config.json or a name; no weights are read.

    Args:
        path: a model folder, its config.json, or its name on the Hugging Face hub.
        dtype: torch's name of a dtype. Default: that of the config, or bfloat16.

    Raises:
        InputError: no config, one that no causal language model is built from, or a model with
            layers that the formulas do not describe.
    """
    import torch

    config = load_config(path)
    element = getattr(torch, dtype).itemsize if dtype else None
    try:
        cost = model_cost(config, element)
    except Exception as problem:
        raise InputError(explain("--model", path, problem)) from None
    unknown = {
        layer.kind
        for layer in cost.layers
        if layer.kind not in (*SOFTMAX, *FEED_FORWARD) and not (layer.per_pair or layer.channels)
    }
    if unknown:
        raise InputError(
            f"--model {path}: has layers of {', '.join(sorted(unknown))} that the estimate does "
            "not know; it knows attention, and states behind a convolution (delta rules, Mamba-2)"
        )
    if not cost.intermediate:
        raise InputError(
            f"--model {path}: the estimate does not know the MLPs of {config.model_type}; none of "
            f"its weights is named {', '.join(MLP_END)}"
        )
    return cost


def estimate(
    forest: PrefixForest, rollouts: Rollouts, cost: ModelCost, *, checkpointing: bool = False
) -> dict[str, Any]:
    """The formulas of the module for one update over all sequences, ready for JSON.

    Args:
        forest: of `rollouts.sequences`.
        rollouts: loss masks tell the scored edges, all where there are none.
        cost: of a token in the model.
        checkpointing: gradient checkpointing of every layer.
    """
    edges = _scored_edges(forest, rollouts)
    lengths = forest.sequence_lengths
    zeros = np.zeros_like(lengths)
    position, length = forest.node_position.astype(np.int64), forest.node_length.astype(np.int64)
    sides = {
        "replicated": (int(lengths.sum()), (zeros, lengths), edges[0], 3.0),
        "packed": (forest.num_tokens, (position, length), edges[1], 4.0),
    }
    passes, attention_passes = (4.0, 4.5) if checkpointing else (3.0, 3.5)
    b = cost.element_bytes
    facts: dict[str, Any] = {
        "model_type": cost.model_type,
        "parameters": cost.parameters,
        "element_bytes": b,
        "gradient_checkpointing": checkpointing,
        "fixed_bytes": 2 * b * cost.parameters,
    }
    for name, (tokens, spans, scored, lm_head_passes) in sides.items():
        pairs = {window: visible_pairs(*spans, window) for window in set(cost.windows)}
        linear = passes * 2 * cost.token_weights * tokens
        attention = attention_passes * 2 * sum(x.per_pair * pairs[x.window] for x in cost.layers)
        states = passes * 2 * cost.token_states * tokens
        lm_head = lm_head_passes * 2 * cost.lm_head_weights * scored
        facts[name] = {
            "scored": scored,
            "linear_flops": linear,
            "attention_flops": attention,
            "state_flops": states,
            "head_flops": lm_head,
            "flops": linear + attention + states + lm_head,
            "activation_bytes": cost.activation_bytes(tokens, checkpointing),
        }
    facts["speedup"] = facts["replicated"]["flops"] / facts["packed"]["flops"]
    return facts


def _scored_edges(forest: PrefixForest, rollouts: Rollouts) -> tuple[int, int]:
    """Scored tokens of all sequences, and distinct ones; a first token is never scored."""
    from prefixtree.packing.layout import pack

    masks = rollouts.loss_masks
    distinct = len(pack(forest).edges(masks).token)
    if masks is None:
        return forest.num_replicated_tokens - forest.num_sequences, distinct
    return sum(int(mask[1:].sum()) for mask in masks), distinct
