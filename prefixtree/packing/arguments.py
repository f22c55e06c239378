"""Checks of arguments that `packing` and the rooms above it share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from prefixtree._numbers import integer
from prefixtree.errors import ForestError, kind_of
from prefixtree.packing.layout import PackedForest

# how to make a packed forest of what came in its place, by the name of its type
_MENDS = {
    "PrefixForest": "pack(forest) makes one",
    "MicroBatch": "batch.packed is the micro-batch's",
    "MicroBatchPlan": "batch.packed is one, for batch in plan[rank]",
    "_RankMicroBatches": "batch.packed is one, for each batch of these",
}


def at_least_one(name: str, value: Any) -> int:
    """Reads an integer >= 1; raises a ValueError for anything else."""
    return integer(name, value, 1)


def check_packed(packed: Any, caller: str, subset: bool = False) -> None:
    """Refuses anything but a packed forest and, unless `subset`, a mask of some queries."""
    if not isinstance(packed, PackedForest):
        kind = type(packed).__name__
        mend = _MENDS.get(kind, "pack(PrefixForest.from_sequences(sequences)) makes one")
        if isinstance(packed, torch.nn.Module):
            mend = "the model comes first"
        elif isinstance(packed, (torch.Tensor, Mapping)):
            mend += ", and batch_logprobs(model, input_ids, attention_mask) takes a padded batch"
        raise TypeError(
            f"{caller} takes a packed forest, got {kind_of(packed, PackedForest)}; {mend}"
        )
    if not subset and packed.mask.query_tokens is not None:
        raise ForestError(
            f"{caller} takes a packed forest whose mask is for all queries, got a mask for "
            f"{packed.mask.num_queries} of {packed.num_tokens}; every part makes such a mask of "
            "its own, so leave for_queries out"
        )
