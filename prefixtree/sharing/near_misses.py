"""Near misses: forks whose branches then run the same tokens again.

A timestamp, a per-sample id, a re-tokenised turn or stripped thinking parts sequences early, and
their common tokens after it are computed once per branch. Each branch of each fork is
compared with the fork's heaviest branch and some others (see `realign`), so sequences that differ
in many places are found at the first of them.

Tokens behind another question are not to win, whatever they repeat. But the run that ends both
prompts is an instruction, and is shared if it stands before the question. Two sequences ask
another question if their groups differ, or, in a file without groups, their first user messages
by more than words with digits: times and ids.

A run of 24 equal tokens or more is found; shorter ones only next to others. Of a branch only its
heaviest chain is compared, so the tokens to win are a lower bound.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from prefixtree import loops
from prefixtree.forest import PrefixForest
from prefixtree.progress import Watch, unwatched
from prefixtree.rollouts import Rollouts
from prefixtree.sharing.differences import Difference, describe, first_user_text

_WITH_DIGITS = re.compile(r"\S*\d\S*")
# `realign`'s, which is imported where numba is needed
GIVEN, SAMPLED, QUESTION = range(3)

# other branches of a fork that a branch is compared with, besides the heaviest
_TRIES = 3
# chains between two steps of the progress bar
_STEP = 512


@dataclass(frozen=True)
class NearMiss:
    """One fork, and the pair of its branches that repeats most.

    Attributes:
        win: tokens that all its branches would share if this difference were gone and later ones
            that the policy did not sample; of questions, if the instruction after them stood
            before.
        alone: the same with this difference gone and no other.
        again: all tokens run again, sampled differences in between or not.
        branches: branches that repeat another.
        sequences: indices of two sequences, one through each branch of the pair.
    """

    win: int
    alone: int
    again: int
    branches: int
    sequences: tuple[int, int]
    difference: Difference


@dataclass(frozen=True)
class NearMisses:
    """The result of `find_near_misses`.

    Attributes:
        shown: the largest, those that can be won first, most tokens to win first.
        num_forks: forks with something to win, shown or not.
        win: tokens to win at forks that the policy did not sample.
        win_sampled: the same at forks that it did: what other samples would have shared.
        move: tokens of instructions that stand after their questions.
    """

    shown: list[NearMiss]
    num_forks: int
    win: int
    win_sampled: int
    move: int


@dataclass(frozen=True)
class _Chains:
    """The forest's chains [C], in preorder, for `realign`.

    begins and ends are packed tokens, position that of the first in its sequences; sequence is one
    that ends at the leaf. trunk, fork and previous are `realign.best_partners`'s; fork_id numbers
    the forks.
    """

    begins: np.ndarray
    ends: np.ndarray
    position: np.ndarray
    sequence: np.ndarray
    trunk: np.ndarray
    fork: np.ndarray
    fork_id: np.ndarray
    previous: np.ndarray


def find_near_misses(
    forest: PrefixForest,
    rollouts: Rollouts,
    *,
    tokenizer: Any = None,
    most: int = 10,
    watch: Watch = unwatched,
) -> NearMisses:
    """Finds the forks of `forest` after which the same tokens run again.

    Args:
        forest: of `rollouts.sequences`, siblings heaviest first.
        rollouts: loss masks tell sampled differences, groups which branches to compare first,
            messages give text.
        most: how many to describe.
    """
    assert forest.tokens is not None
    rollouts = with_shared_masks(forest, rollouts)
    groups = _questions(rollouts)
    again = _run_again(forest, rollouts.loss_masks, groups, np.array(rollouts.origins), watch)
    if again is None:
        return NearMisses([], 0, 0, 0, 0)
    chains, totals = again.chains, again.totals
    a_from = _meeting(chains, again.best, again.other)
    shown = []
    # the text may show that tokens sampled on both sides are one text, so the largest forks of
    # these are described too before the ranking is final
    ranks = np.lexsort((-totals[:, 0], again.cause != GIVEN))
    largest = np.argsort(-totals[:, 0], kind="stable")[:most]
    for f in dict.fromkeys([*ranks[:most].tolist(), *largest.tolist()]):
        b, a = again.best[f], again.other[f]
        blocks = loops.realign.align(
            forest.tokens, chains.begins, chains.ends, *again.index, a, a_from[f], b
        )
        lengths = int(blocks[0, 0] - a_from[f]), int(blocks[0, 1] - chains.begins[b])
        pair = int(chains.sequence[a]), int(chains.sequence[b])
        asks = again.cause[f] == QUESTION
        difference = describe(rollouts, pair, int(chains.position[b]), lengths, tokenizer, asks)
        win, alone, run_again = totals[f].tolist()
        shown.append(NearMiss(win, alone, run_again, int(again.branches[f]), pair, difference))
    shown.sort(key=lambda miss: (not miss.difference.can_be_won, -miss.win))
    return NearMisses(
        shown[:most],
        len(np.unique(again.fork)),
        *(int(totals[again.cause == cause, 0].sum()) for cause in (GIVEN, SAMPLED, QUESTION)),
    )


def tokens_to_win(forest: PrefixForest, loss_masks: Sequence[np.ndarray] | None = None) -> int:
    """Counts tokens of a batch that run again after forks that the policy did not sample.

    Args:
        loss_masks: bool [n] per sequence, true where the policy sampled. Default: it sampled none.
    """
    masks = None if loss_masks is None else _shared_masks(forest, loss_masks)
    every = np.arange(forest.num_sequences)
    again = _run_again(forest, masks, np.zeros_like(every), every, unwatched)
    return 0 if again is None else int(again.totals[again.cause == GIVEN, 0].sum())


def near_miss_facts(misses: NearMisses, rollouts: Rollouts) -> dict[str, Any]:
    """The near misses as plain data, ready for JSON; sequences by their ids and groups."""
    return {
        "forks": misses.num_forks,
        "policy_tokens_known": rollouts.loss_masks is not None,
        "tokens_to_win": misses.win,
        "tokens_to_win_at_sampled_forks": misses.win_sampled,
        "tokens_of_instructions_behind_questions": misses.move,
        "largest": [
            {
                "tokens_to_win": miss.win,
                "by_this_difference_alone": miss.alone,
                "run_again": miss.again,
                "branches": miss.branches,
                "rollouts": [rollouts.ids[i] for i in miss.sequences],
                "groups": None
                if rollouts.groups is None
                else [rollouts.groups[i] for i in miss.sequences],
                **miss.difference.facts(),
            }
            for miss in misses.shown
        ],
    }


def with_shared_masks(forest: PrefixForest, rollouts: Rollouts) -> Rollouts:
    """Makes loss masks true wherever the policy sampled the token, in this sequence or another.

    A trainer that steps turn by turn scores a turn in one sequence; in those that go on from there
    the turn is prompt. Chat templates may tell too (`Rollouts.sampled`).
    """
    if rollouts.loss_masks is None:
        return rollouts
    masks = [
        mask if sampled is None else mask | sampled
        for mask, sampled in zip(rollouts.loss_masks, rollouts.sampled, strict=True)
    ]
    return replace(rollouts, loss_masks=_shared_masks(forest, masks))


@dataclass(frozen=True)
class _Again:
    """Runs of tokens that come again, by forks [F] with something that does.

    A fork stands twice if questions part some branches and other things part some. `totals` is
    int64 [F, 3], the sums of `best_partners`; `best` and `other` are the pair of branches that
    repeats most, and `cause` parts it (`realign.GIVEN`, SAMPLED or QUESTION).
    """

    chains: _Chains
    index: Any
    fork: np.ndarray
    totals: np.ndarray
    branches: np.ndarray
    best: np.ndarray
    other: np.ndarray
    cause: np.ndarray


def _run_again(
    forest: PrefixForest,
    loss_masks: Sequence[np.ndarray] | None,
    groups: np.ndarray,
    origins: np.ndarray,
    watch: Watch,
) -> _Again | None:
    """Finds the runs that come again; None without any.

    groups, origins: int64 [S], numbers of a sequence's question and of its rollout.
    """
    assert forest.tokens is not None
    chains = _chains(forest, groups)
    sampled_before = _sampled_before(chains, forest.num_tokens, loss_masks)
    index = loops.realign.fingerprints(forest.tokens, chains.begins, chains.ends)
    count = len(chains.begins)
    partner, figures = np.full(count, -1), np.zeros((count, 4), np.int64)
    steps = range(0, count, _STEP)
    for first in watch(steps, "near misses", len(steps)):
        loops.realign.best_partners(
            first,
            min(first + _STEP, count),
            forest.tokens,
            sampled_before,
            chains.begins,
            chains.ends,
            origins[chains.sequence],
            groups[chains.sequence],
            chains.trunk,
            chains.fork,
            chains.previous,
            index,
            _TRIES,
            partner,
            figures,
        )
    repeating = np.flatnonzero(partner >= 0)
    if len(repeating) == 0:
        return None
    asks = figures[repeating, 3] == QUESTION
    forks, fork_of = np.unique(
        np.stack([chains.fork_id[repeating], asks]), axis=1, return_inverse=True
    )
    forks, fork_of = forks[0], fork_of.ravel()
    totals = np.zeros((len(forks), 3), np.int64)
    np.add.at(totals, fork_of, figures[repeating, :3])
    order = np.lexsort((-figures[repeating, 0], fork_of))
    best = repeating[order[np.searchsorted(fork_of[order], np.arange(len(forks)))]]
    cause, counts = figures[best, 3], np.bincount(fork_of)
    return _Again(chains, index, forks, totals, counts, best, partner[best], cause)


def _shared_masks(forest: PrefixForest, loss_masks: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Masks that are true wherever any sequence through the token has it true."""
    masks = np.concatenate(loss_masks)
    offsets = np.append(0, np.cumsum([len(mask) for mask in loss_masks])[:-1])
    loops.realign.share_masks(
        masks,
        offsets,
        forest.node_start,
        forest.node_length,
        forest.node_position,
        forest.node_parent,
        forest.sequence_node,
    )
    return np.split(masks, offsets[1:])


def _chains(forest: PrefixForest, groups: np.ndarray) -> _Chains:
    parent = forest.node_parent.astype(np.int64)
    head = parent != np.arange(-1, len(parent) - 1)
    head |= parent < 0
    first = np.flatnonzero(head)
    last = np.append(first[1:], len(parent)) - 1
    chain_of_node = np.cumsum(head) - 1
    node_end = forest.node_start.astype(np.int64) + forest.node_length
    ending = np.empty(len(parent), np.int64)
    # of several sequences the first: assigned last
    backwards = np.arange(forest.num_sequences)[::-1]
    ending[forest.sequence_node[backwards]] = backwards
    begins, sequence = forest.node_start[first].astype(np.int64), ending[last]

    above = parent[first]
    is_root = above < 0
    group = groups[sequence]
    # roots have no node to fork at: those of one group, or without groups all, are one fork
    fork_id = np.where(is_root, -1 - group, above)
    trunk = np.where(is_root, -1, chain_of_node[above])
    fork = np.where(is_root, 0, node_end[above])
    roots = np.flatnonzero(is_root)
    _, first_root, fork_of_root = np.unique(group[roots], return_index=True, return_inverse=True)
    trunk[roots] = roots[first_root][fork_of_root]
    fork[roots] = begins[trunk[roots]]
    trunk[roots[first_root]] = -1

    # earlier branches of the same fork, those of the same group first
    previous = np.full(len(first), -1)
    branch = np.flatnonzero(trunk >= 0)
    order = branch[np.lexsort((branch, group[branch], fork_id[branch]))]
    same = fork_id[order[1:]] == fork_id[order[:-1]]
    previous[order[1:][same]] = order[:-1][same]
    return _Chains(
        begins,
        node_end[last],
        forest.node_position[first].astype(np.int64),
        sequence,
        trunk,
        fork,
        fork_id,
        previous,
    )


def _meeting(chains: _Chains, branch: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Packed token of each `other` at which it parts from `branch`."""
    on_trunk = chains.trunk[branch] == other
    return np.where(on_trunk, chains.fork[branch], chains.begins[other])


def _questions(rollouts: Rollouts) -> np.ndarray:
    """A number per sequence, equal where they are of one group or, without groups, ask the same."""
    questions: Sequence[Any] = (
        [None] * len(rollouts) if rollouts.groups is None else rollouts.groups
    )
    if rollouts.groups is None and rollouts.messages is not None:
        texts = [first_user_text(messages) for messages in rollouts.messages]
        questions = [text if text is None else _WITH_DIGITS.sub("", text) for text in texts]
    numbers: dict[Any, int] = {}
    return np.array([numbers.setdefault(question, len(numbers)) for question in questions])


def _sampled_before(
    chains: _Chains, num_tokens: int, loss_masks: Sequence[np.ndarray] | None
) -> np.ndarray:
    """How many of the tokens before each packed one the policy sampled: int64 [T + 1]."""
    sampled = np.zeros(num_tokens, bool)
    if loss_masks is not None:
        for begin, end, position, sequence in zip(
            chains.begins.tolist(),
            chains.ends.tolist(),
            chains.position.tolist(),
            chains.sequence.tolist(),
            strict=True,
        ):
            sampled[begin:end] = loss_masks[sequence][position:]
    before = np.zeros(num_tokens + 1, np.int64)
    np.cumsum(sampled, out=before[1:])
    return before
