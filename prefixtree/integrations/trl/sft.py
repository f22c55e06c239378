"""`PrefixTreeSFTTrainer`: TRL's SFT with every distinct token of a batch computed once."""

from __future__ import annotations

from typing import Any

from torch import nn
from trl import SFTTrainer

from prefixtree.errors import refuse
from prefixtree.integrations.trl.contract import check_sft
from prefixtree.integrations.trl.fsdp import KeepsOutputs
from prefixtree.integrations.trl.packed_model import PackedModel
from prefixtree.integrations.trl.refusals import SFT, check_recompute, prepare_trainer
from prefixtree.integrations.trl.sharing_report import DATA_SET_ADVICE, SharingReport
from prefixtree.recompute.forward import Recompute


class PrefixTreeSFTTrainer(KeepsOutputs, SFTTrainer):
    """`trl.SFTTrainer` on prefix forests.

    It gives the same losses, gradients and metrics, and computes each distinct token of a batch
    once. It is for samples that begin alike: the turns of an agent's conversation, one sample per
    turn, or several answers to one prompt. It takes the arguments of `SFTTrainer`. The model gets
    attn_implementation="prefixtree".

    A token that several samples share is computed once and learnt once per sample in which it has a
    label, as in the replicated batch. Losses, their masks, the order of the data and logging are
    TRL's code. The metrics of `SharingReport` are added.

    Args:
        recompute: as in `prefixtree.sequence_logprobs`; all else is of `trl.SFTTrainer`. Default:
            None, what `gradient_checkpointing` of the arguments says.

    Raises:
        UnsupportedError: a setting, a model or a batch that is not verified to give the results of
            TRL's trainer. Settings and models are checked when the trainer is made, batches when
            they come. `docs/refusals.md` has the list.
    """

    def __init__(self, *args: Any, recompute: Recompute = None, **kwargs: Any) -> None:
        check_sft(SFTTrainer)
        super().__init__(*args, **kwargs)
        prepare_trainer(self)
        refuse(SFT, self)
        self._recompute = check_recompute(self, recompute)
        self._sharing = SharingReport(self, DATA_SET_ADVICE, recompute=self._recompute)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """TRL's loss of a batch: input_ids, attention_mask and labels, int64 [B, L], and images."""
        outputs = "entropy", "is_top1"
        packed = PackedModel(model, outputs, self._sharing, self._recompute, self._is_vlm)
        return super().compute_loss(packed, inputs, return_outputs, num_items_in_batch)
