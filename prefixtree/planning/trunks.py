"""`plan_trunks`: micro-batches of one forest that keep the trunks they share, for `kept_trunks`.

The ends of sequences are taken in packed order, in which a sequence shares the most with its
neighbours, and micro-batches are runs of them. Tokens that several micro-batches share are a trunk.
Its forward runs once, before the first of them, and its backward once, after the last of them. So a
trunk below another one lives shorter, and all that is alive at once lies on one path. The caller
may also give micro-batches; then what is alive may lie anywhere. Every token has one owner: a
trunk, or the one micro-batch that holds it. Legend: N nodes, E distinct ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from prefixtree.errors import ForestError
from prefixtree.forest import PrefixForest
from prefixtree.packing.layout import PackedForest, pack
from prefixtree.planning.costs import CostModel, ImportCost, run_flops
from prefixtree.planning.steps import Steps

# fewer tokens leave a GPU idle: the trunk above takes in those of a smaller trunk if they fit
_FEW = 1024
# share of the budget; a trunk of fewer tokens takes as long as one of so many
_LEAST = 1 / 32
# budgets tried below max_tokens to make micro-batches even
_EVENINGS = 6


@dataclass(frozen=True)
class TrunkStats:
    """Tokens and memory of kept trunks.

    Attributes:
        trunks: the number of trunks, each of which adds a forward and a backward.
        kept_tokens: tokens of all trunks.
        alive_tokens: the most trunk tokens that are kept at once.
        peak: the most that is held at once, in own tokens; at most `max_tokens` of the plan.
        again: whether trunks keep no graph: their forward runs a second time before their backward.
        on_host: whether exports of trunks wait on the host until a layer reads them.
        states: the most states of recurrent layers that trunks export at once.
    """

    trunks: int
    kept_tokens: int
    alive_tokens: int
    peak: float
    again: bool = False
    on_host: bool = False
    states: int = 0

    def __str__(self) -> str:
        return (
            f"{self.trunks:,} trunks of {self.kept_tokens:,} tokens, of which at most "
            f"{self.alive_tokens:,} are kept at once{', on the host' if self.on_host else ''}"
            f"{f', with {self.states:,} states' if self.states else ''}"
            f"{'; their forward runs twice' if self.again else ''}; at most {self.peak:,.0f} "
            "tokens' memory"
        )


def joined(of_ranks: Sequence[TrunkStats]) -> TrunkStats:
    """Joins the stats of all ranks: sums of trunks and tokens, maxima of what is held at once."""
    return TrunkStats(
        sum(stats.trunks for stats in of_ranks),
        sum(stats.kept_tokens for stats in of_ranks),
        max(stats.alive_tokens for stats in of_ranks),
        max(stats.peak for stats in of_ranks),
        any(stats.again for stats in of_ranks),
        any(stats.on_host for stats in of_ranks),
        max(stats.states for stats in of_ranks),
    )


class Span(NamedTuple):
    """The life of a part, in micro-batches."""

    # the micro-batch before which it runs forward
    first: int
    # the micro-batch after which it runs its backward
    last: int
    # whether others import from it; otherwise it is the part of micro-batch `first`
    is_trunk: bool


class Trunks:
    """A forest in micro-batches and the trunks that they share. Made by `plan_trunks`.

    Attributes:
        sequences: int64 per micro-batch, the sequences of `forest` that it scores.
        spans: one per part, in the order of forwards.
    """

    def __init__(
        self,
        forest: PrefixForest,
        owner: np.ndarray,
        spans: list[Span],
        sequences: list[np.ndarray],
        stats: TrunkStats,
    ) -> None:
        self.forest = forest
        self.sequences = sequences
        self.spans = spans
        self.stats = stats
        self._owner = owner
        self._steps: dict[torch.device, Steps] = {}

    def on(self, device: torch.device) -> Steps:
        """The parts on a device, trunks and micro-batches in the order of forwards; kept."""
        if device not in self._steps:
            packed: PackedForest = pack(self.forest).to(device)
            self._steps[device] = Steps(packed, self._owner, len(self.spans))
        return self._steps[device]

    def costs(self, cost_model: CostModel) -> np.ndarray:
        """FLOPs of an update, float64 [micro-batches], each with the trunks that begin with it."""
        border = np.flatnonzero(np.diff(self._owner, prepend=-1, append=-1))
        flops = run_flops(pack(self.forest), border, cost_model)
        first = np.array([span.first for span in self.spans])[self._owner[border[:-1]]]
        return np.bincount(first, flops, len(self.sequences))

    def exported_states(self) -> np.ndarray:
        """Counts the own tokens of each part that others continue, int64 [parts]."""
        return _states(self.forest, self._owner, len(self.spans))

    def extra_tokens(self, max_tokens: int, has_backward: bool) -> int:
        """The cost of trunks over one pass over every token, in tokens of an update."""
        # a small trunk leaves a GPU idle: it takes as long as a part of the budget does
        sizes = np.bincount(self._owner, minlength=len(self.spans))
        sizes = sizes[[span.is_trunk for span in self.spans]]
        least = int(_LEAST * max_tokens)
        extra = int(np.maximum(least - sizes, 0).sum())
        if self.stats.again and has_backward:
            # a second forward
            extra += int(np.maximum(least, sizes).sum()) // 3
        return extra

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_steps": {}}

    def __repr__(self) -> str:
        return (
            f"Trunks({len(self.sequences)} micro-batches, {self.stats.trunks} trunks of "
            f"{self.stats.kept_tokens} tokens)"
        )


def plan_trunks(
    forest: PrefixForest,
    max_tokens: int,
    import_cost: ImportCost | None = None,
    micro_batches: Sequence[np.ndarray] | None = None,
) -> Trunks:
    """Divides a rank's forest into micro-batches and trunks, and computes every token once.

    Where trunks do not fit with their graphs, they keep none and their forward runs twice. Where
    their exports do not fit either, these wait on the host. Otherwise a ForestError names the least
    budget that works.

    Args:
        max_tokens: what may be held at once, in own tokens. A token of a kept trunk counts
            `import_cost.trunk_weight`. A sequence may be longer.
        micro_batches: the sequences of each micro-batch, in the order in which they run; each
            sequence in one. Default: as few as fit.
    """
    cost = ImportCost() if import_cost is None else import_cost
    if micro_batches is not None:
        micro_batches = [np.sort(members) for members in micro_batches]
    ways = [cost, replace(cost, graph_bytes=0), replace(cost, graph_bytes=0, on_host=True)]

    def divided(budget: int, way: ImportCost) -> Trunks | None:
        weights = _weights(way)
        batches = micro_batches or _micro_batches(forest, budget, weights)
        return _divided(forest, batches, budget, weights)

    def planned(budget: int) -> tuple[Trunks, ImportCost] | None:
        for way in ways:
            if (planned_trunks := divided(budget, way)) is not None:
                return planned_trunks, way
        return None

    if (best := planned(max_tokens)) is None:
        low, high = max_tokens, 2 * max_tokens
        while planned(high) is None:
            low, high = high, 2 * high
        while high - low > max(1, low // 256):
            middle = (low + high) // 2
            low, high = (low, middle) if planned(middle) else (middle, high)
        raise ForestError(
            f"max_tokens {max_tokens} is too little for the trunks of this forest, also where they "
            "keep no graph and what they export waits on the host: the least max_tokens that works "
            f"is about {high}; or compute it in steps (reuse=True)"
        )
    planned_trunks, way = best
    # micro-batches as even as neither more of them nor more trunks make them
    low, high = max_tokens // 2, max_tokens
    for _ in range(_EVENINGS if micro_batches is None and len(planned_trunks.sequences) > 1 else 0):
        middle = (low + high) // 2
        other = divided(middle, way) if middle else None
        if other is not None and len(other.spans) <= len(planned_trunks.spans):
            planned_trunks, high = other, middle
        else:
            low = middle
    if planned_trunks.stats.trunks:
        planned_trunks.stats = replace(
            planned_trunks.stats, again=way is not cost, on_host=way.on_host
        )
    return planned_trunks


class _Weights(NamedTuple):
    """Memory in own tokens: a kept trunk's token, its returned gradients, states after a token."""

    trunk: float
    returned: float
    state: float


def _weights(cost: ImportCost) -> _Weights:
    return _Weights(cost.trunk_weight, cost.returned_weight, cost.state_weight)


def _divided(
    forest: PrefixForest, sequences: Sequence[np.ndarray], max_tokens: int, weights: _Weights
) -> Trunks | None:
    """Makes the trunks of micro-batches within a budget; None where a path does not fit."""
    count = len(sequences)
    # the first and the last micro-batch that holds each node
    first = np.full(forest.num_nodes, count, np.int64)
    last = np.full(forest.num_nodes, -1, np.int64)
    for at, members in enumerate(sequences):
        ends = forest.sequence_node[members]
        first[ends] = np.minimum(first[ends], at)
        last[ends] = at
    above = forest.node_parent
    for node in range(forest.num_nodes - 1, -1, -1):
        if (parent := above[node]) >= 0:
            first[parent] = min(first[parent], first[node])
            last[parent] = max(last[parent], last[node])
    parts = _parts(first, last)
    length = forest.node_length.astype(np.int64)
    sizes = np.bincount(parts.of_node, length, len(parts.spans)).astype(np.int64)
    # larger pieces of trunks are fewer; smaller ones fit next to more others
    for candidate, share in itertools.product(
        (_merged(parts, sizes, above, max_tokens, weights), parts), (1.0, 0.5, 0.25)
    ):
        pieces = _pieces(candidate, forest, max_tokens, weights, share)
        if pieces is None:
            continue
        owner, spans = pieces
        sizes = np.bincount(owner, minlength=len(spans))
        states = _states(forest, owner, len(spans))
        held = _Held(spans, sizes, count, weights, states)
        if held.peak <= max_tokens:
            break
    else:
        return None
    trunk = np.array([span.is_trunk for span in spans])
    stats = TrunkStats(
        int(trunk.sum()),
        int(sizes[trunk].sum()),
        int(held.alive.max()),
        float(held.peak),
        states=int(held.states.max()) if weights.state else 0,
    )
    return Trunks(forest, owner, spans, list(sequences), stats)


def _micro_batches(forest: PrefixForest, max_tokens: int, weights: _Weights) -> list[np.ndarray]:
    """Cuts the ends into runs of sequences, as long as fit with the trunks that they share."""
    ends, end_of = np.unique(forest.sequence_node, return_inverse=True)
    depth = (forest.node_position + forest.node_length).astype(np.int64)[ends].tolist()
    # tokens of the path that each end shares with the one before it, and their memory
    shared, held = [0] * (len(ends) + 1), [0.0] * (len(ends) + 1)
    parents, deep = forest.node_parent.tolist(), forest.node_level
    reach = (forest.node_position + forest.node_length).tolist()
    for k in range(1, len(ends)):
        a, b = int(ends[k - 1]), int(ends[k])
        while a != b:
            if deep[a] > deep[b] or (deep[a] == deep[b] and a > b):
                a = parents[a]
            else:
                b = parents[b]
            if a < 0 or b < 0:
                break
        if a == b:
            shared[k] = reach[a]
            # a state after each of its nodes
            held[k] = weights.trunk * reach[a] + weights.state * (int(deep[a]) + 1)
    border = [0]
    while (start := border[-1]) < len(ends):
        best, tokens = start + 1, depth[start]
        least, held_by_all = shared[start], held[start]
        for stop in range(start + 1, len(ends) + 1):
            if stop > start + 1:
                tokens += depth[stop - 1] - shared[stop - 1]
            least, held_by_all = min(least, shared[stop]), min(held_by_all, held[stop])
            kept = shared[start] + shared[stop] - least
            if tokens - kept + held[start] + held[stop] - held_by_all <= max_tokens:
                best = stop
            elif min(1.0, weights.trunk) * tokens > max_tokens:
                break
        border.append(best)
    of_sequence = np.searchsorted(border, end_of, side="right") - 1
    by_batch = np.argsort(of_sequence, kind="stable")
    return np.split(by_batch, np.cumsum(np.bincount(of_sequence))[:-1])


class _Parts(NamedTuple):
    """The part of each node, int64 [N], and the parts in the order of forwards."""

    of_node: np.ndarray
    spans: list[Span]


def _parts(first: np.ndarray, last: np.ndarray) -> _Parts:
    """Makes a part for each two micro-batches between which nodes are held."""
    # trunks come before their importers: the longer life first
    pairs, of_node = np.unique(np.stack([first, -last], 1), axis=0, return_inverse=True)
    spans = [Span(int(f), int(-n), int(f) != int(-n)) for f, n in pairs]
    return _Parts(of_node.reshape(-1), spans)


class _Held:
    """The memory that is held while parts run, in own tokens.

    Attributes:
        alive: int64 [micro-batches], trunk tokens that are kept while each runs.
        states: int64 [micro-batches], the states after tokens of trunks, likewise.
        of_batch: float64 [micro-batches], the memory held while each runs.
        peak: the most that is held at once, also while trunks run.
    """

    def __init__(
        self,
        spans: list[Span],
        sizes: np.ndarray,
        count: int,
        weights: _Weights,
        states: np.ndarray | None = None,
    ) -> None:
        first, last = (np.array([span[at] for span in spans]) for at in (0, 1))
        is_trunk = np.array([span.is_trunk for span in spans])
        unshared, trunk_sizes = np.where(is_trunk, 0, sizes), np.where(is_trunk, sizes, 0)
        exported = (
            np.zeros(len(spans), np.int64) if states is None else np.where(is_trunk, states, 0)
        )
        change = np.zeros((2, count + 1), np.int64)
        for of_kind, numbers in zip(change, (trunk_sizes, exported), strict=True):
            np.add.at(of_kind, first, numbers)
            np.add.at(of_kind, last + 1, -numbers)
        self.alive, self.states = np.cumsum(change, 1)[:, :-1]
        holds = weights.trunk * trunk_sizes + weights.state * exported
        before = np.tri(len(spans), k=-1, dtype=bool)
        # in its forward: trunks before it; in its backward: trunks whose backward comes later
        forward = before & (first[:, None] <= last)
        ends = last[:, None]
        backward = (first <= ends) & ((last > ends) | (before & (last == ends)))
        beside = np.where(is_trunk, np.maximum(forward @ holds, backward @ holds), 0)
        running = trunk_sizes * (1 + weights.returned) + weights.state * exported + beside
        held = weights.trunk * self.alive + weights.state * self.states
        self.of_batch = np.bincount(first, unshared, count) + held
        self.peak = float(max(running.max(), self.of_batch.max()))


def _states(forest: PrefixForest, owner: np.ndarray, count: int) -> np.ndarray:
    """Counts the own tokens of each part that others continue, int64 [parts]."""
    before = np.arange(forest.num_tokens) - 1
    end = forest.node_start + forest.node_length - 1
    above = forest.node_parent
    before[forest.node_start] = np.where(above < 0, -1, end[above])
    exported = np.unique(before[(before >= 0) & (owner[before] != owner)])
    return np.bincount(owner[exported], minlength=count)


def _merged(
    parts: _Parts, sizes: np.ndarray, above: np.ndarray, max_tokens: int, weights: _Weights
) -> _Parts:
    """Merges small trunks into the trunks above them, where these then still fit."""
    of_node, spans, sizes = parts.of_node.copy(), list(parts.spans), sizes.copy()
    count = max(span.last for span in spans) + 1
    # the one part above all nodes of a part that begin in it; -1 where there are several
    parent = np.full(len(spans), -2)
    for node in range(len(of_node) - 1, -1, -1):
        part = of_node[node]
        over = of_node[above[node]] if above[node] >= 0 else -1
        if over != part:
            parent[part] = over if parent[part] in (-2, over) else -1
    known = _Held(spans, sizes, count, weights).of_batch
    for part in np.argsort(sizes, kind="stable").tolist():
        into = parent[part]
        if not spans[part].is_trunk or sizes[part] >= _FEW or into < 0:
            continue
        tried = sizes.copy()
        tried[into] += tried[part]
        tried[part] = 0
        # a trunk that is too large is cut later
        of_batch = _Held(spans, tried, count, weights).of_batch
        if (of_batch > np.maximum(max_tokens, known)).any():
            continue
        sizes, known = tried, of_batch
        of_node[of_node == part] = into
        parent[parent == part] = into
    kept = np.unique(of_node)
    return _Parts(np.searchsorted(kept, of_node), [spans[part] for part in kept.tolist()])


def _pieces(
    parts: _Parts, forest: PrefixForest, max_tokens: int, weights: _Weights, share: float
) -> tuple[np.ndarray, list[Span]] | None:
    """The owner of each token, and the parts, with those that do not fit cut into pieces."""
    # all pieces of a micro-batch but its last are trunks that it alone imports from; a piece of a
    # trunk fills at most `share` of its room
    of_token = np.repeat(parts.of_node, forest.node_length)
    ends_node = np.zeros(forest.num_tokens, bool)
    ends_node[forest.node_start + forest.node_length - 1] = True
    owner = np.empty(forest.num_tokens, np.int64)
    spans: list[Span] = []
    # memory of each part while it is kept
    holds: list[float] = []
    for part, span in enumerate(parts.spans):
        tokens = np.flatnonzero(of_token == part)
        while len(tokens):
            # later parts are checked once all is known
            alive = sum(
                held
                for before, held in zip(spans, holds, strict=True)
                if before.is_trunk and span.first <= before.last
            )
            room = max_tokens - alive
            # at most a state after each node and after the last token
            states = weights.state * (1 + np.cumsum(ends_node[tokens]))
            if not span.is_trunk and len(tokens) <= room:
                size, piece = len(tokens), span
            else:
                takes = (1 + weights.returned) * np.arange(1, len(tokens) + 1) + states
                size = int(np.searchsorted(takes, share * room, side="right"))
                piece = Span(span.first, span.last, True)
            if size < 1:
                return None
            owner[tokens[:size]] = len(spans)
            spans.append(piece)
            holds.append(weights.trunk * size + states[size - 1])
            tokens = tokens[size:]
    return owner, spans
