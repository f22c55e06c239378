"""Weights by which each drawn token counts once, however many branches it lies on.

A *draw* is one token that the policy sampled. Where rollouts fork, several sequences hold it. Two
rollouts that sampled the same token by chance drew it twice: labels tell this apart, tokens do not.
Legend: S sequences, R replicated tokens, n tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from prefixtree._forest_inputs import label_numbers
from prefixtree._numbers import entries, integers
from prefixtree.errors import ForestError
from prefixtree.forest import PrefixForest
from prefixtree.packing.layout import pack
from prefixtree.packing.per_sequence import check_lengths, per_sequence

#: normalizations that know which sequences are of one rollout
OF_ROLLOUTS = ("rollout-mean", "session-mean")


def rollout_numbers(rollouts: Sequence[Hashable], count: int) -> np.ndarray:
    """int64 [S]: equal labels get equal numbers, counted from 0 as they first appear."""
    listed = entries("rollouts", rollouts, "a list that names one rollout per sequence")
    numbers = label_numbers(listed, "rollouts", count)
    for i, label in enumerate(listed):
        label = label.tolist() if hasattr(label, "tolist") else label
        # None and -1 mean "none" elsewhere: all that have none would be one rollout
        is_label = isinstance(label, (int, str, tuple)) and not isinstance(label, bool)
        if not is_label or (isinstance(label, int) and label < 0):
            raise ForestError(
                f"rollouts[{i}] is {label!r}; expected an integer >= 0, text or a tuple, unlike "
                "those of other rollouts: number the rollouts from 0, those of one sequence too"
            )
    return numbers


def divisors(
    normalization: str, drawn: np.ndarray, constant: float | None, rollout: np.ndarray | None
) -> np.ndarray:
    """Computes what the weights of each sequence are divided by, float64 [S].

    drawn is [S], the scored tokens of each sequence, or its shares of them; `constant` is for
    "constant", rollout, int64 [S], for `OF_ROLLOUTS`.
    """
    known = ("token-mean", "sequence-mean", "constant", *OF_ROLLOUTS[: 2 * (rollout is not None)])
    if normalization not in known:
        mend = "; for those of rollouts give token_weights rollouts=" * (
            normalization in OF_ROLLOUTS
        )
        raise ValueError(
            f"normalization must be {', '.join(map(repr, known[:-1]))} or {known[-1]!r}, got "
            f"{normalization!r}{mend}"
        )
    if (normalization == "constant") != (constant is not None):
        raise ValueError("constant= goes with normalization='constant', and only with it")
    count = len(drawn)
    if constant is not None:
        return np.full(count, count * float(constant))
    if not drawn.any():
        raise ValueError("no token is scored: there is nothing to take a mean of")
    if normalization == "token-mean":
        return np.full(count, drawn.sum())
    if normalization == "sequence-mean":
        return count * drawn
    assert rollout is not None
    sequences = np.bincount(rollout)
    if normalization == "session-mean":
        return len(sequences) * sequences[rollout] * drawn
    return len(sequences) * np.bincount(rollout, drawn)[rollout]


def shares_of_draws(
    forest: PrefixForest,
    scored: np.ndarray,
    rollout: np.ndarray | None,
    turns: Sequence[Any] | None,
) -> np.ndarray:
    """Divides each draw's weight of 1 among its scored copies: 1 / their number, 0 elsewhere; [R].

    scored [R] is nonzero where a token is scored; rollout int64 [S] tells draws apart where `turns`
    is None. Returns float64.
    """
    lengths = forest.sequence_lengths
    every = np.arange(len(lengths))
    starts = np.cumsum(lengths) - lengths
    which, _ = pack(forest).copy_index(every)
    if forest.tokens is not None:
        # by tokens: siblings that were given may begin alike, and the tree parts where an engine
        # recorded other routes for a copy. Without routes, roots tell namespaces apart
        ids = np.split(forest.tokens[which], starts[1:])
        roots = which[starts] if forest.routes is None else None
        which, _ = pack(PrefixForest.from_sequences(ids, roots)).copy_index(every)
    copies = np.flatnonzero(scored)
    which = which[copies]
    sequence = np.repeat(every, lengths)[copies]
    if turns is None:
        assert rollout is not None
        label = rollout[sequence]
    else:
        place = copies - starts[sequence]
        label = _turn_numbers(turns, lengths, copies, which, sequence, place)
    draws = label * (int(which.max(initial=0)) + 1) + which
    _, draw, count = np.unique(draws, return_inverse=True, return_counts=True)
    shares = np.zeros(len(scored))
    shares[copies] = 1 / count[draw]
    return shares


def _turn_numbers(
    turns: Sequence[Any],
    lengths: np.ndarray,
    copies: np.ndarray,
    which: np.ndarray,
    sequence: np.ndarray,
    place: np.ndarray,
) -> np.ndarray:
    """The turn of each scored copy, numbered from 0: packed token `which`, entry `place`."""
    listed = per_sequence("turns", turns, len(lengths))
    arrays = [integers(f"turns[{i}]", turn) for i, turn in enumerate(listed)]
    check_lengths("turns", [len(turn) for turn in arrays], lengths)
    turn = np.concatenate(arrays)[copies]
    for bad in np.flatnonzero(turn < 0)[:1]:
        raise ForestError(
            f"turns[{sequence[bad]}][{place[bad]}] is {turn[bad]}, no turn, and the token is "
            "scored: give it a number >= 0, or 0 in loss_mask"
        )
    _, number = np.unique(turn, return_inverse=True)
    # a turn draws one token at a place
    _, first, back = np.unique(
        number * int(lengths.max()) + place, return_index=True, return_inverse=True
    )
    for bad in np.flatnonzero(which != which[first[back]])[:1]:
        at, other = f"[{place[bad]}]", sequence[first[back[bad]]]
        raise ForestError(
            f"turns[{sequence[bad]}]{at} and turns[{other}]{at} are both {turn[bad]}, but the "
            "sequences differ up to there: a turn is drawn once, on one path; number the turns "
            "across the whole batch"
        )
    return number
