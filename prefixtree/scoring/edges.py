"""The scored edges of a packed forest, and the copy of their scores to its sequences.

Legend: S sequences, T packed tokens, R replicated tokens, U scored edges, one per temperature and
set of kept tokens, P predictors, d hidden size, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from prefixtree import loops
from prefixtree._numbers import numbers
from prefixtree.forest import PrefixForest
from prefixtree.kernels.lm_head.logprobs import ScoreOptions
from prefixtree.kernels.lm_head.measures import MeasuredEdges, source_of
from prefixtree.kernels.operators import uncompiled
from prefixtree.packing.copies import GatherIndex, gather, move
from prefixtree.packing.layout import PackedForest
from prefixtree.packing.per_sequence import check_lengths, per_sequence
from prefixtree.scoring.forest_edges import ForestEdges
from prefixtree.scoring.sampling_masks import KeptSets, OverSets, read_sets

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
            the loss mask is 0, and at tokens 1 .. k, which have none. They are of the whole
            vocabulary, with `sampling_masks` too. None without `mtp`.
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
    if packed.forest.is_dummy:
        # `MicroBatch.take` has no temperature for it, nor a set for each of its tokens
        temperature, loss_mask, sampling_masks = 1.0, None, None
    found = _found(packed, temperature, loss_mask, sampling_masks)
    if packed.forest.routes is not None:
        _check_recorded(packed, found)
    return found


def _check_recorded(packed: PackedForest, found: ScoredEdges) -> None:
    """Refuses edges that depend on a token whose experts are not recorded."""
    routes = packed.forest.routes
    assert routes is not None
    missing = np.flatnonzero((routes < 0).any((1, 2)))
    # how many of them are on the path of each token
    change = np.zeros(len(routes) + 1, np.int64)
    change[missing] = 1
    np.subtract.at(change, packed.mask.host.subtree_end[missing], 1)
    depends = np.cumsum(change)[found.predictor] > 0
    if depends.any():
        found.source.refuse(
            depends,
            "depend on a token whose experts are not recorded; score with the loss_mask that "
            "from_sequences(routes=, loss_mask=) got, or with less of it",
        )


def _found(
    packed: PackedForest,
    temperature: float | Sequence[Any],
    loss_mask: Sequence[Any] | None,
    sampling_masks: Sequence[Any] | None,
) -> ScoredEdges:
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
