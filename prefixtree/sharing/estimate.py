"""Estimates the cost of one update of a model on a file of rollouts, replicated and packed, and
how its forest divides among the ranks of a group.

FLOPs of an update, forward and backward:

    linear     3 x 2 x (weights a token meets in linear layers) x tokens
    attention  3.5 x 2 x (query heads) x (D + Dv) x (visible query-key pairs), summed over layers
    states     3 x 2 x (multiply-adds of a token with the states, `planning.model_cost`) x tokens
    lm_head    3 x 2 x hidden size x vocabulary x (scored edges); packed 4 x 2 x, because
               prefixtree makes the logits once more in backward rather than keep them

tokens, pairs and scored edges are the replicated batch's or the packed forest's; a layer with a
sliding window counts the pairs inside it; a token meets the experts it is routed to. Backward costs
2 forwards in matrix products and 2.5 in attention; gradient checkpointing adds one more forward of
all, not of the lm_head. The speed-up is the ratio of the FLOPs: both sides are taken to run at the
same rate, which short sequences and memory-bound layers do not.

Memory of an update, without optimizer states: weights and gradients, 2 x (bytes per element) x
parameters; and what layers that are not compiled take for all tokens at once, counted on shapes
(`recompute.probes`).
Micro-batches divide both sides alike.

The formulas of ranks are in the docstring of `prefixtree.planning.costs.ImportCost`.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prefixtree.errors import InputError, UnsupportedError
from prefixtree.forest import PrefixForest
from prefixtree.hub import explain, load_config
from prefixtree.packing.visible import visible_pairs
from prefixtree.planning.model_cost import FEED_FORWARD, SOFTMAX, ModelCost, model_cost
from prefixtree.rollouts import Rollouts

if TYPE_CHECKING:
    from prefixtree.recompute.layers import Mode
    from prefixtree.recompute.memory import ModelMemory


# bytes that torch sees of GPUs of 80 and 141 GB
_GPUS = {"80 GB": int(79.2 * 2**30), "141 GB": int(139.8 * 2**30)}


def read_cost(path: str | Path, dtype: str | None = None) -> ModelCost:
    """Computes the cost of a token in the model of a folder, config.json or name, without weights.

    Args:
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
    return cost


def read_memory(path: str | Path, dtype: str | None = None) -> ModelMemory | None:
    """Computes the memory of a model's layers; None if the family's layers look at numbers."""
    import torch

    from prefixtree.recompute.probes import memory_of_config

    config = load_config(path)
    element = getattr(torch, dtype) if dtype else getattr(config, "dtype", None) or torch.bfloat16
    try:
        return memory_of_config(config, element)
    except UnsupportedError:
        return None


def estimate(
    forest: PrefixForest,
    rollouts: Rollouts,
    cost: ModelCost,
    memory: ModelMemory | None = None,
    *,
    checkpointing: bool = False,
) -> dict[str, Any]:
    """Computes the module's formulas for one update over all sequences, ready for JSON.

    Args:
        forest: of `rollouts.sequences`.
        rollouts: loss masks tell the scored edges, all where there are none.
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
    mode: Mode = "all" if checkpointing else "nothing"
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
        attention = 2 * sum(
            (attention_passes * x.per_pair + x.index_per_pair) * pairs[x.window]
            for x in cost.layers
        )
        states = passes * 2 * cost.token_states * tokens
        lm_head = lm_head_passes * 2 * cost.lm_head_weights * scored
        facts[name] = {
            "scored": scored,
            "linear_flops": linear,
            "attention_flops": attention,
            "state_flops": states,
            "head_flops": lm_head,
            "flops": linear + attention + states + lm_head,
            "activation_bytes": None if memory is None else memory.peak(tokens, mode),
        }
    facts["fits"] = _fits(memory, facts["fixed_bytes"], edges[1] / forest.num_tokens)
    facts["speedup"] = facts["replicated"]["flops"] / facts["packed"]["flops"]
    return facts


def _fits(memory: ModelMemory | None, held: int, scored_share: float) -> list[dict[str, Any]]:
    """Finds how many distinct tokens fit a GPU, all recomputed or nothing, next to `held` bytes."""
    if memory is None:
        return []
    from prefixtree.recompute.plan import reserve, tokens_that_fit

    left = {gpu: size - reserve(size) - held for gpu, size in _GPUS.items()}
    return [
        {
            "gpu": gpu,
            **{
                mode: tokens_that_fit(memory, available, scored_share, mode)
                for mode in ("nothing", "all")
            },
        }
        for gpu, available in left.items()
    ]


def _scored_edges(forest: PrefixForest, rollouts: Rollouts) -> tuple[int, int]:
    """Scored tokens of all sequences, and distinct ones; a first token is never scored."""
    from prefixtree.packing.layout import pack

    masks = rollouts.loss_masks
    distinct = len(pack(forest).edges(masks).token)
    if masks is None:
        return forest.num_replicated_tokens - forest.num_sequences, distinct
    return sum(int(mask[1:].sum()) for mask in masks), distinct


def predict_ranks(
    forest: PrefixForest,
    rollouts: Rollouts,
    ranks: int,
    cost: ModelCost | None = None,
    *,
    checkpointing: bool = False,
) -> dict[str, Any]:
    """Divides the forest among ranks and predicts balance, traffic and efficiency, ready for JSON.

    Args:
        forest: of `rollouts.sequences`.
        rollouts: loss masks tell the scored edges, all where there are none.
        cost: of a token in the model. Default: a model like Qwen3-8B, without checkpointing.

    Returns:
        The attributes of `SplitStats` and of `Split`, and the rates that are assumed of a GPU, per
            second.

    Raises:
        ForestError: more ranks than packed tokens.
        InputError: a model without keys and values to import.
    """
    from prefixtree.packing.layout import pack
    from prefixtree.planning.costs import CostModel, ImportCost, cost_model_of, import_cost_of
    from prefixtree.planning.split import split_tokens

    cost_model, import_cost = CostModel(), ImportCost()
    if cost is not None:
        cost_model = cost_model_of(cost, gradient_checkpointing=checkpointing)
        try:
            import_cost = import_cost_of(cost)
        except ValueError as problem:
            raise InputError(f"--ranks: {problem}") from None
    packed = pack(forest)
    scored = None if rollouts.loss_masks is None else packed.edges(rollouts.loss_masks)
    split = split_tokens(packed, ranks, cost_model, scored, import_cost=import_cost)
    return {
        "ranks": ranks,
        "model_type": None if cost is None else cost.model_type,
        "chunks_per_rank": split.chunks_per_part,
        "tile": split.tile,
        "assumed": {
            "linear_flops": import_cost.linear_rate,
            "attention_flops": import_cost.attention_rate,
            "bytes": import_cost.link_rate,
        },
        **asdict(split.stats),
        "token_balance": split.stats.token_balance,
        "work_balance": split.stats.work_balance,
        "received_share": split.stats.received_share,
    }
