"""Sampling masks of rollouts, and a stock engine whose logits are masked by them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from prefixtree.integrations.verl.batches import SAMPLING_MASKS

# of a logit: its probability is 0, and times that a finite number
_LEAST = -1e4


def with_masks(rows: dict[str, list[Any]], vocabulary: int, everywhere: bool) -> dict[str, Any]:
    """Rollouts with some ids per token of a response, itself among them, as an agent loop has them.

    Of rows that share tokens some have the same sets, others do not. Tools' tokens have none, nor
    has the last row; unless `everywhere`, none of the second half.
    """
    sets: list[Any] = []
    for i, pair in enumerate(zip(rows["responses"], rows["response_mask"], strict=True)):
        # of four, 0 and 2 share, and so do 1 and 3
        rng = np.random.default_rng(i % 4 // 3)
        sets.append(
            [
                sorted({int(token), *rng.integers(2, vocabulary, 4).tolist()}) if sampled else []
                for token, sampled in zip(*pair, strict=True)
            ]
        )
    count = len(sets) - 1 if everywhere else len(sets) // 2
    given = [*sets[:count], *[None] * (len(sets) - count)]
    return rows | {"extra_fields": [{SAMPLING_MASKS: of_row} for of_row in given]}


def mask_logits(worker: Any, rows: dict[str, list[Any]]) -> None:
    """Leaves a stock engine, whose rows are padded, the logits of kept tokens."""
    sets_of: dict[tuple[int, ...], list[Any]] = {}
    columns = zip(rows["prompts"], rows["responses"], rows["extra_fields"], strict=True)
    for prompt, response, more in columns:
        of_row = more[SAMPLING_MASKS] or [[]] * len(response)
        # a token is drawn from the logits of the one before it
        ids = torch.cat([prompt, response])
        sets_of[tuple(ids.tolist())] = [[]] * (len(prompt) - 1) + of_row + [[]]

    def mask(model: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        is_kept = torch.ones_like(output.logits, dtype=torch.bool)
        inputs = kwargs["input_ids"], kwargs["attention_mask"].bool()
        for row, ids, is_token in zip(is_kept, *inputs, strict=True):
            sets = sets_of[tuple(ids[is_token].tolist())]
            for at, kept in zip(is_token.nonzero(), sets, strict=True):
                if kept:
                    row[at] = False
                    row[at, kept] = True
        output.logits = output.logits.masked_fill(~is_kept, _LEAST)
        return output

    modules = worker.engine.module.modules()
    model = next(m for m in modules if type(m).__name__.endswith("Qwen3ForCausalLM"))
    model.register_forward_hook(mask, with_kwargs=True)
