"""`MicroBatch`: sequences of a forest, cut out of it, for one forward. `PlanStats`: what a plan of
micro-batches computes, next to other ways to compute the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from prefixtree import loops
from prefixtree.errors import ForestError
from prefixtree.forest import PrefixForest
from prefixtree.packing.arguments import check_packed
from prefixtree.packing.layout import PackedForest, pack
from prefixtree.packing.per_sequence import per_sequence, zeros_like
from prefixtree.planning import assignment
from prefixtree.planning.costs import CostModel

if TYPE_CHECKING:
    from prefixtree.planning.steps import StepStats
    from prefixtree.planning.trunks import TrunkStats


class MicroBatch:
    """Sequences of the batch that one forward computes. Made by `plan_micro_batches`.

    `sequence_logprobs`, `sequence_values` and `Teacher` take a micro-batch in the place of a packed
    forest and move it to the model's device. Masks and temperatures given with it are always those
    of the whole plan; the micro-batch takes its own entries.

    An empty step is a micro-batch too: `sequence_indices` is empty and `packed` holds a dummy
    (`PrefixForest.dummy`), one token that stands for nothing. It runs through a model like any
    other, so collectives match. It has no score. Its values and its losses of routers are 0, with a
    graph to the parameters.

    Attributes:
        sequence_indices: int64 [s], ascending indices into the planned sequences. Sequence i of
            `packed` is sequence_indices[i].
        num_tokens: distinct tokens; 0 for an empty step.
        cost: FLOPs of an update (forward and backward), by the plan's cost model; 0 for an empty
            step.
        steps: the StepStats of the steps that compute it, where it holds more tokens than the
            plan's `max_tokens`; None where it is computed in one forward.
    """

    def __init__(
        self,
        source: PrefixForest,
        sequence_indices: np.ndarray,
        num_tokens: int,
        cost: float,
        steps: StepStats | None = None,
        forest: PrefixForest | None = None,
        num_planned: int | None = None,
    ) -> None:
        self._source = source
        self._forest = forest
        self._num_planned = source.num_sequences if num_planned is None else num_planned
        self.sequence_indices = sequence_indices
        self.num_tokens = num_tokens
        self.cost = cost
        self.steps = steps

        self._on: PackedForest | None = None

    @property
    def num_planned(self) -> int:
        """S, the sequences of the whole mini-batch, on all ranks."""
        return self._num_planned

    @property
    def is_empty(self) -> bool:
        """Whether this is an empty step: a dummy without a sequence of the batch."""
        return len(self.sequence_indices) == 0

    @property
    def forest(self) -> PrefixForest:
        """The forest of these sequences alone, cut out of the plan's forest.

        It is made at the first access, without comparing tokens, and kept.
        """
        if self._forest is None and self.is_empty:
            self._forest = self._source.dummy()
        elif self._forest is None:
            self._forest = cut_out(self._source, self.sequence_indices)
        return self._forest

    @cached_property
    def packed(self) -> PackedForest:
        """`pack(self.forest)`, on the CPU; `.to(device)` copies it to a device.

        It is made at the first access and kept, so that later passes reuse its block tables.
        """
        return pack(self.forest)

    def on(self, device: torch.device | str) -> PackedForest:
        """Copies `packed` to a device; the copy on the last device is kept."""
        device = torch.empty(0, device=device).device
        if self._on is None or self._on.device != device:
            self._on = self.packed.to(device)
        return self._on

    def take(self, values: Sequence[Any]) -> list[Any]:
        """Selects the entries of a per-sequence list that belong to this micro-batch.

        Args:
            values: S entries, one per planned sequence: numbers, lists, arrays, tensors or anything
                else.

        Returns:
            One entry per sequence of `packed`, in their order. For the dummy of an empty step one
            entry of zeros, without a gradient: a number for numbers, one token's worth ([1, ...])
            for per-token values, None for what has no zero. So a training loop needs no special
            case.

        Raises:
            ForestError: a number of entries other than S, such as values that were taken already.
        """
        per_planned = per_sequence("values", values, self._num_planned)
        if self.is_empty:
            return [zeros_like(per_planned[0])]
        return _some(per_planned, self.sequence_indices)

    def __reduce__(self) -> tuple[Any, ...]:
        # to another process goes this micro-batch's part of the forest, not the whole
        sizes = self.sequence_indices, self.num_tokens, self.cost, self.steps, self._num_planned
        return _rebuild, (self.forest, *sizes)

    def __repr__(self) -> str:
        steps = f" in {len(self.steps.own_tokens)} steps" if self.steps else ""
        return (
            f"MicroBatch({len(self.sequence_indices)} sequences, {self.num_tokens} tokens{steps})"
        )


def micro_batch_of(forest: PrefixForest, sequences: Sequence[int] | np.ndarray) -> MicroBatch:
    """Cuts a micro-batch of one or more sequences out of a forest, at `CostModel()`'s cost."""
    indices = np.sort(np.asarray(sequences, np.int64))
    part = cut_out(forest, indices)
    cost = CostModel().cost(part.node_position, part.node_length).sum()
    return MicroBatch(forest, indices, part.num_tokens, float(cost), forest=part)


def packed_of(given: Any, caller: str, device: Callable[[], torch.device]) -> PackedForest:
    """Returns the given packed forest, or that of a micro-batch on the model's device."""
    if isinstance(given, MicroBatch):
        return given.on(device())
    check_packed(given, caller, subset=True)
    packed: PackedForest = given
    return packed


def own_of(
    given: Any, temperature: Any, loss_mask: Any, sampling_masks: Any = None
) -> tuple[Any, Any, Any]:
    """Selects a micro-batch's temperatures and masks, or all those of a packed forest."""
    if not isinstance(given, MicroBatch):
        return temperature, loss_mask, sampling_masks
    which = given.num_planned, given.sequence_indices
    entries = of_plan(temperature, loss_mask, sampling_masks, *which)
    # nothing is scored of a dummy
    return (1.0, None, None) if given.is_empty else entries


def of_plan(
    temperature: Any, loss_mask: Any, sampling_masks: Any, num_planned: int, which: np.ndarray
) -> tuple[Any, Any, Any]:
    """Selects entries of temperatures and masks that were given for all planned sequences."""
    if isinstance(temperature, (list, tuple)) or getattr(temperature, "ndim", 0) > 0:
        temperature = _some(_of_planned("temperature", temperature, num_planned), which)
    if loss_mask is not None:
        loss_mask = _some(_of_planned("loss_mask", loss_mask, num_planned), which)
    if sampling_masks is not None:
        sampling_masks = _some(_of_planned("sampling_masks", sampling_masks, num_planned), which)
    return temperature, loss_mask, sampling_masks


def _of_planned(name: str, values: Any, num_planned: int) -> list[Any]:
    try:
        return per_sequence(name, values, num_planned)
    except ForestError as problem:
        raise ForestError(
            f"{problem}: of a plan, {name} is that of all sequences that were planned, from which "
            "each micro-batch takes its own; give it whole, not what batch.take gave (which goes "
            "with batch.packed)"
        ) from None


def _some(values: list[Any], which: np.ndarray) -> list[Any]:
    return [values[i] for i in which.tolist()]


def _rebuild(
    forest: PrefixForest,
    sequence_indices: np.ndarray,
    num_tokens: int,
    cost: float,
    steps: StepStats | None,
    num_planned: int,
) -> MicroBatch:
    return MicroBatch(forest, sequence_indices, num_tokens, cost, steps, forest, num_planned)


# ---- forests of micro-batches --------------------------------------------------------------------


def cut_out(forest: PrefixForest, sequences: np.ndarray) -> PrefixForest:
    """Cuts out the paths of some sequences (int64, ascending) as a forest, compressed again."""
    ends, sequence_end = np.unique(forest.sequence_node[sequences], return_inverse=True)
    nodes = loops.planning.used_nodes(forest.node_parent, ends)
    parent = assignment.renumber(forest.node_parent[nodes], nodes)
    # a node continues its parent's where no other child is left and no sequence ends between
    children = np.bincount(parent[parent >= 0], minlength=len(nodes))
    is_end = np.zeros(len(nodes), bool)
    is_end[np.searchsorted(nodes, ends)] = True
    starts = (parent < 0) | (children[parent] > 1) | is_end[parent]
    new_id = np.cumsum(starts) - 1
    first_nodes = np.flatnonzero(starts)
    above = parent[first_nodes]
    lengths = forest.node_length[nodes].astype(np.int64)
    tokens = routes = None
    if forest.tokens is not None:
        first = forest.node_start[nodes] - (np.cumsum(lengths) - lengths)
        place = np.repeat(first, lengths) + np.arange(lengths.sum())
        tokens = forest.tokens[place]
        routes = None if forest.routes is None else forest.routes[place]
    return PrefixForest.from_parents(
        np.where(above < 0, -1, new_id[above]),
        np.add.reduceat(lengths, first_nodes),
        tokens,
        new_id[np.searchsorted(nodes, ends)][sequence_end],
        routes=routes,
    )


# ---- stats of a plan -----------------------------------------------------------------------------


@dataclass(frozen=True)
class ReuseStats:
    """The cost of steps in a plan whose trees are not cut, next to the plan that cuts them.

    Attributes:
        stepped: the number of micro-batches in steps, each of more than `max_tokens` tokens.
        forwards: steps of these, and one forward per other micro-batch.
        imported_tokens: the most tokens that a step imports.
        exported_bytes: the most bytes of exported keys and values that a micro-batch keeps from its
            forwards to its backwards, in all layers.
        second_forward: FLOPs of the forwards that the backward of steps repeats. `rank_costs` does
            not include them.
        cut_tokens: tokens of the plan that cuts trees; None where a sequence is longer than
            `max_tokens`, so that there is no such plan.
        cut_cost: FLOPs of that plan; None likewise.
    """

    stepped: int
    forwards: int
    imported_tokens: int
    exported_bytes: int
    second_forward: float
    cut_tokens: int | None
    cut_cost: float | None


@dataclass(frozen=True)
class PlanStats:
    """The tokens and FLOPs of a plan, next to those of other ways to compute the batch.

    Dummies of empty steps are not counted.

    Attributes:
        packed_tokens: tokens that the plan computes, summed over its micro-batches.
        distinct_tokens: tokens of one forest over all sequences. No plan computes fewer.
        replicated_tokens: tokens of all sequences. A trainer without sharing computes these.
        micro_batches: the number of micro-batches that hold sequences.
        steps: micro-batches per rank, empty ones included.
        empty_steps: the number of dummies, over all ranks.
        rank_costs: FLOPs of each rank, by the cost model.
        lockstep_cost: FLOPs of the costliest micro-batch of each step, summed over the steps: the
            time of ranks that wait for each other in every step, as under FSDP.
        naive_tokens: distinct tokens of micro-batches filled in input order up to the budget in
            replicated tokens, as trainers do, if each were packed.
        naive_micro_batches: the number of those micro-batches.
        reuse: the cost of steps, in a plan with `reuse`; None without.
        trunks: sums and maxima over the ranks of a plan with `trunks`; None without.
    """

    packed_tokens: int
    distinct_tokens: int
    replicated_tokens: int
    micro_batches: int
    steps: int
    empty_steps: int
    rank_costs: tuple[float, ...]
    lockstep_cost: float
    naive_tokens: int
    naive_micro_batches: int
    reuse: ReuseStats | None = None
    trunks: TrunkStats | None = None

    @property
    def repeated_tokens(self) -> int:
        """Ancestor tokens computed again because their tree was cut: packed - distinct."""
        return self.packed_tokens - self.distinct_tokens

    @property
    def balance(self) -> float:
        """Cost of the heaviest rank divided by the mean cost per rank; 1.0 is even."""
        return max(self.rank_costs) * len(self.rank_costs) / sum(self.rank_costs)

    @property
    def lockstep_balance(self) -> float:
        """`lockstep_cost` divided by the mean cost per rank; 1.0 is even in every step."""
        return self.lockstep_cost * len(self.rank_costs) / sum(self.rank_costs)

    def __str__(self) -> str:
        packed = self.packed_tokens
        empty = f", {self.empty_steps} of them empty" if self.empty_steps else ""
        if idle := self.rank_costs.count(0):
            empty += f" ({idle} rank{'s have' if idle > 1 else ' has'} no sequence)"
        ranks = len(self.rank_costs)
        lines: tuple[str, ...] = (
            f"{packed:,} tokens in {self.micro_batches:,} micro-batches",
            f"  ranks       {ranks} x {self.steps} steps{empty}; heaviest rank "
            f"{self.balance:.3f} x the mean, {self.lockstep_balance:.3f} x step by step",
            f"  repeated    {self.repeated_tokens:,} ancestor tokens beyond the "
            f"{self.distinct_tokens:,} distinct ({packed / self.distinct_tokens - 1:.1%})",
            f"  replicated  {self.replicated_tokens:,} tokens "
            f"({self.replicated_tokens / packed:.2f} x)",
            f"  naive       {self.naive_tokens:,} tokens in {self.naive_micro_batches:,} "
            f"micro-batches ({self.naive_tokens / packed:.2f} x)",
        )
        if self.trunks is not None:
            lines = (*lines, f"  trunks      {self.trunks}")
        return "\n".join(lines if self.reuse is None else (*lines, self._reuse_line(self.reuse)))

    def _reuse_line(self, reuse: ReuseStats) -> str:
        work = sum(self.rank_costs)
        line = (
            f"  reuse       {reuse.stepped:,} micro-batches in steps, {reuse.forwards:,} forwards; "
            f"a step imports at most {reuse.imported_tokens:,} tokens; "
            f"{reuse.exported_bytes / 2**30:,.2f} GiB of exported keys and values; a second "
            f"forward is {reuse.second_forward / work:.1%} of the work"
        )
        if reuse.cut_tokens is None or reuse.cut_cost is None:
            return f"{line}; a sequence is too long to cut trees instead"
        return (
            f"{line}; cut trees take {reuse.cut_tokens:,} tokens and {reuse.cut_cost / work:.2f} x "
            "the work"
        )
