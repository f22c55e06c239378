"""`batch_logprobs`: a trainer's batch in, scores where its tokens stand out.

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
    """The scores of a batch [B, L]: that of a token stands where the token stands.

    Attributes:
        logprobs: float32 [B, L], the natural log-probabilities; 0 where nothing is scored.
        scored: bool [B, L], where a score stands: not on padding, on the first token of a sequence,
            or where loss_mask is 0.
        packed: the forest that was computed.
        entropy: float32 [B, L], in nats; None without `return_entropy`.
        statistics: name -> float32 [B, L], without gradients.
        measured: [B, L, C], what `measure` gave; None without it.
        aux_loss, router_logits: as in `SequenceScores`.
    """

    logprobs: torch.Tensor
    scored: torch.Tensor
    packed: PackedForest
    entropy: torch.Tensor | None = None
    statistics: dict[str, torch.Tensor] = field(default_factory=dict)
    measured: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None
    router_logits: tuple[torch.Tensor, ...] = ()


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
    """`sequence_logprobs` in the layout of a trainer's micro-batch.

    It takes the place of forward, shift and log-softmax. The forest is that of this batch, so what
    is shared is what the micro-batches hold: `plan_micro_batches` puts histories together.

    One of `attention_mask`, `position_ids` and `cu_seqlens` says where sequences stand. A batch of
    padding alone runs a dummy (`PrefixForest.dummy`), as other ranks may wait.

    Args:
        model: as in `sequence_logprobs`.
        input_ids: int64 [B, L], on the model's device; or lists or an array.
        attention_mask: [B, L], 1 on tokens and 0 elsewhere: one sequence per row, padded on either
            side or both. Rows without tokens are fine.
        position_ids: [B, L] or [1, L]. Without a mask, several sequences per row, each of which
            restarts at 0; with one, they count from 0 along it.
        cu_seqlens: int [S + 1], the borders of sequences in the flattened rows, as FlashAttention
            has them; what is behind the last is padding.
        temperature: the divisor of the logits: a number, one per row [B], or one per token [B, L],
            where the entry of a token divided the logits that it was drawn from. Default: 1.0.
        loss_mask: [B, L], 1 where a token is scored. Default: every token of a sequence but the
            first.
        **options: the other keywords of `sequence_logprobs`. `images` must be made of the
            sequences of this batch, in its order: token ids are compared. Rows of one text with
            images of one size cannot be told apart.

    Returns:
        BatchScores, differentiable as `SequenceScores`. Trainers that keep the score of token t at
        t - 1 take `[:, 1:]`, or roll.

    Raises:
        ForestError: none of the three arguments, or cu_seqlens beside another; a hole in a row of
            the mask; positions that do not restart at 0, or that do not follow the mask; borders
            that descend or lie beyond the batch; a loss_mask of another shape, or with a 1 where no
            token stands; images of other sequences; and what `sequence_logprobs` raises.
        ValueError: a temperature of another shape, and what `sequence_logprobs` raises.
        TypeError: input_ids that are no batch, and what `sequence_logprobs` raises.
        UnsupportedError, RuntimeError: what `sequence_logprobs` raises.
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
    # of padding alone a dummy runs; any id does
    forest = PrefixForest.from_sequences(sequences or [np.zeros(1, np.int64)])
    packed = pack(forest if sequences else forest.dummy()).to(device)
    masks, scored = _masks(layout, loss_mask)
    if not len(layout.lengths):
        temperature, masks = 1.0, None
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
    )


def _masks(layout: BatchLayout, loss_mask: Any) -> tuple[list[np.ndarray] | None, np.ndarray]:
    """loss_mask per sequence, and bool [B, L], where a score stands."""
    scored = np.zeros(layout.shape, bool)
    scored.reshape(-1)[layout.predicted] = True
    if loss_mask is None:
        return None, scored
    given = to_numpy(loss_mask, "loss_mask")
    masks = layout.sequences("loss_mask", given)
    wanted = given != 0
    holds = np.zeros(layout.shape, bool)
    holds.reshape(-1)[layout.place] = True
    for row, column in np.argwhere(wanted & ~holds)[:1]:
        raise ForestError(
            f"loss_mask is 1 in row {row}, column {column}, where no sequence has a token; set it "
            "to 0 on padding"
        )
    return masks, scored & wanted


def _temperatures(layout: BatchLayout, temperature: Any) -> Any:
    """As `sequence_logprobs` takes it: a number, one per sequence, or [n] per sequence."""
    if np.ndim(temperature) == 0:
        return temperature
    found = to_numpy(temperature, "temperature")
    if found.shape == layout.shape[:1]:
        return found[layout.rows].tolist()
    if found.shape == layout.shape:
        return layout.sequences("temperature", found)
    raise ValueError(
        f"temperature must be a number, one per row [{layout.shape[0]}] or one per token "
        f"{list(layout.shape)}, got shape {list(found.shape)}"
    )
