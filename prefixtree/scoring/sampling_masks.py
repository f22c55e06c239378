"""Sampling masks: log p and entropies over the tokens that a sampler kept, as by top-k or top-p.

A measure gathers the logits of a set and normalises over them. Its columns take the place of log p
and the entropy where an edge has a set.

Legend: R replicated tokens, N token ids of all sets, U scored edges, r of them in a block, V
vocabulary, C columns of the caller's measure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from prefixtree._numbers import entries, integers
from prefixtree.errors import ForestError
from prefixtree.kernels.lm_head.eager import LEAST
from prefixtree.kernels.lm_head.logprobs import ScoreOptions
from prefixtree.kernels.lm_head.measures import Measure, MeasuredEdges
from prefixtree.packing.copies import move
from prefixtree.packing.layout import PackedForest
from prefixtree.packing.per_sequence import per_sequence

# above every token id
_END = 1 << 31
_FORMS = "a list of token ids per token, or token_ids with offsets or counts"


@dataclass(frozen=True)
class KeptSets:
    """Sets of token ids, one after another.

    Attributes:
        ids: int64 [N], ascending within a set.
        counts: int64, the size of each set; 0 for the whole vocabulary.
    """

    ids: np.ndarray
    counts: np.ndarray

    def take(self, which: np.ndarray) -> KeptSets:
        """Takes some of the sets, int64 [*], in this order."""
        counts = self.counts[which]
        ends = np.cumsum(counts)
        begins = (np.cumsum(self.counts) - self.counts)[which]
        place = np.repeat(begins - (ends - counts), counts) + np.arange(counts.sum())
        return KeptSets(self.ids[place], counts)

    def numbers(self, index: np.ndarray) -> np.ndarray:
        """Numbers the different sets of each packed token from 0, int64 [r].

        Args:
            index: int [r], the packed token of each set.
        """
        number = np.zeros(len(index), np.int64)
        ends = np.cumsum(self.counts)
        found: dict[int, dict[bytes, int]] = {}
        # most tokens have one copy that is scored
        for at in np.flatnonzero(np.bincount(index)[index] > 1).tolist():
            of_token = found.setdefault(int(index[at]), {})
            ids = self.ids[ends[at] - self.counts[at] : ends[at]].tobytes()
            number[at] = of_token.setdefault(ids, len(of_token))
        return number


def read_sets(
    packed: PackedForest, sampling_masks: Sequence[Any], selected: np.ndarray | None
) -> KeptSets:
    """Reads the sets of all replicated tokens, [R], which are empty where nothing is scored.

    Args:
        sampling_masks: as in `sequence_logprobs`.
        selected: the loss mask, uint8 [R]. Default: every token is scored.
    """
    lengths = packed.forest.sequence_lengths
    begins = np.cumsum(lengths) - lengths
    is_scored = np.ones(lengths.sum(), bool) if selected is None else selected != 0
    counts, ids = np.zeros(len(is_scored), np.int64), [np.zeros(0, np.int64)]
    for i, entry in enumerate(per_sequence("sampling_masks", sampling_masks, len(lengths))):
        tokens = slice(begins[i], begins[i] + lengths[i])
        its_ids, counts[tokens] = sets_of(f"sampling_masks[{i}]", entry, is_scored[tokens])
        ids.append(its_ids)
    # a first token is not scored either
    is_scored[begins] = False
    scored_ids = np.concatenate(ids)[np.repeat(is_scored, counts)]
    return _checked(packed, scored_ids, np.where(is_scored, counts, 0), begins)


def sets_of(name: str, entry: Any, is_scored: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Reads the sets of one sequence: ids, and how many each token has, int64 [n].

    Args:
        name: of the entry, for errors.
        entry: as in `sequence_logprobs`; None without sets.
        is_scored: bool [n].

    Raises:
        ForestError: another number of sets than of tokens, or of scored tokens.
    """
    counts = np.zeros(len(is_scored), np.int64)
    if entry is None:
        return np.zeros(0, np.int64), counts
    ids, given = _read(name, entry)
    scored = np.flatnonzero(is_scored)
    if len(given) not in (len(scored), len(counts)):
        raise ForestError(
            f"{name} must hold one set per token of the sequence ({len(counts)}) or per token that "
            f"loss_mask scores ({len(scored)}), got {len(given)}"
        )
    counts[scored if len(given) == len(scored) else slice(None)] = given
    return ids, counts


def _read(name: str, entry: Any) -> tuple[np.ndarray, np.ndarray]:
    """Reads ids, and the size of each set."""

    def field(*names: str) -> Any:
        get = entry.get if isinstance(entry, Mapping) else lambda name: getattr(entry, name, None)
        return next((get(name) for name in names if get(name) is not None), None)

    token_ids, offsets, counts = field("token_ids", "ids"), field("offsets"), field("counts")
    if token_ids is None:
        rows = entries(name, entry, _FORMS)
        sets = [integers(f"{name}[{t}]", () if row is None else row) for t, row in enumerate(rows)]
        counts = np.array([len(ids) for ids in sets], np.int64)
        return np.concatenate([np.zeros(0, np.int64), *sets]), counts
    ids = integers(f"{name}.token_ids", token_ids)
    if offsets is not None:
        borders = integers(f"{name}.offsets", offsets)
        sizes = np.diff(borders)
        fits = borders[:1].tolist() == [0] and borders[-1] == len(ids)
    else:
        sizes = integers(f"{name}.counts", () if counts is None else counts)
        fits = sizes.sum() == len(ids)
    if not fits or (sizes < 0).any():
        raise ForestError(
            f"{name} does not divide its {len(ids)} token ids among tokens: offsets go from 0 up "
            "to their number, and counts add up to it"
        )
    return ids, sizes


def _checked(
    packed: PackedForest, ids: np.ndarray, counts: np.ndarray, begins: np.ndarray
) -> KeptSets:
    """Sorts the ids of each set; refuses a set without the token that was sampled from it."""
    tokens = packed.forest.tokens
    has_set = np.flatnonzero(counts)
    if not len(has_set) or tokens is None:
        return KeptSets(ids, counts)
    sampled = tokens[packed.copy_index(np.arange(len(begins)))[0][has_set]].astype(np.int64)
    owner = np.repeat(np.arange(len(counts)), counts)

    def refuse(is_wrong: np.ndarray, which: np.ndarray, problem: str) -> None:
        for first in which[is_wrong][:1]:
            i = int(np.searchsorted(begins, first, side="right")) - 1
            raise ForestError(
                f"sampling_masks[{i}], for token {first - begins[i]} of the sequence, {problem}"
            )

    refuse((ids < 0) | (ids >= _END), owner, "holds a number that is no token id")
    keys = np.sort(owner * _END + ids)
    refuse(keys[1:] == keys[:-1], keys[1:] // _END, "holds a token id twice")
    wanted = has_set * _END + sampled
    refuse(
        keys[np.searchsorted(keys, wanted).clip(max=len(keys) - 1)] != wanted,
        has_set,
        "does not hold that token, so it was not sampled from this set: give the sets of this "
        "sequence, from its first token on or from the first that loss_mask scores, as the sampler "
        "had them (a set that was cut to a number of ids is none)",
    )
    return KeptSets(keys % _END, counts)


class OverSets:
    """A measure [r, 3 + C]: log p and entropy over sets, whether there is one, and the caller's.

    Args:
        sets: of the scored edges, [U].
        measure: the caller's measure, or none.
    """

    def __init__(self, sets: KeptSets, measure: Measure | None, device: torch.device) -> None:
        self.measure = measure
        ends = np.cumsum(sets.counts)
        both = np.stack([ends - sets.counts, sets.counts])
        self._begins, self._counts = move(torch.from_numpy(both), device)
        # an edge without a set reads one id too, so that nothing is infinite
        self._ids = move(torch.from_numpy(np.append(sets.ids, 0)), device)
        self._columns = torch.arange(max(1, int(sets.counts.max(initial=0))), device=device)

    def __call__(self, logits: torch.Tensor, edges: MeasuredEdges) -> torch.Tensor:
        counts = self._counts[edges.scored_edge]
        place = self._begins[edges.scored_edge][:, None] + self._columns
        is_kept = self._columns < counts.clamp(min=1)[:, None]
        ids = self._ids[place.where(is_kept, -1)]
        # not less logsumexp: between large logits that cancels
        of_kept = logits.gather(1, ids).masked_fill(~is_kept, -torch.inf).log_softmax(1)
        is_token = is_kept & (ids == edges.token[:, None])
        log_p = of_kept.masked_fill(~is_token, 0).sum(1, keepdim=True)
        entropy = -(of_kept.exp() * of_kept.clamp(min=LEAST)).sum(1, keepdim=True)
        columns = [log_p, entropy, (counts > 0).to(log_p)[:, None]]
        if self.measure is not None:
            columns.append(self.measure(logits, edges))
        return torch.cat(columns, 1)

    def settled(
        self, scores: torch.Tensor, options: ScoreOptions
    ) -> tuple[torch.Tensor, ScoreOptions]:
        """Puts scores [*, columns] over sets in their place; gives the caller's options back."""
        at = options.columns
        has_set = scores[:, at + 2 : at + 3] > 0
        over_sets = scores[:, at : at + options.with_gradients]
        over_all = scores[:, : options.with_gradients]
        columns = [
            torch.where(has_set, over_sets, over_all),
            scores[:, options.with_gradients : at],
            scores[:, at + 3 :],
        ]
        return torch.cat(columns, 1), replace(options, measure=self.measure)


def over_sets(options: ScoreOptions, sets: KeptSets | None, device: torch.device) -> ScoreOptions:
    """Makes options that score over the sets of the scored edges, if they have any."""
    if sets is None:
        return options
    return replace(options, measure=OverSets(sets, options.measure, device))
