"""Predicts how the packed forest of a file of rollouts divides among the ranks of a group.

The formulas are in the docstring of `prefixtree.planning.costs.BorrowCost`.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from prefixtree.errors import InputError
from prefixtree.forest import PrefixForest
from prefixtree.planning.model_cost import ModelCost
from prefixtree.rollouts import Rollouts


def predict_ranks(
    forest: PrefixForest,
    rollouts: Rollouts,
    ranks: int,
    cost: ModelCost | None = None,
    *,
    checkpointing: bool = False,
) -> dict[str, Any]:
    """Divides the forest among ranks and predicts balance, traffic and efficiency.

    Args:
        forest: of `rollouts.sequences`.
        rollouts: loss masks tell the scored edges, all where there are none.
        ranks: the ranks of the group.
        cost: of a token in the model. Default: a model like Qwen3-8B, without checkpointing.
        checkpointing: gradient checkpointing of every layer, where `cost` is given.

    Returns:
        Facts, ready for JSON: the attributes of `SplitStats` and of `Split`, and the rates that
        are assumed of a GPU, per second.

    Raises:
        ForestError: more ranks than packed tokens.
        InputError: a model without keys and values to borrow.
    """
    from prefixtree.packing.layout import pack
    from prefixtree.planning.costs import BorrowCost, CostModel, borrow_cost_of, cost_model_of
    from prefixtree.planning.split import split_tokens

    cost_model, borrow_cost = CostModel(), BorrowCost()
    if cost is not None:
        cost_model = cost_model_of(cost, gradient_checkpointing=checkpointing)
        try:
            borrow_cost = borrow_cost_of(cost)
        except ValueError as problem:
            raise InputError(f"--ranks: {problem}") from None
    packed = pack(forest)
    scored = None if rollouts.loss_masks is None else packed.edges(rollouts.loss_masks)
    split = split_tokens(packed, ranks, cost_model, scored, borrow_cost=borrow_cost)
    return {
        "ranks": ranks,
        "model_type": None if cost is None else cost.model_type,
        "chunks_per_rank": split.chunks_per_part,
        "tile": split.tile,
        "assumed": {
            "linear_flops": borrow_cost.linear_rate,
            "attention_flops": borrow_cost.attention_rate,
            "bytes": borrow_cost.link_rate,
        },
        **asdict(split.stats),
        "token_balance": split.stats.token_balance,
        "work_balance": split.stats.work_balance,
        "received_share": split.stats.received_share,
    }
