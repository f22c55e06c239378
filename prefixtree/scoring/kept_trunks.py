"""`kept_trunks` and `kept_values`: scores of micro-batches, with shared trunks computed once.

How trunks and micro-batches run is in `scoring.kept_runs`. Legend: S planned sequences, n tokens of
one, C labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from prefixtree.errors import with_hints
from prefixtree.images.images import Images
from prefixtree.kernels.lm_head.logprobs import ScoreOptions
from prefixtree.kernels.lm_head.measures import Measure
from prefixtree.models.checks import check_module, check_vocabulary, find_causal_lm
from prefixtree.models.families import forward_inputs
from prefixtree.packing.copies import gather
from prefixtree.packing.layout import PackedForest
from prefixtree.planning.micro_batch import MicroBatch, of_plan
from prefixtree.recompute.choose import Recompute
from prefixtree.recompute.trunk_modes import RecomputeTrunks, check_modes
from prefixtree.scoring.edges import SequenceScores, find_edges, scores_of
from prefixtree.scoring.forward import AskedWings, ModelForward, ScoresOfParts
from prefixtree.scoring.kept_runs import CUT_BY_TRUNKS, KeptRuns, TurnRows, running
from prefixtree.scoring.local import inputs_of
from prefixtree.scoring.sampling_masks import over_sets
from prefixtree.scoring.values import ValuesForward, checked_classifier


@with_hints
@contextmanager
def kept_trunks(
    model: nn.Module,
    batches: Sequence[MicroBatch],
    temperature: float | Sequence[float] = 1.0,
    loss_mask: Sequence[Any] | None = None,
    *,
    images: Images | None = None,
    return_entropy: bool = False,
    chunk_size: int | None = None,
    recompute: Recompute = None,
    return_statistics: Sequence[str] = (),
    recompute_trunks: RecomputeTrunks = None,
    measure: Measure | None = None,
    sampling_masks: Sequence[Any] | None = None,
    output_router_logits: bool | None = None,
) -> Iterator[Iterator[tuple[MicroBatch, SequenceScores]]]:
    """Scores the micro-batches of a rank, and computes every distinct token once.

        plan = plan_micro_batches(rollouts, max_tokens, trunks=True)
        with kept_trunks(model, plan[rank], loss_mask=masks) as scored:
            for batch, scores in scored:
                ...  # the loss of this micro-batch
                loss.backward()
        optimizer.step()

    A trunk is a prefix that several micro-batches share. Its forward runs once, before the first of
    them, and its backward once, after the last. The gradients are those of the sum of the
    micro-batches' losses, as if each micro-batch were scored alone.

    Each loss must run its backward within its turn of the loop. The backwards of trunks run between
    turns and at the end of the block. If an exception leaves the block, they do not run and all
    graphs are freed. With gradients disabled, the same block computes log-probabilities alone.

    Args:
        model: as in `sequence_logprobs`.
        batches: `plan[rank]` of a plan with `trunks=True`.
        temperature: as in `sequence_logprobs`; one number, or one per planned sequence, [S].
        loss_mask: as in `sequence_logprobs`, one mask per planned sequence.
        images: as in `sequence_logprobs`; the plan must be of `images.sequences`. Each trunk and
            each micro-batch encodes the images of its own tokens. Default: text alone.
        return_entropy: as in `sequence_logprobs`.
        chunk_size: as in `sequence_logprobs`.
        recompute: what layers compute again in the backward of a micro-batch. None, "all",
            "all_but_attention", "nothing" or a RecomputePlan: as in `sequence_logprobs`. "auto":
            trunks and micro-batches recompute what does not fit the memory that is free when the
            block begins; vision encoders then always recompute. Default: None, as the model is set.
        return_statistics: as in `sequence_logprobs`.
        recompute_trunks: the same choice for trunks. Or "again": a trunk's whole forward runs a
            second time just before its backward, so that only its keys and values stay in memory
            between the two. Default: "again" where the plan says so (`TrunkStats.again`), else as
            `recompute`; with "auto" it is planned.
        measure: as in `sequence_logprobs`, without `measured_edges`. Edges are numbered as in
            `scored.packed`; a `Teacher` of `pack(plan.forest)` has their rows.
        sampling_masks: as in `sequence_logprobs`, one entry per planned sequence.
        output_router_logits: as in `sequence_logprobs`: one loss per micro-batch, over its tokens
            and those of the trunks above them.

    Yields:
        An iterator over (MicroBatch, SequenceScores). Its attribute `packed` is the packed forest
        of all sequences of the rank, in planned order.

    Raises:
        TypeError, ValueError, ForestError: as `sequence_logprobs`; batches of a plan without
            `trunks=True`; "auto" for one of the two recompute arguments and a mode for the other.
        UnsupportedError: a model that is not verified with kept trunks, with the reason.
        torch.OutOfMemoryError: "auto", and a forest that does not fit with every layer recomputed.
        RuntimeError: a model that changed within the block; a micro-batch whose backward did not
            run, or ran late; a block that is left before all micro-batches were scored.
    """
    modes = recompute, recompute_trunks
    check_modes(model, *modes, images is not None)
    options = ScoreOptions(return_entropy, return_statistics, chunk_size, measure=measure)
    causal_lm = find_causal_lm(model)
    asked_wings = AskedWings(images, output_router_logits)

    def prepare(packed: PackedForest, members: np.ndarray | None) -> _KeptScores:
        asked_wings.check(model, causal_lm, packed, CUT_BY_TRUNKS)
        per_sequence: Any = 1.0, None
        if members is not None:
            planned = temperature, loss_mask, sampling_masks, batches[0].num_planned
            per_sequence = of_plan(*planned, members)
        found = find_edges(packed, *per_sequence)
        if found.sets is not None:
            check_vocabulary(causal_lm, found.sets.ids)
        packed, wings = asked_wings.open(model, causal_lm, packed, packed)
        inputs = inputs_of(packed, causal_lm, wings)
        over = over_sets(options, found.sets, packed.device)
        forward = ModelForward(model, causal_lm, packed, over, wings)
        return _KeptScores(forward, inputs, found)

    with running(KeptRuns(model, batches, prepare, modes)) as run:
        yield run


class _KeptScores(ScoresOfParts):
    """The scores of the edges whose predictors a part owns: a `KeptForward`."""

    def result(self, batch: MicroBatch, found: TurnRows) -> SequenceScores:
        scores = scores_of(found.units, found.to_sequences, found.lengths, self.options)
        scores = replace(scores, measured_edges=None)
        for wing in self.wings.values():
            scores = wing.result(scores, found.of_tokens, batch.packed)
        return scores


# ---- values --------------------------------------------------------------------------------------


@with_hints
@contextmanager
def kept_values(
    model: nn.Module,
    batches: Sequence[MicroBatch],
    *,
    recompute: Recompute = None,
    recompute_trunks: RecomputeTrunks = None,
) -> Iterator[Iterator[tuple[MicroBatch, list[torch.Tensor]]]]:
    """Computes the values of the micro-batches of a rank, and every distinct token once.

        plan = plan_micro_batches(rollouts, max_tokens, trunks=True)
        with kept_values(critic, plan[rank]) as scored:
            for batch, values in scored:
                ...  # the loss of this micro-batch, of values [n, C] per sequence
                loss.backward()
        optimizer.step()

    It is `kept_trunks` for a critic or a reward model; the rules for losses, backwards and
    gradients are those of `kept_trunks`.

    Args:
        model: as in `sequence_values`.
        batches: `plan[rank]` of a plan with `trunks=True`.
        recompute: as in `kept_trunks`.
        recompute_trunks: as in `kept_trunks`.

    Yields:
        An iterator over (MicroBatch, values): one tensor [n, C] per sequence, as `sequence_values`
        returns them.

    Raises:
        TypeError, ValueError, ForestError: as `sequence_values`; batches of a plan without
            `trunks=True`.
        UnsupportedError: a model that is not verified with kept trunks, with the reason.
        torch.OutOfMemoryError: as `kept_trunks`.
        RuntimeError: as `kept_trunks`.
    """
    check_module(model)
    modes = recompute, recompute_trunks
    check_modes(model, *modes, sees=False)

    def prepare(packed: PackedForest, members: np.ndarray | None) -> _KeptValues:
        classifier = checked_classifier(model, packed, CUT_BY_TRUNKS)
        return _KeptValues(model, classifier, packed, forward_inputs(packed, classifier))

    with running(KeptRuns(model, batches, prepare, modes)) as run:
        yield run


class _KeptValues(ValuesForward):
    """The values of the tokens that a part owns: a `KeptForward`."""

    def result(self, batch: MicroBatch, found: TurnRows) -> list[torch.Tensor]:
        values = found.units
        if batch.is_empty:
            # one token, as `take` has it, whose gradient is 0
            return [values.new_zeros(1, values.shape[1]) + values.sum()]
        return list(gather(values, found.to_sequences).split(found.lengths))
