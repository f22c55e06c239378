"""The part of a packed forest that one rank of a group computes.

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
from prefixtree.models.families import KEYS, ROUTES
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

# ---- the part of a rank --------------------------------------------------------------------------

_Local = TypeVar("_Local")


class SplitInSlots:
    """Divides slots of a packed forest among the ranks of a group, of which this is one.

    Args:
        packed: the forest, with a token per rank or more.
        found: what is scored; None for values, which every token has.

    Attributes:
        ranks: n.
        by_heads: whether attention too exchanges tokens for heads (`group_mode="ulysses"`).
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
            # attention is divided evenly by heads, and no rank imports
            cost_model = replace(cost_model, attention=0.0, windowed=0.0, window=None)
            import_cost = replace(import_cost, kv_heads=0)
        self._cost_model, self._import_cost = cost_model, import_cost

    def __call__(self, border: np.ndarray, on_host: bool = False) -> Divided:
        """Divides the slots between these borders, int64 [S + 1]; `on_host` as in `Divided`."""
        costs = self._cost_model, self._scored
        parts = split_slots(self.packed, border, self.ranks, *costs, import_cost=self._import_cost)
        where = on_host, self.rank, self.group, self.by_heads
        return Divided(Division(parts, self.ranks), *where)


#: Divides a forest into steps: (transformers model, how slots are divided) -> slots and ranks.
Divide = Callable[[Any, SplitInSlots], Divided]


def part_inputs(inputs: dict[str, Any], part: Part, mask: PartMask) -> dict[str, Any]:
    """Makes the keywords of a forward over a part, from those of the whole forest."""
    own = part.index_on(inputs["input_ids"].device)
    rows = {name: x.index_select(axis, own) for name, axis, x in of_tokens(inputs)}
    of_all, of_part = (x["position_ids"].flatten(0, -2)[0] for x in (inputs, rows))
    if inputs["tree_mask"].is_given(of_all):
        # without this, the host would wait for a GPU to compare them
        mask.mask = mask.mask.given_with(of_part)
    return {**inputs, **rows, "tree_mask": mask}


def of_tokens(inputs: dict[str, Any]) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Yields the keywords of a forward that have an entry per packed token: name, axis, tensor."""
    for name, axis in (("input_ids", -1), ("position_ids", -1), (ROUTES, 0), (KEYS, 0)):
        if name in inputs:
            yield name, axis, inputs[name]


# ---- a part, in a group of ranks -----------------------------------------------------------------


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
        **part.tokens(causal_lm),
        gathered=gathered_together,
        edges=edges,
        to_sequences=to_sequences,
        lengths=found.lengths,
        order=row_of_unit,
    )


def values_of_rank(classifier: Any, found: None, part: RankPart) -> LocalTokens:
    """Makes what a rank needs for the values of its tokens."""
    return LocalTokens(
        **part.tokens(classifier),
        gathered=lambda rows: tuple(map(part.of_all_tokens, rows)),
    )


class _Together(torch.autograd.Function):
    """Ties gathered rows together: their backwards all run, or none, as ranks wait in each."""

    @staticmethod
    def forward(ctx: Any, *gathered: torch.Tensor) -> Rows:
        return tuple(x.view_as(x) for x in gathered)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Rows:
        return gradients


class RankPart:
    """The part of a forest that one rank computes.

    Args:
        given: the forest of the caller, before it was padded.
        in_steps: whether there may be several slots.

    Attributes:
        packed: the forest, padded to a token per rank.
        owner: int [T], the rank of each token.
        mask: the mask of a forward over the first slot.
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

    def tokens(self, transformer: Any) -> dict[str, Any]:
        """The fields of `LocalTokens` except `gathered`."""
        of_all = inputs_of(self.packed, transformer, self._wings)
        where = self.divided.division.parts, self.divided.rank, self.group
        return {
            "wings": {name: wing.of_rank(*where) for name, wing in self._wings.items()},
            "inputs": part_inputs(of_all, self.mask.part, self.mask),
            "mask": self.mask.attended,
            "of_steps": of_all,
            "share": self._share(transformer.config) if self._recompute == "auto" else None,
            "steps": (lambda: self.divided) if self._in_steps else None,
        }

    def _share(self, config: Any) -> GroupShare:
        """The part as recompute="auto" plans it."""
        tokens = self.mask.part
        work, num_own = PartWork.of(tokens, 0, True), tokens.num_tokens
        imported, sent = tokens.num_imported, tokens.num_exported
        if self.divided.by_heads:
            # all tokens for some heads are as many rows as own tokens for all heads. Rows of
            # queries, keys and values travel both ways; outputs are kept before and after
            groups = [n / kv for n, kv in heads_of(config.get_text_config())]
            largest_group = max(groups, default=0.0)
            work = replace(
                work,
                imported=round(num_own * largest_group / 2),
                wide=num_own * (largest_group + 1),
            )
        else:
            above = imported if self.computes_above else 0
            # gradients of all rows and of own rows, and gradients sent back and received
            wide = 2 * (num_own + imported) + sent if imported or sent else 0
            work = replace(work, wide=wide, above=above)
        return GroupShare(work, self.group)

    def of_all_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """Gathers values [t, C] of own tokens to [T, C], all tokens of the caller's forest."""
        # counts tokens of the padded forest, in which every rank has a token
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
    """Finds the edges that a rank of a group scores, and how gathered scores are read.

    Args:
        owner: int [T], the rank of each token.

    Returns:
        The edges of this rank; the gather from all scores to the sequences; and a function that
        gives int64 [U], the row of each edge among the gathered scores.
    """
    own_tokens = np.flatnonzero(owner == rank)
    own_edges = np.flatnonzero(owner[found.predictor] == rank)

    def row() -> np.ndarray:
        return arrival(owner[found.predictor], 1 + int(owner.max()))[0]

    def of_copies() -> np.ndarray:
        # -1 (not scored) stays -1
        return np.append(row(), -1).astype(np.int32)[found.of_copies]

    rows = np.searchsorted(own_tokens, found.predictor[own_edges])
    edges = edges_on_device(packed, found, own_edges, rows)
    return edges, GatherIndex(of_copies, found.count, packed.device), row


def gathering(
    owner: np.ndarray, rank: int, group: ProcessGroup, tokens: np.ndarray
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Makes a function that gathers values [u, C] of this rank to those of all ranks, [U, C].

    Args:
        owner: int [T], the rank of each token.
        tokens: int64 [U], the token of each value. Each rank has its values in this order; the
            gathered ones are rank by rank (see `arrival`).
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
    """Makes this rank's part of a group's work once all ranks agree, and finds the inner model.

    Everything is made before ranks wait for one another and for the work their GPUs still have to
    do: the first kernel may then follow at once.

    Args:
        check: gives the transformers model inside and what is scored, or raises.
        local: makes what the call needs, from these two and this rank's part.
        options: further arguments that must be the same on all ranks, `recompute` among them.
        divide: divides the forest into steps. Default: one forward.
        asked: what the call asks of wings. Default: none.
    """
    import torch.distributed as dist

    ranks = dist.get_world_size(group)

    def prepare() -> tuple[tuple[Any, _Local], dict[str, Parts]]:
        inner, scored = check()
        refuse(GROUPS, model)
        # a layer that refuses here makes all ranks raise
        prepare_layers(inner)
        check_averages(model, group)
        check_mode(mode, inner.config.get_text_config(), packed, ranks)
        padded, wings = padded_to_ranks(packed, ranks), dict[str, CallWing]()
        if asked is not None:
            padded, wings = asked.open(model, inner, packed, padded, scored)
        split = SplitInSlots(inner, padded, scored, group, mode)
        at_once = np.array([0, padded.num_tokens])
        divided = split(at_once) if divide is None else divide(inner, split)
        rank_part = RankPart(packed, divided, wings, options["recompute"], divide is not None)
        for heads, shared in state_heads(inner):
            problem = state_heads_problem(heads, shared, ranks)
            if problem and not rank_part.computes_above:
                raise ValueError(problem)
        part, runs = local(inner, scored, rank_part), divided.division.parts.runs
        return (inner, part), {
            "forest": parts_of_forest(packed),
            **parts_of_scores(scored),
            **{name: wings[name].facts() if name in wings else {} for name in WINGS},
            "model": parts_of_model(inner),
            "options": {"group_mode": mode, **options, **parts_of_state(inner, packed)},
            "division": dict(zip(("starts of runs", "their owners"), runs, strict=False)),
        }

    return agree(group, packed.device, prepare, FACTS)


def padded_to_ranks(packed: PackedForest, least: int) -> PackedForest:
    """The forest, padded to `least` tokens where it has fewer."""
    if packed.num_tokens >= least:
        return packed
    mask = packed.mask
    padded = pack(packed.forest, least).with_options(mask.backend, mask.deterministic)
    return padded.to(packed.device)


def edges_of(found: ScoredEdges | None) -> Edges | None:
    """The scored edges in the form that `split_slots` takes."""
    if found is None:
        return None
    return Edges(torch.from_numpy(found.predictor), torch.from_numpy(found.token))
