"""Trunks that the micro-batches of an optimiser step share, each computed once: for GRPO's trainer.

TRL runs forward, loss and backward for one micro-batch after another, and clips and steps behind
the last one. So trunks run forward before the first micro-batch that needs them, and backward
behind the last one, within TRL's `training_step` of that micro-batch. What is held at once stays
within what the largest micro-batch takes alone.

Policy, old policy and reference go through the same plan, made once per generation from the
policy's memory alone. So where weights are equal log-probabilities are too, to the bit. Otherwise
a KL of equal weights would have a gradient of rounding, of which AdamW makes whole steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from prefixtree.errors import ForestError, UnsupportedError
from prefixtree.forest import PrefixForest
from prefixtree.images.pictures import Pictures
from prefixtree.images.placements import place
from prefixtree.integrations.trl.images import forest_with_images
from prefixtree.models.checks import transformer_of
from prefixtree.models.layers import device_of
from prefixtree.packing.layout import pack
from prefixtree.planning.costs import BorrowCost
from prefixtree.planning.micro_batches import batches_with_trunks
from prefixtree.planning.trunks import Trunks, plan_trunks
from prefixtree.recompute.forward import Recompute, tower_memory_of
from prefixtree.recompute.picture_work import PictureWork
from prefixtree.scoring.edges import SequenceScores
from prefixtree.scoring.in_steps import borrow_cost
from prefixtree.scoring.kept_runs import check_kept
from prefixtree.scoring.kept_trunks import kept_trunks

if TYPE_CHECKING:
    from prefixtree.recompute.tower_memory import TowerMemory


class Rows(NamedTuple):
    """Padded rows of a micro-batch.

    Attributes:
        input_ids, attention_mask: [B, L] each.
        pixels, grids: pixel_values and image_grid_thw of the rows, None without images.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    pixels: torch.Tensor | None = None
    grids: torch.Tensor | None = None


def is_kept(model: nn.Module) -> bool:
    """Whether kept trunks serve a model: a matter of settings, the same on all processes."""
    try:
        check_kept(model)
    except UnsupportedError:
        return False
    return True


class WindowCost(NamedTuple):
    """The memory that tokens of the policy take.

    Attributes:
        token: the bytes of a token, for plans.
        tower: the memory of its vision tower; None without, or where it is not known.
    """

    token: BorrowCost
    tower: TowerMemory | None


def window_cost(model: nn.Module, recompute: Recompute, sees: bool) -> WindowCost | None:
    """The cost of a policy's tokens, as it trains now; None where it cannot be read off.

    Args:
        model: wrapped or not.
        recompute: what its layers recompute.
        sees: whether rows may have images.
    """
    try:
        # also where TRL scores without
        with torch.enable_grad():
            token = borrow_cost(model, recompute)
    except UnsupportedError:
        return None
    tower = None
    if sees:
        transformer = transformer_of(model)
        with suppress(UnsupportedError):
            tower = tower_memory_of(model, transformer, device_of(transformer))
    return WindowCost(token, tower)


class WindowPlan(NamedTuple):
    """Micro-batches that keep trunks.

    Attributes:
        rows: of each micro-batch.
        trunks: their plan.
        pictures: of their forest; None of text alone.
    """

    rows: Sequence[Rows]
    trunks: Trunks
    pictures: Pictures | None


class KeptWindow:
    """Micro-batches whose trunks are kept, scored one after another. Made by `open_window`.

    Attributes:
        rows: of each micro-batch.
        prompts: int64 [B], of each micro-batch, the lengths of its prompts.
        trunks: their plan.
        scored: how many micro-batches were.
    """

    def __init__(
        self,
        accelerator: Any,
        model: nn.Module,
        plan: WindowPlan,
        width: int,
        recompute: Recompute,
        **options: Any,
    ) -> None:
        self._accelerator, self._model = accelerator, model
        self.rows, self.trunks = rows, trunks = plan.rows, plan.trunks
        self.scored = 0
        self.prompts = [prompt_lengths(each.attention_mask, width) for each in rows]
        lengths = trunks.forest.sequence_lengths
        prompts = np.concatenate(self.prompts)
        masks = [np.arange(n) >= prompt for n, prompt in zip(lengths, prompts, strict=True)]
        self._masks = masks
        batches = batches_with_trunks(trunks)
        self._stack = ExitStack()
        with accelerator.autocast():
            options |= {"loss_mask": masks, "recompute": recompute, "pictures": plan.pictures}
            kept = kept_trunks(model, batches, **options)
            self._scored = self._stack.enter_context(kept)
        self._batches = batches

    @property
    def is_over(self) -> bool:
        """Whether all micro-batches were scored."""
        return self.scored == len(self.rows)

    def score(self, rows: Rows) -> SequenceScores:
        """The scores of the next micro-batch.

        Raises:
            UnsupportedError: rows that are not those of that micro-batch.
        """
        if self.is_over or not same_rows(self.rows[self.scored], rows):
            raise UnsupportedError(
                "the loss of a micro-batch asks for other rows than the trainer buffered, and the "
                "trunks that its rows share with others were computed already: a subclass or a "
                "callback changes inputs within an optimiser step; make the trainer with "
                "keep_trunks=False"
            )
        if isinstance(self._model, FSDPModule) and torch.is_grad_enabled():
            # backwards of trunks come in between, on each rank at its own time: all are reduced
            self._model.set_requires_gradient_sync(True)
        with self._accelerator.autocast():
            _, scores = next(self._scored)
        self.scored += 1
        return scores

    def sharing_of(self, at: int) -> tuple[PrefixForest, list[np.ndarray], int]:
        """Of a micro-batch: its forest, the loss masks of its rows [n], and its share, by its
        tokens, of the tokens that run for the window."""
        batch, forest = self._batches[at], self.trunks.forest
        share = batch.forest.num_replicated_tokens / forest.num_replicated_tokens
        return batch.forest, batch.take(self._masks), round(share * forest.num_tokens)

    def close(self, *failure: Any) -> None:
        """Runs the backwards of trunks that are left; with an exception's triple lets go of all."""
        self._stack.__exit__(*(failure or (None, None, None)))

    def abandon(self, why: str) -> None:
        """Lets go of all, before anything ran."""
        failure = ForestError(why)
        self.close(type(failure), failure, None)


def plan_windows(
    accelerator: Any,
    model: nn.Module,
    blocks: Sequence[Sequence[Rows]],
    width: int,
    max_tokens: int | None,
    cost: WindowCost | None,
    sees: bool = False,
) -> list[WindowPlan]:
    """The plans of a generation's micro-batches; none where each is better computed by itself.

    All processes decide together, as sharded models run in lockstep, and for the whole generation,
    as each process shuffles by itself.

    Args:
        accelerator: of the trainer.
        model: of which the pictures' placeholders are read.
        blocks: rows of the micro-batches that keep trunks together, as many on every process.
        width: C, the number of last columns, which are scored.
        max_tokens: what may be held at once; what towers hold counts by its mean per token.
            Default: what the largest micro-batch takes.
        cost: of the policy's tokens. None: no plans.
        sees: whether rows may have images. Default: False.
    """
    plans, saved = [], 0
    try:
        for rows in blocks:
            found = _planned(model, rows, width, max_tokens, cost, sees)
            if found is None:
                break
            plans.append(found[0])
            saved += found[1]
    except (ForestError, UnsupportedError):
        pass
    numbers = torch.tensor([len(plans) < len(blocks), saved], device=accelerator.device)
    failed, saved = accelerator.reduce(numbers, "sum").tolist()
    return [] if failed or saved <= 0 else plans


def _planned(
    model: nn.Module,
    rows: Sequence[Rows],
    width: int,
    max_tokens: int | None,
    cost: WindowCost | None,
    sees: bool,
) -> tuple[WindowPlan, int] | None:
    """The plan of micro-batches, and how many tokens fewer it computes; None where there is none.

    Raises:
        ForestError, UnsupportedError: trunks that do not fit; images.
    """
    if cost is None:
        return None
    input_ids = torch.cat([each.input_ids for each in rows]).cpu()
    attention_mask = torch.cat([each.attention_mask for each in rows]).cpu()
    if not bool(attention_mask[:, : input_ids.shape[1] - width].any(1).all()):
        # an empty prompt is refused where a micro-batch is scored by itself
        return None
    border = np.cumsum([0, *(len(each.input_ids) for each in rows)])
    members = [np.arange(a, b) for a, b in itertools.pairwise(border)]
    pictures, token = None, cost.token
    if sees:
        images = _joined(each.pixels for each in rows), _joined(each.grids for each in rows)
        config = transformer_of(model).config
        forest, pictures = forest_with_images(input_ids, attention_mask, images, config)
        if pictures is not None and cost.tower is not None:
            token = _with_towers(token, cost.tower, forest, pictures)
    else:
        forest = PrefixForest.from_padded(input_ids, attention_mask)
    tokens = [_distinct(forest, each) for each in members]
    budget = max(tokens) if max_tokens is None else max_tokens
    trunks = plan_trunks(forest, budget, token, members)
    extra = trunks.extra_tokens(budget, has_backward=True)
    return WindowPlan(rows, trunks, pictures), sum(tokens) - forest.num_tokens - extra


def open_window(
    accelerator: Any,
    model: nn.Module,
    plan: WindowPlan,
    width: int,
    recompute: Recompute,
    **options: Any,
) -> KeptWindow | None:
    """A window over the micro-batches of a plan.

    None on all processes where recompute="auto" finds no room for the gradients of one of them.

    Args:
        accelerator: of the trainer.
        model: wrapped or not, one that `is_kept`.
        plan: of `plan_windows`.
        width: C, the number of last columns, which are scored.
        recompute: as in `kept_trunks`.
        options: temperature and return_entropy, as in `kept_trunks`.
    """
    arguments = accelerator, model, plan, width, recompute
    if recompute != "auto":
        return KeptWindow(*arguments, **options)
    window = None
    # of its own plan, before anything runs, or of that of another process of FSDP2
    with suppress(torch.OutOfMemoryError, ForestError):
        window = KeptWindow(*arguments, **options)
    missing = torch.tensor(int(window is None), device=accelerator.device)
    if not int(accelerator.reduce(missing, "sum")):
        return window
    if window is not None:
        window.abandon("another process cannot keep its trunks")
    return None


def _with_towers(
    cost: BorrowCost, tower: TowerMemory, forest: PrefixForest, pictures: Pictures
) -> BorrowCost:
    """The bytes of a token with the pixels and features that wait for a tower's backward, the mean
    of the forest."""
    placements = place(pack(forest), pictures)[0]
    shown = PictureWork.of(placements, pictures, tower.dtype, moved=False)
    held = 0.0 if shown is None else shown.held(tower) / forest.num_tokens
    # a trunk that holds no graph encodes its pictures again
    graph = cost.graph_bytes and cost.graph_bytes + held
    own = None if cost.token_bytes is None else cost.token_bytes + held
    return replace(cost, token_bytes=own, graph_bytes=graph)


def prompt_lengths(attention_mask: torch.Tensor, width: int) -> np.ndarray:
    """The tokens of each row before its last `width` columns, int64 [B]."""
    return attention_mask[:, : attention_mask.shape[1] - width].sum(1).cpu().numpy()


def same_rows(rows: Rows, others: Rows) -> bool:
    """Whether tokens, padding and images are the same."""
    return all(
        a is b or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(rows, others, strict=True)
    )


def _joined(parts: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
    held = [part for part in parts if part is not None]
    return torch.cat(held) if held else None


def _distinct(forest: PrefixForest, sequences: np.ndarray) -> int:
    """Distinct tokens of some sequences."""
    nodes = np.unique(np.concatenate([forest.path(i) for i in sequences.tolist()]))
    return int(forest.node_length[nodes].sum())
