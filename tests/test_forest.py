"""`PrefixForest`: what constructors find, the order of siblings, the invariants, bad input."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import networkx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import (
    Sequences,
    forests,
    packed_path,
    positions_of,
    sequences_of,
    token_sequences,
    tree_arguments,
    trie_size,
)

from prefixtree import ForestError, PrefixForest

EXAMPLE: Sequences = [[1, 2, 3, 4], [1, 2, 3], [1, 2, 5, 6, 7, 8], [9], [1, 2, 3]]
ARRAYS = (
    "node_parent",
    "node_start",
    "node_length",
    "node_depth",
    "node_subtree_end",
    "sequence_node",
    "tokens",
)


def assert_same(a: PrefixForest, b: PrefixForest) -> None:
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


def children_of(forest: PrefixForest, node: int) -> list[int]:
    """Children in preorder; the roots for node -1."""
    return np.flatnonzero(forest.node_parent == node).tolist()


def first_sequence(forest: PrefixForest) -> list[int]:
    """The smallest sequence index at or below each node."""
    first = [forest.num_sequences] * forest.num_nodes
    for s in range(forest.num_sequences):
        for node in forest.path(s):
            first[node] = min(first[node], s)
    return first


# ---- worked examples ----------------------------------------------------------------------------


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
        assert forest.node_depth.tolist() == [0, 2, 2, 3, 0]
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
        assert forest.depth == 3
        assert forest.node_multiplicity.tolist() == [4, 1, 3, 1, 1]

    def test_repr_names_the_counts(self, forest: PrefixForest) -> None:
        expected = "PrefixForest(5 sequences, 9 distinct of 17 tokens, 5 nodes, depth 3)"
        assert repr(forest) == expected

    def test_integer_kinds_have_the_documented_dtypes(self, forest: PrefixForest) -> None:
        assert forest.tokens.dtype == np.int64
        for name in ARRAYS[:-1]:
            assert getattr(forest, name).dtype == np.int32, name
        assert forest.sequence_lengths.dtype == np.int64
        assert forest.path(0).dtype == np.int64


def test_one_token() -> None:
    forest = PrefixForest.from_sequences([[5]])
    assert (forest.num_tokens, forest.num_nodes, forest.depth) == (1, 1, 1)
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


# ---- from_sequences by property -----------------------------------------------------------------


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
    # groups above _trie._SMALL go through another sort
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 40, rng.integers(1, 5)).tolist() for _ in range(400)]
    forest = PrefixForest.from_sequences(sequences, order="input")
    assert sequences_of(forest) == sequences
    assert forest.num_tokens == trie_size(sequences)
    first = first_sequence(forest)
    for node in range(-1, forest.num_nodes):
        order = [first[child] for child in children_of(forest, node)]
        assert order == sorted(order)


# ---- order of siblings --------------------------------------------------------------------------


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


# ---- kinds of input -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "convert",
    [
        tuple,
        lambda s: np.array(s, np.int32),
        lambda s: np.array(s, np.uint8),
        lambda s: np.array(s, np.int16),
        lambda s: np.array(s, np.uint64),
        lambda s: np.array([s, s]).T[:, 0],
        lambda s: torch.tensor(s),
        lambda s: torch.tensor(s, dtype=torch.int32),
        lambda s: torch.tensor(s, dtype=torch.uint8),
    ],
    ids=["tuple", "int32", "uint8", "int16", "uint64", "strided", "torch64", "torch32", "torch8"],
)
def test_kinds_of_integers_agree(convert: Any) -> None:
    sequences = EXAMPLE
    expected = PrefixForest.from_sequences([np.array(s, np.int64) for s in sequences])
    assert_same(PrefixForest.from_sequences([convert(s) for s in sequences]), expected)
    assert_same(PrefixForest.from_sequences(sequences), expected)


def test_kinds_of_integers_mix() -> None:
    dtypes = [np.int64, np.int32, np.uint8, np.int16, np.uint32]
    sequences = EXAMPLE
    mixed = [np.array(s, dtype) for s, dtype in zip(sequences, dtypes, strict=True)]
    assert_same(PrefixForest.from_sequences(mixed), PrefixForest.from_sequences(sequences))


def test_uint64_mixes_with_int64() -> None:
    # numpy joins the two as float64
    forest = PrefixForest.from_sequences([np.array([1, 2], np.uint64), np.array([1, 3], np.int64)])
    assert forest.tokens.tolist() == [1, 2, 3]


def test_a_generator_and_an_object_array_of_sequences() -> None:
    sequences = EXAMPLE
    expected = PrefixForest.from_sequences(sequences)
    assert_same(PrefixForest.from_sequences(s for s in sequences), expected)
    array = np.empty(len(sequences), object)
    array[:] = sequences
    assert_same(PrefixForest.from_sequences(array), expected)


def test_token_ids_are_not_limited_to_32_bits() -> None:
    sequences = [[2**40, 1], [2**40, 2], [2**40 + 2**32, 1]]
    forest = PrefixForest.from_sequences(sequences)
    assert sequences_of(forest) == sequences
    assert forest.num_tokens == 5


@pytest.mark.parametrize("keys", [[0, 0, 1], (0, 0, 1), np.array([0, 0, 1])], ids=type)
def test_kinds_of_keys(keys: Any) -> None:
    assert PrefixForest.from_sequences([[1, 2], [1, 3], [1, 2]], keys).num_tokens == 5


def test_keys_in_a_tensor_are_compared_by_value() -> None:
    # a tensor hashes by identity: taken as it is, every sequence would get a key of its own
    forest = PrefixForest.from_sequences([[1, 2], [1, 3], [1, 2]], torch.tensor([0, 0, 1]))
    assert forest.num_tokens == 5


# ---- from_padded --------------------------------------------------------------------------------


def pad(sequences: Sequences, starts: list[int], length: int) -> tuple[np.ndarray, np.ndarray]:
    """input_ids and attention_mask; padding is -100, which is no token id."""
    ids = np.full((len(sequences), length), -100)
    mask = np.zeros_like(ids)
    for row, (sequence, start) in enumerate(zip(sequences, starts, strict=True)):
        ids[row, start : start + len(sequence)] = sequence
        mask[row, start : start + len(sequence)] = 1
    return ids, mask


@given(token_sequences(), st.integers(0, 3), st.data())
def test_padded_equals_sequences(sequences: Sequences, spare: int, data: st.DataObject) -> None:
    length = max(map(len, sequences)) + spare
    starts = [data.draw(st.integers(0, length - len(s))) for s in sequences]
    ids, mask = pad(sequences, starts, length)
    forest = PrefixForest.from_padded(ids, mask)
    assert_same(forest, PrefixForest.from_sequences(sequences))
    assert forest.columns is not None
    assert forest.columns[0] == length
    assert forest.columns[1].tolist() == starts


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("mask_dtype", [torch.int64, torch.bool, torch.int32])
def test_padded_torch_equals_numpy(side: str, mask_dtype: torch.dtype) -> None:
    sequences = EXAMPLE
    starts = [8 - len(s) if side == "left" else 0 for s in sequences]
    ids, mask = pad(sequences, starts, 8)
    forest = PrefixForest.from_padded(torch.from_numpy(ids), torch.from_numpy(mask).to(mask_dtype))
    assert_same(forest, PrefixForest.from_padded(ids, mask))
    assert forest.columns is not None
    assert forest.columns[1].tolist() == starts


def test_padded_takes_lists_keys_and_order() -> None:
    forest = PrefixForest.from_padded([[1, 0], [1, 2]], [[1, 0], [1, 1]], ["a", "b"], order="input")
    assert forest.tokens.tolist() == [1, 1, 2]


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_padded_takes_a_float_mask(make: Any) -> None:
    # several tokenizers' collators make one; nonzero means a token
    forest = PrefixForest.from_padded(make([[1, 2], [1, 0]]), make([[1.0, 1.0], [1.0, 0.0]]))
    assert sequences_of(forest) == [[1, 2], [1]]


def test_only_padded_forests_have_columns() -> None:
    assert PrefixForest.from_sequences([[1]]).columns is None


# ---- from_groups --------------------------------------------------------------------------------


def test_groups_are_one_level() -> None:
    forest = PrefixForest.from_groups(
        [[1, 2], [7]], [[[3, 4], [3]], [[8], [9], [8]]], order="input"
    )
    assert forest.tokens.tolist() == [1, 2, 3, 4, 3, 7, 8, 9, 8]
    assert forest.node_parent.tolist() == [-1, 0, 0, -1, 3, 3, 3]
    assert forest.depth == 2
    assert sequences_of(forest) == [[1, 2, 3, 4], [1, 2, 3], [7, 8], [7, 9], [7, 8]]


def test_equal_prompts_are_not_joined() -> None:
    forest = PrefixForest.from_groups([[1, 2], [1, 2]], [[[3]], [[3]]])
    assert forest.num_tokens == 6
    assert forest.replication_ratio == 1.0


def test_groups_order_heaviest_first_and_results_in_input_order() -> None:
    forest = PrefixForest.from_groups([[1], [2]], [[[3]], [[4], [5, 6]]])
    assert forest.tokens.tolist() == [2, 5, 6, 4, 1, 3]
    assert sequences_of(forest) == [[1, 3], [2, 4], [2, 5, 6]]


@given(st.lists(st.tuples(token_sequences(1), token_sequences(4)), min_size=1, max_size=4))
def test_groups_are_recovered(groups: list[tuple[Sequences, Sequences]]) -> None:
    prompts = [prompt[0] for prompt, _ in groups]
    responses = [responses for _, responses in groups]
    forest = PrefixForest.from_groups(prompts, responses)
    expected = [p + r for p, group in zip(prompts, responses, strict=True) for r in group]
    assert sequences_of(forest) == expected
    assert forest.num_tokens == sum(map(len, prompts)) + sum(len(r) for g in responses for r in g)


def test_groups_of_tensors() -> None:
    forest = PrefixForest.from_groups(torch.tensor([[1, 2]]).unbind(), [torch.tensor([[3], [4]])])
    assert sequences_of(forest) == [[1, 2, 3], [1, 2, 4]]


# ---- from_parents -------------------------------------------------------------------------------


@given(tree_arguments())
def test_parents_in_any_order_give_every_path(arguments: dict[str, Any]) -> None:
    forest = PrefixForest.from_parents(**arguments)
    parents, lengths, tokens = (arguments[name] for name in ("parents", "lengths", "tokens"))
    begin = np.cumsum(lengths) - lengths
    expected = []
    for node in arguments["sequence_ends"]:
        path: list[int] = []
        while node >= 0:
            path = tokens[begin[node] : begin[node] + lengths[node]].tolist() + path
            node = parents[node]
        expected.append(path)
    assert sequences_of(forest) == expected
    assert forest.num_nodes == len(parents)
    assert forest.num_tokens == sum(lengths)


@given(tree_arguments())
def test_parents_order_siblings_as_asked(arguments: dict[str, Any]) -> None:
    forest = PrefixForest.from_parents(**arguments)
    # tokens tell which of the nodes given a packed node is
    begin = (np.cumsum(arguments["lengths"]) - arguments["lengths"]) * 7
    given_as = {int(token): node for node, token in enumerate(begin)}
    weight = forest.node_subtree_end - forest.node_start
    for node in range(-1, forest.num_nodes):
        rank: list[Any] = [
            (-weight[child], given_as[int(forest.tokens[forest.node_start[child]])])
            for child in children_of(forest, node)
        ]
        if arguments["order"] == "input":
            rank = [first for _, first in rank]
        assert rank == sorted(rank)


def test_sequences_end_at_the_leaves_unless_said() -> None:
    forest = PrefixForest.from_parents([2, 2, -1, 1], [1, 2, 3, 4], tokens=range(10), order="input")
    # the leaves in the order given: nodes 0 and 3
    assert sequences_of(forest) == [[3, 4, 5, 0], [3, 4, 5, 1, 2, 6, 7, 8, 9]]


def test_sequence_ends_may_be_inside_and_repeated() -> None:
    ends = [1, 0, 1, 0]
    forest = PrefixForest.from_parents([-1, 0], [2, 1], tokens=[5, 6, 7], sequence_ends=ends)
    assert sequences_of(forest) == [[5, 6, 7], [5, 6], [5, 6, 7], [5, 6]]
    assert forest.node_multiplicity.tolist() == [4, 2]


def test_siblings_given_as_apart_stay_apart() -> None:
    forest = PrefixForest.from_parents([-1, 0, 0], [1, 1, 1], tokens=[1, 2, 2])
    assert forest.num_tokens == 3


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2, 3, 4, 5],
        np.array([1, 2, 3, 4, 5], np.int32),
        torch.tensor([1, 2, 3, 4, 5]),
        [[1, 2], [3], [4, 5]],
        [np.array([1, 2]), np.array([3]), np.array([4, 5])],
        [torch.tensor([1, 2]), torch.tensor([3]), torch.tensor([4, 5])],
    ],
    ids=["flat-list", "flat-numpy", "flat-torch", "nested-list", "nested-numpy", "nested-torch"],
)
def test_tokens_flat_or_nested(tokens: Any) -> None:
    forest = PrefixForest.from_parents([-1, 0, 0], [2, 1, 2], tokens=tokens, order="input")
    assert forest.tokens.tolist() == [1, 2, 3, 4, 5]


def test_structure_without_tokens() -> None:
    forest = PrefixForest.from_parents([-1, 0], [3, 2])
    assert forest.tokens is None
    assert (forest.num_tokens, forest.num_sequences) == (5, 1)


def test_the_same_tree_from_tokens_and_from_structure() -> None:
    by_tokens = PrefixForest.from_sequences(EXAMPLE)
    by_structure = PrefixForest.from_parents(
        by_tokens.node_parent,
        by_tokens.node_length,
        by_tokens.tokens,
        by_tokens.sequence_node,
    )
    assert_same(by_structure, by_tokens)


# ---- to_networkx --------------------------------------------------------------------------------


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
            "depth": sum(graph.nodes[m]["length"] for m in ancestors),
            "level": len(ancestors),
            "subtree_end": start + sum(graph.nodes[m]["length"] for m in below),
            "multiplicity": sum(n in path for path in paths),
            "sequences": [s for s, path in enumerate(paths) if path[-1] == n],
        }


def test_networkx_without_tokens() -> None:
    graph = PrefixForest.from_parents([-1, 0], [1, 1]).to_networkx()
    assert [graph.nodes[n]["tokens"] for n in graph] == [None, None]


# ---- facts and invariants -----------------------------------------------------------------------


@given(forests())
def test_arrays_agree_with_the_paths(forest: PrefixForest) -> None:
    position = positions_of(forest)
    starts = forest.node_start
    np.testing.assert_array_equal(forest.node_depth, position[starts])
    lengths = [len(packed_path(forest, s)) for s in range(forest.num_sequences)]
    assert forest.sequence_lengths.tolist() == lengths
    assert forest.depth == max(len(forest.path(s)) for s in range(forest.num_sequences))
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
        forest.tokens = None  # type: ignore[misc]


#     0 (tokens 0 1)        3 (token 5)
#     |-- 1 (tokens 2 3)
#     `-- 2 (token 4)
SOUND: dict[str, list[int]] = {
    "node_parent": [-1, 0, 0, -1],
    "node_start": [0, 2, 4, 5],
    "node_length": [2, 2, 1, 1],
    "node_depth": [0, 2, 2, 0],
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
        ("depth is its parent's", {"node_depth": [1, 3, 3, 0]}),
        ("depth is its parent's", {"node_depth": [0, 2, 2, 5]}),
        ("depth is its parent's", {"node_depth": [0, 2, 3, 0]}),
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
        ("one entry a node", {"node_depth": [0, 2, 2]}),
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
            node_depth=[0, 2, 0, 2],
            node_subtree_end=[6, 4, 5, 6],
        )


def test_a_subtree_that_ends_inside_a_node_is_refused() -> None:
    # node 0 and its child 1, then a root of two tokens, half of which node 0 claims
    with pytest.raises(ForestError, match="breaks the forest"):
        construct(
            node_parent=[-1, 0, -1],
            node_start=[0, 1, 2],
            node_length=[1, 1, 2],
            node_depth=[0, 1, 0],
            node_subtree_end=[3, 2, 4],
            sequence_node=[1, 2],
        )


def test_empty_arrays_are_refused() -> None:
    with pytest.raises(ForestError, match="at least one node"):
        construct(**{name: [] for name in SOUND})


# ---- size and shape -----------------------------------------------------------------------------


def test_a_chain_of_per_turn_prefixes() -> None:
    whole = np.arange(2000) % 11
    sequences = [whole[: n + 1] for n in range(2000)]
    forest = PrefixForest.from_sequences(sequences)
    assert (forest.num_tokens, forest.num_nodes, forest.depth) == (2000, 2000, 2000)
    np.testing.assert_array_equal(forest.tokens, whole)
    np.testing.assert_array_equal(forest.sequence_node, np.arange(2000))
    np.testing.assert_array_equal(forest.node_multiplicity, np.arange(2000, 0, -1))
    assert forest.path(1999).tolist() == list(range(2000))


def test_a_deep_chain_given_leaf_first() -> None:
    n = 5000
    forest = PrefixForest.from_parents([*range(1, n), -1], [1] * n, tokens=range(n))
    assert forest.depth == n
    np.testing.assert_array_equal(forest.tokens, np.arange(n)[::-1])


def test_a_thousand_leaves_on_a_short_root() -> None:
    sequences = [[1, 2, 3, 10 + i] for i in range(1000)]
    forest = PrefixForest.from_sequences(sequences)
    assert (forest.num_tokens, forest.num_nodes, forest.depth) == (1003, 1001, 2)
    # equal weights: first-come
    np.testing.assert_array_equal(forest.sequence_node, np.arange(1, 1001))
    assert forest.node_multiplicity[0] == 1000


# ---- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([], "sequences is empty; expected at least one"),
        ([[1], []], r"sequences\[1\] is empty; drop it"),
        ([[1], np.array([], np.int64)], r"sequences\[1\] is empty"),
        ([[1], [3, -2, -1]], r"sequences\[1\] has the negative token id -2; remove padding"),
        ([[1], [1.5]], r"sequences\[1\] has float64 values; token ids are integers"),
        ([[1], torch.tensor([1.0])], r"sequences\[1\] has float32 values; token ids are integers"),
        ([[True]], r"sequences\[0\] has bool values"),
        ([[1], np.array([True])], r"sequences\[1\] has bool values"),
        ([["a"]], r"sequences\[0\] has <U1 values"),
        ([[None]], r"sequences\[0\] has object values"),
        ([[1], [[2, 3]]], r"sequences\[1\] has shape \[1, 2\]; expected 1-D"),
        ([[1], 2], r"sequences\[1\] has shape \[\]; expected 1-D"),
        ([[1], [[2], [3, 4]]], r"sequences\[1\] .*expected 1-D"),
        (np.ones((2, 3), int), r"one array of shape \[2, 3\]; for a padded batch use from_padded"),
        (np.ones(3, int), r"one array of shape \[3\]"),
        (torch.ones(2, 3, dtype=torch.long), r"one array of shape \[2, 3\]"),
        ("abc", "must be a list of token id sequences, got .*str"),
        (7, "must be a list of token id sequences, got .*int"),
        (None, "must be a list of token id sequences, got .*NoneType"),
        ([np.array([2**63], np.uint64)], r"9223372036854775808"),
    ],
)
def test_bad_sequences_say_expected_and_got(sequences: Any, message: str) -> None:
    with pytest.raises(ForestError, match=message):
        PrefixForest.from_sequences(sequences)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["a"], "got 1 keys for 2 sequences"),
        (["a", "b", "c"], "got 3 keys for 2 sequences"),
        ([], "got 0 keys for 2 sequences"),
        ([["a"], ["b"]], "keys must be hashable: .*list"),
    ],
)
def test_bad_keys_say_expected_and_got(keys: Any, message: str) -> None:
    with pytest.raises(ForestError, match=message):
        PrefixForest.from_sequences([[1], [2]], keys)


def test_bad_order_names_the_orders() -> None:
    with pytest.raises(ForestError, match="one of heaviest, input, got 'random'"):
        PrefixForest.from_sequences([[1]], order="random")


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        ([1, 2], [1, 1], r"one shape \[B, L\], got \[2\] and \[2\]"),
        ([[1, 2]], [[1]], r"one shape \[B, L\], got \[1, 2\] and \[1, 1\]"),
        ([[[1]]], [[[1]]], r"got \[1, 1, 1\] and"),
        (np.empty((0, 3), int), np.empty((0, 3), int), r"empty batch of shape \[0, 3\]"),
        (np.empty((3, 0), int), np.empty((3, 0), int), r"empty batch of shape \[3, 0\]"),
        ([[1, 2], [3, 4]], [[1, 1], [0, 0]], "row 1 of attention_mask has no token"),
        ([[1, 2, 3]], [[1, 0, 1]], "row 0 of attention_mask has a hole between columns 0 and 2"),
        ([[1, 2, 3], [1, -7, 3]], [[1, 1, 0], [0, 1, 1]], "must be >= 0, got -7; is it padding"),
        ([[1.0, 2.0]], [[1, 1]], "must be integers, got float64"),
        ([[1, 2], [3]], [[1, 1], [1]], "ragged lists where one rectangular array was expected"),
    ],
)
def test_bad_padded_batches_say_expected_and_got(ids: Any, mask: Any, message: str) -> None:
    with pytest.raises(ForestError, match=message):
        PrefixForest.from_padded(ids, mask)


def test_padded_batch_checks_its_keys() -> None:
    with pytest.raises(ForestError, match="got 1 keys for 2 sequences"):
        PrefixForest.from_padded([[1], [2]], [[1], [1]], ["a"])


@pytest.mark.parametrize(
    ("prompts", "responses", "message"),
    [
        ([[1], [2]], [[[3]]], "got 2 prompts and 1 lists"),
        ([[1], [2]], [[[3]], []], r"prompts\[1\] has no response"),
        ([], [], "prompts is empty"),
        ([[]], [[[1]]], r"prompts\[0\] is empty"),
        ([[1]], [[[]]], r"responses\[0\]\[0\] is empty"),
        ([[-1]], [[[1]]], r"prompts\[0\] has the negative token id -1"),
        ([[1]], [[[2], [-5]]], r"responses\[0\]\[1\] has the negative token id -5"),
    ],
)
def test_bad_groups_say_expected_and_got(prompts: Any, responses: Any, message: str) -> None:
    with pytest.raises(ForestError, match=message):
        PrefixForest.from_groups(prompts, responses)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"parents": [], "lengths": []}, "at least one node, got none"),
        ({"parents": [-1], "lengths": [1, 2]}, "as many lengths as parents, got 2 and 1"),
        (
            {"parents": [-1, 2], "lengths": [1, 1]},
            r"parents\[1\] is 2; expected -1 or .* below 2",
        ),
        ({"parents": [-2], "lengths": [1]}, r"parents\[0\] is -2"),
        ({"parents": [-1, 0], "lengths": [1, 0]}, r"lengths\[1\] is 0; a node has at least one"),
        ({"parents": [[-1]], "lengths": [1]}, r"parents must be 1-D integers, got shape \[1, 1\]"),
        ({"parents": [-1], "lengths": [1.5]}, r"lengths must be 1-D integers, got .* of float64"),
        ({"parents": [0], "lengths": [1]}, "cycle through node 0"),
        ({"parents": [-1, 2, 3, 1], "lengths": [1] * 4}, "cycle through node 1"),
        ({"parents": [-1], "lengths": [2], "tokens": [1]}, "1 token ids; lengths add up to 2"),
        ({"parents": [-1], "lengths": [1], "tokens": [-1]}, r"tokens\[0\] has the negative .* -1"),
        ({"parents": [-1], "lengths": [1], "tokens": [0.5]}, r"tokens\[0\] has float64 values"),
        (
            {"parents": [-1, 0], "lengths": [1, 2], "tokens": [[1, 2], [3]]},
            r"tokens\[n\] must",
        ),
        ({"parents": [-1, 0], "lengths": [1, 2], "tokens": [[1, 2, 3]]}, r"tokens\[n\] must"),
        ({"parents": [-1], "lengths": [1], "sequence_ends": []}, "sequence_ends is empty"),
        (
            {"parents": [-1], "lengths": [1], "sequence_ends": [1]},
            r"sequence_ends\[0\] is 1; .*1$",
        ),
        ({"parents": [-1], "lengths": [1], "sequence_ends": [-1]}, r"sequence_ends\[0\] is -1"),
        (
            {"parents": [-1], "lengths": [1], "sequence_ends": [0.0]},
            "sequence_ends must be 1-D",
        ),
        ({"parents": [-1, 0], "lengths": [1, 1], "sequence_ends": [0]}, "leaf ends at least one"),
        ({"parents": [-1], "lengths": [2**31]}, "2147483648 distinct tokens; one forest holds"),
    ],
)
def test_bad_parents_say_expected_and_got(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ForestError, match=message):
        PrefixForest.from_parents(**arguments)


def test_errors_are_value_errors() -> None:
    assert issubclass(ForestError, ValueError)
