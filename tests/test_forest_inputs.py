"""Constructors of `PrefixForest`: kinds of input, padded batches, groups, parents, bad input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefixtree import ForestError, PrefixForest
from tests.support.forest_examples import EXAMPLE, assert_same, children_of
from tests.support.strategies import Sequences, sequences_of, token_sequences, tree_arguments

# ---- kinds of input ------------------------------------------------------------------------------


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


@pytest.mark.parametrize("namespaces", [[0, 0, 1], (0, 0, 1), np.array([0, 0, 1])], ids=type)
def test_kinds_of_namespaces(namespaces: Any) -> None:
    assert PrefixForest.from_sequences([[1, 2], [1, 3], [1, 2]], namespaces).num_tokens == 5


def test_namespaces_in_a_tensor_are_compared_by_value() -> None:
    # a tensor hashes by identity: taken as it is, every sequence would get a namespace of its own
    forest = PrefixForest.from_sequences([[1, 2], [1, 3], [1, 2]], torch.tensor([0, 0, 1]))
    assert forest.num_tokens == 5


# ---- from_padded ---------------------------------------------------------------------------------


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


# ---- from_groups ---------------------------------------------------------------------------------


def test_groups_are_one_level() -> None:
    forest = PrefixForest.from_groups(
        [[1, 2], [7]], [[[3, 4], [3]], [[8], [9], [8]]], order="input"
    )
    assert forest.tokens.tolist() == [1, 2, 3, 4, 3, 7, 8, 9, 8]
    assert forest.node_parent.tolist() == [-1, 0, 0, -1, 3, 3, 3]
    assert forest.num_levels == 2
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


# ---- from_parents --------------------------------------------------------------------------------


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


# ---- bad input -----------------------------------------------------------------------------------


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
        ([[1], 2], r"sequences\[1\] is one number, 2; .* as \[\[1, 2, 3\]\]"),
        ([[1], [[2], [3, 4]]], r"sequences\[1\] is ragged"),
        (np.ones((2, 3), int), r"one array of shape \[2, 3\]; for a padded batch use from_padded"),
        (np.ones(3, int), r"one array of shape \[3\]"),
        (torch.ones(2, 3, dtype=torch.long), r"one array of shape \[2, 3\]"),
        ("abc", "must be a list of token id sequences, got .*str"),
        (
            {"input_ids": [[1]], "attention_mask": [[1]]},
            "got dict with the keys 'input_ids', 'attention_mask'; give its token ids: one list",
        ),
        (["hello", "hello you"], r"sequences\[0\] is text; expected token ids: tokenise it first"),
        (7, "must be a list of token id sequences, got .*int"),
        (None, "must be a list of token id sequences, got .*NoneType"),
        ([np.array([2**63], np.uint64)], r"9223372036854775808"),
    ],
)
def test_bad_sequences_say_expected_and_got(sequences: Any, message: str) -> None:
    with pytest.raises(ForestError, match=message):
        PrefixForest.from_sequences(sequences)


@pytest.mark.parametrize(
    ("namespaces", "message"),
    [
        (["a"], "got 1 namespaces for 2 sequences"),
        (["a", "b", "c"], "got 3 namespaces for 2 sequences"),
        ([], "got 0 namespaces for 2 sequences"),
        ([["a"], ["b"]], "namespaces must be hashable: .*list"),
    ],
)
def test_bad_namespaces_say_expected_and_got(namespaces: Any, message: str) -> None:
    with pytest.raises(ForestError, match=message):
        PrefixForest.from_sequences([[1], [2]], namespaces)


def test_bad_order_names_the_orders() -> None:
    with pytest.raises(ForestError, match="one of heaviest, input, got 'random'"):
        PrefixForest.from_sequences([[1]], order="random")


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        ([1, 2], [1, 1], r"one shape \[B, L\], got \[2\] and \[2\]"),
        ([[1, 2]], [[1]], r"one shape \[B, L\], got \[1, 2\] and \[1, 1\]"),
        ([[[1]]], [[[1]]], r"got \[1, 1, 1\] and"),
        (
            np.empty((0, 3), int),
            np.empty((0, 3), int),
            r"one row and one column, got shape \[0, 3\]",
        ),
        (
            np.empty((3, 0), int),
            np.empty((3, 0), int),
            r"one row and one column, got shape \[3, 0\]",
        ),
        ([[1, 2], [3, 4]], [[1, 1], [0, 0]], "row 1 of attention_mask has no token"),
        ([[1, 2, 3]], [[1, 0, 1]], "row 0 of attention_mask has a hole between columns 0 and 2"),
        ([[1, 2, 3], [1, -7, 3]], [[1, 1, 0], [0, 1, 1]], "must be >= 0, got -7; is it padding"),
        ([[1.0, 2.0]], [[1, 1]], "must be integers, got float64"),
        ([[1, 2], [3]], [[1, 1], [1]], "input_ids is ragged; expected one rectangular array"),
    ],
)
def test_bad_padded_batches_say_expected_and_got(ids: Any, mask: Any, message: str) -> None:
    with pytest.raises(ForestError, match=message):
        PrefixForest.from_padded(ids, mask)


def test_padded_batch_checks_its_keys() -> None:
    with pytest.raises(ForestError, match="got 1 namespaces for 2 sequences"):
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
