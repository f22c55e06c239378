"""`PrefixTreeGRPOTrainer`: TRL's GRPO with every distinct token of a step computed once.

Legend: B rows of a micro-batch, L = P + C columns, P of prompts (padded left), C of completions
(padded right).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from trl import GRPOTrainer

from prefixtree.integrations.core.batch import Batch, on_host
from prefixtree.integrations.trl.contract import check_trainer, known_arguments
from prefixtree.integrations.trl.images import PER_ROW, RowImages
from prefixtree.integrations.trl.kept_windows import Generation, StepTrunks
from prefixtree.integrations.trl.micro_batches import (
    KeepsNeighbours,
    sharing_advice,
    warn_of_micro_batches,
)
from prefixtree.integrations.trl.refusals import GRPO, check_attention, check_prompts
from prefixtree.integrations.trl.sharding import BeforeTRL, PackedTrainer
from prefixtree.integrations.trl.sharing_report import SharingReport
from prefixtree.models.checks import transformer_of
from prefixtree.packing.arguments import at_least_one
from prefixtree.recompute.choose import Recompute
from prefixtree.scoring.edges import SequenceScores

# float32 log-probabilities [B, C], entropies [B, C], and the load-balancing loss []
_Scores = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


class SharesGenerations(PackedTrainer, KeepsNeighbours, BeforeTRL):
    """A base before TRL's trainers that sample groups of completions of each prompt.

    Attributes:
        trl_class: the class of TRL that is extended.
    """

    trl_class: type

    def __init__(
        self,
        *args: Any,
        recompute: Recompute = None,
        max_tokens: int | None = None,
        keep_trunks: bool = True,
        **kwargs: Any,
    ) -> None:
        check_trainer(self.trl_class)
        super().__init__(*args, **kwargs)
        verified = "use_liger_kernel", "torch_compile", "fp16", "cast_lm_head_to_fp32"
        self._start(recompute, GRPO, verified)
        # RLOO has no such setting
        if getattr(self.args, "cast_lm_head_to_fp32", False):
            for each in (self.model, self.ref_model):
                _take_head_out_of_autocast(each)
        # RLOO's of TRL 1.15 has none, and takes no images here
        self._sees: bool = getattr(self, "_is_vlm", False)
        self._max_tokens = None if max_tokens is None else at_least_one("max_tokens", max_tokens)
        limits: dict[str, Any] = {"recompute": self._recompute, "max_tokens": self._max_tokens}
        self._trunks = StepTrunks(self, keep_trunks, **limits, sees=self._sees)
        together = self._micro_batches_together()
        self._sharing = SharingReport(
            self,
            sharing_advice(self.args),
            **limits,
            micro_batches_that_keep_trunks=together if self._trunks.keeps else None,
        )
        if self.accelerator.is_main_process:
            warn_of_micro_batches(self.args, self.aux_loss_enabled, together)

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **more: Any,
    ) -> _Scores:
        """Scores the completions; TRL calls it for the policy, the old policy and the reference.

        Returns:
            float32 log-probabilities [B, C], float32 entropies [B, C] or None, 0 where the mask is
            0, and the load-balancing loss [] or None: TRL's for the same rows, the mean over the
            forwards of `batch_size` rows each.
        """
        images = known_arguments(super()._get_per_token_logps_and_entropies, more)
        prompt = input_ids.shape[1] - logits_to_keep
        batches = self._batches(input_ids, attention_mask, prompt, batch_size, images)
        check_attention(model)
        options = {
            "temperature": self.temperature,
            "return_entropy": compute_entropy,
            "output_router_logits": compute_aux_loss,
        }
        generation = Generation(self._step, self._blocks, self._buffered_batches)
        kept_scores = self._trunks.score(model, batches, options, generation)
        if kept_scores is None:
            kept_scores = [self._score(model, batch, options) for batch in batches]
        elif torch.is_grad_enabled():
            assert self._trunks.window is not None
            self._sharing.saw(*self._trunks.window.sharing())
        parts = zip(batches, kept_scores, strict=True)
        return _joined([_completions(batch, scores, prompt) for batch, scores in parts])

    def _batches(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        prompt: int,
        batch_size: int | None,
        images: dict[str, Any],
    ) -> list[Batch]:
        """Makes batches of rows that are packed together, with one copy from the device for all."""
        shown = RowImages(images, self._sees)
        ids, mask = on_host((input_ids, attention_mask))
        check_prompts(mask[:, :prompt].sum(1) == 0)
        scored = np.broadcast_to(np.arange(ids.shape[1]) >= prompt, ids.shape)
        config = transformer_of(self.model).config if self._sees else None
        more = {"pixels": shown.of(0, len(ids)), "config": config}
        all_rows = Batch.padded(ids, mask, scored, input_ids.device, **more)
        size = batch_size or len(ids)
        if len(ids) <= size:
            return [all_rows]
        starts = range(0, len(ids), size)
        return [all_rows.rows(at, at + size, shown.of(at, at + size)) for at in starts]

    def _score(self, model: nn.Module, batch: Batch, options: dict[str, Any]) -> SequenceScores:
        """Scores a micro-batch by itself."""
        limit = self._max_tokens
        cost = None if limit is None else self._trunks.cost
        options = options | {"recompute": self._recompute, "max_step_tokens": limit}
        with self.accelerator.autocast():
            scores = batch.score(model, **options, import_cost=cost and cost.token)
        if torch.is_grad_enabled():
            self._sharing.saw(batch.forest, batch.masks)
        return scores

    # ---- trunks that micro-batches share ---------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with self._trunks.micro_batch():
            loss: torch.Tensor = super().training_step(*args, **kwargs)
        return loss

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self.model.training:
            self._trunks.begin_generation()
        return super()._generate_and_score_completions(inputs)

    def _micro_batches_together(self) -> int:
        # those that share stay together
        return self._trunks.together if self._trunks.keeps else 1

    def _buffered_batches(self) -> list[Batch]:
        """The micro-batches of the generation, in the order in which its rows were generated."""
        batches = []
        for inputs in self._buffered_inputs or []:
            ids, mask = (
                torch.cat([inputs[f"prompt_{part}"], inputs[f"completion_{part}"]], 1)
                for part in ("ids", "mask")
            )
            images = {name: inputs.get(name) for name in PER_ROW}
            batches += self._batches(ids, mask, inputs["prompt_ids"].shape[1], None, images)
        each, blocks = self._trunks.together, np.argsort(self._blocks).tolist()
        return [batch for i in blocks for batch in batches[i * each : (i + 1) * each]]


def _take_head_out_of_autocast(model: nn.Module | None) -> None:
    """Keeps the lm_head's forward, which TRL set, in float32 where autocast would cast it."""
    if model is None:
        return
    lm_head = transformer_of(model).get_output_embeddings()
    forward = lm_head.forward

    def in_float32(hidden: torch.Tensor) -> torch.Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            logits: torch.Tensor = forward(hidden)
        return logits

    lm_head.forward = in_float32


class PrefixTreeGRPOTrainer(SharesGenerations, GRPOTrainer):
    """Trains as `trl.GRPOTrainer` does, and computes each distinct token once.

    Losses, gradients and metrics are the same. Tokens are shared within a micro-batch, or among all
    micro-batches of an optimiser step. Two things differ from `GRPOTrainer`:

    - Log-probabilities and entropies (policy, old and reference) come from the packed forest of a
      micro-batch's rows. The models get attn_implementation="prefixtree", also for generation.
    - Micro-batches are shuffled, not rows. Each holds neighbouring rows of the generation batch, in
      which the completions of a prompt are next to each other. Old log-probabilities and the
      reference's come from the same rows, computed in the same way. So the ratio is exactly 1
      before the policy's first update, and the KL of a policy that is its reference is exactly 0.

    Rewards, advantages, losses and their masks (a tool mask included), generation and logging are
    TRL's code. The metrics of `SharingReport` are added.

    Args:
        recompute: what the policy's layers compute again in the backward, as in
            `prefixtree.sequence_logprobs`. Default: None, as `gradient_checkpointing` of the
            arguments says.
        max_tokens: the most distinct tokens that are held at once. A micro-batch with more is
            computed in steps (`prefixtree.sequence_logprobs(max_step_tokens=)`). Default: None, no
            limit.
        keep_trunks: whether micro-batches of one generation and one optimiser step compute common
            prefixes once (`prefixtree.kept_trunks`), where that computes less. It holds no more at
            once than the largest micro-batch takes alone, or max_tokens. Default: True.
        *args: as in `trl.GRPOTrainer`.
        **kwargs: as in `trl.GRPOTrainer`.

    Raises:
        UnsupportedError: a setting, a model or a batch that is not verified (`docs/refusals.md`).
    """

    trl_class = GRPOTrainer


def _completions(batch: Batch, scores: SequenceScores, prompt: int) -> _Scores:
    """The scores of the columns after those of prompts."""
    entropy = None if scores.entropy is None else batch.spread(scores.entropy)[:, prompt:]
    return batch.spread(scores.logprobs)[:, prompt:], entropy, scores.aux_loss


def _joined(parts: list[_Scores]) -> _Scores:
    """Joins the scores of all rows, and takes the mean of the losses."""
    logps, entropies, losses = ([x for x in of if x is not None] for of in zip(*parts, strict=True))
    return (
        torch.cat(logps),
        torch.cat(entropies) if entropies else None,
        torch.stack(losses).mean() if losses else None,
    )
