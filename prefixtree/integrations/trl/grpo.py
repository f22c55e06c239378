"""`PrefixTreeGRPOTrainer`: TRL's GRPO with every distinct token of a step computed once.

Legend: B rows of a micro-batch, L = P + C columns, P of prompts (padded left), C of completions
(padded right).
"""

from __future__ import annotations

import math
import sys
import warnings
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from trl import GRPOTrainer

from prefixtree.errors import UnsupportedError
from prefixtree.forest import PrefixForest
from prefixtree.integrations.trl.contract import check_grpo
from prefixtree.integrations.trl.images import PER_ROW, RowImages, forest_with_images
from prefixtree.integrations.trl.kept_windows import (
    KeptWindow,
    Rows,
    WindowCost,
    WindowPlan,
    is_kept,
    open_window,
    plan_windows,
    same_rows,
    window_cost,
)
from prefixtree.integrations.trl.micro_batches import (
    KeepsNeighbours,
    sharing_advice,
    warn_of_micro_batches,
)
from prefixtree.integrations.trl.refusals import check_attention, check_recompute, prepare_trainer
from prefixtree.integrations.trl.sharding import KeepsOutputs
from prefixtree.integrations.trl.sharing_report import SharingReport
from prefixtree.models.checks import transformer_of
from prefixtree.packing.arguments import at_least_one
from prefixtree.packing.layout import pack
from prefixtree.recompute.forward import Recompute
from prefixtree.scoring.edges import SequenceScores
from prefixtree.scoring.logprobs import sequence_logprobs

# float32 log-probabilities [B, C], entropies [B, C], and the load-balancing loss []
_Scores = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


class PrefixTreeGRPOTrainer(KeepsOutputs, KeepsNeighbours, GRPOTrainer):
    """`trl.GRPOTrainer` on prefix forests.

    It gives the same losses, gradients and metrics, and computes each distinct token of a
    micro-batch once, or of all micro-batches of an optimiser step. It takes the arguments of
    `GRPOTrainer`. Two things differ:

    - Log-probabilities and entropies (policy, old and reference) come from the packed forest of a
      micro-batch's rows. The models get attn_implementation="prefixtree", also for generation.
    - Micro-batches are shuffled, not rows. Each holds neighbouring rows of the generation batch, in
      which the completions of a prompt are next to each other. Old log-probabilities and the
      reference's come from the same rows, computed in the same way. So the ratio is exactly 1
      before the policy's first update, and the KL of a policy that is its reference exactly 0.

    Rewards, advantages, losses and their masks (a tool mask included), generation and logging are
    TRL's code. The metrics of `SharingReport` are added.

    Args:
        recompute: what the policy's layers compute again in the backward, as in
            `prefixtree.sequence_logprobs`; all else is of `trl.GRPOTrainer`. Default: None, what
            `gradient_checkpointing` of the arguments says.
        max_tokens: the most distinct tokens that are held at once. A micro-batch with more is
            computed in steps, as in `prefixtree.sequence_logprobs`. Default: None, no limit.
        keep_trunks: whether micro-batches that are in one generation and one optimiser step share
            what their rows have in common (`prefixtree.kept_trunks`) where that computes less. It
            holds no more at once than the largest micro-batch takes alone, or max_tokens.
            Default: True.

    Raises:
        UnsupportedError: a setting, a model or a batch that is not verified to give the results of
            TRL's trainer. Settings and models are checked when the trainer is made, batches when
            they come. `docs/refusals.md` has the list.
    """

    def __init__(
        self,
        *args: Any,
        recompute: Recompute = None,
        max_tokens: int | None = None,
        keep_trunks: bool = True,
        **kwargs: Any,
    ) -> None:
        check_grpo(GRPOTrainer)
        super().__init__(*args, **kwargs)
        prepare_trainer(
            self,
            verified=("use_liger_kernel", "torch_compile", "fp16"),
            deepspeed=True,
        )
        self._recompute = check_recompute(self, recompute)
        self._max_tokens = None if max_tokens is None else at_least_one("max_tokens", max_tokens)
        refused = self.args.torch_compile, self.is_deepspeed_enabled
        # so many are always within one generation and one optimiser step, whatever comes first
        accumulated = self.args.gradient_accumulation_steps
        self._together = math.gcd(self.args.steps_per_generation, accumulated)
        served = not any(refused) and self._together > 1
        self._keeps = keep_trunks and served and is_kept(self.model)
        # of the policy, as it was before the last generation, and of that generation: its plans in
        # the order of its rows. None: not made yet; none: micro-batches are scored alone
        self._cost: WindowCost | None = None
        self._plans: list[WindowPlan] | None = None
        # the micro-batches that keep trunks now, and how many of the optimiser step are done;
        # whether one runs now
        self._window: KeptWindow | None = None
        self._done, self._in_step = 0, False
        together = self._micro_batches_together()
        self._sharing = SharingReport(
            self,
            sharing_advice(self.args),
            recompute=self._recompute,
            max_tokens=self._max_tokens,
            micro_batches_that_keep_trunks=together if self._keeps else None,
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
        **images: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Scores the completions; TRL calls it for the policy, the old policy and the reference.

        Args:
            model: the model to score with.
            input_ids: int64 [B, L].
            attention_mask: [B, L], 1 on tokens and 0 on padding.
            logits_to_keep: C, the number of last columns, which are scored.
            batch_size: the number of rows that are packed together. Default: B.
            compute_entropy: whether to compute entropies. Default: False.
            compute_aux_loss: whether to compute the load-balancing loss of experts. Default: False.
            images: TRL's arguments for images: pixel_values, image_grid_thw and num_images; their
                positions are computed anew.

        Returns:
            float32 log-probabilities [B, C], float32 entropies [B, C] or None, 0 where the mask is
            0, and the load-balancing loss [] or None: TRL's for the same rows, the mean over the
            forwards of `batch_size` rows each.

        Raises:
            UnsupportedError: images of other kinds, a row with an empty prompt, or a load-balancing
                loss of a model type that computes none.
            ForestError: placeholders that do not match the images.
        """
        shown = RowImages(images, self._is_vlm)
        rows = batch_size or len(input_ids)
        trains = torch.is_grad_enabled()
        asked = logits_to_keep, compute_entropy, compute_aux_loss
        if trains and self._in_step and self._keeps:
            given = Rows(input_ids, attention_mask, *shown.of())
            if self._window is None:
                self._window = self._window_of_step(model, given, *asked)
            if (window := self._window) is not None:
                return self._score_next(window, given, logits_to_keep)
        elif not trains and self._keeps and rows < len(input_ids):
            chunks = [
                Rows(ids, mask, *shown.of(at, at + rows))
                for at, ids, mask in zip(
                    range(0, len(input_ids), rows),
                    input_ids.split(rows),
                    attention_mask.split(rows),
                    strict=True,
                )
            ]
            if found := self._score_blocks(model, chunks, *asked):
                return _joined(found)
        parts = [
            self._score(
                model,
                input_ids[at : at + rows],
                attention_mask[at : at + rows],
                *asked,
                shown.of(at, at + rows),
            )
            for at in range(0, len(input_ids), rows)
        ]
        return _joined(parts)

    # ---- trunks that micro-batches share ---------------------------------------------------------

    # TRL's: how many micro-batches ran
    _step: int

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._in_step = True
        try:
            loss: torch.Tensor = super().training_step(*args, **kwargs)
            if self._window is not None and self._window.is_over:
                # before gradients are clipped
                window, self._window = self._window, None
                window.close()
        except BaseException:
            if self._window is not None:
                window, self._window = self._window, None
                window.close(*sys.exc_info())
            raise
        finally:
            self._in_step = False
        self._done = 0 if self.accelerator.sync_gradients else self._done + 1
        return loss

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self.model.training:
            self._plans, self._cost = None, None
            # now, while the adapters of the policy are on
            self._cost_of_policy()
        return super()._generate_and_score_completions(inputs)

    def _cost_of_policy(self) -> WindowCost | None:
        """The cost of tokens by which all models that score a generation are planned."""
        if self._cost is None and (self._keeps or self._max_tokens is not None):
            checkpointing: Recompute = "all" if self.args.gradient_checkpointing else None
            self._cost = window_cost(self.model, self._recompute or checkpointing, self._is_vlm)
        return self._cost

    def _score_blocks(
        self,
        model: nn.Module,
        chunks: list[Rows],
        width: int,
        with_entropy: bool,
        with_aux_loss: bool,
    ) -> list[_Scores]:
        """The scores of a generation's micro-batches, in order; none where they keep no trunks."""
        each = self._together
        blocks = [chunks[at : at + each] for at in range(0, len(chunks), each)]
        found, plans = [], self._plans_of(model, blocks, width)
        planned = [rows for plan in plans for rows in plan.rows]
        if planned and not (len(planned) == len(chunks) and all(map(same_rows, planned, chunks))):
            # a caller's own rows, not those of the generation
            plans = self._new_plans(model, blocks, width)
        for plan in plans:
            window = self._open(model, plan, width, with_entropy, with_aux_loss)
            assert window is not None, "without gradients nothing is planned for memory"
            found += [self._score_next(window, rows, width) for rows in plan.rows]
            window.close()
        return found

    def _window_of_step(
        self, model: nn.Module, given: Rows, width: int, with_entropy: bool, with_aux_loss: bool
    ) -> KeptWindow | None:
        """The micro-batches from this one on that keep trunks."""
        each, at = self._together, self._step % self.args.steps_per_generation
        left = self.current_gradient_accumulation_steps - self._done
        if at % each or left < each:
            # it was tried before the first of them
            return None
        if self._plans is None:
            # nothing was scored before
            rows = [
                Rows(
                    torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1),
                    torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1),
                    *RowImages({n: batch.get(n) for n in PER_ROW}, self._is_vlm).of(),
                )
                for batch in self._buffered_inputs or []
            ]
            blocks = [rows[i : i + each] for i in range(0, len(rows), each)]
            in_order = sorted(zip(self._blocks, blocks, strict=True), key=lambda block: block[0])
            self._plans_of(model, [block for _, block in in_order], width)
        if not self._plans:
            return None
        plan = self._plans[self._blocks[at // each]]
        if not same_rows(plan.rows[0], given):
            return None
        window = self._open(model, plan, width, with_entropy, with_aux_loss)
        if window is None:
            self._keeps = False
            warnings.warn(
                "recompute='auto' found no room for the trunks of an optimiser step: from now on "
                "each micro-batch is computed by itself. In this generation old log-probabilities "
                "and the reference's may differ from the policy's by rounding; to start so, make "
                "the trainer with keep_trunks=False",
                stacklevel=2,
            )
        return window

    def _plans_of(self, model: nn.Module, blocks: list[list[Rows]], width: int) -> list[WindowPlan]:
        """The plans of the generation: made for the first of the models that score it."""
        if not is_kept(model):
            # something wrapped it behind the constructor
            self._keeps, self._plans = False, []
        if self._plans is None:
            self._plans = self._new_plans(model, blocks, width)
            if self._recompute == "auto" and not torch.is_grad_enabled() and not self._fit(width):
                self._plans = []
        return self._plans

    def _new_plans(
        self, model: nn.Module, blocks: list[list[Rows]], width: int
    ) -> list[WindowPlan]:
        given = width, self._max_tokens, self._cost_of_policy(), self._is_vlm
        return plan_windows(self.accelerator, model, blocks, *given)

    def _fit(self, width: int) -> bool:
        """Whether the policy has room for the gradients of all plans."""
        with torch.enable_grad():
            for plan in self._plans or ():
                window = self._open(self.model, plan, width, True, self.aux_loss_enabled)
                if window is None:
                    return False
                window.abandon("tried")
        return True

    def _open(
        self,
        model: nn.Module,
        plan: WindowPlan,
        width: int,
        with_entropy: bool,
        with_aux_loss: bool,
    ) -> KeptWindow | None:
        check_attention(model)
        recompute = self._recompute if torch.is_grad_enabled() else None
        options = {
            "temperature": self.temperature,
            "return_entropy": with_entropy,
            "output_router_logits": with_aux_loss,
        }
        return open_window(self.accelerator, model, plan, width, recompute, **options)

    def _score_next(self, window: KeptWindow, given: Rows, width: int) -> _Scores:
        at = window.scored
        if torch.is_grad_enabled():
            self._sharing.begins(*window.sharing_of(at))
        scores = window.score(given)
        return _padded(scores, window.prompts[at].tolist(), width)

    # ---- micro-batches by themselves -------------------------------------------------------------

    def _score(
        self,
        model: nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        width: int,
        with_entropy: bool,
        with_aux_loss: bool,
        images: tuple[torch.Tensor | None, torch.Tensor | None],
    ) -> _Scores:
        prompts = attention_mask[:, : input_ids.shape[1] - width].sum(1).tolist()
        if 0 in prompts:
            raise UnsupportedError(
                f"row {prompts.index(0)} has an empty prompt: nothing predicts the first token of "
                "its completion; give every prompt a token (a BOS token)"
            )
        check_attention(model)
        pictures = None
        if self._is_vlm:
            config = transformer_of(model).config
            forest, pictures = forest_with_images(input_ids, attention_mask, images, config)
        else:
            forest = PrefixForest.from_padded(input_ids, attention_mask)
        packed = pack(forest)
        lengths = packed.forest.sequence_lengths
        masks = [np.arange(n) >= prompt for n, prompt in zip(lengths, prompts, strict=True)]
        if torch.is_grad_enabled():
            self._sharing.begins(packed.forest, masks)
        cost = self._cost_of_policy()
        cost_of_steps = cost.token if cost is not None and self._max_tokens is not None else None
        with self.accelerator.autocast():
            scores = sequence_logprobs(
                model,
                packed.to(input_ids.device),
                temperature=self.temperature,
                loss_mask=masks,
                return_entropy=with_entropy,
                recompute=self._recompute,
                output_router_logits=with_aux_loss,
                pictures=pictures,
                max_tokens=self._max_tokens,
                borrow_cost=cost_of_steps,
            )
        return _padded(scores, prompts, width)

    def _micro_batches_together(self) -> int:
        # those that share stay together
        return self._together if self._keeps else 1


def _padded(scores: SequenceScores, prompts: list[int], width: int) -> _Scores:
    """The scores of the completions of rows."""
    entropy = None
    if scores.entropy is not None:
        entropy = _completions(scores.entropy, prompts, width)
    return _completions(scores.logprobs, prompts, width), entropy, scores.aux_loss


def _joined(parts: list[_Scores]) -> _Scores:
    """Joins the scores of all rows, and takes the mean of the losses."""
    logps, entropies, losses = ([x for x in of if x is not None] for of in zip(*parts, strict=True))
    return (
        torch.cat(logps),
        torch.cat(entropies) if entropies else None,
        torch.stack(losses).mean() if losses else None,
    )


def _completions(values: list[torch.Tensor], prompts: list[int], width: int) -> torch.Tensor:
    """Values of tokens 1 .. n - 1 of every row -> those of its completion, [B, width], padded."""
    rows = [value[prompt - 1 :] for value, prompt in zip(values, prompts, strict=True)]
    padded = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return F.pad(padded, (0, width - padded.shape[1]))
