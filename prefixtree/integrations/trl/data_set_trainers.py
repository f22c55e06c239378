"""`PrefixTreeSFTTrainer` and `PrefixTreeDPOTrainer`: TRL's SFT and DPO with every distinct token of
a batch computed once.

TRL's trainers (`KTOTrainer` too) call `model(**batch, labels=..., fused_lm_head=True)` and compute
their losses and metrics from the returned log-probabilities. `PackedModel` answers that call from
the packed forest of the batch's rows. Legend: B rows, padded right to L columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from trl import DPOTrainer, SFTTrainer
from trl.trainer.utils import FusedCausalLMOutput

from prefixtree.errors import ForestError, UnsupportedError
from prefixtree.integrations.core.batch import Batch, Pixels, on_host
from prefixtree.integrations.trl.refusals import SFT, check_attention, prepare_trainer
from prefixtree.integrations.trl.sharding import DataSetTrainer
from prefixtree.integrations.trl.sharing_report import (
    DATA_SET_ADVICE,
    PACKING_ADVICE,
    SharingReport,
    warn_of_packing,
)
from prefixtree.models.changes import changing
from prefixtree.models.checks import transformer_of
from prefixtree.models.families import PACKING_KEYWORDS
from prefixtree.packing.batch_layout import BatchLayout
from prefixtree.recompute.choose import Recompute

# ---- the stand-in that TRL's trainers call in place of a model with TRL's fused head -------------

_NO_LABEL = -100
# what TRL's collator computes from the positions of joined rows
_OF_POSITIONS = (*PACKING_KEYWORDS, "seq_idx")


class PackedModel:
    """A model as TRL calls it, with every distinct token of a batch computed once.

    Args:
        outputs: the entries of `FusedCausalLMOutput` to compute in addition to `log_probs` and
            `label_mask`: "entropy", "mean_logits", "is_top1", "log_sum_sq_probs".
    """

    def __init__(
        self,
        model: nn.Module,
        outputs: Sequence[str] = (),
        sharing: SharingReport | None = None,
        recompute: Recompute = None,
        images: bool = False,
    ) -> None:
        self._model = model
        self._images = images
        self._with_entropy = "entropy" in outputs
        self._statistics = [name for name in outputs if name != "entropy"]
        self._sharing = sharing
        self._recompute = recompute

    def __call__(self, *, fused_lm_head: bool = False, **inputs: Any) -> Any:
        """Computes the scores of the labels; without `fused_lm_head`, the model's own output.

        Args:
            inputs: input_ids, attention_mask and labels, int64 [B, L], labels being the input ids
                or -100; position_ids in the place of attention_mask for rows of several samples;
                output_router_logits, for aux_loss; use_cache, ignored; with images their
                pixel_values, image_grid_thw and mm_token_type_ids; nothing else.

        Returns:
            FusedCausalLMOutput: float32 [B, L - 1] each, is_top1 and label_mask bool, 0 where there
            is no label; aux_loss [], the load-balancing loss of the rows.
        """
        if not fused_lm_head:
            return self._model(**inputs)
        check_attention(self._model)
        with_aux_loss = bool(inputs.pop("output_router_logits", False))
        pixels = _pixels_of(inputs) if self._images else (None, None)
        entries = _entries(inputs)
        labels = entries["labels"]
        rows = dict(zip(entries, on_host(entries.values()), strict=True))
        _check_rows(**rows)
        scored = rows["labels"] != _NO_LABEL
        ids, config = rows["input_ids"], transformer_of(self._model).config
        layout = BatchLayout.of(ids.shape, rows.get("attention_mask"), rows.get("position_ids"))
        more = {"pixels": pixels, "config": config if self._images else None}
        batch = Batch.of(layout, ids, scored, labels.device, **more)
        scores = batch.score(
            self._model,
            return_entropy=self._with_entropy,
            return_statistics=self._statistics,
            recompute=self._recompute,
            output_router_logits=with_aux_loss,
        )
        if self._sharing is not None and torch.is_grad_enabled():
            self._sharing.saw(batch.forest, batch.masks)
        outputs = {"log_probs": scores.logprobs, **scores.statistics}
        if scores.entropy is not None:
            outputs["entropy"] = scores.entropy
        spread = {name: batch.spread(values)[:, 1:] for name, values in outputs.items()}
        if "is_top1" in spread:
            spread["is_top1"] = spread["is_top1"].bool()
        return FusedCausalLMOutput(
            label_mask=labels[:, 1:] != _NO_LABEL,
            aux_loss=scores.aux_loss,
            **spread,
        )


def _pixels_of(inputs: dict[str, Any]) -> Pixels:
    """Takes a batch's images out of it: pixel_values and image_grid_thw."""
    # positions are computed from the placeholders
    inputs.pop("mm_token_type_ids", None)
    return inputs.pop("pixel_values", None), inputs.pop("image_grid_thw", None)


def _entries(inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Takes input_ids, labels, and attention_mask or position_ids from a batch of nothing else."""
    entries = {name: value for name, value in inputs.items() if value is not None}
    entries.pop("use_cache", None)
    place = "attention_mask"
    if place not in entries and "position_ids" in entries:
        place = "position_ids"
        for name in _OF_POSITIONS:
            entries.pop(name, None)
    needed = ("input_ids", place, "labels")
    if missing := [name for name in needed if name not in entries]:
        raise UnsupportedError(
            f"the batch has no {', '.join(missing)}: rows are packed from input_ids [B, L], labels "
            "and attention_mask (position_ids with padding_free), as TRL's collators make them"
        )
    if others := sorted(entries.keys() - set(needed)):
        raise UnsupportedError(
            f"the batch has {', '.join(others)}, which is not packed yet; train on text alone, "
            "with the entries input_ids, attention_mask and labels (or completion_mask)"
        )
    return entries


def _check_rows(input_ids: np.ndarray, labels: np.ndarray, **place: np.ndarray) -> None:
    """Refuses rows whose scores would not be where TRL looks for them, or of other tokens."""
    for name, values in {"labels": labels, **place}.items():
        if values.shape != input_ids.shape:
            raise ForestError(
                f"{name} must be [B, L] as input_ids, {list(input_ids.shape)}, got "
                f"{list(values.shape)}"
            )
    # 0 at padding of attention_mask, at the beginnings of samples of position_ids
    ((name, places),) = place.items()
    for bad in np.flatnonzero(places[:, 0] == 0)[: name == "attention_mask"]:
        raise UnsupportedError(
            f"row {bad} begins with padding: rows must be padded on the right, as TRL's collators "
            "for DPO and SFT pad them"
        )
    wrong = (labels != _NO_LABEL) & ((labels != input_ids) | (places == 0))
    for row, column in np.argwhere(wrong)[:1]:
        raise UnsupportedError(
            f"labels[{row}, {column}] is {labels[row, column]} where input_ids has "
            f"{input_ids[row, column]} and {name} {places[row, column]}: a label must be -100 or "
            f"the row's token, and -100 where {name} is 0"
        )


# ---- SFT -----------------------------------------------------------------------------------------


class PrefixTreeSFTTrainer(DataSetTrainer, SFTTrainer):
    """Trains as `trl.SFTTrainer` does, and computes each distinct token of a batch once.

    Losses, gradients and metrics are the same. It is for samples that begin alike: the turns of an
    agent's conversation, one sample per turn, or several answers to one prompt. The model gets
    attn_implementation="prefixtree".

    A token that several samples share is computed once and learnt once per sample in which it has a
    label, as in the replicated batch. Losses, their masks, the order of the data and logging are
    TRL's code. The metrics of `SharingReport` are added.

    Args:
        recompute: as in `prefixtree.sequence_logprobs`. Default: None, as `gradient_checkpointing`
            of the arguments says.
        *args: as in `trl.SFTTrainer`.
        **kwargs: as in `trl.SFTTrainer`.

    Raises:
        UnsupportedError: a setting, a model or a batch that is not verified (`docs/refusals.md`).
    """

    trl_class = SFTTrainer
    refused = SFT

    def _advice(self) -> str:
        return PACKING_ADVICE if self.args.packing else DATA_SET_ADVICE

    def _started(self) -> None:
        if self.args.packing and self.accelerator.is_main_process:
            warn_of_packing(self.args.packing_strategy)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Computes TRL's loss of a batch of `PackedModel`."""
        outputs = "entropy", "is_top1"
        packed = PackedModel(model, outputs, self._sharing, self._recompute, self._is_vlm)
        return super().compute_loss(packed, inputs, return_outputs, num_items_in_batch)


# ---- DPO, and the base of KTO --------------------------------------------------------------------


class ComparesWithReference(DataSetTrainer):
    """A base before TRL's trainers whose loss compares a policy with a reference.

    Attributes:
        reference_entries: the names in a batch of what `compute_ref_log_probs` returns.
    """

    reference_entries: tuple[str, str]
    # TRL's attribute: whether batches have the reference's log-probabilities
    precompute_ref_logps: bool

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        # TRL's constructor calls it
        prepare_trainer(self, self.verified)
        return super()._precompute_ref_logps(dataset, name, batch_size)

    def compute_ref_log_probs(
        self, model: nn.Module, inputs: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes the reference's log-probabilities of the answers of a batch."""
        packed = PackedModel(model, images=self._is_vlm)
        return super().compute_ref_log_probs(packed, inputs)

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool) -> Any:
        outputs = ["entropy", "mean_logits", "is_top1"]
        if getattr(self, "use_weighting", False):
            # DPO's
            outputs.append("log_sum_sq_probs")
        packed = PackedModel(model, outputs, self._sharing, self._recompute, self._is_vlm)
        if not self.precompute_ref_logps:
            # not by truth value: a compiled model has none
            model_of_reference = self.model if self.ref_model is None else self.ref_model
            reference = self.compute_ref_log_probs(model_of_reference, inputs)
            inputs = {**inputs, **dict(zip(self.reference_entries, reference, strict=True))}
        # the batch has them, so TRL calls no model but `packed`
        with changing(self) as changes:
            changes.set(self, precompute_ref_logps=True)
            return super()._compute_loss(packed, inputs, return_outputs)


class PrefixTreeDPOTrainer(ComparesWithReference, DPOTrainer):
    """Trains as `trl.DPOTrainer` does, and computes each distinct token of a batch once.

    Losses, gradients and metrics are the same. Policy and reference both share tokens: the two
    answers of a pair share their prompt, and pairs of one prompt, or of one conversation, share
    more. The models get attn_implementation="prefixtree".

    Losses, divergences, the order of the data and logging are TRL's code. The metrics of
    `SharingReport` are added.

    Args:
        recompute: as in `prefixtree.sequence_logprobs`. Default: None, as `gradient_checkpointing`
            of the arguments says.
        *args: as in `trl.DPOTrainer`.
        **kwargs: as in `trl.DPOTrainer`.

    Raises:
        UnsupportedError: a setting, a model or a batch that is not verified (`docs/refusals.md`).
    """

    trl_class = DPOTrainer
    reference_entries = "ref_chosen_logps", "ref_rejected_logps"
