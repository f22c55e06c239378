"""The part of a packed forest that this process computes: all, or a rank's part in a group.

Legend: U scored edges, one per temperature, n ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import nn

from prefixtree.errors import refuse
from prefixtree.models.families import ROUTES
from prefixtree.models.prepared import prepare_layers
from prefixtree.packing.copies import GatherIndex, gather
from prefixtree.packing.layout import Edges, PackedForest, pack
from prefixtree.parallel.agreement import Parts, agree, num_ranks
from prefixtree.parallel.attention import PartMask
from prefixtree.parallel.heads import state_heads_problem
from prefixtree.parallel.ledger import Divided
from prefixtree.parallel.ranks import arrival, gather_rows
from prefixtree.parallel.states import part_mask
from prefixtree.planning.division import Division
from prefixtree.planning.model_cost import state_heads
from prefixtree.planning.parts import Part
from prefixtree.planning.split import split_slots
from prefixtree.recompute.choose import GroupShare
from prefixtree.recompute.plan import PartWork
from prefixtree.scoring.edges import DeviceEdges, ScoredEdges, edges_on_device
from prefixtree.scoring.forward import AskedWings
from prefixtree.scoring.group_facts import (
    FACTS,
    WINGS,
    costs_of,
    parts_of_forest,
    parts_of_model,
    parts_of_scores,
    parts_of_state,
)
from prefixtree.scoring.group_refusals import GROUPS, check_averages, check_mode, heads_of
from prefixtree.scoring.local import LocalPart, LocalTokens, Rows, inputs_of
from prefixtree.scoring.refusals import GroupMode
from prefixtree.wings import CallWing

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


__all__ = ["RankPart", "num_ranks", "part_of_rank", "scores_of_rank", "values_of_rank"]

# ---- the part of a rank -------------------------------------------------------------------------

_Local = TypeVar("_Local")


class SplitInSlots:
    """Divides slots of a packed forest among the ranks of a group, of which this is one.

    Args:
        model: the transformers model. packed: the forest, of a token per rank or more.
        found: what is scored; None of values, which are of every token.
        group: the process group. mode: what its ranks exchange.

    Attributes:
        packed, group: as given.
        ranks: n.
        rank: this rank's place in the group.
        by_heads: whether ranks exchange tokens for heads in attention too.
    """

    def __init__(
        self,
        model: nn.Module,
        packed: PackedForest,
        found: ScoredEdges | None,
        group: ProcessGroup,
        mode: GroupMode,
    ) -> None:
        import torch.distributed as dist

        self.packed, self.group, self.by_heads = packed, group, mode == "ulysses"
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self._scored = edges_of(found)
        cost_model, import_cost = costs_of(model)
        if self.by_heads:
            # attention is even anyway, and nobody imports
            cost_model = replace(cost_model, attention=0.0, windowed=0.0, window=None)
            import_cost = replace(import_cost, kv_heads=0)
        self._cost_model, self._import_cost = cost_model, import_cost

    def __call__(self, border: np.ndarray, on_host: bool = False) -> Divided:
        """The slots between these borders, int64 [S + 1]; `on_host` as in `Divided`."""
        costs = self._cost_model, self._scored
        parts = split_slots(self.packed, border, self.ranks, *costs, import_cost=self._import_cost)
        where = on_host, self.rank, self.group, self.by_heads
        return Divided(Division(parts, self.ranks), *where)


#: Divides a forest into steps: (transformers model, how slots are divided) -> slots and ranks.
Divide = Callable[[Any, SplitInSlots], Divided]


def part_inputs(inputs: dict[str, Any], part: Part, mask: PartMask) -> dict[str, Any]:
    """The keywords of a forward over a part, from those of the whole forest."""
    own = part.index_on(inputs["input_ids"].device)
    rows = {name: x.index_select(axis, own) for name, axis, x in of_tokens(inputs)}
    of_all, of_part = (x["position_ids"].flatten(0, -2)[0] for x in (inputs, rows))
    if inputs["tree_mask"].is_given(of_all):
        # else the host would wait for a GPU, to compare them
        mask.mask = mask.mask.given_with(of_part)
    return {**inputs, **rows, "tree_mask": mask}


def of_tokens(inputs: dict[str, Any]) -> Iterator[tuple[str, int, torch.Tensor]]:
    """The keywords of a forward that have an entry per packed token: name, axis, tensor."""
    for name, axis in (("input_ids", -1), ("position_ids", -1), (ROUTES, 0)):
        if name in inputs:
            yield name, axis, inputs[name]


# ---- a part, in a group of ranks ---------------------------------------------------------------


def scores_of_rank(causal_lm: Any, found: ScoredEdges, part: RankPart) -> LocalPart:
    """Makes what a rank needs to score its edges."""
    # with the token ids that the model knows
    where = part.owner, part.divided.rank
    edges, to_sequences, row_of_unit = edges_of_part(part.packed, *where, found)
    gathered = gathering(*where, part.group, found.predictor)

    def gathered_together(rows: Rows) -> Rows:
        scores, *of_tokens = rows
        if not of_tokens:
            return (gathered(scores),)
        wide = part.of_all_tokens(torch.cat(of_tokens, 1))
        return _Together.apply(
            gathered(scores), *wide.split([layer.shape[1] for layer in of_tokens], 1)
        )

    return LocalPart(
        **part.tokens(causal_lm.config),
        gathered=gathered_together,
        edges=edges,
        to_sequences=to_sequences,
        lengths=found.lengths,
        order=row_of_unit,
    )


def values_of_rank(classifier: Any, found: None, part: RankPart) -> LocalTokens:
    """Makes what a rank needs for the values of its tokens."""
    return LocalTokens(
        **part.tokens(classifier.config),
        gathered=lambda rows: tuple(map(part.of_all_tokens, rows)),
    )


class _Together(torch.autograd.Function):
    """Joins gathered rows: the backwards of all run where that of one does, as ranks wait for one
    another in each."""

    @staticmethod
    def forward(ctx: Any, *gathered: torch.Tensor) -> Rows:
        return tuple(x.view_as(x) for x in gathered)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Rows:
        return gradients


class RankPart:
    """A rank's part of a forest.

    Args:
        given: the forest of the caller. divided: slots and ranks, of a forest that may be padded.
        wings: of the call. recompute: as in `sequence_logprobs`.
        in_steps: whether there may be several slots.

    Attributes:
        packed: the forest.
        divided, group: slots and ranks, and the process group.
        owner: int [T], the rank of each token.
        mask: in the place of a mask in a forward over the first slot.
        computes_above: whether ranks compute the tokens above their own again, for states.
    """

    def __init__(
        self,
        given: PackedForest,
        divided: Divided,
        wings: Mapping[str, CallWing],
        recompute: Any,
        in_steps: bool,
    ) -> None:
        assert divided.group is not None
        self._given, self._wings, self._recompute = given, wings, recompute
        self.divided, self.group, self._in_steps = divided, divided.group, in_steps
        division = divided.division
        self.packed, self.owner = division.packed, division.parts.owner % division.ranks
        self.computes_above = division.computes_above
        self.mask = part_mask(divided.at_once(), divided.by_heads)

    def tokens(self, config: Any) -> dict[str, Any]:
        """The fields of `LocalTokens` but `gathered`."""
        of_all = inputs_of(self.packed, config, self._wings)
        where = self.divided.division.parts, self.divided.rank, self.group
        return {
            "wings": {name: wing.of_rank(*where) for name, wing in self._wings.items()},
            "inputs": part_inputs(of_all, self.mask.part, self.mask),
            "mask": self.mask.attended,
            "of_steps": of_all,
            "share": self._share(config) if self._recompute == "auto" else None,
            "steps": (lambda: self.divided) if self._in_steps else None,
        }

    def _share(self, config: Any) -> GroupShare:
        """The part as "auto" plans it."""
        tokens = self.mask.part
        work, own = PartWork.of(tokens, 0, True), tokens.num_tokens
        imported, sent = tokens.num_imported, tokens.num_exported
        if self.divided.by_heads:
            # all tokens for some heads are as many rows as own tokens for all. Those of queries,
            # keys and values travel both ways, and outputs are kept before and after
            groups = [n / kv for n, kv in heads_of(config.get_text_config())]
            most = max(groups, default=0.0)
            work = replace(work, imported=round(own * most / 2), wide=own * (most + 1))
        else:
            above = imported if self.computes_above else 0
            # gradients of all rows and of own ones, those that go back and those that come
            wide = 2 * (own + imported) + sent if imported or sent else 0
            work = replace(work, wide=wide, above=above)
        return GroupShare(work, self.group)

    def of_all_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """From the values [t, C] of the own tokens to those of all tokens of the caller's forest,
        [T, C]."""
        # of the forest that may be padded, so that every rank has a token
        every = np.arange(self.packed.num_tokens)
        gathered = gathering(self.owner, self.divided.rank, self.group, every)
        return gather(gathered(values), self._order)

    @cached_property
    def _order(self) -> GatherIndex:
        row_of_token, _ = arrival(self.owner, self.divided.division.ranks)
        row_of_token = row_of_token[: self._given.num_tokens].astype(np.int32)
        return GatherIndex(row_of_token, self.packed.num_tokens, self.packed.device)


def edges_of_part(
    packed: PackedForest, owner: np.ndarray, rank: int, found: ScoredEdges
) -> tuple[DeviceEdges, GatherIndex, Callable[[], np.ndarray]]:
    """The edges that a rank of a group scores, and how all scores are read once gathered.

    Args:
        packed: the forest. owner: int [T], the rank of each token.
        rank: this rank's place in the group. found: all that is scored.

    Returns:
        Its edges; from the gathered scores to the sequences; and what gives int64 [U], the row of
        each edge's scores among those that are gathered.
    """
    own = np.flatnonzero(owner == rank)
    which = np.flatnonzero(owner[found.predictor] == rank)

    def row() -> np.ndarray:
        return arrival(owner[found.predictor], 1 + int(owner.max()))[0]

    def of_copies() -> np.ndarray:
        # -1, of what is not scored, stays
        return np.append(row(), -1).astype(np.int32)[found.of_copies]

    rows = np.searchsorted(own, found.predictor[which])
    edges = edges_on_device(packed, found, which, rows)
    return edges, GatherIndex(of_copies, found.count, packed.device), row


def gathering(
    owner: np.ndarray, rank: int, group: ProcessGroup, tokens: np.ndarray
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that gathers the values of some packed tokens, which their owners compute.

    Args:
        owner: int [T], the rank of each token. rank: this rank's place in the group.
        tokens: int64 [U], a token per value. Each rank has its values in this order.

    Returns:
        From this rank's values [u, C] to those of all, [U, C], rank by rank: see `arrival`.
    """
    counts = np.bincount(owner[tokens], minlength=group.size()).tolist()
    return lambda values: gather_rows(values, counts, rank, group)


def part_of_rank(
    model: nn.Module,
    packed: PackedForest,
    group: ProcessGroup,
    check: Callable[[], tuple[Any, Any]],
    local: Callable[[Any, Any, RankPart], _Local],
    options: dict[str, Any],
    mode: GroupMode = "parts",
    divide: Divide | None = None,
    asked: AskedWings | None = None,
) -> tuple[Any, _Local]:
    """This rank's part of what the ranks of a group compute together, once all of them agree.

    All is made before ranks wait for one another, and for what their GPUs have still to do: the
    first kernel may then follow at once.

    Args:
        model: what is called.
        packed: the packed forest.
        group: the process group, of two ranks or more.
        check: gives the transformers model inside and what is scored, or raises.
        local: makes what the call needs, of these two and of the part of this rank.
        options: further arguments that must be the same on all ranks, `recompute` among them.
        mode: what ranks exchange.
        divide: divides the forest into steps. Default: one forward.
        asked: what the call asks of wings. Default: there are none.

    Returns:
        The transformers model, and what `local` made.

    Raises:
        ValueError, RuntimeError: as `agree`.
        UnsupportedError: what is not verified in groups.
    """
    import torch.distributed as dist

    ranks = dist.get_world_size(group)

    def prepare() -> tuple[tuple[Any, _Local], dict[str, Parts]]:
        inner, found = check()
        refuse(GROUPS, model)
        # what one layer refuses, all ranks do
        prepare_layers(inner)
        check_averages(model, group)
        check_mode(mode, inner.config.get_text_config(), packed, ranks)
        whole, wings = padded_to_ranks(packed, ranks), dict[str, CallWing]()
        if asked is not None:
            whole, wings = asked.open(model, inner, packed, whole)
        split = SplitInSlots(inner, whole, found, group, mode)
        at_once = np.array([0, whole.num_tokens])
        divided = split(at_once) if divide is None else divide(inner, split)
        own = RankPart(packed, divided, wings, options["recompute"], divide is not None)
        for heads, shared in state_heads(inner):
            problem = state_heads_problem(heads, shared, ranks)
            if problem and not own.computes_above:
                raise ValueError(problem)
        part, runs = local(inner, found, own), divided.division.parts.runs
        return (inner, part), {
            "forest": parts_of_forest(packed),
            **parts_of_scores(found),
            **{name: wings[name].facts() if name in wings else {} for name in WINGS},
            "model": parts_of_model(inner),
            "options": {"group_mode": mode, **options, **parts_of_state(inner, packed)},
            "division": dict(zip(("starts of runs", "their owners"), runs, strict=False)),
        }

    return agree(group, packed.device, prepare, FACTS)


def padded_to_ranks(packed: PackedForest, least: int) -> PackedForest:
    """The forest; one with fewer tokens is padded to `least`."""
    if packed.num_tokens >= least:
        return packed
    mask = packed.mask
    padded = pack(packed.forest, least).with_options(mask.backend, mask.deterministic)
    return padded.to(packed.device)


def edges_of(found: ScoredEdges | None) -> Edges | None:
    """The edges that are scored, as `split_tokens` takes them."""
    if found is None:
        return None
    return Edges(torch.from_numpy(found.predictor), torch.from_numpy(found.token))
