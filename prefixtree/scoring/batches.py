"""`batch_logprobs`: scores of a trainer's batch, each at the place of its token.

Legend: B rows, L columns, S sequences, n tokens of one, C columns of a measure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from prefixtree._numbers import to_numpy
from prefixtree.errors import ForestError, with_hints
from prefixtree.forest import PrefixForest
from prefixtree.models.checks import check_loaded, transformer_of
from prefixtree.models.layers import device_of
from prefixtree.packing.batch_layout import BatchLayout
from prefixtree.packing.copies import move
from prefixtree.packing.layout import PackedForest, pack
from prefixtree.scoring.logprobs import sequence_logprobs
from prefixtree.wings import load


@dataclass(frozen=True)
class BatchScores:
    """The scores of a batch [B, L]; the score of a token stands where the token stands.

    Attributes:
        logprobs: float32 [B, L], natural log-probabilities; 0 where nothing is scored.
        scored: bool [B, L], whether a token is scored. False on padding, on the first token of a
            sequence and where `loss_mask` is 0.
        packed: the packed forest that the model ran over.
        entropy: float32 [B, L], in nats; None without `return_entropy`.
        statistics: name -> float32 [B, L], without gradients.
        measured: [B, L, C], the values of `measure`; None without it.
        aux_loss: float32 [], the load-balancing loss of a mixture of experts; see `SequenceScores`.
        router_logits: [T, E] per layer of experts; see `SequenceScores`.
        mtp: one float32 [B, L] per layer of `mtp`; see `SequenceScores`. None without it.
    """

    logprobs: torch.Tensor
    scored: torch.Tensor
    packed: PackedForest
    entropy: torch.Tensor | None = None
    statistics: dict[str, torch.Tensor] = field(default_factory=dict)
    measured: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None
    router_logits: tuple[torch.Tensor, ...] = ()
    mtp: list[torch.Tensor] | None = None


@with_hints
def batch_logprobs(
    model: nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    position_ids: torch.Tensor | None = None,
    cu_seqlens: Any = None,
    temperature: Any = 1.0,
    loss_mask: torch.Tensor | None = None,
    **options: Any,
) -> BatchScores:
    """Scores the tokens of a padded or packed batch: `sequence_logprobs` for a trainer's layout.

    It replaces forward, shift and log-softmax. Prefixes are shared within this batch alone:
    `plan_micro_batches` puts sequences of one history into one micro-batch.

    `attention_mask`, `position_ids` or `cu_seqlens` says where sequences stand. A batch of padding
    alone runs a dummy forward (`PrefixForest.dummy`), because other ranks may wait for this one.

    Args:
        model: as in `sequence_logprobs`.
        input_ids: int64 [B, L], on the model's device; or nested lists, or an array.
        attention_mask: [B, L], 1 on tokens and 0 elsewhere: one sequence per row, padded on the
            left, on the right or on both sides. A row may hold no token.
        position_ids: [B, L] or [1, L]. Without a mask, a row may hold several sequences, each of
            which restarts at 0. With a mask, positions must count its tokens from 0.
        cu_seqlens: int [S + 1], the borders of sequences in the flattened rows, as FlashAttention
            takes them. Tokens after the last border are padding.
        temperature: the divisor of the logits: one number, one per row [B], or one per token
            [B, L], at each token the divisor of the logits that it was drawn from. Default: 1.0.
        loss_mask: [B, L], 1 where a token is scored. Default: every token of a sequence but the
            first.
        **options: the other keywords of `sequence_logprobs`. `images` must be made from the
            sequences of this batch, in its order; token ids are compared. Rows of equal text with
            images of equal size cannot be told apart. `sampling_masks` has an entry per sequence.

    Returns:
        BatchScores, differentiable as `SequenceScores` is. A trainer that keeps the score of token
        t at t - 1 takes `[:, 1:]`, or rolls.

    Raises:
        ForestError: no layout (none of the three arguments), or cu_seqlens with another of them; a
            hole in a row of the mask; positions that do not restart at 0, or do not follow the
            mask; borders that descend or lie beyond the batch; a loss_mask of another shape, or
            with a 1 on padding; images of other sequences; and as `sequence_logprobs`.
        ValueError: a temperature of another shape; and as `sequence_logprobs`.
        TypeError: input_ids that are no batch; and as `sequence_logprobs`.
        UnsupportedError, RuntimeError: as `sequence_logprobs`.
    """
    if isinstance(input_ids, (str, Mapping, PackedForest)) or input_ids is None:
        raise TypeError(
            f"input_ids must be a tensor [B, L], got {type(input_ids).__name__}: a tokenizer's "
            "batch is given as **batch, and sequence_logprobs(model, packed) takes a packed forest"
        )
    ids = to_numpy(input_ids, "input_ids")
    if isinstance(input_ids, torch.Tensor):
        device = input_ids.device
    else:
        device = device_of(transformer_of(model))
        check_loaded(transformer_of(model))
    layout = BatchLayout.of(ids.shape, attention_mask, position_ids, cu_seqlens)
    sequences = layout.sequences("input_ids", ids)
    images = options.get("images")
    if images is not None:
        load("images").check_sequences(sequences, images)
        sequences = images.sequences
    # a batch of padding alone runs a dummy, for which any id does
    forest = PrefixForest.from_sequences(sequences or [np.zeros(1, np.int64)])
    packed = pack(forest if sequences else forest.dummy()).to(device)
    masks, scored = _masks(layout, loss_mask)
    if not len(layout.lengths):
        temperature, masks = 1.0, None
        options["sampling_masks"] = None
    scores = sequence_logprobs(
        model, packed, _temperatures(layout, temperature), loss_mask=masks, **options
    )
    return BatchScores(
        logprobs=layout.spread(scores.logprobs),
        scored=move(torch.from_numpy(scored), device),
        packed=packed,
        entropy=None if scores.entropy is None else layout.spread(scores.entropy),
        statistics={name: layout.spread(of) for name, of in scores.statistics.items()},
        measured=None if scores.measured is None else layout.spread(scores.measured),
        aux_loss=scores.aux_loss,
        router_logits=scores.router_logits,
        mtp=None if scores.mtp is None else [layout.spread(of) for of in scores.mtp],
    )


def _masks(layout: BatchLayout, loss_mask: Any) -> tuple[list[np.ndarray] | None, np.ndarray]:
    """Makes a loss_mask [n] per sequence, and bool [B, L] that says where a score stands."""
    scored = np.zeros(layout.shape, bool)
    scored.reshape(-1)[layout.predicted] = True
    if loss_mask is None:
        return None, scored
    mask = to_numpy(loss_mask, "loss_mask")
    masks = layout.sequences("loss_mask", mask)
    is_scored = mask != 0
    holds = np.zeros(layout.shape, bool)
    holds.reshape(-1)[layout.place] = True
    for row, column in np.argwhere(is_scored & ~holds)[:1]:
        raise ForestError(
            f"loss_mask is 1 in row {row}, column {column}, where no sequence has a token; set it "
            "to 0 on padding"
        )
    return masks, scored & is_scored


def _temperatures(layout: BatchLayout, temperature: Any) -> Any:
    """Temperatures as `sequence_logprobs` takes them: a number, or one or [n] per sequence."""
    if np.ndim(temperature) == 0:
        return temperature
    values = to_numpy(temperature, "temperature")
    if values.shape == layout.shape[:1]:
        return values[layout.rows].tolist()
    if values.shape == layout.shape:
        return layout.sequences("temperature", values)
    raise ValueError(
        f"temperature must be a number, one per row [{layout.shape[0]}] or one per token "
        f"{list(layout.shape)}, got shape {list(values.shape)}"
    )
