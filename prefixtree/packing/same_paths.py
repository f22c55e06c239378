"""Tokens of one forest found in another, by their paths.

So rows or numbers per token of one forest can be read for another: the same forest, one that was
cut out of it, or one of more sequences.

Legend: T tokens of a forest, Q tokens of the forest that reads.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from prefixtree import loops
from prefixtree._forest_inputs import numbers_of
from prefixtree.forest import PrefixForest


class Found(NamedTuple):
    """The tokens of another forest with the same paths as a forest's tokens."""

    # int64 [Q], the first token there with the path; -1 if there is none
    at: np.ndarray
    # bool [Q], whether several tokens there have the path, as under `namespaces=`
    is_one_of_several: np.ndarray


class _Paths(NamedTuple):
    """The paths of a forest's tokens, sorted by their hashes."""

    # int64 [T]: the token before each, -1 for none; equal for equal token ids and routes
    above: np.ndarray
    value: np.ndarray
    # the distinct hashes, ascending, and the first token with each
    hashes: np.ndarray
    first: np.ndarray
    # int64 [T], the first token with each token's hash; bool [T], whether it has the same path
    first_of: np.ndarray
    is_equal: np.ndarray
    # bool [T], whether a first token's hash is also that of others
    comes_again: np.ndarray

    @classmethod
    def of(cls, forest: PrefixForest, value: np.ndarray) -> _Paths:
        above = _token_above(forest)
        all_hashes = loops.sequence_copies.hashes(above, value)
        hashes, first, inverse = np.unique(all_hashes, return_index=True, return_inverse=True)
        first_of = first[inverse]
        is_equal = loops.sequence_copies.are_equal(first_of, above, value)
        comes_again = np.bincount(first_of, minlength=len(above)) > 1
        return cls(above, value, hashes, first, first_of, is_equal, comes_again)


_paths: WeakKeyDictionary[PrefixForest, _Paths] = WeakKeyDictionary()


def find_paths(forest: PrefixForest, other: PrefixForest) -> Found:
    """Looks up each token of a forest in another one."""
    # equal paths have equal token ids and, if the other forest has routes, equal routes; in forests
    # whose nodes are alike and in one order, token t is token t
    if _is_alike(forest, other):
        return Found(np.arange(forest.num_tokens), np.zeros(forest.num_tokens, bool))
    nothing = Found(np.full(forest.num_tokens, -1), np.zeros(forest.num_tokens, bool))
    if forest.tokens is None or other.tokens is None:
        return nothing
    value, other_value = forest.tokens, other.tokens
    if other.routes is not None:
        if forest.routes is None or forest.routes.shape[1:] != other.routes.shape[1:]:
            return nothing
        values_and_routes = (
            np.concatenate([value, other_value]),
            np.concatenate([forest.routes, other.routes]),
        )
        value, other_value = np.split(numbers_of(*values_and_routes), [len(value)])
    # numbers of routes hold for this pair of forests alone
    paths = _paths.get(other) if other.routes is None else None
    if paths is None:
        paths = _Paths.of(other, other_value)
        if other.routes is None:
            _paths[other] = paths
    above = _token_above(forest)
    own_hashes = loops.sequence_copies.hashes(above, value)
    place = np.searchsorted(paths.hashes, own_hashes).clip(max=len(paths.hashes) - 1)
    at = np.where(paths.hashes[place] == own_hashes, paths.first[place], -1)
    others = paths.first_of, paths.is_equal, paths.above, paths.value
    loops.sequence_copies.keep_equal(at, above, value, *others)
    return Found(at, (at >= 0) & paths.comes_again[at])


def _is_alike(a: PrefixForest, b: PrefixForest) -> bool:
    """Whether the packed tokens of both are the same, number by number."""
    if a is b:
        return True
    pairs = [(a.node_parent, b.node_parent), (a.node_length, b.node_length), (a.tokens, b.tokens)]
    if b.routes is not None:
        pairs.append((a.routes, b.routes))
    return all(
        x is y or (x is not None and y is not None and np.array_equal(x, y)) for x, y in pairs
    )


def _token_above(forest: PrefixForest) -> np.ndarray:
    """Finds the token before each on its path, int64 [T], -1 for none."""
    above = np.arange(-1, forest.num_tokens - 1)
    parent = forest.node_parent
    last = forest.node_start + forest.node_length - 1
    above[forest.node_start] = np.where(parent < 0, -1, last[parent])
    return above


def described(forest: PrefixForest, token: int) -> str:
    """Names a packed token for messages: its position, its id and the first sequence with it."""
    node = int(np.searchsorted(forest.node_start, token, side="right")) - 1
    ends = forest.node_start[forest.sequence_node]
    below = (ends >= forest.node_start[node]) & (ends < forest.node_subtree_end[node])
    position = int(forest.node_position[node]) + token - int(forest.node_start[node])
    token_id = "" if forest.tokens is None else f" (id {forest.tokens[token]})"
    return f"token {position}{token_id} of sequence {int(below.argmax())}"
