"""`kept_trunks`: the micro-batches of a rank, with the trunks that they share computed once.

A trunk's forward runs once and its graph is kept. Each micro-batch reads the trunk's keys and
values (in recurrent layers its states) in every layer, and the scores of the trunk's edges, as
leaves; its backward runs at once and
adds to their gradients in float32. Behind the backward of the last micro-batch that borrows from
it, the trunk's own backward runs. So every distinct token is computed once per rank, for a loss
that is a sum over micro-batches. How parts lend and return is in `parallel.steps`, which parts
there are in `planning.trunks`. Legend: S sequences that were planned, U scored edges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from prefixtree._hints import with_hints
from prefixtree.errors import ForestError, UnsupportedError
from prefixtree.kernels.lm_head.measures import Measure
from prefixtree.kernels.lm_head.options import ScoreOptions
from prefixtree.models.checks import check_model, find_causal_lm, runs_deepspeed
from prefixtree.models.families import forward_inputs
from prefixtree.models.indexers import compresses_keys
from prefixtree.models.layers import groups_of, most_of_all_ranks
from prefixtree.models.paths import not_handed_on
from prefixtree.models.replay import check_routes
from prefixtree.models.router_loss import router_loss
from prefixtree.models.stamp import ModelStamp
from prefixtree.models.vision import PlacedPictures, check_pictures
from prefixtree.packing.gather import GatherIndex
from prefixtree.packing.per_sequence import per_sequence
from prefixtree.parallel.attention import PartMask
from prefixtree.parallel.lockstep import BACKWARD, FORWARD, agree_on_order
from prefixtree.parallel.steps import LoanStore, StepExchanges
from prefixtree.pictures import Pictures
from prefixtree.planning.micro_batch import MicroBatch
from prefixtree.planning.trunks import Trunks
from prefixtree.recompute.forward import Recompute, recomputed_forward
from prefixtree.recompute.plan import RUN, RecomputePlan
from prefixtree.scoring.edges import (
    SequenceScores,
    edges_on_device,
    find_edges,
    scores_of,
)
from prefixtree.scoring.in_groups import part_inputs
from prefixtree.scoring.in_steps import Wrapped, check_static_graph, dummy_of
from prefixtree.scoring.kept_modes import RecomputeTrunks, check_modes, modes_of
from prefixtree.scoring.logprobs import ModelForward

_INSTEAD = "leave kept_trunks out and call sequence_logprobs for each micro-batch"


@with_hints
@contextmanager
def kept_trunks(
    model: nn.Module,
    batches: Sequence[MicroBatch],
    temperature: float | Sequence[float] = 1.0,
    loss_mask: Sequence[Any] | None = None,
    *,
    pictures: Pictures | None = None,
    return_entropy: bool = False,
    chunk_size: int | None = None,
    recompute: Recompute = None,
    return_statistics: Sequence[str] = (),
    recompute_trunks: RecomputeTrunks = None,
    measure: Measure | None = None,
) -> Iterator[Iterator[tuple[MicroBatch, SequenceScores]]]:
    """Scores the micro-batches of a rank; every distinct token is computed once.

        plan = plan_micro_batches(rollouts, max_tokens, trunks=True)
        with kept_trunks(model, plan[rank], loss_mask=masks) as scored:
            for batch, scores in scored:
                ...  # the loss of this micro-batch
                loss.backward()
        optimizer.step()

    The gradients are those of the sum of the micro-batches' losses, as if each were scored alone.
    Each loss must run its backward within its turn of the loop. Those of trunks run in between, and
    at the end of the block; if an exception leaves it, they do not run, and everything is let go.
    With gradients disabled the same block computes log-probabilities alone.

    Args:
        model: as in `sequence_logprobs`.
        batches: `plan[rank]` of a plan with `trunks=True`.
        temperature: as in `sequence_logprobs`; one number, or one per planned sequence, [S].
        loss_mask: as in `sequence_logprobs`, one mask per planned sequence.
        pictures: as in `sequence_logprobs`; the plan is one of `pictures.sequences`. A trunk, or a
            micro-batch, encodes those of its own tokens. Default: text alone.
        return_entropy: as in `sequence_logprobs`.
        chunk_size: as in `sequence_logprobs`.
        return_statistics: as in `sequence_logprobs`.
        recompute: what layers compute again in the backward of a micro-batch: None, "all",
            "all_but_attention", "nothing" or a RecomputePlan; or "auto": trunks and micro-batches
            recompute what does not fit the memory that is free when the block begins. Default:
            None, as the model is set.
        recompute_trunks: the same for trunks; or "again": their whole forward runs a second time,
            before their backward, so that between both only keys and values wait. Default: "again"
            where the plan says so (`TrunkStats.again`), else as `recompute`; with "auto" planned.
        measure: as in `sequence_logprobs`, without `measured_edges`. The numbers of edges are those
            of `scored.packed`.

    Yields:
        An iterator over the micro-batches with their scores. Its `packed` is the packed forest of
        all sequences of the rank, in the order in which they were planned.

    Raises:
        TypeError, ValueError, ForestError: as `sequence_logprobs`; batches of a plan without
            `trunks=True`; "auto" beside a mode.
        UnsupportedError: a model that is not verified with kept trunks, with the reason; "auto"
            with pictures.
        torch.OutOfMemoryError: "auto", and what does not fit with every layer recomputed.
        RuntimeError: a model that changed within the block; a micro-batch whose backward did not
            run, or ran late; a block that is left before all micro-batches were scored.
    """
    modes = recompute, recompute_trunks
    check_modes(model, *modes, pictures is not None)
    per_sequence_options = temperature, loss_mask
    options = ScoreOptions(return_entropy, return_statistics, chunk_size, measure=measure)
    run = KeptScores(model, batches, per_sequence_options, options, modes, pictures)
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
    if runs_deepspeed(model):
        raise UnsupportedError(
            "DeepSpeed counts one backward per micro-batch, and kept trunks add their own: use "
            f"FSDP2, or {_INSTEAD}"
        )
    if compresses_keys(find_causal_lm(model).config.get_text_config()):
        raise not_handed_on()
    check_static_graph(model, "kept trunks", _INSTEAD)
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel):
            raise UnsupportedError(
                "FSDP1 is not verified with kept trunks, whose forwards do not each meet their "
                f"backward at once: use FSDP2 (fully_shard), or {_INSTEAD}"
            )
        if getattr(module, "_is_hooked", False):
            raise UnsupportedError(
                f"{type(module).__name__} is tensor or expert parallel, which is not verified with "
                f"kept trunks: {_INSTEAD}"
            )


class KeptScores(Iterator[tuple[MicroBatch, SequenceScores]]):
    """The micro-batches of one block of `kept_trunks`, one after another, with their scores.

    Attributes:
        packed: the packed forest of all sequences of the rank, ascending as they were planned.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[MicroBatch],
        per_sequence_options: tuple[float | Sequence[float], Sequence[Any] | None],
        options: ScoreOptions,
        modes: tuple[Recompute, RecomputeTrunks],
        pictures: Pictures | None = None,
    ) -> None:
        self._model, self._batches = model, batches
        self._causal_lm = find_causal_lm(model)
        self._device = next(self._causal_lm.parameters()).device
        self._has_gradients = torch.is_grad_enabled()
        self._trains = self._has_gradients and any(p.requires_grad for p in model.parameters())
        self._at = -1
        self._turn: _Turn | None = None
        self._is_over = False
        # by trunk: its scores, and the leaf in their place
        self._graphs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        # scores of dummies that wait for their backward
        self._waiting: list[torch.Tensor] = []
        is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
        groups = groups_of(model) if is_sharded else []
        problem, order = None, None
        try:
            self._prepare(*per_sequence_options, options, modes, pictures)
            order = "".join(self._order_of_runs()) if groups else ""
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
            patches = modes[0].patches if isinstance(modes[0], RecomputePlan) else RUN
            most = placed.most_runs((part.own_tokens for part in self._steps or ()), patches)
            (placed.least_runs,) = most_of_all_ranks(model, [most], self._device)

    def _prepare(
        self,
        temperature: float | Sequence[float],
        loss_mask: Sequence[Any] | None,
        options: ScoreOptions,
        modes: tuple[Recompute, RecomputeTrunks],
        pictures: Pictures | None,
    ) -> None:
        """Checks everything, and finds what each part scores."""
        model, causal_lm, batches = self._model, self._causal_lm, self._batches
        self._options = options
        trunks: Trunks | None = getattr(batches, "trunks", None)
        if not batches or (trunks is None and any(not batch.is_empty for batch in batches)):
            raise ValueError(
                "kept_trunks takes plan[rank] of a plan that keeps trunks, as it is: plan with "
                "plan_micro_batches(..., trunks=True)"
            )
        check_kept(model)
        self._trunks = trunks
        self._steps = None if trunks is None else trunks.on(self._device)
        packed = batches[-1].packed.to(self._device)
        if self._steps is not None:
            packed = self._steps.packed
        if pictures is not None:
            check_pictures(model, causal_lm, packed, pictures)
        check_model(model, causal_lm, packed, pictures)
        if router_loss(causal_lm, packed, None) is not None:
            raise UnsupportedError(
                "the load-balancing loss of experts is not verified with kept trunks: set "
                f"config.output_router_logits to False, or {_INSTEAD}"
            )
        check_routes(model, causal_lm, packed)
        placed = None
        if pictures is not None:
            placed = PlacedPictures(model, causal_lm, packed, pictures)
            packed = placed.packed
        self._forward = ModelForward(model, causal_lm, packed, None, options)
        self._forward.placed = placed
        self.packed = packed
        self._inputs = forward_inputs(packed, causal_lm.config)
        self._inputs |= {} if placed is None else placed.inputs
        self._wrapped = Wrapped(model, self._device)
        if trunks is None:
            temperature, loss_mask = 1.0, None
        else:
            members = np.sort(np.concatenate([batch.sequence_indices for batch in batches]))
            num_planned = batches[0].num_planned
            if isinstance(temperature, (list, tuple)) or getattr(temperature, "ndim", 0) > 0:
                given = per_sequence("temperature", temperature, num_planned)
                temperature = [given[i] for i in members.tolist()]
            if loss_mask is not None:
                given = per_sequence("loss_mask", loss_mask, num_planned)
                loss_mask = [given[i] for i in members.tolist()]
        self._found = found = find_edges(packed, temperature, loss_mask)
        # the part that scores each edge, and its row there
        self._part_of_edge = np.zeros(found.count, np.int64)
        self._row_of_edge = np.zeros(found.count, np.int64)
        self._scored = [part.scored(found.predictor) for part in self._steps or ()]
        for part, (which, _) in enumerate(self._scored):
            self._part_of_edge[which] = part
            self._row_of_edge[which] = np.arange(len(which))
        self._copies = np.concatenate([[0], np.cumsum(found.lengths)])
        counts = [len(which) for which, _ in self._scored]
        self._modes = modes_of(model, trunks, self._steps, counts, *modes, options, self._trains)
        for mode in dict.fromkeys([*self._modes.of_part, self._modes.of_dummy]):
            # what each forward would refuse
            recomputed_forward(model, causal_lm, packed, 0, mode)
        self._store: LoanStore | None = None
        if trunks is not None and self._steps is not None:
            self._store = LoanStore(self._steps, keeps=False, on_host=trunks.stats.on_host)
        self._stamp: ModelStamp | None = None
        if self._trains:
            # what layers that are recomputed read
            names = "input_ids", "position_ids"
            read = {f"{n} of the plan, or what shares its memory,": self._inputs[n] for n in names}
            read |= {} if placed is None else placed.pixels()
            self._stamp = ModelStamp(model, read, for_backward=True)

    def _order_of_runs(self) -> Iterator[str]:
        """The forwards and backwards of this rank, in order."""
        backward = BACKWARD if self._trains else ""
        for at, batch in enumerate(self._batches):
            if self._trunks is None or batch.is_empty:
                yield FORWARD + backward
                continue
            yield FORWARD * len(self._trunks.starting(at))
            if self._trunks.part_of(at) is not None:
                yield FORWARD + backward
            again = FORWARD if self._modes.runs_again and self._trains else ""
            yield (again + backward) * len(self._trunks.ending(at))

    # ---- turns -----------------------------------------------------------------------------------

    def __next__(self) -> tuple[MicroBatch, SequenceScores]:
        if self._is_over:
            raise RuntimeError(
                "the micro-batches of kept_trunks are scored within its with block, and this one "
                "has ended"
            )
        self._end_turn()
        if self._at + 1 == len(self._batches):
            raise StopIteration
        self._at += 1
        batch = self._batches[self._at]
        self._turn = _Turn()
        return batch, self._scores(batch, self._turn)

    def finish(self) -> None:
        """Behind the last micro-batch: what is left to run.

        Raises:
            RuntimeError: micro-batches that were not scored, or not run backward.
        """
        self._end_turn()
        if left := len(self._batches) - 1 - self._at:
            raise RuntimeError(
                f"{left} of {len(self._batches)} micro-batches were not scored when the block of "
                "kept_trunks ended: go through all of them, also through empty ones"
            )
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
        if self._store is not None:
            self._store.clear()
        self._graphs.clear()
        self._waiting.clear()

    def _end_turn(self) -> None:
        """Behind the backward of a micro-batch: those of trunks that nobody needs any more."""
        self._check()
        if self._turn is None:
            return
        if self._trains and not self._turn.backwards:
            raise RuntimeError(
                f"no backward of the scores of micro-batch {self._at} ran within its turn of the "
                "loop of kept_trunks, and a later one would come too late for its trunks: call "
                "loss.backward() for each micro-batch, also where its loss is 0"
            )
        self._turn.end()
        self._turn = None
        if self._trunks is None or self._store is None:
            return
        for part in self._trunks.ending(self._at):
            self._store.end(part)
            scores, leaf = self._graphs.pop(part)
            if self._trains:
                if self._modes.runs_again:
                    self._run_dummies(FORWARD)
                    scores = self._run_part(part, self._store.borrowing(part))
                self._run_dummies(BACKWARD)
                _backward(scores, leaf.grad)
                self._store.close(part)
                # an optimizer may run in a hook
                self._check()

    def _scores(self, batch: MicroBatch, turn: _Turn) -> SequenceScores:
        """The forwards of a turn."""
        own, lengths = None, [0]
        index = GatherIndex(np.empty(0, np.int32), 0, self._device)
        if self._trunks is None or batch.is_empty:
            self._run_dummies(FORWARD)
            scores = own = self._dummy(is_last=False)
        else:
            for part in self._trunks.starting(self._at):
                self._run_trunk(part)
            if (part_of := self._trunks.part_of(self._at)) is not None:
                self._run_dummies(FORWARD)
                assert self._store is not None
                turn.exchanges = self._store.borrowing(part_of)
                own = self._run_part(part_of, turn.exchanges)
            scores, index, lengths = self._joined(part_of, own)
        if self._stamp is not None and self._at == 0:
            self._stamp.settle()
        if self._trains:
            scores.register_hook(turn.note)
            if own is not None:
                self._run_dummies(BACKWARD)
        return replace(scores_of(scores, index, lengths, self._options), measured_edges=None)

    def _joined(
        self, own: int | None, of_own: torch.Tensor | None
    ) -> tuple[torch.Tensor, GatherIndex, list[int]]:
        """The scores of this micro-batch's own edges and of its trunks', which sequences read.

        Returns:
            [u, columns]; the row of each token of every sequence but its first; n - 1 of each
            sequence.
        """
        assert self._trunks is not None
        sequences = self._trunks.sequences[self._at].tolist()
        border = self._copies
        edges = np.concatenate(
            [self._found.of_copies[border[i] : border[i + 1]] for i in sequences]
        )
        is_scored = edges >= 0
        parts = np.unique(self._part_of_edge[edges[is_scored]]).tolist()
        if own is not None and own not in parts:
            # its graph reaches what it borrows
            parts.append(own)
        first = np.zeros(len(self._scored), np.int64)
        found, count = [], 0
        for part in parts:
            scores = of_own if part == own else self._graphs[part][1]
            assert scores is not None
            first[part] = count
            found.append(scores)
            count += len(scores)
        rows = np.full(len(edges), -1, np.int32)
        at = edges[is_scored]
        rows[is_scored] = first[self._part_of_edge[at]] + self._row_of_edge[at]
        if not found:
            # of any trunk, to which its tokens belong
            of_trunk, _ = next(iter(self._graphs.values()))
            found = [of_trunk.detach()[:0].requires_grad_(self._trains)]
        lengths = [self._found.lengths[i] for i in sequences]
        return torch.cat(found), GatherIndex(rows, count, self._device), lengths

    # ---- runs ------------------------------------------------------------------------------------

    def _run_trunk(self, part: int) -> None:
        self._run_dummies(FORWARD)
        assert self._store is not None
        keeps_graph = self._trains and not self._modes.runs_again
        graph: Any = nullcontext() if keeps_graph else torch.no_grad()
        with self._store.keeping(part) as exchanges, graph:
            scores = self._run_part(part, exchanges)
        leaf = scores.detach().requires_grad_(self._trains)
        self._graphs[part] = scores, leaf

    def _run_part(self, part: int, exchanges: StepExchanges) -> torch.Tensor:
        """The scores [u, columns] of the edges whose predictors a part owns."""
        assert self._steps is not None
        tokens = self._steps[part]
        inputs = part_inputs(self._inputs, tokens, PartMask(tokens, exchanges, exchanges.states_of))
        edges = edges_on_device(self.packed, self._found, *self._scored[part])
        mode = self._modes.of_part[part]
        arguments = tokens.mask, inputs, edges, tokens.own_tokens
        return self._run_model(arguments, mode, is_last=False)

    def _run_model(self, arguments: Any, mode: Recompute, is_last: bool) -> torch.Tensor:
        self._forward.recompute = mode
        with self._wrapped.as_in_the_forward(is_last):
            return self._forward(*arguments)

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
        edges = edges_on_device(self.packed, self._found, nothing, nothing)
        inputs = forward_inputs(packed, self._causal_lm.config)
        arguments = packed.mask, inputs, edges, nothing
        return self._run_model(arguments, self._modes.of_dummy, is_last)

    def _check(self) -> None:
        """Raises a RuntimeError if the model is not what it was."""
        if torch.is_grad_enabled() != self._has_gradients:
            raise RuntimeError(
                f"gradients were {'enabled' if self._has_gradients else 'disabled'} when the block "
                "of kept_trunks began, and now they are not so: keep the mode for the whole block"
            )
        if self._stamp is not None and (change := self._stamp.change()) is not None:
            raise RuntimeError(
                f"{change} within the block of kept_trunks, whose trunks wait for their backward: "
                "make such a change (optimizer.step(), other adapters, another mode) behind the "
                "block, call optimizer.zero_grad() and score again"
            )


class _Turn:
    """The turn of one micro-batch.

    Attributes:
        exchanges: what it borrows by; None where it runs no forward that borrows.
        backwards: how often its backward ran.
    """

    def __init__(self) -> None:
        self.exchanges: StepExchanges | None = None
        self.backwards = 0

    def note(self, gradient: torch.Tensor) -> None:
        """The hook of its scores."""
        self.backwards += 1

    def end(self) -> None:
        """A backward behind this one comes too late."""
        if self.exchanges is not None:
            self.exchanges.is_over = True


def _backward(scores: torch.Tensor, gradient: torch.Tensor | None) -> None:
    torch.autograd.backward(scores, torch.zeros_like(scores) if gradient is None else gradient)
