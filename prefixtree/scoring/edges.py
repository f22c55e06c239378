"""The scored edges of a packed forest, and the copy of their scores to its sequences.

The number of an edge has a meaning in one forest and for one loss mask alone. Another call (a
teacher's rows, values at packed tokens, an earlier measure) finds an edge by its path and its
temperature (`ForestEdges`).

Legend: S sequences, T packed tokens, R replicated tokens, U scored edges, one per temperature and
set of kept tokens, P predictors, d hidden size, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import torch

from prefixtree import loops
from prefixtree._numbers import numbers
from prefixtree.errors import ForestError
from prefixtree.forest import PrefixForest
from prefixtree.kernels.lm_head.logprobs import ScoreOptions
from prefixtree.kernels.lm_head.measures import MeasuredEdges, source_of
from prefixtree.kernels.operators import new_library, register, uncompiled
from prefixtree.packing.copies import GatherIndex, gather, lasting, move
from prefixtree.packing.layout import PackedForest
from prefixtree.packing.per_sequence import check_lengths, per_sequence
from prefixtree.packing.same_paths import described, find_paths
from prefixtree.scoring.sampling_masks import KeptSets, OverSets, read_sets

# ---- edges in their forest, by which other calls find them ---------------------------------------

MEND = (
    "give the forest that is scored, or one that holds all its sequences (of a plan "
    "pack(plan.forest))"
)


@dataclass(frozen=True, eq=False)
class ForestEdges:
    """The (edge, temperature) pairs that a call scores, on the host; one with several sets of kept
    tokens stands there once per set.

    Attributes:
        predictor, token: int64 [U], packed tokens.
        temperature: float32 [U].
        handle: int64 [], the number of this object in the operator `rows_in`.
    """

    forest: PrefixForest
    predictor: np.ndarray
    token: np.ndarray
    temperature: np.ndarray
    handle: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "handle", make_handle(self))

    def __reduce__(self) -> tuple[Any, ...]:
        # through the constructor: a handle means nothing in another process
        return type(self), (self.forest, self.predictor, self.token, self.temperature)

    def tokens_in(self, packed: PackedForest, device: torch.device) -> torch.Tensor:
        """Finds the tokens that the edges score in another packed forest: int64 [U] on a device.

        Raises:
            ForestError: an edge that the forest lacks, or holds more than once.
        """
        if not isinstance(packed, PackedForest):
            raise TypeError(f"tokens_in takes a packed forest, got {type(packed).__name__}")
        other = packed.forest
        return self.kept(other, device, lambda: self._tokens_in(other))

    def rows_of(self, other: ForestEdges, device: torch.device) -> torch.Tensor:
        """Finds the numbers of these pairs among those of another call: int64 [U] on a device.

        Raises:
            ForestError: a pair that the other call lacks. ValueError: one at another temperature.
        """
        return self.kept(other, device, lambda: self._rows_of(other))

    def _tokens_in(self, other: PrefixForest) -> np.ndarray:
        paths = find_paths(self.forest, other)
        at = paths.at[self.token]
        self.refuse(at < 0, f"are not in the forest that they are looked up in; {MEND}")
        self.refuse(
            paths.is_one_of_several[self.token],
            "are in the forest that they are looked up in more than once (namespaces, routes, "
            "from_groups), and which is meant nobody knows; give the forest that is scored",
        )
        return at

    def _rows_of(self, other: ForestEdges) -> np.ndarray:
        token = self._tokens_in(other.forest)
        self.refuse(
            ~np.isin(token, other.token),
            "were not measured in the call whose measured_edges are read; measure there with the "
            "same loss_mask, or without one",
        )
        temperatures, number = np.unique(other.temperature, return_inverse=True)
        most, count = max(len(temperatures) - 1, 0), other.forest.num_tokens
        sought = np.searchsorted(temperatures, self.temperature).clip(max=most) * count + token
        keys = number * count + other.token
        # those of several sets are measured alike
        order = np.argsort(keys, kind="stable")
        rows = order[np.searchsorted(keys, sought, sorter=order).clip(max=max(len(keys) - 1, 0))]
        is_same = (keys[rows] == sought) & (other.temperature[rows] == self.temperature)
        for one in np.flatnonzero(~is_same)[:1]:
            raise ValueError(
                f"{described(self.forest, int(self.token[one]))} is scored at temperature "
                f"{self.temperature[one]:g}, and the call whose measured_edges are read measured "
                "it at others: give both calls the same temperature"
            )
        return rows

    def refuse(self, which: np.ndarray, problem: str) -> None:
        """Raises a ForestError if an edge of bool [U] `which` is True.

        Args:
            problem: a verb and the mend, for the message.
        """
        for first in np.flatnonzero(which)[:1]:
            raise ForestError(
                f"{which.sum()} of {len(which)} scored edges (the first: "
                f"{described(self.forest, int(self.token[first]))}) {problem}"
            )

    @lasting
    def kept(
        self, other: Any, device: torch.device, find: Callable[[], np.ndarray]
    ) -> torch.Tensor:
        """Moves the result of `find` for these edges and another object to a device, once."""
        of_these = _found.setdefault(self, WeakKeyDictionary())
        of_both: dict[torch.device, torch.Tensor] = of_these.setdefault(other, {})
        if device not in of_both:
            of_both[device] = move(torch.from_numpy(find()), device)
        return of_both[device]


# look-ups already made, by the edges and by the object they were looked up in
_found: WeakKeyDictionary[ForestEdges, WeakKeyDictionary[Any, Any]] = WeakKeyDictionary()


# ---- in compiled code ----------------------------------------------------------------------------

# A compiled graph holds no look-up on the host: it calls an operator that gets objects as numbers
_known: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = count()


@lasting
def make_handle(this: Any) -> torch.Tensor:
    """Makes an int64 [] on the CPU that stands for a live object in `rows_in`."""
    number = next(_numbers)
    _known[number] = this
    return torch.tensor(number)


def _rows_in(edges: torch.Tensor, other: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    of_other = _known[int(other)]
    rows: torch.Tensor = of_other.rows_of(_known[int(edges)], which.device)[which]
    return rows


_edges_library = new_library("_edges_library")
#: (handle of `ForestEdges`, handle of an object, int64 [r]) -> int64 [r]: those rows of what the
#: object's `rows_of(edges, device)` gives for all edges, int64 [U]
rows_in = register(
    _edges_library,
    "edge_rows_in",
    "(Tensor edges, Tensor other, Tensor which) -> Tensor",
    _rows_in,
    lambda edges, other, which: torch.empty_like(which),
)


# ---- edges that are scored -----------------------------------------------------------------------

# logits up to 3e8 divided by it are finite in float32
_LEAST_TEMPERATURE = 1e-30


@dataclass(frozen=True)
class SequenceScores:
    """The scores of every sequence, in input order.

    Attributes:
        logprobs: one float32 tensor [n - 1] per sequence, on the model's device: the natural
            log-probabilities of tokens 1 .. n - 1; 0 where the loss mask is 0. They are float64
            where a Megatron model computes in float64.
        entropy: one float32 tensor [n - 1] per sequence, in nats: the entropies of the
            distributions of those tokens; 0 where the loss mask is 0. None without
            `return_entropy`.
        statistics: one entry per name of `return_statistics`: one float32 tensor [n - 1] per
            sequence, without gradients; 0 where the loss mask is 0.
        aux_loss: float32 [], differentiable: the load-balancing loss of a mixture of experts, equal
            to that of transformers' forward over one padded batch of all sequences with its
            attention_mask. It is not yet multiplied by `config.router_aux_loss_coef`. None unless
            it was asked for.
        measured: one float32 tensor [n - 1, C] per sequence: the values of `measure` at those
            tokens, with gradients; 0 where the loss mask is 0. None without a measure.
        measured_edges: float32 [U, C], the same values once per scored edge, without gradients. Row
            i belongs to `MeasuredEdges.scored_edge` i of this call; `of_edges` finds rows for
            another call. None without a measure.
        router_logits: [T, E] per layer of experts, differentiable, the logits that gave `aux_loss`,
            for losses of your own: weigh each packed token by `packed.multiplicity`. Empty without
            `aux_loss`.
        source: the edges of `measured_edges` in their forest, which `of_edges` reads.
        mtp: one list as `logprobs` per layer of `mtp`: log-probabilities of the same tokens, which
            layer k = 1, 2, .. predicts from the model's hidden states k + 1 tokens before; 0 where
            the loss mask is 0, and at tokens 1 .. k, which have none. None without `mtp`.
    """

    logprobs: list[torch.Tensor]
    entropy: list[torch.Tensor] | None
    statistics: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    aux_loss: torch.Tensor | None = None
    router_logits: tuple[torch.Tensor, ...] = ()
    measured: list[torch.Tensor] | None = None
    measured_edges: torch.Tensor | None = None
    source: Any = field(default=None, repr=False)
    mtp: list[list[torch.Tensor]] | None = None

    @uncompiled
    def of_edges(self, edges: MeasuredEdges) -> torch.Tensor:
        """Finds the rows of `measured_edges` for the edges that another call's measure gets.

        Args:
            edges: edges of a call over the same forest, or over another forest that holds them.

        Returns:
            [r, C], without gradients.

        Raises:
            ForestError: an edge that was not measured here.
            ValueError: no `measured_edges`, an edge at another temperature, or edges that were made
                by hand.
        """
        if self.measured_edges is None or self.source is None:
            raise ValueError(
                "these scores have no measured_edges: give sequence_logprobs measure= (kept_trunks "
                "has none)"
            )
        rows = source_of(edges).rows_of(self.source, edges.edge.device)
        return self.measured_edges[rows[edges.scored_edge]]


@dataclass(frozen=True)
class ScoredUnits:
    """The edges or tokens that get one row each from a model, on the host.

    Attributes:
        predictor: int64 [U], the packed token whose hidden state gives each row.
        find_copies: makes `of_copies`, which is first needed after a forward was launched.
        lengths: the number of copies in each sequence.
    """

    predictor: np.ndarray
    find_copies: Callable[[], np.ndarray]
    lengths: list[int]

    @cached_property
    def of_copies(self) -> np.ndarray:
        """The unit of each copy, int32, sequence after sequence; -1 where it is not scored."""
        return self.find_copies()

    @property
    def count(self) -> int:
        """The number U of units."""
        return len(self.predictor)


@dataclass(frozen=True)
class ScoredEdges(ScoredUnits):
    """The distinct (edge, temperature, set) triples, on the host; here "edge" is such a triple.

    The copies of a sequence are its tokens but the first, so that `of_copies` is [R - S] and a
    length n - 1.

    Attributes:
        token: int64 [U], the packed token of each edge.
        temperature: float32 [U].
        sets: the tokens over which each edge is scored, [U]. None: the whole vocabulary.
    """

    token: np.ndarray
    temperature: np.ndarray
    forest: PrefixForest
    sets: KeptSets | None = None

    @cached_property
    def source(self) -> ForestEdges:
        """Gives the pairs in a form that other forests can look up."""
        return ForestEdges(self.forest, self.predictor, self.token, self.temperature)


@dataclass(frozen=True)
class DeviceEdges:
    """The distinct (edge, temperature, set) triples that an lm_head scores, on the device.

    Attributes:
        predictors: int64 [P], the rows of the model's input whose hidden states the lm_head needs,
            ascending.
        to_predictors: gathers hidden states [P, d] to one row per edge [U, d].
        target: int64 [U] token ids. temperature: float32 [U].
        which: int64 [U], the numbers of these edges in `found`; None for all.
    """

    predictors: torch.Tensor
    to_predictors: GatherIndex
    target: torch.Tensor
    temperature: torch.Tensor
    found: ScoredEdges
    which: np.ndarray | None

    def numbers(self) -> tuple[torch.Tensor, torch.Tensor, ForestEdges]:
        """Numbers edges for a measure.

        Returns:
            int64 [U] in `packed.edges(loss_mask)`; int64 [U] in `found`; and the source of `found`.
        """
        found = self.found
        which = np.arange(found.count) if self.which is None else self.which
        edge = loops.sequence_copies.distinct(found.token)[1][which]
        both = move(torch.from_numpy(np.stack([edge, which])), self.target.device)
        return both[0], both[1], found.source


def find_edges(
    packed: PackedForest,
    temperature: float | Sequence[Any],
    loss_mask: Sequence[Any] | None,
    sampling_masks: Sequence[Any] | None = None,
) -> ScoredEdges:
    """Finds what is scored; arguments and errors as in `sequence_logprobs`."""
    lengths = packed.forest.sequence_lengths
    selected = None if loss_mask is None else packed.flat_selection(loss_mask)
    per_token = _per_token(temperature, lengths)
    if per_token is None:
        values, number = np.unique(_temperatures(temperature, len(lengths)), return_inverse=True)
        if len(values) == 1 and sampling_masks is None:
            return _of_one_temperature(packed, selected, values.astype(np.float32))
    ends = np.cumsum(lengths)
    index, counts = packed.copy_index(np.arange(len(lengths)), selected)
    # their places among all replicated tokens
    place = np.arange(ends[-1]) if selected is None else np.flatnonzero(selected)
    predictor = packed.mask.host.predictor
    has_edge = predictor[index] >= 0
    if per_token is None:
        number = np.repeat(number, counts)[has_edge]
    else:
        values, number = _unique_of_runs(per_token[place[has_edge]])
        _check_temperatures(values)
    sets, num_sets = None, 1
    if sampling_masks is not None:
        sets = read_sets(packed, sampling_masks, selected).take(place[has_edge])
        set_number = sets.numbers(index[has_edge])
        num_sets = 1 + int(set_number.max(initial=0))
        number = number * num_sets + set_number
    pairs = index[has_edge], number, packed.num_tokens, len(values) * num_sets
    token, number, edge = loops.sequence_copies.distinct_pairs(*pairs)
    if sets is not None:
        sets = sets.take(loops.sequence_copies.first_copy(edge, len(token)))
    edge_of_copy = np.full(ends[-1], -1, np.int32)
    edge_of_copy[place[has_edge]] = edge
    return ScoredEdges(
        predictor[token].astype(np.int64),
        lambda: np.delete(edge_of_copy, ends - lengths),
        (lengths - 1).tolist(),
        token,
        values[number // num_sets].astype(np.float32),
        packed.forest,
        sets,
    )


def _of_one_temperature(
    packed: PackedForest, selected: np.ndarray | None, temperature: np.ndarray
) -> ScoredEdges:
    """Finds the edges of one temperature, float32 [1], token by token; `selected` is uint8 [R]."""
    token, lengths = packed.scored_tokens(selected), packed.forest.sequence_lengths

    def find_copies() -> np.ndarray:
        edge = np.full(packed.num_tokens, -1, np.int32)
        edge[token] = np.arange(len(token))
        edge_of_copy = edge[packed.copy_index(np.arange(len(lengths)))[0]]
        if selected is not None:
            edge_of_copy[selected == 0] = -1
        return np.delete(edge_of_copy, np.cumsum(lengths) - lengths)

    return ScoredEdges(
        packed.mask.host.predictor[token].astype(np.int64),
        find_copies,
        (lengths - 1).tolist(),
        token,
        np.repeat(temperature, len(token)),
        packed.forest,
    )


def _unique_of_runs(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Computes np.unique(values, return_inverse=True) of [r], with one entry per run to sort."""
    begins = np.flatnonzero(np.append(True, values[1:] != values[:-1])[: len(values)])
    unique, number = np.unique(values[begins], return_inverse=True)
    return unique, np.repeat(number, np.diff(begins, append=len(values)))


def edges_on_device(
    packed: PackedForest, found: ScoredEdges, which: np.ndarray | None, rows: np.ndarray
) -> DeviceEdges:
    """Moves edges to the device, in two copies: the integers and the temperatures.

    Args:
        which: int64 [*], the edges to move. Default: all.
        rows: int64 [*], the row of the model's output that scores each of them.
    """
    device = packed.device
    token = found.token if which is None else found.token[which]
    temperature = found.temperature if which is None else found.temperature[which]
    predictors, row = loops.sequence_copies.distinct(rows)
    both = move(torch.from_numpy(np.concatenate([predictors, token])), device)
    predictor_ids, token_ids = both.split([len(predictors), len(token)])
    return DeviceEdges(
        predictors=predictor_ids,
        to_predictors=GatherIndex(row.astype(np.int32), len(predictors), device),
        target=packed.model_inputs()["input_ids"][0, token_ids],
        temperature=move(torch.from_numpy(temperature), device),
        found=found,
        which=which,
    )


def scores_of(
    scores: torch.Tensor,
    to_sequences: GatherIndex,
    lengths: list[int],
    options: ScoreOptions,
    order: Callable[[], np.ndarray] | None = None,
    found: ScoredEdges | None = None,
) -> SequenceScores:
    """Copies the scores of edges to the sequences that hold them.

    Args:
        scores: [U, columns], in the order that `to_sequences` reads.
        to_sequences: gathers [R - S] rows: every token of a sequence but the first.
        lengths: n - 1 of each sequence.
        options: what the columns hold.
        order: gives int64 [U], the row of each scored edge. Default: rows are in edge order.
    """
    if isinstance(options.measure, OverSets):
        scores, options = options.measure.settled(scores, options)
    columns = gather(scores, to_sequences).split(lengths)
    if scores.requires_grad:
        # made while a GPU has a forward to compute: it may be idle before the backward
        _ = to_sequences.copies
    others = {
        name: [c[:, at].detach() for c in columns]
        for at, name in enumerate(options.statistics, options.with_gradients)
    }
    entropy = [c[:, 1] for c in columns] if options.with_entropy else None
    result = SequenceScores([c[:, 0] for c in columns], entropy, others)
    if options.measure is None:
        return result
    of_edges = scores.detach()[:, options.columns :]
    return replace(
        result,
        source=None if found is None else found.source,
        measured=[c[:, options.columns :] for c in columns],
        measured_edges=of_edges
        if order is None
        else of_edges[move(torch.from_numpy(order()), scores.device)],
    )


def _per_token(temperature: Any, lengths: np.ndarray) -> np.ndarray | None:
    """Spreads temperatures over replicated tokens, float32 [R]; None if each sequence has one."""
    is_array = getattr(temperature, "ndim", 0) == 2
    if not is_array and not (
        isinstance(temperature, (list, tuple))
        and any(isinstance(t, (list, tuple)) or getattr(t, "ndim", 0) for t in temperature)
    ):
        return None
    listed = per_sequence("temperature", temperature, len(lengths))
    expected = "a number, or one number or one array [n] per sequence"
    arrays = [numbers(f"temperature[{i}]", t, expected, TypeError) for i, t in enumerate(listed)]
    # one number serves its whole sequence
    arrays = [np.full(n, t) if t.ndim == 0 else t for t, n in zip(arrays, lengths, strict=True)]
    check_lengths("temperature", [len(t) if t.ndim == 1 else -1 for t in arrays], lengths)
    with np.errstate(over="ignore"):
        return np.concatenate(arrays).astype(np.float32)


def _temperatures(temperature: float | Sequence[float], count: int) -> np.ndarray:
    with np.errstate(over="ignore"):
        # float32, in which the logits are divided
        expected = "a number, or one number or one array [n] per sequence"
        values = numbers("temperature", temperature, expected, TypeError).astype(np.float32)
    if values.ndim > 1 or (values.ndim == 1 and len(values) != count):
        raise ValueError(
            f"temperature must be one number, or one number or one array [n] per sequence "
            f"({count}), got shape {list(values.shape)}"
        )
    _check_temperatures(values.reshape(-1))
    return np.broadcast_to(values.astype(np.float64), count)


def _check_temperatures(values: np.ndarray) -> None:
    wrong = values[~(np.isfinite(values) & (values >= _LEAST_TEMPERATURE))]
    if len(wrong):
        raise ValueError(
            f"temperatures must be finite and above 0 (at least {_LEAST_TEMPERATURE}, or logits "
            f"divided by them overflow float32), got {wrong[0]:g}"
        )
