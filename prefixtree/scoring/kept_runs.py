"""The micro-batches of a rank and the trunks that they share, run one after another.

A trunk's forward runs once and its graph is kept. Each micro-batch reads the trunk's keys and
values (in recurrent layers its states) and the trunk's rows of output as leaves. Its backward runs
at once and adds to their gradients in float32. The trunk's own backward runs after that of the last
micro-batch that imports from it. So every distinct token is computed once per rank, for a loss that
is a sum over micro-batches. Export and return of rows are in `parallel.ledger`, the choice of parts
in `planning.trunks`. Legend: U units that get a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from prefixtree.errors import ForestError, refuse
from prefixtree.models.checks import check_loaded, transformer_of
from prefixtree.models.layers import device_of, groups_of
from prefixtree.packing.copies import GatherIndex, move
from prefixtree.packing.layout import PackedForest
from prefixtree.parallel.agreement import agree_on_order, among_ranks, order_of
from prefixtree.parallel.ledger import Divided
from prefixtree.parallel.run import Rows, Run
from prefixtree.planning import schedule
from prefixtree.planning.division import Division
from prefixtree.planning.micro_batch import MicroBatch
from prefixtree.planning.trunks import Trunks
from prefixtree.recompute.choose import Recompute
from prefixtree.recompute.trunk_modes import RecomputeTrunks, modes_of
from prefixtree.scoring.forward import recomputed
from prefixtree.scoring.part_runs import PartForward, PartRuns
from prefixtree.scoring.refusals import KEPT_TRUNKS
from prefixtree.sparse.indexers import compresses_keys
from prefixtree.sparse.masks import not_handed_on

# the words for what cuts a forest, in refusals that depend on the length of sequences
CUT_BY_TRUNKS = "a trunk or micro-batch of kept trunks"
_Result = TypeVar("_Result")
_Result_co = TypeVar("_Result_co", covariant=True)


class KeptForward(PartForward, Protocol[_Result_co]):
    """Calls a model over parts of a rank's forest, and makes what micro-batches get."""

    def result(self, batch: MicroBatch, found: TurnRows) -> _Result_co:
        """Makes what the caller gets for a micro-batch."""


class TurnRows(NamedTuple):
    """The rows of a micro-batch, some of which trunks gave.

    Attributes:
        units: [u, columns], of its own parts and of the trunks above them.
        of_tokens: [t, ...] each, per packed token of the micro-batch.
        to_sequences: gathers `units` to the sequences.
        lengths: the number of copies in each sequence.
    """

    units: torch.Tensor
    of_tokens: Rows
    to_sequences: GatherIndex
    lengths: list[int]


@contextmanager
def running(run: KeptRuns[_Result]) -> Iterator[KeptRuns[_Result]]:
    """Opens the block in which micro-batches are scored."""
    try:
        yield run
        run.finish()
    finally:
        run.let_go()


def check_kept(model: nn.Module) -> None:
    """Refuses models that are not verified with kept trunks: an UnsupportedError with the mend."""
    if compresses_keys(transformer_of(model).config.get_text_config()):
        raise not_handed_on()
    refuse(KEPT_TRUNKS, model)


class KeptRuns(Iterator[tuple[MicroBatch, _Result]], Generic[_Result]):
    """The micro-batches of one block of kept trunks, one after another, with what they get.

    Args:
        prepare: checks the model and makes its calls, for the packed forest of the rank and the
            planned numbers of its sequences (int64, ascending; None where it has none).
        modes: `recompute` and `recompute_trunks`.

    Attributes:
        packed: the packed forest of all sequences of the rank, in planned order.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[MicroBatch],
        prepare: Callable[[PackedForest, np.ndarray | None], KeptForward[_Result]],
        modes: tuple[Recompute, RecomputeTrunks],
    ) -> None:
        self._model, self._batches = model, batches
        self._transformer = transformer_of(model)
        device = device_of(self._transformer)
        self._has_gradients = torch.is_grad_enabled()
        self._trains = self._has_gradients and any(p.requires_grad for p in model.parameters())
        self._at = -1
        self._is_over = False
        is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
        groups = groups_of(model) if is_sharded else []
        problem, order = None, None
        try:
            self._prepare(prepare, modes)
            order = order_of(self._schedule) if groups else ""
        except Exception as failure:
            # raised once the others know
            problem = failure
        order = agree_on_order(groups, device, order)
        if problem is not None:
            raise problem
        if order is None:
            raise ForestError(
                "another rank cannot keep its trunks, and no rank can go on without it; its own "
                "message says what it needs"
            )
        if groups:
            owns = [part.own_tokens for part in self._steps or ()]
            for wing in self._forward.wings.values():
                wing.in_lockstep(owns, self._modes.of_part)
        self._run = self._run_of(among_ranks(self._schedule, order))

    def _prepare(
        self,
        prepare: Callable[[PackedForest, np.ndarray | None], KeptForward[_Result]],
        modes: tuple[Recompute, RecomputeTrunks],
    ) -> None:
        """Checks everything, and plans what each part recomputes."""
        model, batches = self._model, self._batches
        trunks: Trunks | None = getattr(batches, "trunks", None)
        if not batches or (trunks is None and any(not batch.is_empty for batch in batches)):
            raise ValueError(
                "batches must be plan[rank] of a plan that keeps trunks, as it is: plan with "
                "plan_micro_batches(..., trunks=True)"
            )
        check_kept(model)
        check_loaded(self._transformer)
        self._trunks = trunks
        device = device_of(self._transformer)
        self._steps = None if trunks is None else trunks.on(device)
        packed, members = batches[-1].packed.to(device), None
        self._divided = None
        if trunks is not None and self._steps is not None:
            self._divided = Divided(Division(self._steps), trunks.stats.on_host)
            packed = self._steps.packed
            members = np.sort(np.concatenate([batch.sequence_indices for batch in batches]))
        self._forward = forward = prepare(packed, members)
        self.packed = packed = forward.packed
        scored = [part.scored(forward.units.predictor) for part in self._steps or ()]
        held_bytes = 0
        if trunks is not None:
            # tokens of a micro-batch and of the trunks alive with it
            most_tokens = max(batch.num_tokens for batch in batches) + trunks.stats.alive_tokens
            whole = sum(wing.held_bytes for wing in forward.wings.values())
            held_bytes = whole * most_tokens // packed.num_tokens
        arguments = *modes, forward, self._trains, held_bytes
        counts = [len(units) for units, _ in scored]
        self._modes = modes_of(model, trunks, self._steps, counts, *arguments)
        spans = () if trunks is None else trunks.spans
        again = self._modes.runs_again
        self._schedule = schedule.kept(spans, len(batches), self._trains, again)
        for mode in dict.fromkeys([*self._modes.of_part, self._modes.of_dummy]):
            # raises what each forward would refuse
            recomputed(model, self._transformer, packed, 0, mode)
        self._runs = PartRuns(
            *(model, self._transformer, forward, self._divided, scored, self._modes, self._trains),
            inputs_of="{} of the plan",
        )

    def _run_of(self, events: schedule.Schedule) -> Run:
        """Makes the run of a schedule."""
        # trunks are read many times: what they export stays on the device
        ledger = None if self._divided is None else self._divided.ledger(events, parks=False)
        self._gives = [self._parts_of(at) for at in range(len(self._batches))]
        return Run(events, ledger, self._gives, self._runs, self._check, inline=False)

    def _parts_of(self, at: int) -> list[int]:
        """The parts that own a token of a micro-batch's sequences."""
        if self._trunks is None or self._steps is None or at >= len(self._trunks.sequences):
            return [schedule.DUMMY]
        tokens = self._steps.packed.copy_index(self._trunks.sequences[at])[0]
        owned = np.bincount(self._steps.owner[tokens], minlength=len(self._steps))
        return np.flatnonzero(owned).tolist()

    # ---- turns -----------------------------------------------------------------------------------

    def __next__(self) -> tuple[MicroBatch, _Result]:
        if self._is_over:
            raise RuntimeError(
                "the micro-batches of kept trunks are scored within their with block, and this one "
                "has ended"
            )
        rows = self._run.give()
        if rows is None:
            raise StopIteration
        self._at += 1
        if self._at == 0:
            self._runs.settle("each micro-batch and each trunk of kept trunks")
        batch = self._batches[self._at]
        return batch, self._forward.result(batch, self._found(batch, rows))

    def finish(self) -> None:
        """Runs what is left after the last micro-batch; refuses ones that did not run."""
        if left := len(self._batches) - 1 - self._at:
            self._run.check_turn()
            raise RuntimeError(
                f"{left} of {len(self._batches)} micro-batches were not scored when the block of "
                "kept trunks ended: go through all of them, also through empty ones"
            )
        self._run.give()
        # all backwards so far were local: one more averages their gradients over ranks, also where
        # the block began within no_sync
        self._runs.wrapped.synchronise_as_now()
        if self._trains and self._runs.wrapped.synchronises:
            self._run.run_dummy()

    def let_go(self) -> None:
        """Frees everything; later backwards and micro-batches raise."""
        self._is_over = True
        self._run.close()

    def _found(self, batch: MicroBatch, rows: list[Rows]) -> TurnRows:
        """Gathers the rows that the sequences of this micro-batch read."""
        joined = [torch.cat(of_parts) for of_parts in zip(*rows, strict=True)]
        if batch.is_empty:
            nothing = GatherIndex(np.empty(0, np.int32), 0, joined[0].device)
            return TurnRows(joined[0], tuple(joined[1:]), nothing, [0])
        assert self._trunks is not None
        parts, units = self._gives[self._at], self._forward.units
        which = np.concatenate([self._runs.scored[part][0] for part in parts])
        # the last row is for copies that are not scored
        row = np.full(units.count + 1, -1, np.int32)
        row[which] = np.arange(len(which))
        sequences = self._trunks.sequences[self._at].tolist()
        border = np.concatenate([[0], np.cumsum(units.lengths)])
        copies = [units.of_copies[border[i] : border[i + 1]] for i in sequences]
        index = GatherIndex(row[np.concatenate(copies)], len(which), joined[0].device)
        of_tokens: Rows = ()
        if len(joined) > 1:
            place = move(torch.from_numpy(self._places(batch, parts)), joined[0].device)
            of_tokens = tuple(x.index_select(0, place) for x in joined[1:])
        return TurnRows(joined[0], of_tokens, index, [units.lengths[i] for i in sequences])

    def _places(self, batch: MicroBatch, parts: list[int]) -> np.ndarray:
        """The place of each packed token of a micro-batch among the tokens of parts, int64."""
        assert self._trunks is not None and self._steps is not None
        tokens = np.concatenate([self._steps[part].own_tokens for part in parts])
        place = np.zeros(self._steps.packed.num_tokens, np.int64)
        place[tokens] = np.arange(len(tokens))
        # the same copies, in both forests
        here = batch.packed.copy_index(np.arange(len(batch.sequence_indices)))[0]
        there = self._steps.packed.copy_index(self._trunks.sequences[self._at])[0]
        # padding has multiplicity 0, wherever it is read
        places = np.zeros(batch.packed.num_tokens, np.int64)
        places[here] = place[there]
        return places

    def _check(self) -> None:
        """Raises a RuntimeError if the model has changed since the block began."""
        if torch.is_grad_enabled() != self._has_gradients:
            raise RuntimeError(
                f"gradients were {'enabled' if self._has_gradients else 'disabled'} when the block "
                "of kept trunks began, and now they are not so: keep the mode for the whole block"
            )
        if (change := self._runs.change()) is not None:
            raise RuntimeError(
                f"{change} within the block of kept trunks, which wait for their backward: "
                "make such a change (optimizer.step(), other adapters, another mode) after the "
                "block, call optimizer.zero_grad() and score again"
            )
