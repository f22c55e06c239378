"""Tokens of one forest found in another by their paths, beside paths that are written out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given

from prefixtree import PrefixForest, loops
from prefixtree.packing.same_paths import described, find_paths
from tests.support.strategies import forests


def paths_of(forest: PrefixForest) -> list[tuple[Any, ...]]:
    """The path of each packed token, of ids and of routes where there are some."""
    found: list[tuple[Any, ...]] = [()] * forest.num_tokens
    for node, parent in enumerate(forest.node_parent.tolist()):
        path = ()
        if parent >= 0:
            path = found[forest.node_start[parent] + forest.node_length[parent] - 1]
        for t in range(forest.node_start[node], forest.node_start[node] + forest.node_length[node]):
            routes = () if forest.routes is None else tuple(forest.routes[t].flatten().tolist())
            path = found[t] = (*path, (int(forest.tokens[t]), routes))
    return found


def assert_found(forest: PrefixForest, other: PrefixForest) -> None:
    got = find_paths(forest, other)
    theirs = paths_of(other)
    for token, path in enumerate(paths_of(forest)):
        places = [i for i, its in enumerate(theirs) if its == path]
        assert got.at[token] == (places[0] if places else -1)
        assert got.is_one_of_several[token] == (len(places) > 1)


@given(forests(), forests())
def test_any_two_forests(forest: PrefixForest, other: PrefixForest) -> None:
    """Siblings may begin alike, and roots be repeated."""
    same = PrefixForest.from_parents(
        forest.node_parent, forest.node_length, forest.tokens, forest.sequence_node, order="input"
    )
    for alike in (forest, same):
        assert find_paths(alike, forest).at.tolist() == list(range(forest.num_tokens))
    if paths_of(forest) != paths_of(other):
        assert_found(forest, other)


@pytest.mark.parametrize("order", ["heaviest", "input"])
def test_forests_of_some_of_the_sequences(order):
    rng = np.random.default_rng(0)
    stems = [rng.integers(0, 4, 6).tolist() for _ in range(3)]
    sequences = [stems[i % 3][: 1 + i % 6] + rng.integers(0, 3, 5).tolist() for i in range(20)]
    whole = PrefixForest.from_sequences(sequences)
    some = PrefixForest.from_sequences(sequences[3:11][::-1], order=order)
    assert (find_paths(some, whole).at >= 0).all() and (find_paths(whole, some).at < 0).any()
    assert_found(some, whole)
    assert_found(whole, some)
    apart = PrefixForest.from_sequences(sequences, namespaces=[i % 2 for i in range(20)])
    assert find_paths(some, apart).is_one_of_several.any()
    # in itself every token is found, also where its path comes again
    assert find_paths(apart, apart).at.tolist() == list(range(apart.num_tokens))
    routes = [np.array(s)[:, None, None] * 2 + np.array([[[0, 1]]]) for s in sequences]
    routed = PrefixForest.from_sequences(sequences, routes=routes)
    assert_found(routed, routed)
    assert (find_paths(some, routed).at < 0).all()
    assert (find_paths(routed, whole).at >= 0).all()
    assert (find_paths(PrefixForest.from_parents([-1], [3]), whole).at < 0).all()
    assert described(whole, 0).startswith(f"token 0 (id {whole.tokens[0]}) of sequence ")


def test_equal_hashes_are_no_equal_paths(monkeypatch):
    """What a hash finds is compared, up to the root."""
    forest = PrefixForest.from_sequences([[1, 2, 3], [1, 5]])
    other = PrefixForest.from_sequences([[4, 2, 3], [6, 5]])
    monkeypatch.setattr(
        loops.sequence_copies, "hashes", lambda above, value: value.astype(np.uint64)
    )
    assert find_paths(forest, other).at.tolist() == [-1] * 4
