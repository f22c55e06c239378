"""`PrefixTreeRewardTrainer`: TRL's training of reward models with every distinct token
of a batch computed once.

Legend: B rows, padded right to L columns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.modeling_outputs import SequenceClassifierOutput
from trl import RewardTrainer

from prefixtree.errors import UnsupportedError
from prefixtree.integrations.core.batch import Batch, on_host
from prefixtree.integrations.trl.refusals import REWARDS, check_attention
from prefixtree.integrations.trl.sharding import DataSetTrainer
from prefixtree.models.checks import transformer_of
from prefixtree.scoring.values import sequence_values


class PrefixTreeRewardTrainer(DataSetTrainer, RewardTrainer):
    """Trains as `trl.RewardTrainer` does, and computes each distinct token of a batch once.

    Losses, gradients and metrics are the same. The two answers of a pair share their prompt, and
    pairs of one prompt share more. The model gets attn_implementation="prefixtree". A reward is
    read where transformers reads it: at the last token that is not `pad_token_id`.

    The loss, the order of the data and logging are TRL's code. The metrics of `SharingReport` are
    added.

    Args:
        recompute: as in `prefixtree.sequence_values`. Default: None, as `gradient_checkpointing`
            of the arguments says.
        *args: as in `trl.RewardTrainer`.
        **kwargs: as in `trl.RewardTrainer`.

    Raises:
        UnsupportedError: a setting, a model or a batch that is not verified (`docs/refusals.md`).
    """

    trl_class = RewardTrainer
    refused = REWARDS

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Computes TRL's loss of input_ids and attention_mask, int64 [B, L], and margin [B / 2]."""

        def rewards(**batch: Any) -> SequenceClassifierOutput:
            return SequenceClassifierOutput(logits=self._rewards(model, **batch))

        return super().compute_loss(rewards, inputs, return_outputs, num_items_in_batch)

    def _rewards(
        self,
        model: nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        use_cache: bool = False,
        margin: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """Computes the rewards of rows: [B, 1]; margins are TRL's to subtract."""
        if others:
            raise UnsupportedError(
                f"the batch has {', '.join(sorted(others))}, which is not packed: train on the "
                "entries input_ids, attention_mask and margin"
            )
        check_attention(model)
        ids, mask = on_host((input_ids, attention_mask))
        last = _last(ids, mask, transformer_of(model).config.get_text_config().pad_token_id)
        batch = Batch.padded(ids, mask, np.zeros_like(mask), input_ids.device)
        values = sequence_values(model, batch.packed, recompute=self._recompute)
        if torch.is_grad_enabled():
            self._sharing.saw(batch.forest, None)
        return torch.stack([row[at] for row, at in zip(values, last.tolist(), strict=True)])


def _last(ids: np.ndarray, mask: np.ndarray, pad: int | None) -> np.ndarray:
    """Finds where transformers reads the reward of each row [B, L]: the last token but `pad`.

    That need not be the row's last token: TRL pads with the end of text where a tokenizer has no
    padding.
    """
    columns = np.arange(ids.shape[1])
    last = np.where(ids != pad, columns, 0).max(1)
    for bad in np.flatnonzero(mask[np.arange(len(ids)), last] == 0)[:1]:
        raise UnsupportedError(
            f"row {bad} begins with padding, or is padded with other tokens than the model's "
            f"pad_token_id={pad}: pad on the right with that token, as TRL's collator does"
        )
    for bad in np.flatnonzero(mask[:, 0] == 0)[:1]:
        raise UnsupportedError(f"row {bad} begins with padding: pad rows on the right")
    return last
