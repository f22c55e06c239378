"""`PrefixForest`: what `from_sequences` finds, the order of siblings, facts and invariants."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import networkx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixtree import ForestError, PrefixForest
from tests.support.forest_examples import ARRAYS, EXAMPLE, assert_same, children_of
from tests.support.strategies import (
    Sequences,
    forests,
    packed_path,
    positions_of,
    sequences_of,
    token_sequences,
    trie_size,
)


def first_sequence(forest: PrefixForest) -> list[int]:
    """The smallest sequence index at or below each node."""
    first = [forest.num_sequences] * forest.num_nodes
    for s in range(forest.num_sequences):
        for node in forest.path(s):
            first[node] = min(first[node], s)
    return first


# ---- worked examples -----------------------------------------------------------------------------


class TestWorkedExample:
    """[1 2] is shared by all but the fourth; the fifth repeats the second, which ends inside."""

    @pytest.fixture
    def forest(self) -> PrefixForest:
        return PrefixForest.from_sequences(EXAMPLE)

    def test_nodes_stand_in_preorder_heaviest_first(self, forest: PrefixForest) -> None:
        assert forest.tokens.tolist() == [1, 2, 5, 6, 7, 8, 3, 4, 9]
        assert forest.node_parent.tolist() == [-1, 0, 0, 2, -1]
        assert forest.node_start.tolist() == [0, 2, 6, 7, 8]
        assert forest.node_length.tolist() == [2, 4, 1, 1, 1]
        assert forest.node_position.tolist() == [0, 2, 2, 3, 0]
        assert forest.node_subtree_end.tolist() == [8, 6, 8, 8, 9]
        assert forest.node_level.tolist() == [0, 1, 1, 2, 0]

    def test_sequences_end_where_they_end(self, forest: PrefixForest) -> None:
        assert forest.sequence_node.tolist() == [3, 2, 1, 4, 2]
        assert forest.sequence_lengths.tolist() == [4, 3, 6, 1, 3]
        assert [forest.path(s).tolist() for s in range(5)] == [
            [0, 2, 3],
            [0, 2],
            [0, 1],
            [4],
            [0, 2],
        ]

    def test_counts(self, forest: PrefixForest) -> None:
        assert forest.num_tokens == 9
        assert forest.num_replicated_tokens == 17
        assert forest.replication_ratio == pytest.approx(17 / 9)
        assert forest.num_sequences == 5
        assert forest.num_nodes == 5
        assert forest.num_levels == 3
        assert forest.node_multiplicity.tolist() == [4, 1, 3, 1, 1]

    def test_repr_names_the_counts(self, forest: PrefixForest) -> None:
        expected = "PrefixForest(5 sequences, 9 distinct of 17 tokens, 5 nodes, 3 levels)"
        assert repr(forest) == expected

    def test_integer_kinds_have_the_documented_dtypes(self, forest: PrefixForest) -> None:
        assert forest.tokens.dtype == np.int64
        for name in ARRAYS[:-1]:
            assert getattr(forest, name).dtype == np.int32, name
        assert forest.sequence_lengths.dtype == np.int64
        assert forest.path(0).dtype == np.int64


def test_one_token() -> None:
    forest = PrefixForest.from_sequences([[5]])
    assert (forest.num_tokens, forest.num_nodes, forest.num_levels) == (1, 1, 1)
    assert forest.replication_ratio == 1.0


def test_repeated_sequence_costs_nothing() -> None:
    forest = PrefixForest.from_sequences([[4, 5, 6]] * 7)
    assert (forest.num_nodes, forest.num_tokens, forest.num_replicated_tokens) == (1, 3, 21)
    assert forest.sequence_node.tolist() == [0] * 7
    assert forest.node_multiplicity.tolist() == [7]


def test_prefix_of_another_ends_inside_whichever_comes_first() -> None:
    for sequences in ([[1, 2], [1, 2, 3]], [[1, 2, 3], [1, 2]]):
        forest = PrefixForest.from_sequences(sequences)
        assert forest.num_tokens == 3
        assert forest.node_length.tolist() == [2, 1]
        assert sequences_of(forest) == sequences


def test_documents_without_sharing_are_roots() -> None:
    forest = PrefixForest.from_sequences([[1, 5], [2, 5], [3, 5]])
    assert forest.node_parent.tolist() == [-1, -1, -1]
    assert forest.replication_ratio == 1.0


# ---- from_sequences by property ------------------------------------------------------------------


@given(token_sequences())
def test_every_sequence_is_recovered_along_its_path(sequences: Sequences) -> None:
    assert sequences_of(PrefixForest.from_sequences(sequences)) == sequences


@given(token_sequences())
def test_distinct_tokens_are_the_nodes_of_a_trie(sequences: Sequences) -> None:
    forest = PrefixForest.from_sequences(sequences)
    assert forest.num_tokens == trie_size(sequences)
    assert forest.num_replicated_tokens == sum(map(len, sequences))


@given(token_sequences())
def test_nodes_are_as_long_as_they_can_be(sequences: Sequences) -> None:
    forest = PrefixForest.from_sequences(sequences)
    for node in range(forest.num_nodes):
        below = children_of(forest, node)
        heads = [int(forest.tokens[forest.node_start[child]]) for child in below]
        assert len(set(heads)) == len(heads), "siblings that share a token were not joined"
        assert len(below) != 1 or node in forest.sequence_node, "a chain was not compressed"


@given(token_sequences(), st.data())
def test_keys_keep_sequences_apart(sequences: Sequences, data: st.DataObject) -> None:
    key = st.sampled_from(["a", "b", ("c", 1)])
    keys = data.draw(st.lists(key, min_size=len(sequences), max_size=len(sequences)))
    forest = PrefixForest.from_sequences(sequences, keys)
    assert sequences_of(forest) == sequences
    groups = [[s for s, k in zip(sequences, keys, strict=True) if k == name] for name in set(keys)]
    assert forest.num_tokens == sum(map(trie_size, groups))
    root_key: dict[int, Any] = {}
    for s, name in enumerate(keys):
        assert root_key.setdefault(int(forest.path(s)[0]), name) == name


@given(token_sequences(), st.randoms(use_true_random=False))
def test_order_of_input_does_not_change_what_is_shared(sequences: Sequences, random: Any) -> None:
    shuffled = sequences.copy()
    random.shuffle(shuffled)
    a, b = PrefixForest.from_sequences(sequences), PrefixForest.from_sequences(shuffled)
    assert (a.num_tokens, a.num_nodes) == (b.num_tokens, b.num_nodes)
    assert sorted(sequences_of(a)) == sorted(sequences_of(b)) == sorted(sequences)


def test_more_sequences_than_the_insertion_sort_takes() -> None:
    # groups above loops.trie._SMALL go through another sort
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 40, rng.integers(1, 5)).tolist() for _ in range(400)]
    forest = PrefixForest.from_sequences(sequences, order="input")
    assert sequences_of(forest) == sequences
    assert forest.num_tokens == trie_size(sequences)
    first = first_sequence(forest)
    for node in range(-1, forest.num_nodes):
        order = [first[child] for child in children_of(forest, node)]
        assert order == sorted(order)


# ---- order of siblings ---------------------------------------------------------------------------


@given(token_sequences())
def test_heaviest_subtree_first_ties_first_come(sequences: Sequences) -> None:
    forest = PrefixForest.from_sequences(sequences)
    first = first_sequence(forest)
    weight = forest.node_subtree_end - forest.node_start
    for node in range(-1, forest.num_nodes):
        rank = [(-weight[child], first[child]) for child in children_of(forest, node)]
        assert rank == sorted(rank)


@given(token_sequences())
def test_order_input_is_first_come(sequences: Sequences) -> None:
    forest = PrefixForest.from_sequences(sequences, order="input")
    first = first_sequence(forest)
    for node in range(-1, forest.num_nodes):
        rank = [first[child] for child in children_of(forest, node)]
        assert rank == sorted(rank)


def test_orders_differ_where_the_light_subtree_comes_first() -> None:
    sequences = [[1, 2], [1, 3, 4, 5]]
    heaviest = PrefixForest.from_sequences(sequences)
    assert heaviest.tokens.tolist() == [1, 3, 4, 5, 2]
    first_come = PrefixForest.from_sequences(sequences, order="input")
    assert first_come.tokens.tolist() == [1, 2, 3, 4, 5]


def test_heaviest_counts_the_subtree_and_not_the_node() -> None:
    sequences = [[1, 2, 2, 2], [1, 3, 4], [1, 3, 5], [1, 3, 6]]
    assert PrefixForest.from_sequences(sequences).tokens.tolist() == [1, 3, 4, 5, 6, 2, 2, 2]


@pytest.mark.parametrize("order", ["heaviest", "input"])
def test_heaviest_applies_to_roots_too(order: str) -> None:
    forest = PrefixForest.from_sequences([[1], [2, 2]], order=order)
    assert forest.tokens.tolist() == ([2, 2, 1] if order == "heaviest" else [1, 2, 2])


# ---- to_networkx ---------------------------------------------------------------------------------


@given(forests())
def test_networkx_carries_every_fact(forest: PrefixForest) -> None:
    graph = forest.to_networkx()
    assert list(graph.nodes) == list(range(forest.num_nodes))
    assert networkx.is_forest(graph)
    paths = [forest.path(s).tolist() for s in range(forest.num_sequences)]
    for n, facts in graph.nodes(data=True):
        above = list(graph.predecessors(n))
        assert above == ([int(forest.node_parent[n])] if forest.node_parent[n] >= 0 else [])
        ancestors = networkx.ancestors(graph, n)
        below = networkx.descendants(graph, n) | {n}
        start = sum(graph.nodes[m]["length"] for m in range(n))
        assert facts.pop("tokens").tolist() == forest.tokens[start:][: facts["length"]].tolist()
        assert facts == {
            "start": start,
            "length": int(forest.node_length[n]),
            "position": sum(graph.nodes[m]["length"] for m in ancestors),
            "depth": facts["position"],
            "level": len(ancestors),
            "subtree_end": start + sum(graph.nodes[m]["length"] for m in below),
            "multiplicity": sum(n in path for path in paths),
            "sequences": [s for s, path in enumerate(paths) if path[-1] == n],
        }


def test_networkx_without_tokens() -> None:
    graph = PrefixForest.from_parents([-1, 0], [1, 1]).to_networkx()
    assert [graph.nodes[n]["tokens"] for n in graph] == [None, None]


# ---- facts and invariants ------------------------------------------------------------------------


@given(forests())
def test_arrays_agree_with_the_paths(forest: PrefixForest) -> None:
    position = positions_of(forest)
    starts = forest.node_start
    np.testing.assert_array_equal(forest.node_position, position[starts])
    lengths = [len(packed_path(forest, s)) for s in range(forest.num_sequences)]
    assert forest.sequence_lengths.tolist() == lengths
    assert forest.num_levels == max(len(forest.path(s)) for s in range(forest.num_sequences))
    assert forest.num_replicated_tokens == sum(lengths)


def every_array(forest: PrefixForest) -> dict[str, np.ndarray]:
    assert forest.columns is not None
    return {name: getattr(forest, name) for name in ARRAYS} | {"columns": forest.columns[1]}


@pytest.mark.parametrize("name", [*ARRAYS, "columns"])
def test_arrays_are_read_only(name: str) -> None:
    forest = PrefixForest.from_padded([[1, 2], [1, 3]], [[1, 1], [1, 1]])
    with pytest.raises(ValueError, match="read-only"):
        every_array(forest)[name][0] = 0


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda f: pickle.loads(pickle.dumps(f))])
def test_copies_are_equal_and_read_only(duplicate: Any) -> None:
    forest = PrefixForest.from_padded([[1, 2], [1, 3]], [[1, 1], [1, 1]])
    twin = duplicate(forest)
    assert_same(twin, forest)
    assert not any(array.flags.writeable for array in every_array(twin).values())


def test_fields_cannot_be_replaced() -> None:
    forest = PrefixForest.from_sequences([[1]])
    with pytest.raises(AttributeError, match="cannot assign"):
        forest.tokens = None


#     0 (tokens 0 1)        3 (token 5)
#     |-- 1 (tokens 2 3)
#     `-- 2 (token 4)
SOUND: dict[str, list[int]] = {
    "node_parent": [-1, 0, 0, -1],
    "node_start": [0, 2, 4, 5],
    "node_length": [2, 2, 1, 1],
    "node_position": [0, 2, 2, 0],
    "node_subtree_end": [5, 4, 5, 6],
    "sequence_node": [1, 2, 3],
}


def construct(**changes: Any) -> PrefixForest:
    return PrefixForest(**{n: np.array(v, np.int32) for n, v in (SOUND | changes).items()})


def test_sound_arrays_are_taken() -> None:
    assert construct().num_tokens == 6


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("parents precede children", {"node_parent": [-1, 2, 0, -1]}),
        ("parents precede children", {"node_parent": [-1, 1, 0, -1]}),
        ("parents precede children", {"node_parent": [-2, 0, 0, -1]}),
        ("at least one token", {"node_length": [2, 0, 1, 1]}),
        ("side by side", {"node_start": [0, 2, 3, 5]}),
        ("side by side", {"node_start": [1, 3, 5, 6]}),
        ("position is its parent's", {"node_position": [1, 3, 3, 0]}),
        ("position is its parent's", {"node_position": [0, 2, 2, 5]}),
        ("position is its parent's", {"node_position": [0, 2, 3, 0]}),
        ("subtree ends nest", {"node_subtree_end": [5, 3, 5, 6]}),
        ("subtree ends nest", {"node_subtree_end": [5, 4, 6, 6]}),
        ("subtree ends nest", {"node_subtree_end": [5, 4, 5, 7]}),
        ("subtree ends nest", {"node_subtree_end": [4, 4, 5, 6]}),
        # a node that claims more than its own descendants
        ("breaks the forest", {"node_subtree_end": [6, 4, 5, 6]}),
        ("breaks the forest", {"node_subtree_end": [5, 5, 5, 6]}),
        ("a leaf ends at least one sequence", {"sequence_node": [1, 3]}),
        ("sequence_node must name", {"sequence_node": [1, 2, 3, 4]}),
        ("sequence_node must name", {"sequence_node": [1, 2, 3, -1]}),
        ("one entry per node", {"node_position": [0, 2, 2]}),
        ("at least one node and one sequence", {"sequence_node": []}),
        ("tokens must hold 6 ids", {"tokens": [1, 2, 3]}),
    ],
)
def test_broken_arrays_are_refused(rule: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ForestError, match=rule):
        construct(**changes)


def test_a_root_inside_another_trees_subtree_is_refused() -> None:
    # nodes out of preorder: node 2 is a root, yet it stands between node 0 and its child 3
    with pytest.raises(ForestError, match="breaks the forest"):
        construct(
            node_parent=[-1, 0, -1, 0],
            node_position=[0, 2, 0, 2],
            node_subtree_end=[6, 4, 5, 6],
        )


def test_a_subtree_that_ends_inside_a_node_is_refused() -> None:
    # node 0 and its child 1, then a root of two tokens, half of which node 0 claims
    with pytest.raises(ForestError, match="breaks the forest"):
        construct(
            node_parent=[-1, 0, -1],
            node_start=[0, 1, 2],
            node_length=[1, 1, 2],
            node_position=[0, 1, 0],
            node_subtree_end=[3, 2, 4],
            sequence_node=[1, 2],
        )


def test_empty_arrays_are_refused() -> None:
    with pytest.raises(ForestError, match="at least one node"):
        construct(**{name: [] for name in SOUND})


# ---- size and shape ------------------------------------------------------------------------------


def test_a_chain_of_per_turn_prefixes() -> None:
    whole = np.arange(2000) % 11
    sequences = [whole[: n + 1] for n in range(2000)]
    forest = PrefixForest.from_sequences(sequences)
    assert (forest.num_tokens, forest.num_nodes, forest.num_levels) == (2000, 2000, 2000)
    np.testing.assert_array_equal(forest.tokens, whole)
    np.testing.assert_array_equal(forest.sequence_node, np.arange(2000))
    np.testing.assert_array_equal(forest.node_multiplicity, np.arange(2000, 0, -1))
    assert forest.path(1999).tolist() == list(range(2000))


def test_a_deep_chain_given_leaf_first() -> None:
    n = 5000
    forest = PrefixForest.from_parents([*range(1, n), -1], [1] * n, tokens=range(n))
    assert forest.num_levels == n
    np.testing.assert_array_equal(forest.tokens, np.arange(n)[::-1])


def test_a_thousand_leaves_on_a_short_root() -> None:
    sequences = [[1, 2, 3, 10 + i] for i in range(1000)]
    forest = PrefixForest.from_sequences(sequences)
    assert (forest.num_tokens, forest.num_nodes, forest.num_levels) == (1003, 1001, 2)
    # equal weights: first-come
    np.testing.assert_array_equal(forest.sequence_node, np.arange(1, 1001))
    assert forest.node_multiplicity[0] == 1000
