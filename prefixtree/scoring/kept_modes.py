"""Modes of kept trunks and of their micro-batches, as the caller said or as planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from torch import nn
from torch.distributed.fsdp import FSDPModule

from prefixtree.errors import refuse
from prefixtree.kernels.lm_head.measures import measure_bytes
from prefixtree.kernels.lm_head.options import ScoreOptions
from prefixtree.models.vision import PlacedPictures
from prefixtree.planning.steps import Steps
from prefixtree.planning.trunks import Trunks
from prefixtree.recompute.forward import (
    Recompute,
    left_for_activations,
    lm_head_trains,
    memory_of,
    tower_memory_of,
)
from prefixtree.recompute.kept_plan import plan_kept
from prefixtree.recompute.picture_work import PictureWork
from prefixtree.recompute.plan import PartWork
from prefixtree.scoring.refusals import KEPT_PICTURES

#: What `kept_trunks(recompute_trunks=)` takes.
RecomputeTrunks = Recompute | Literal["again"]


class PartModes(NamedTuple):
    """The modes of the forwards of `kept_trunks`.

    Attributes:
        of_part: per part.
        of_dummy: of a dummy token.
        runs_again: whether trunks hold no graph and run forward again.
    """

    of_part: Sequence[Recompute]
    of_dummy: Recompute
    runs_again: bool


def check_modes(
    model: nn.Module, recompute: Recompute, recompute_trunks: RecomputeTrunks, sees: bool
) -> None:
    """Refuses modes that do not go together.

    Args:
        model: as `kept_trunks` takes it.
        sees: whether there are pictures.

    Raises:
        ValueError: "auto", which would plan only one of trunks and micro-batches.
        UnsupportedError: under FSDP2 with pictures two modes.
    """
    if recompute_trunks == "auto" or (
        recompute == "auto" and recompute_trunks not in (None, "again")
    ):
        raise ValueError(
            "recompute='auto' plans trunks and micro-batches together, so recompute_trunks goes "
            f"with it only as None or 'again', got recompute={recompute!r} and recompute_trunks="
            f"{recompute_trunks!r}: leave recompute_trunks out, or name a mode for both"
        )
    if sees and recompute_trunks not in (None, "again", recompute):
        refuse(KEPT_PICTURES, model)


def modes_of(
    model: nn.Module,
    trunks: Trunks | None,
    steps: Steps | None,
    num_scored: Sequence[int],
    recompute: Recompute,
    recompute_trunks: RecomputeTrunks,
    options: ScoreOptions,
    trains: bool,
    placed: PlacedPictures | None,
) -> PartModes:
    """The modes of all parts; those of "auto" for the memory that is available now.

    Args:
        model: as `kept_trunks` takes it.
        trunks: of the rank; None where it has no sequence. steps: their parts.
        num_scored: edges that each part scores.
        recompute, recompute_trunks: as in `kept_trunks`.
        options: what is computed of each edge.
        trains: whether there are backwards.
        placed: the pictures; None of text alone.

    Raises:
        torch.OutOfMemoryError, UnsupportedError, ValueError: see `plan_recomputation` and
            `plan_kept`.
    """
    again = recompute_trunks == "again"
    if recompute == "auto":
        if trunks is None or steps is None or not trains:
            # ranks of FSDP2 whose parts are planned recompute their towers, dummies' too
            return PartModes([None] * len(num_scored), "all" if trains else None, again)
        causal_lm, available = left_for_activations(model, steps.packed.device)
        if options.measure is not None:
            vocabulary = causal_lm.config.get_text_config().vocab_size
            available -= measure_bytes(max(num_scored, default=0), vocabulary)
        trains_head = lm_head_trains(causal_lm)
        # values have no lm_head, and their rows are those of the last norm
        counts = num_scored if trains_head is not None else [0] * len(num_scored)
        parts = zip(steps, counts, trunks.lent_states(), strict=True)
        works = [PartWork.of(part, n, bool(trains_head), int(states)) for part, n, states in parts]
        tower = None
        if placed is not None and len(placed.placements.number):
            tower = tower_memory_of(model, causal_lm, steps.packed.device)
            if any(isinstance(module, FSDPModule) for module in model.modules()):
                # a backward may meet that of any forward of another rank: all compute again
                tower = replace(tower, may_keep=False)
            shown = [
                PictureWork.of(
                    placed.placements.shown_by(part.own_tokens, placed.pictures),
                    placed.pictures,
                    tower.dtype,
                    moved=False,
                )
                for part in steps
            ]
            works = [replace(work, pictures=x) for work, x in zip(works, shown, strict=True)]
        plan = plan_kept(
            memory_of(model, causal_lm, steps.packed.device),
            works,
            trunks.spans,
            available,
            on_host=trunks.stats.on_host,
            runs_again=again,
            tower=tower,
            with_spare=True,
        )
        return PartModes(plan.of_part, "all", plan.runs_again)
    again |= recompute_trunks is None and trunks is not None and trunks.stats.again
    of_trunks: Recompute = recompute
    if recompute_trunks is not None and recompute_trunks != "again":
        of_trunks = recompute_trunks
    spans = () if trunks is None else trunks.spans
    modes = [of_trunks if span.is_trunk else recompute for span in spans]
    return PartModes(modes, recompute, again)
