"""Trunks that the micro-batches of an optimiser step share, each computed once: for GRPO's trainer.

TRL runs forward, loss and backward for one micro-batch after another, and then clips and steps. So
trunks run forward before the first micro-batch that needs them, and backward after the last one,
within TRL's `training_step` of that micro-batch. No more is held at once than the largest
micro-batch takes alone.

Policy, old policy and reference use one plan per generation, made from the policy's memory. So
equal weights give equal log-probabilities, to the bit. Otherwise a KL of equal weights would have a
gradient of rounding, of which AdamW makes whole steps.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from prefixtree.errors import ForestError, UnsupportedError
from prefixtree.forest import PrefixForest
from prefixtree.images.images import Images
from prefixtree.images.placements import place
from prefixtree.integrations.core.batch import Batch
from prefixtree.integrations.core.trunks import all_keep, is_kept, planned, token_cost
from prefixtree.models.checks import transformer_of
from prefixtree.models.layers import device_of
from prefixtree.packing.layout import pack
from prefixtree.planning.costs import ImportCost
from prefixtree.planning.micro_batches import batches_with_trunks
from prefixtree.planning.trunks import Trunks
from prefixtree.recompute.choose import Recompute, encoder_memory_of
from prefixtree.recompute.image_work import ImageWork
from prefixtree.scoring.edges import SequenceScores
from prefixtree.scoring.kept_trunks import kept_trunks

if TYPE_CHECKING:
    from prefixtree.recompute.memory import EncoderMemory


class WindowCost(NamedTuple):
    """The bytes of a policy's token, and the memory of its vision encoder, None if not known."""

    token: ImportCost
    encoder: EncoderMemory | None


class WindowPlan(NamedTuple):
    """Micro-batches that keep trunks, their plan, and the images of their forest."""

    batches: Sequence[Batch]
    trunks: Trunks
    images: Images | None


class Generation(NamedTuple):
    """The place of a trainer in the generation that it trains on.

    Attributes:
        step: the number of micro-batches that were trained on before.
        blocks: the number in the generation of each block of micro-batches, in training order.
        buffered: gives the micro-batches of the generation, in the order of its rows.
    """

    step: int
    blocks: Sequence[int]
    buffered: Callable[[], list[Batch]]


class StepTrunks:
    """The trunks of a trainer's steps: plans of a generation, and the window that is open.

    Args:
        trainer: only its names that TRL and transformers make public are read.
        recompute: the policy's. max_tokens: held at once; None for what a micro-batch takes.
        sees: whether the policy takes images.

    Attributes:
        keeps: whether micro-batches share trunks.
        together: the number of micro-batches in a block, which is always within one generation and
            one optimiser step.
        window: the micro-batches that keep trunks now.
    """

    def __init__(
        self,
        trainer: Any,
        keep_trunks: bool,
        *,
        recompute: Recompute,
        max_tokens: int | None,
        sees: bool,
    ) -> None:
        args = trainer.args
        self.together = math.gcd(args.steps_per_generation, args.gradient_accumulation_steps)
        served = not (args.torch_compile or trainer.is_deepspeed_enabled) and self.together > 1
        self.keeps = keep_trunks and served and is_kept(trainer.model)
        self.window: KeptWindow | None = None
        self._trainer = trainer
        self._recompute, self._max_tokens, self._sees = recompute, max_tokens, sees
        # the policy's cost before the last generation
        self._cost: WindowCost | None = None
        # plans of that generation, in the order of its rows; None before they are made, and empty
        # where micro-batches are scored alone
        self._plans: list[WindowPlan] | None = None
        # the finished micro-batches of the optimiser step, and whether one runs now
        self._done, self._runs = 0, False

    @property
    def cost(self) -> WindowCost | None:
        """The cost by which every model's plan is made; None where it cannot be read off."""
        if self._cost is None:
            checkpoints: Recompute = "all" if self._trainer.args.gradient_checkpointing else None
            how = self._recompute or checkpoints, self._sees
            self._cost = _cost_of(self._trainer.model, *how)
        return self._cost

    def begin_generation(self) -> None:
        """Forgets the plans of the last generation."""
        self._plans, self._cost = None, None
        if self.keeps or self._max_tokens is not None:
            # read now, while the adapters of the policy are on
            _ = self.cost

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """A context in which TRL runs the forward and the backward of one micro-batch."""
        self._runs = True
        try:
            yield
            if self.window is not None and self.window.is_over:
                # runs before gradients are clipped
                self._take_window().close()
        except BaseException:
            if self.window is not None:
                self._take_window().close(*sys.exc_info())
            raise
        finally:
            self._runs = False
        self._done = 0 if self._trainer.accelerator.sync_gradients else self._done + 1

    def _take_window(self) -> KeptWindow:
        window, self.window = self.window, None
        assert window is not None
        return window

    def score(
        self,
        model: nn.Module,
        batches: list[Batch],
        options: dict[str, Any],
        generation: Generation,
    ) -> list[SequenceScores] | None:
        """Scores micro-batches that keep trunks; None where each is scored by itself."""
        if not self.keeps:
            return None
        if torch.is_grad_enabled():
            if not self._runs or len(batches) > 1:
                return None
            if self.window is None:
                self.window = self._window_of_step(model, batches[0], options, generation)
            return None if self.window is None else [self.window.score(batches[0])]
        return self._score_blocks(model, batches, options) if len(batches) > 1 else None

    def _score_blocks(
        self, model: nn.Module, batches: list[Batch], options: dict[str, Any]
    ) -> list[SequenceScores] | None:
        """Scores a generation's micro-batches, in order; None where they keep no trunks."""
        scores, plans = [], self._plans_of(model, batches)
        held = [batch for plan in plans for batch in plan.batches]
        if held and not (len(held) == len(batches) and all(map(Batch.equals, held, batches))):
            # the caller's own rows, not the generation's
            plans = self._new_plans(model, batches)
        for plan in plans:
            window = self._open(model, plan, options)
            assert window is not None, "without gradients nothing is planned for memory"
            scores += [window.score(batch) for batch in plan.batches]
            window.close()
        return scores or None

    def _window_of_step(
        self, model: nn.Module, batch: Batch, options: dict[str, Any], generation: Generation
    ) -> KeptWindow | None:
        """Opens the window of the micro-batches from this one on that keep trunks, if they do."""
        trainer, block_size = self._trainer, self.together
        at = generation.step % trainer.args.steps_per_generation
        left = trainer.current_gradient_accumulation_steps - self._done
        if at % block_size or left < block_size:
            # this block was tried at its first micro-batch
            return None
        if self._plans is None:
            # nothing of this generation was scored before
            self._plans_of(model, generation.buffered())
        if not self._plans:
            return None
        plan = self._plans[generation.blocks[at // block_size]]
        if not plan.batches[0].equals(batch):
            return None
        window = self._open(model, plan, options)
        if window is None:
            self.keeps = False
            warnings.warn(
                "recompute='auto' found no room for the trunks of an optimiser step: from now on "
                "each micro-batch is computed by itself. In this generation old log-probabilities "
                "and the reference's may differ from the policy's by rounding; to start so, make "
                "the trainer with keep_trunks=False",
                stacklevel=2,
            )
        return window

    def _plans_of(self, model: nn.Module, batches: list[Batch]) -> list[WindowPlan]:
        """The plans of the generation, made for the first of the models that score it."""
        if not is_kept(model):
            # it was wrapped after the constructor
            self.keeps, self._plans = False, []
        if self._plans is None:
            self._plans = self._new_plans(model, batches)
            tries = self._recompute == "auto" and not torch.is_grad_enabled()
            if tries and not self._fit():
                self._plans = []
        return self._plans

    def _new_plans(self, model: nn.Module, batches: list[Batch]) -> list[WindowPlan]:
        """Makes a plan per block of micro-batches; none where each is better computed by itself.

        All processes decide together, as sharded models run in lockstep, and for the whole
        generation, as each process shuffles by itself.
        """
        plans, saved = [], 0
        blocks = [batches[i : i + self.together] for i in range(0, len(batches), self.together)]
        with suppress(ForestError, UnsupportedError):
            for block in blocks:
                planned = _planned(model, block, self._max_tokens, self.cost)
                if planned is None:
                    break
                plans.append(planned[0])
                saved += planned[1]
        return plans if all_keep(len(plans) == len(blocks), saved, self._total) else []

    def _fit(self) -> bool:
        """Whether the policy has room for the gradients of all plans."""
        trainer = self._trainer
        options = {
            "temperature": trainer.temperature,
            "return_entropy": True,
            "output_router_logits": trainer.aux_loss_enabled,
        }
        with torch.enable_grad():
            for plan in self._plans or ():
                window = self._open(trainer.model, plan, options)
                if window is None:
                    return False
                window.abandon("tried")
        return True

    def _open(
        self, model: nn.Module, plan: WindowPlan, options: dict[str, Any]
    ) -> KeptWindow | None:
        """Opens a window over a plan; None on all processes if "auto" lacks room on one."""
        recompute = self._recompute if torch.is_grad_enabled() else None
        arguments = self._trainer.accelerator, model, plan, {**options, "recompute": recompute}
        if recompute != "auto":
            return KeptWindow(*arguments)
        window = None
        # raised for its own plan before anything runs, or for that of another process of FSDP2
        with suppress(torch.OutOfMemoryError, ForestError):
            window = KeptWindow(*arguments)
        if not self._total([window is None])[0]:
            return window
        if window is not None:
            window.abandon("another process cannot keep its trunks")
        return None

    def _total(self, numbers: list[int]) -> list[int]:
        accelerator = self._trainer.accelerator
        mine = torch.tensor(numbers, dtype=torch.int64, device=accelerator.device)
        found: list[int] = accelerator.reduce(mine, "sum").tolist()
        return found


class KeptWindow:
    """Micro-batches whose trunks are kept, scored one after another."""

    def __init__(
        self, accelerator: Any, model: nn.Module, plan: WindowPlan, options: dict[str, Any]
    ) -> None:
        self._accelerator, self._model, self._plan = accelerator, model, plan
        self._scored = 0
        masks = [mask for batch in plan.batches for mask in batch.masks or ()]
        self._masks, self._parts = masks, batches_with_trunks(plan.trunks)
        self._stack = ExitStack()
        with accelerator.autocast():
            given = {"loss_mask": masks, "images": plan.images, **options}
            self._kept = self._stack.enter_context(kept_trunks(model, self._parts, **given))

    @property
    def is_over(self) -> bool:
        """Whether all micro-batches were scored."""
        return self._scored == len(self._plan.batches)

    def score(self, batch: Batch) -> SequenceScores:
        """Scores the next micro-batch."""
        if self.is_over or not self._plan.batches[self._scored].equals(batch):
            raise UnsupportedError(
                "the loss of a micro-batch asks for other rows than the trainer buffered, and the "
                "trunks that its rows share with others were computed already: a subclass or a "
                "callback changes inputs within an optimiser step; make the trainer with "
                "keep_trunks=False"
            )
        if isinstance(self._model, FSDPModule) and torch.is_grad_enabled():
            # backwards of trunks come in between, at different times on each rank: all are reduced
            self._model.set_requires_gradient_sync(True)
        with self._accelerator.autocast():
            _, scores = next(self._kept)
        self._scored += 1
        return scores

    def sharing(self) -> tuple[PrefixForest, list[np.ndarray], int]:
        """The last micro-batch's forest, row masks, and share of the tokens the window runs."""
        part, forest = self._parts[self._scored - 1], self._plan.trunks.forest
        share = part.forest.num_replicated_tokens / forest.num_replicated_tokens
        return part.forest, part.take(self._masks), round(share * forest.num_tokens)

    def close(self, *failure: Any) -> None:
        """Runs the remaining backwards of trunks; with an exception's triple frees everything."""
        self._stack.__exit__(*(failure or (None, None, None)))

    def abandon(self, why: str) -> None:
        """Frees everything before anything ran."""
        failure = ForestError(why)
        self.close(type(failure), failure, None)


# ---- the plan of a window ------------------------------------------------------------------------


def _cost_of(model: nn.Module, recompute: Recompute, sees: bool) -> WindowCost | None:
    """The cost of a policy's tokens, as it trains now; None where it cannot be read off."""
    token, encoder = token_cost(model, recompute), None
    if token is None:
        return None
    if sees:
        transformer = transformer_of(model)
        with suppress(UnsupportedError):
            encoder = encoder_memory_of(model, transformer, device_of(transformer))
    return WindowCost(token, encoder)


def _planned(
    model: nn.Module, batches: Sequence[Batch], max_tokens: int | None, cost: WindowCost | None
) -> tuple[WindowPlan, int] | None:
    """Plans micro-batches and counts the tokens that the plan saves; None where there is no plan.

    Args:
        max_tokens: the limit of what is held at once; vision encoders count by their mean per
            token. Default: what the largest micro-batch takes.
    """
    if cost is None:
        return None
    rows = [row for batch in batches for row in batch.tokens]
    images, token = None, cost.token
    if batches[0].config is not None:
        pixels, grids = map(_joined, zip(*(batch.pixels for batch in batches), strict=True))
        images = Images.from_batch(rows, pixels, grids, transformer_of(model).config)
        rows = images.sequences
    forest = PrefixForest.from_sequences(rows)
    if images is not None and cost.encoder is not None:
        token = _with_encoders(token, cost.encoder, forest, images)
    members = np.split(np.arange(len(rows)), np.cumsum([len(batch) for batch in batches])[:-1])
    tokens = [_distinct(forest, each) for each in members]
    budget = max(tokens) if max_tokens is None else max_tokens
    trunks = planned(forest, budget, token, members)
    if trunks is None:
        return None
    extra = trunks.extra_tokens(budget, has_backward=True)
    return WindowPlan(batches, trunks, images), sum(tokens) - forest.num_tokens - extra


def _with_encoders(
    cost: ImportCost, encoder: EncoderMemory, forest: PrefixForest, images: Images
) -> ImportCost:
    """Adds the mean bytes per token that wait for a vision encoder's backward."""
    placements = place(pack(forest), images)[0]
    shown = ImageWork.of(placements, images, encoder.dtype, moved=False)
    held = 0.0 if shown is None else shown.held(encoder) / forest.num_tokens
    # a trunk that holds no graph encodes its images again
    graph = cost.graph_bytes and cost.graph_bytes + held
    own = None if cost.token_bytes is None else cost.token_bytes + held
    return replace(cost, token_bytes=own, graph_bytes=graph)


def _joined(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    held = [part for part in parts if part is not None]
    return torch.cat(held) if held else None


def _distinct(forest: PrefixForest, sequences: np.ndarray) -> int:
    """Counts the distinct tokens of some sequences."""
    nodes = np.unique(np.concatenate([forest.path(i) for i in sequences.tolist()]))
    return int(forest.node_length[nodes].sum())
