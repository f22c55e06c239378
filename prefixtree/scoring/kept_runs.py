"""The micro-batches of a rank and the trunks that they share, run one after another.

A trunk's forward runs once and its graph is kept. Each micro-batch reads the trunk's keys and
values (in recurrent layers its states) in every layer, and what the model gives of the trunk, as
leaves; its backward runs at once and adds to their gradients in float32. Behind the backward of the
last micro-batch that borrows from it, the trunk's own backward runs. So every distinct token is
computed once per rank, for a loss that is a sum over micro-batches. How parts lend and return is in
`parallel.ledger`, which parts there are in `planning.trunks`, and what the model gives of a part in
`scoring.kept_trunks`.

Legend: S sequences that were planned, U units that get a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from prefixtree.errors import ForestError, refuse
from prefixtree.kernels.lm_head.logprobs import ScoreOptions
from prefixtree.models.changes import ModelStamp
from prefixtree.models.checks import check_loaded, transformer_of, warn_of_hooks
from prefixtree.models.families import forward_inputs
from prefixtree.models.indexers import compresses_keys
from prefixtree.models.layers import device_of, groups_of, most_of_all_ranks
from prefixtree.models.paths import not_handed_on
from prefixtree.models.vision import PlacedPictures
from prefixtree.packing.copies import GatherIndex
from prefixtree.packing.layout import PackedForest
from prefixtree.packing.mask import TreeMask
from prefixtree.parallel.agreement import BACKWARD, FORWARD, agree_on_order, order_of
from prefixtree.parallel.ledger import Ledger, PartExchanges
from prefixtree.parallel.states import part_mask
from prefixtree.planning import schedule
from prefixtree.planning.micro_batch import MicroBatch
from prefixtree.planning.trunks import Trunks
from prefixtree.recompute.forward import Recompute, recomputed_forward
from prefixtree.recompute.kept_modes import RecomputeTrunks, modes_of
from prefixtree.recompute.picture_work import RUN
from prefixtree.scoring.edges import ScoredUnits
from prefixtree.scoring.in_groups import part_inputs
from prefixtree.scoring.in_steps import Wrapped, dummy_of
from prefixtree.scoring.refusals import KEPT_TRUNKS

# what cuts a forest, where it matters how long sequences are
KEPT = "a trunk or micro-batch of kept trunks"
_Result = TypeVar("_Result")
_Result_co = TypeVar("_Result_co", covariant=True)


class PartForward(Protocol[_Result_co]):
    """Calls a model over parts of a rank's forest: what differs between scores and values.

    Attributes:
        packed: the forest, with the token ids that the model knows.
        inputs: keywords of a forward over all of it.
        placed: its pictures; None of text alone.
        options: what is computed of a language model's edges.
    """

    packed: PackedForest
    inputs: dict[str, Any]
    placed: PlacedPictures | None
    options: ScoreOptions

    @property
    def units(self) -> ScoredUnits:
        """All that gets a row."""

    def __call__(
        self,
        mask: TreeMask,
        inputs: dict[str, Any],
        which: np.ndarray,
        rows: np.ndarray,
        own: np.ndarray,
        recompute: Recompute,
    ) -> torch.Tensor:
        """One forward: [u, columns].

        Args:
            mask, inputs: of the part.
            which, rows: int64 [u], the units whose rows it gives, and for each the own token that
                gives it.
            own: int64 [t], the packed tokens that it computes.
            recompute: as in `kept_trunks`.
        """

    def result(self, rows: torch.Tensor, index: GatherIndex, lengths: list[int]) -> _Result_co:
        """The result of a micro-batch.

        Args:
            rows: [u, columns]. index: from these to its sequences. lengths: of each sequence.
        """


@contextmanager
def running(run: KeptRuns[_Result]) -> Iterator[KeptRuns[_Result]]:
    """The block in which micro-batches are scored."""
    try:
        yield run
        run.finish()
    finally:
        run.let_go()


def check_kept(model: nn.Module) -> None:
    """Refuses what is not verified to run with kept trunks.

    Raises:
        UnsupportedError: with what stands in the way and the way to mend it.
    """
    if compresses_keys(transformer_of(model).config.get_text_config()):
        raise not_handed_on()
    refuse(KEPT_TRUNKS, model)


class KeptRuns(Iterator[tuple[MicroBatch, _Result]], Generic[_Result]):
    """The micro-batches of one block of kept trunks, one after another, with what they get.

    Args:
        model: as `kept_trunks` takes it, or `kept_values`.
        batches: `plan[rank]` of a plan with `trunks=True`.
        prepare: checks the model, and gives the calls of it, for the packed forest of the rank and
            its sequences as they were planned, ascending (int64; None where it has none).
        modes: `recompute` and `recompute_trunks`.

    Attributes:
        packed: the packed forest of all sequences of the rank, ascending as they were planned.

    Raises:
        as `kept_trunks`.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[MicroBatch],
        prepare: Callable[[PackedForest, np.ndarray | None], PartForward[_Result]],
        modes: tuple[Recompute, RecomputeTrunks],
    ) -> None:
        self._model, self._batches = model, batches
        self._transformer = transformer_of(model)
        self._device = device_of(self._transformer)
        self._has_gradients = torch.is_grad_enabled()
        self._trains = self._has_gradients and any(p.requires_grad for p in model.parameters())
        self._at = -1
        self._turn: _Turn | None = None
        self._is_over = False
        # by trunk: its scores, and the leaf in their place
        self._graphs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        # the part of a micro-batch, or a dummy, and its scores; None where trunks own all
        self._own: tuple[int, torch.Tensor] | None = None
        # scores of dummies that wait for their backward
        self._waiting: list[torch.Tensor] = []
        is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
        groups = groups_of(model) if is_sharded else []
        problem, order = None, None
        try:
            self._prepare(prepare, modes)
            order = order_of(self._schedule) if groups else ""
        except Exception as failure:
            # raised once the others know
            problem = failure
        order = agree_on_order(groups, self._device, order)
        if problem is not None:
            raise problem
        if order is None:
            raise ForestError(
                "another rank cannot keep its trunks, and no rank can go on without it; its own "
                "message says what it needs"
            )
        self._order = list(order)
        if groups and (placed := self._forward.placed) is not None:
            # a backward may meet that of any forward of another rank, and each run of a tower is
            # exchanges: so all forwards of the block make as many
            most = [
                placed.most_runs(part.own_tokens, getattr(mode, "patches", RUN))
                for part, mode in zip(self._steps or (), self._modes.of_part, strict=True)
            ]
            most_here = max(most, default=1)
            (placed.least_runs,) = most_of_all_ranks(model, [most_here], self._device)

    def _prepare(
        self,
        prepare: Callable[[PackedForest, np.ndarray | None], PartForward[_Result]],
        modes: tuple[Recompute, RecomputeTrunks],
    ) -> None:
        """Checks everything, and finds what each part scores."""
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
        self._steps = None if trunks is None else trunks.on(self._device)
        packed, members = batches[-1].packed.to(self._device), None
        if self._steps is not None:
            packed = self._steps.packed
            members = np.sort(np.concatenate([batch.sequence_indices for batch in batches]))
        self._forward = prepare(packed, members)
        self.packed = packed = self._forward.packed
        self._wrapped = Wrapped(model, self._device)
        found = self._forward.units
        # the part that gives each unit, and its row there
        self._part_of = np.zeros(found.count, np.int64)
        self._row_of = np.zeros(found.count, np.int64)
        self._scored = [part.scored(found.predictor) for part in self._steps or ()]
        for part, (which, _) in enumerate(self._scored):
            self._part_of[which] = part
            self._row_of[which] = np.arange(len(which))
        self._copies = np.concatenate([[0], np.cumsum(found.lengths)])
        counts = [len(which) for which, _ in self._scored]
        given = *modes, self._forward.options, self._trains, self._forward.placed
        self._modes = modes_of(model, trunks, self._steps, counts, *given)
        spans = () if trunks is None else trunks.spans
        again = self._modes.runs_again
        self._schedule = schedule.kept(spans, len(batches), self._trains, again)
        # what is left of it, by place
        self._events = iter(enumerate(self._schedule))
        for mode in dict.fromkeys([*self._modes.of_part, self._modes.of_dummy]):
            # what each forward would refuse
            recomputed_forward(model, self._transformer, packed, 0, mode)
        self._ledger: Ledger | None = None
        if trunks is not None and self._steps is not None:
            # trunks are read again and again: what they lend stays where it is
            on_host = trunks.stats.on_host
            self._ledger = Ledger(self._steps, self._schedule, parks=False, on_host=on_host)
        self._stamp: ModelStamp | None = None
        if self._trains:
            # what layers that are recomputed read
            names, inputs = ("input_ids", "position_ids"), self._forward.inputs
            read = {f"{n} of the plan, or what shares its memory,": inputs[n] for n in names}
            placed = self._forward.placed
            read |= {} if placed is None else placed.pixels()
            self._stamp = ModelStamp(model, read, for_backward=True)

    # ---- turns -----------------------------------------------------------------------------------

    def __next__(self) -> tuple[MicroBatch, _Result]:
        if self._is_over:
            raise RuntimeError(
                "the micro-batches of kept trunks are scored within their with block, and this one "
                "has ended"
            )
        self._end_turn()
        self._turn = turn = _Turn()
        if not self._run_on(turn):
            self._turn = None
            raise StopIteration
        self._at += 1
        return self._batches[self._at], self._scores(turn)

    def finish(self) -> None:
        """Behind the last micro-batch: what is left to run.

        Raises:
            RuntimeError: micro-batches that were not scored, or not run backward.
        """
        self._end_turn()
        if left := len(self._batches) - 1 - self._at:
            raise RuntimeError(
                f"{left} of {len(self._batches)} micro-batches were not scored when the block of "
                "kept trunks ended: go through all of them, also through empty ones"
            )
        self._run_on(_Turn())
        self._run_dummies(None)
        copied = [m for m in self._model.modules() if isinstance(m, DistributedDataParallel)]
        if self._trains and any(module.require_backward_grad_sync for module in copied):
            # all backwards so far were local: this one averages their gradients over ranks, also
            # where the block began within no_sync
            self._wrapped.synchronise_as_now()
            _backward(self._dummy(is_last=True), None)

    def let_go(self) -> None:
        """Frees everything; later backwards and micro-batches raise."""
        self._is_over = True
        if self._turn is not None:
            self._turn.end()
        if self._ledger is not None:
            self._ledger.clear()
        self._graphs.clear()
        self._waiting.clear()
        self._own = None

    def _end_turn(self) -> None:
        """Behind the backward of a micro-batch: whether it ran, and as it should."""
        self._check()
        if self._turn is None:
            return
        if self._turn.backwards != self._turn.whole:
            raise RuntimeError(
                f"gradients of micro-batch {self._at} were asked for by torch.autograd.grad or "
                "backward(inputs=), which reach its own tokens and not the trunks of kept trunks: "
                "call loss.backward(), which adds those of all to .grad; optimizer.zero_grad() "
                "before you score again"
            )
        if self._trains and not self._turn.backwards:
            raise RuntimeError(
                f"no backward of the scores of micro-batch {self._at} ran within its turn of the "
                "loop of kept trunks, and a later one would come too late for its trunks: call "
                "loss.backward() for each micro-batch, also where its loss is 0"
            )
        self._turn.end()
        self._turn = None
        if self._trunks is None or self._trains:
            return
        for part, span in enumerate(self._trunks.spans):
            if span.is_trunk and span.last == self._at:
                del self._graphs[part]

    def _run_on(self, turn: _Turn) -> bool:
        """Runs up to the next micro-batch whose scores are given; whether there is one.

        Args:
            turn: of that one.
        """
        for place, (kind, part) in self._events:
            if kind == schedule.GIVE:
                return True
            if kind in (schedule.FORWARD, schedule.KEEP):
                self._run_dummies(FORWARD)
                self._run_forward(place, turn)
            elif kind == schedule.BACKWARD and part != schedule.DUMMY:
                self._run_backward(place)
        return False

    def _scores(self, turn: _Turn) -> _Result:
        """The results of the forwards of a turn."""
        own, self._own = self._own, None
        index, lengths = GatherIndex(np.empty(0, np.int32), 0, self._device), [0]
        if own is not None and own[0] == schedule.DUMMY:
            scores = own[1]
        else:
            scores, index, lengths = self._joined(own)
        if self._stamp is not None and self._at == 0:
            self._stamp.settle()
            warn_of_hooks(self._model, "each micro-batch and each trunk of kept trunks")
        if self._trains:
            if scores.requires_grad:
                scores = turn.watched(scores)
            else:
                # no parameter that trains stands before them
                turn.backwards = turn.whole = 1
            if own is not None:
                self._run_dummies(BACKWARD)
        return self._forward.result(scores, index, lengths)

    def _joined(
        self, own: tuple[int, torch.Tensor] | None
    ) -> tuple[torch.Tensor, GatherIndex, list[int]]:
        """The rows of this micro-batch's own units and of its trunks', which sequences read.

        Returns:
            [u, columns]; the row of each copy; how many copies each sequence has.
        """
        assert self._trunks is not None
        sequences = self._trunks.sequences[self._at].tolist()
        border = self._copies
        edges = np.concatenate(
            [self._forward.units.of_copies[border[i] : border[i + 1]] for i in sequences]
        )
        is_scored = edges >= 0
        parts = np.unique(self._part_of[edges[is_scored]]).tolist()
        scores_of = {part: leaf for part, (_, leaf) in self._graphs.items()}
        if own is not None:
            scores_of[own[0]] = own[1]
            if own[0] not in parts:
                # its graph reaches what it borrows
                parts.append(own[0])
        first = np.zeros(len(self._scored), np.int64)
        found, count = [], 0
        for part in parts:
            first[part] = count
            found.append(scores_of[part])
            count += len(scores_of[part])
        rows = np.full(len(edges), -1, np.int32)
        at = edges[is_scored]
        rows[is_scored] = first[self._part_of[at]] + self._row_of[at]
        if not found:
            # of any trunk, to which its tokens belong
            _, leaf = next(iter(self._graphs.values()))
            found = [leaf.detach()[:0].requires_grad_(leaf.requires_grad)]
        lengths = [self._forward.units.lengths[i] for i in sequences]
        return torch.cat(found), GatherIndex(rows, count, self._device), lengths

    # ---- runs ------------------------------------------------------------------------------------

    def _run_forward(self, place: int, turn: _Turn) -> None:
        """The forward of a trunk, its second one, or that of a micro-batch's own tokens."""
        kind, part = self._schedule[place]
        if part == schedule.DUMMY:
            self._own = part, self._dummy(is_last=False)
            return
        assert self._ledger is not None and self._trunks is not None
        is_trunk = self._trunks.spans[part].is_trunk
        keeps = kind == schedule.KEEP
        # where no parameter trains, a hook on the embedding may still ask for a graph: its backward
        # would come after what it reads is freed
        graph: Any = nullcontext() if keeps else torch.no_grad()
        with self._ledger.running(place) as exchanges, graph:
            scores = self._run_part(part, exchanges)
        if not is_trunk:
            turn.exchanges = exchanges
            self._own = part, scores
        elif part in self._graphs:
            self._graphs[part] = scores, self._graphs[part][1]
        else:
            # of a forward that runs again it is not known yet
            trains = scores.requires_grad if keeps else self._trains
            self._graphs[part] = scores, scores.detach().requires_grad_(trains)

    def _run_backward(self, place: int) -> None:
        """That of a trunk; that of a micro-batch ran within its turn."""
        assert self._ledger is not None
        trunk = self._graphs.pop(self._schedule[place].at, None)
        if trunk is not None:
            self._run_dummies(BACKWARD)
            scores, leaf = trunk
            _backward(scores, leaf.grad)
        self._ledger.end_backward(place)
        if trunk is not None:
            # an optimizer may run in a hook
            self._check()

    def _run_part(self, part: int, exchanges: PartExchanges) -> torch.Tensor:
        """The rows [u, columns] of a part's units."""
        assert self._steps is not None
        tokens = self._steps[part]
        inputs = part_inputs(self._forward.inputs, tokens, part_mask(exchanges))
        arguments = *self._scored[part], tokens.own_tokens, self._modes.of_part[part]
        with self._wrapped.as_in_the_forward(is_last=False):
            return self._forward(tokens.mask, inputs, *arguments)

    def _run_dummies(self, kind: str | None) -> None:
        """Runs dummies where other ranks run others before this rank's next run; None: all."""
        while self._order:
            upcoming = self._order.pop(0)
            if upcoming == kind:
                return
            if upcoming == FORWARD:
                self._waiting.append(self._dummy(is_last=False))
            else:
                _backward(self._waiting.pop(), None)

    def _dummy(self, is_last: bool) -> torch.Tensor:
        """A forward over one token, none of which is scored: [0, columns]."""
        packed, nothing = dummy_of(self.packed), np.empty(0, np.int64)
        inputs = forward_inputs(packed, self._transformer.config)
        arguments = nothing, nothing, nothing, self._modes.of_dummy
        with self._wrapped.as_in_the_forward(is_last):
            return self._forward(packed.mask, inputs, *arguments)

    def _check(self) -> None:
        """Raises a RuntimeError if the model is not what it was."""
        if torch.is_grad_enabled() != self._has_gradients:
            raise RuntimeError(
                f"gradients were {'enabled' if self._has_gradients else 'disabled'} when the block "
                "of kept trunks began, and now they are not so: keep the mode for the whole block"
            )
        if self._stamp is not None and (change := self._stamp.change()) is not None:
            raise RuntimeError(
                f"{change} within the block of kept trunks, which wait for their backward: "
                "make such a change (optimizer.step(), other adapters, another mode) behind the "
                "block, call optimizer.zero_grad() and score again"
            )


class _Turn:
    """The turn of one micro-batch.

    Attributes:
        exchanges: what it borrows by; None where it runs no forward that borrows.
        backwards: how often its backward ran.
        whole: how often of these it added to all leaves of the graph.
    """

    def __init__(self) -> None:
        self.exchanges: PartExchanges | None = None
        self.backwards = self.whole = 0

    def watched(self, scores: torch.Tensor) -> torch.Tensor:
        """Its scores, whose backwards are counted."""
        # a leaf that nobody asks for by name
        leaf = torch.zeros((), device=scores.device, requires_grad=True)
        leaf.register_hook(self._note)
        watched: torch.Tensor = _Watched.apply(scores, leaf, self)
        return watched

    def _note(self, gradient: torch.Tensor) -> None:
        self.whole += 1

    def end(self) -> None:
        """A backward behind this one comes too late."""
        if self.exchanges is not None:
            self.exchanges.is_over = True


class _Watched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, leaf: torch.Tensor, turn: _Turn) -> torch.Tensor:
        ctx.turn = turn
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        ctx.turn.backwards += 1
        return gradient, gradient.new_zeros(()), None


def _backward(scores: torch.Tensor, gradient: torch.Tensor | None) -> None:
    if not scores.requires_grad:
        return
    torch.autograd.backward(scores, torch.zeros_like(scores) if gradient is None else gradient)
