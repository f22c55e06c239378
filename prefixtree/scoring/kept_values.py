"""`kept_values`: values of micro-batches, with the trunks that they share computed once.

How trunks and micro-batches run is in `scoring.kept_runs`. Legend: n tokens of a sequence,
C labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from prefixtree._hints import with_hints
from prefixtree.kernels.lm_head.logprobs import ScoreOptions
from prefixtree.models.checks import check_module
from prefixtree.models.families import forward_inputs
from prefixtree.models.hybrids import prepare_states
from prefixtree.models.rows_alone import check_layers
from prefixtree.models.vision import PlacedPictures
from prefixtree.packing.copies import GatherIndex, gather
from prefixtree.packing.layout import PackedForest
from prefixtree.packing.mask import TreeMask
from prefixtree.planning.micro_batch import MicroBatch
from prefixtree.recompute.forward import Recompute, recomputed_forward
from prefixtree.scoring.edges import ScoredUnits
from prefixtree.scoring.kept_modes import RecomputeTrunks, check_modes
from prefixtree.scoring.kept_runs import KEPT, KeptRuns, running
from prefixtree.scoring.values import checked_classifier, values_of_tokens


@with_hints
@contextmanager
def kept_values(
    model: nn.Module,
    batches: Sequence[MicroBatch],
    *,
    recompute: Recompute = None,
    recompute_trunks: RecomputeTrunks = None,
) -> Iterator[Iterator[tuple[MicroBatch, list[torch.Tensor]]]]:
    """The values of the micro-batches of a rank; every distinct token is computed once.

        plan = plan_micro_batches(rollouts, max_tokens, trunks=True)
        with kept_values(critic, plan[rank]) as scored:
            for batch, values in scored:
                ...  # the loss of this micro-batch, of values [n, C] per sequence
                loss.backward()
        optimizer.step()

    It is `kept_trunks` of a critic or a reward model, and what is said there of losses, backwards
    and gradients holds here.

    Args:
        model: as in `sequence_values`.
        batches: `plan[rank]` of a plan with `trunks=True`.
        recompute: as in `kept_trunks`.
        recompute_trunks: as in `kept_trunks`.

    Yields:
        An iterator over the micro-batches with their values: one tensor [n, C] per sequence, as
        `sequence_values` gives them.

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

    def prepare(packed: PackedForest, members: np.ndarray | None) -> _ValuesOfParts:
        return _ValuesOfParts(model, checked_classifier(model, packed, KEPT), packed)

    with running(KeptRuns(model, batches, prepare, modes)) as run:
        yield run


class _ValuesOfParts:
    """The values of the tokens that a part owns: a `PartForward`."""

    placed: PlacedPictures | None = None
    options = ScoreOptions()

    def __init__(self, model: nn.Module, classifier: Any, packed: PackedForest) -> None:
        prepare_states(classifier)
        check_layers(model, classifier, packed.device)
        self._model, self._classifier = model, classifier
        self.packed = packed
        self.inputs = forward_inputs(packed, classifier.config)
        lengths = packed.forest.sequence_lengths
        every = np.arange(len(lengths))
        self.units = ScoredUnits(
            np.arange(packed.num_tokens), lambda: packed.copy_index(every)[0], lengths.tolist()
        )

    def __call__(
        self,
        mask: TreeMask,
        inputs: dict[str, Any],
        which: np.ndarray,
        rows: np.ndarray,
        own: np.ndarray,
        recompute: Recompute,
    ) -> torch.Tensor:
        arguments = self._model, self._classifier
        with recomputed_forward(*arguments, self.packed, 0, recompute):
            values = values_of_tokens(*arguments, mask, inputs)
        # of a part's own tokens all, and of a dummy none
        return values[: len(rows)]

    def result(
        self, rows: torch.Tensor, index: GatherIndex, lengths: list[int]
    ) -> list[torch.Tensor]:
        if lengths == [0]:
            # an empty micro-batch: one token, as `take` has it, whose gradient is 0
            return [rows.new_zeros(1, rows.shape[1]) + rows.sum()]
        return list(gather(rows, index).split(lengths))
