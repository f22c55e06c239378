"""TRL's distillation, on policy (`DistillationTrainer`) and of given answers (`GKDTrainer`,
`GOLDTrainer`): student and teacher compute every distinct token of a micro-batch once.

Legend: B rows, L = P + C columns, P of prompts (padded left), C of completions (padded right).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutput
from trl import DistillationTrainer
from trl.experimental.gkd import GKDTrainer
from trl.experimental.gold import GOLDTrainer

from prefixtree.errors import UnsupportedError
from prefixtree.integrations.core.batch import Batch, on_host
from prefixtree.integrations.trl.micro_batches import KeepsNeighbours
from prefixtree.integrations.trl.refusals import (
    ANSWERS,
    DISTILLATION,
    check_attention,
    check_prompts,
)
from prefixtree.integrations.trl.sharding import DataSetTrainer
from prefixtree.scoring.teacher import Teacher

_NO_LABEL = -100


class PrefixTreeDistillationTrainer(DataSetTrainer, KeepsNeighbours, DistillationTrainer):
    """Trains as `trl.DistillationTrainer` does, and computes each distinct token once.

    Losses, gradients and metrics are the same. Student and teacher both share the tokens of a
    micro-batch, and both get attn_implementation="prefixtree", also for generation. Micro-batches
    are shuffled, not rows, so that prompts that begin alike stay together.

    Generation, the divergence's normalisation and logging are TRL's code. The metrics of
    `SharingReport` are added.

    Args:
        recompute: as in `prefixtree.sequence_logprobs`, for the student. Default: None, as
            `gradient_checkpointing` of the arguments says.
        *args: as in `trl.DistillationTrainer`.
        **kwargs: as in `trl.DistillationTrainer`.

    Raises:
        UnsupportedError: a setting, a model or a batch that is not verified (`docs/refusals.md`).
    """

    trl_class = DistillationTrainer
    refused = DISTILLATION
    verified = ()

    def _started(self) -> None:
        # the packed forward calls the wrapped student by itself
        self._forward_redirection = _call

    def _compute_loss(
        self, unwrapped_student: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Computes the divergence of a micro-batch, for TRL's `compute_loss`.

        Returns:
            The loss [], the sum of the student's entropies [] in nats, and the number of scored
            tokens [].
        """
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        completion = inputs["completion_mask"]
        scored = completion * inputs.get("tool_mask", torch.ones_like(completion))
        scored = torch.cat([torch.zeros_like(inputs["prompt_mask"]), scored], 1)
        loss, count, entropy = _divergence(
            self, unwrapped_student, ids, mask, scored != 0, self.temperature, True
        )
        divisor = count.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        return loss / _on(divisor, loss), entropy, count


class _OfAnswers(DataSetTrainer):
    """A base before TRL's experimental trainers whose loss is a divergence at a batch's labels."""

    refused = (*ANSWERS, *DISTILLATION)
    verified = ()

    def _loss_temperature(self) -> float:
        """The divisor of the logits of both models in TRL's loss."""
        return 1.0

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Computes the divergence of a batch [B, L], padded on either side, without logits."""
        scored = inputs["labels"] != _NO_LABEL
        loss, count, _ = _divergence(
            self,
            model,
            inputs["input_ids"],
            inputs["attention_mask"],
            scored,
            self._loss_temperature(),
        )
        divisor = count.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        loss = loss / _on(divisor, loss)
        return (loss, CausalLMOutput(loss=loss)) if return_outputs else loss


class PrefixTreeGKDTrainer(_OfAnswers, GKDTrainer):
    """Trains as `trl.experimental.gkd.GKDTrainer` does, and computes each distinct token once.

    Losses and gradients are the same. Student and teacher both share the tokens of a batch, and
    both get attn_implementation="prefixtree", also for generation (`lmbda`, `seq_kd`). Generation,
    collators and logging are TRL's code. The metrics of `SharingReport` are added.

    Args:
        recompute: as in `prefixtree.sequence_logprobs`, for the student. Default: None, as
            `gradient_checkpointing` of the arguments says.
        *args: as in `GKDTrainer`.
        **kwargs: as in `GKDTrainer`.

    Raises:
        UnsupportedError: as `PrefixTreeDistillationTrainer`.
    """

    trl_class = GKDTrainer


class PrefixTreeGOLDTrainer(_OfAnswers, GOLDTrainer):
    """Trains as `trl.experimental.gold.GOLDTrainer` does, and computes each distinct token once.

    The teacher must have the student's tokenizer. Everything else is as in `PrefixTreeGKDTrainer`.
    A group of `num_generations` rows shares a prompt.

    Args:
        recompute: as in `prefixtree.sequence_logprobs`, for the student. Default: None, as
            `gradient_checkpointing` of the arguments says.
        *args: as in `GOLDTrainer`.
        **kwargs: as in `GOLDTrainer`.

    Raises:
        UnsupportedError: as `PrefixTreeDistillationTrainer`; use_uld_loss.
    """

    trl_class = GOLDTrainer

    def _loss_temperature(self) -> float:
        return self.temperature


def _divergence(
    trainer: Any,
    student: nn.Module,
    ids: torch.Tensor,
    mask: torch.Tensor,
    scored: torch.Tensor,
    temperature: float,
    with_entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sums over scored tokens: (divergences [], their number [], entropies [] without gradients).

    Args:
        ids, mask: [B, L]. scored: bool [B, L].
    """
    check_attention(student)
    check_attention(trainer.teacher_model)
    rows, kept, is_scored = on_host((ids, mask, scored))
    _check_scored(kept, is_scored)
    batch = Batch.padded(rows, kept, is_scored != 0, ids.device)
    trainer.teacher_model.eval()
    teacher = Teacher(trainer.teacher_model, batch.packed, batch.masks)
    scores = batch.score(
        student,
        temperature=temperature,
        return_entropy=with_entropy,
        measure=teacher.divergence(trainer.beta),
        # TRL's loss has no load-balancing loss
        output_router_logits=False,
        recompute=trainer._recompute,
    )
    if torch.is_grad_enabled():
        trainer._sharing.saw(batch.forest, batch.masks)
    assert scores.measured is not None
    # 0 where nothing is scored
    loss = torch.cat(scores.measured).sum()
    entropy = torch.zeros_like(loss)
    if scores.entropy is not None:
        entropy = torch.cat(scores.entropy).detach().sum()
    count = torch.tensor(sum(int(m[1:].sum()) for m in batch.masks or ()), device=loss.device)
    return loss, count, entropy


def _check_scored(mask: np.ndarray, scored: np.ndarray) -> None:
    """Refuses rows [B, L] that score padding, or a token that nothing predicts."""
    first = mask.argmax(1)
    check_prompts((first > 0) & (scored[np.arange(len(mask)), first] != 0))
    for row, column in np.argwhere((scored != 0) & (mask == 0))[:1]:
        raise UnsupportedError(
            f"labels[{row}, {column}] is scored, and padding: labels must be -100 there"
        )


def _call(wrapper: nn.Module, original: nn.Module, method: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces TRL's redirection: the method gets the wrapper, and calls it as any model."""
    return method(*(wrapper if arg is original else arg for arg in args), **kwargs)


def _on(divisor: Any, loss: torch.Tensor) -> Any:
    return divisor.to(loss.device) if isinstance(divisor, torch.Tensor) else divisor
