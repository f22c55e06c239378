"""`PrefixTreeDPOTrainer`: TRL's DPO with every distinct token of a batch of pairs computed once."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from trl import DPOTrainer

from prefixtree.integrations.trl.contract import check_dpo
from prefixtree.integrations.trl.fsdp import KeepsOutputs
from prefixtree.integrations.trl.packed_model import PackedModel
from prefixtree.integrations.trl.refusals import check_recompute, prepare_trainer
from prefixtree.integrations.trl.sharing_report import DATA_SET_ADVICE, SharingReport
from prefixtree.models.changes import changing
from prefixtree.recompute.forward import Recompute


class PrefixTreeDPOTrainer(KeepsOutputs, DPOTrainer):
    """`trl.DPOTrainer` on prefix forests.

    It gives the same losses, gradients and metrics, and computes each distinct token of a batch
    once, for the policy and for the reference. The two answers of a pair share their prompt, and
    pairs of one prompt, or of one conversation, share more. It takes the arguments of `DPOTrainer`.
    The models get attn_implementation="prefixtree".

    Losses, divergences, the order of the data and logging are TRL's code. The metrics of
    `SharingReport` are added.

    Args:
        recompute: as in `prefixtree.sequence_logprobs`; all else is of `trl.DPOTrainer`. Default:
            None, what `gradient_checkpointing` of the arguments says.

    Raises:
        UnsupportedError: a setting, a model or a batch that is not verified to give the results of
            TRL's trainer. Settings and models are checked when the trainer is made, batches when
            they come. `docs/refusals.md` has the list.
    """

    # TRL's: whether batches have the log-probabilities of the reference
    precompute_ref_logps: bool

    def __init__(self, *args: Any, recompute: Recompute = None, **kwargs: Any) -> None:
        check_dpo(DPOTrainer)
        super().__init__(*args, **kwargs)
        prepare_trainer(self)
        self._recompute = check_recompute(self, recompute)
        self._sharing = SharingReport(self, DATA_SET_ADVICE, recompute=self._recompute)

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        # TRL's constructor calls it
        prepare_trainer(self)
        return super()._precompute_ref_logps(dataset, name, batch_size)

    def compute_ref_log_probs(
        self, model: nn.Module, inputs: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The reference's log-probabilities of the chosen and of the rejected answers.

        Args:
            model: the reference; with PEFT, the policy, whose adapter TRL switches off.
            inputs: a batch: input_ids, attention_mask and completion_mask, [2B, L], the chosen
                answers before the rejected ones; and their images.

        Returns:
            float32 [B] each.
        """
        packed = PackedModel(model, images=self._is_vlm)
        return super().compute_ref_log_probs(packed, inputs)

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool) -> Any:
        outputs = ["entropy", "mean_logits", "is_top1"]
        if self.use_weighting:
            outputs.append("log_sum_sq_probs")
        packed = PackedModel(model, outputs, self._sharing, self._recompute, self._is_vlm)
        if not self.precompute_ref_logps:
            reference = self.compute_ref_log_probs(self.ref_model or self.model, inputs)
            names = ("ref_chosen_logps", "ref_rejected_logps")
            inputs = {**inputs, **dict(zip(names, reference, strict=True))}
        # the batch has them, so that TRL calls no model but `packed`
        with changing(self) as changes:
            changes.set(self, precompute_ref_logps=True)
            return super()._compute_loss(packed, inputs, return_outputs)
