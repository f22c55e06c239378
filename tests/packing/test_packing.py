"""`pack`, `PackedForest` and `TreeMask`: layout, edges, copies, queries, bad input."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefixtree import (
    ForestError,
    PackedForest,
    PrefixForest,
    TileShape,
    TreeMask,
    UnsupportedError,
    pack,
)
from prefixtree.packing.host_mask import host_of
from tests.support.forest_examples import EXAMPLE, as_lists, example
from tests.support.strategies import (
    Sequences,
    forests,
    packed_path,
    positions_of,
    predictors_of,
    query_ranges,
    subtree_ends,
    token_sequences,
)

# ---- layout --------------------------------------------------------------------------------------


def test_worked_example() -> None:
    packed = example()
    assert packed.input_ids.tolist() == [1, 2, 5, 6, 7, 8, 3, 4, 9]
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 2, 3, 0]
    assert packed.subtree_end.tolist() == [8, 8, 6, 6, 6, 6, 8, 8, 9]
    assert packed.predictor.tolist() == [-1, 0, 1, 2, 3, 4, 1, 6, -1]
    assert packed.multiplicity.tolist() == [4, 4, 1, 1, 1, 1, 3, 1, 1]
    assert (packed.num_tokens, packed.num_padding) == (9, 0)


def test_documented_dtypes() -> None:
    packed = example(pad_to_multiple_of=4)
    assert packed.input_ids.dtype == packed.position_ids.dtype == torch.int64
    for narrow in (packed.subtree_end, packed.predictor, packed.multiplicity):
        assert narrow.dtype == torch.int32
    edges = packed.edges()
    assert edges.predictor.dtype == edges.token.dtype == torch.int64


@given(forests(), st.one_of(st.none(), st.integers(1, 9)))
def test_layout_follows_the_paths(forest: PrefixForest, multiple: int | None) -> None:
    packed = pack(forest, pad_to_multiple_of=multiple)
    real = forest.num_tokens
    assert packed.num_padding == (-real % multiple if multiple else 0)
    assert packed.num_tokens == real + packed.num_padding
    np.testing.assert_array_equal(packed.input_ids[:real], forest.tokens)
    np.testing.assert_array_equal(packed.position_ids[:real], positions_of(forest))
    np.testing.assert_array_equal(packed.predictor[:real], predictors_of(forest))
    np.testing.assert_array_equal(packed.subtree_end[:real], subtree_ends(forest))
    paths = np.concatenate([packed_path(forest, s) for s in range(forest.num_sequences)])
    np.testing.assert_array_equal(packed.multiplicity[:real], np.bincount(paths))


def test_padding_sees_itself_alone_and_is_in_nothing() -> None:
    packed = example(pad_to_multiple_of=4)
    assert (packed.num_tokens, packed.num_padding) == (12, 3)
    padding = slice(9, 12)
    assert packed.input_ids[padding].tolist() == [0, 0, 0]
    assert packed.position_ids[padding].tolist() == [0, 0, 0]
    assert packed.subtree_end[padding].tolist() == [10, 11, 12]
    assert packed.predictor[padding].tolist() == [-1, -1, -1]
    assert packed.multiplicity[padding].tolist() == [0, 0, 0]
    dense = packed.mask.dense()
    assert torch.equal(dense[padding], torch.eye(12, dtype=torch.bool)[padding])
    assert not dense[:9, padding].any()
    assert packed.edges().token.max() < 9
    assert as_lists(packed.unpack(packed.input_ids)) == EXAMPLE


@pytest.mark.parametrize("multiple", [1, 3, 9])
def test_a_multiple_that_fits_adds_nothing(multiple: int) -> None:
    assert example(pad_to_multiple_of=multiple).num_padding == 0


def test_model_inputs() -> None:
    packed = example()
    inputs = packed.model_inputs()
    guard = inputs.pop("num_items_in_batch")
    assert list(inputs) == ["input_ids", "position_ids", "tree_mask", "use_cache"]
    assert torch.equal(inputs["input_ids"], packed.input_ids[None])
    assert torch.equal(inputs["position_ids"], packed.position_ids[None])
    assert inputs["tree_mask"] is packed.mask
    assert inputs["use_cache"] is False
    with pytest.raises(UnsupportedError, match="sequence_logprobs"):
        torch.ones(()) / pickle.loads(pickle.dumps(guard))


def test_structure_without_tokens_packs_but_feeds_no_model() -> None:
    packed = pack(PrefixForest.from_parents([-1, 0], [2, 1]))
    assert packed.input_ids is None
    assert packed.position_ids.tolist() == [0, 1, 2]
    with pytest.raises(ForestError, match="no token ids; give from_parents its tokens="):
        packed.model_inputs()


def test_options_travel_with_the_mask() -> None:
    packed = example()
    changed = packed.with_options(backend="sdpa", deterministic=True)
    assert (changed.mask.backend, changed.mask.deterministic) == ("sdpa", True)
    assert (packed.mask.backend, packed.mask.deterministic) == ("auto", False)
    assert changed.with_options(deterministic=False).mask.backend == "sdpa"
    assert changed.model_inputs()["tree_mask"] is changed.mask
    assert torch.equal(changed.input_ids, packed.input_ids)


def test_repr_names_the_counts() -> None:
    text = repr(example(pad_to_multiple_of=4))
    assert "9 distinct of 17 tokens" in text
    assert "3 padding, cpu" in text


@pytest.mark.parametrize("multiple", [0, -4])
def test_bad_multiple_says_expected_and_got(multiple: int) -> None:
    with pytest.raises(ValueError, match=f"must be None or an integer >= 1, got {multiple}"):
        example(pad_to_multiple_of=multiple)


# ---- edges ---------------------------------------------------------------------------------------


@given(forests(), st.integers(1, 4))
def test_every_token_but_the_first_of_a_root_is_scored_once(
    forest: PrefixForest, multiple: int
) -> None:
    edges = pack(forest, multiple).edges()
    predictor = predictors_of(forest)
    assert edges.token.tolist() == np.flatnonzero(predictor >= 0).tolist()
    assert edges.predictor.tolist() == predictor[predictor >= 0].tolist()


@given(token_sequences(), st.data())
def test_a_loss_mask_selects_what_any_sequence_asks_for(
    sequences: Sequences, data: st.DataObject
) -> None:
    bits = st.integers(0, 1)
    masks = [data.draw(st.lists(bits, min_size=len(s), max_size=len(s))) for s in sequences]
    forest = PrefixForest.from_sequences(sequences)
    wanted = set()
    for s, mask in enumerate(masks):
        path = packed_path(forest, s)
        wanted |= {(int(path[i - 1]), int(path[i])) for i in range(1, len(path)) if mask[i]}
    edges = pack(forest).edges(masks)
    expected = sorted(wanted, key=lambda edge: edge[1])
    assert list(zip(edges.predictor.tolist(), edges.token.tolist(), strict=True)) == expected


def test_the_first_token_after_a_branch_is_an_edge_like_any_other() -> None:
    edges = example().edges()
    scored = dict(zip(edges.token.tolist(), edges.predictor.tolist(), strict=True))
    # both branches below token 1 start with an edge from it; a rolled label would say 5 -> 6
    assert scored[2] == 1
    assert scored[6] == 1
    assert 8 not in scored


def test_the_first_entry_of_a_loss_mask_is_ignored() -> None:
    masks = [[1] + [0] * (len(s) - 1) for s in EXAMPLE]
    edges = example().edges(masks)
    assert edges.token.shape == edges.predictor.shape == (0,)


@pytest.mark.parametrize(
    "convert",
    [
        np.array,
        torch.tensor,
        lambda m: torch.tensor(m, dtype=torch.bool),
        lambda m: torch.tensor(m, dtype=torch.float32),
        lambda m: np.array(m, bool),
    ],
    ids=["numpy", "torch", "torch-bool", "torch-float", "numpy-bool"],
)
def test_kinds_of_loss_masks_agree(convert: Callable[[list[int]], Any]) -> None:
    masks = [[0, 1, 0, 1], [0, 0, 0], [0, 0, 1, 1, 0, 1], [1], [0, 0, 1]]
    packed = example()
    expected = packed.edges(masks)
    assert expected.token.tolist() == [1, 2, 3, 5, 6, 7]
    edges = packed.edges([convert(mask) for mask in masks])
    assert torch.equal(edges.token, expected.token)
    assert torch.equal(edges.predictor, expected.predictor)


def test_a_loss_mask_may_mix_lists_and_tensors() -> None:
    packed = pack(PrefixForest.from_sequences([[1, 2], [1, 3]]))
    assert packed.edges([torch.tensor([1, 1]), [1, 0]]).token.tolist() == [1]
    assert packed.edges([[1, 0], torch.tensor([1, 1])]).token.tolist() == [2]


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ([], "one mask per sequence, got none"),
        ([[1] * 4], "expected 5, got 1"),
        ([[1] * 4, [1] * 4, [1] * 6, [1], [1] * 3], r"\[1\] must have .* length 3, got length 4"),
        ([1, [1] * 3, [1] * 6, [1], [1] * 3], r"loss_mask\[0\] .* length 4, got no 1-D array"),
        ([torch.ones(4), torch.ones(2)], "expected 5, got 2"),
        (
            [torch.ones(n) for n in (4, 3, 6, 1, 2)],
            r"loss_mask\[4\] must have the sequence's length 3, got length 2",
        ),
    ],
)
def test_bad_loss_masks_say_expected_and_got(masks: Any, message: str) -> None:
    packed = example()
    with pytest.raises(ForestError, match=message):
        packed.edges(masks)
    with pytest.raises(ForestError, match=message):
        packed.unpack(packed.input_ids, loss_mask=masks)


# ---- moving and copying --------------------------------------------------------------------------


def assert_same_packed(a: PackedForest, b: PackedForest) -> None:
    for name in ("input_ids", "position_ids", "subtree_end", "predictor", "multiplicity"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert (a.num_tokens, a.num_padding) == (b.num_tokens, b.num_padding)
    assert torch.equal(a.mask.dense(), b.mask.dense())


def test_to_cpu_keeps_everything() -> None:
    packed = example(pad_to_multiple_of=4).with_options(deterministic=True)
    moved = packed.to("cpu")
    assert_same_packed(moved, packed)
    assert moved.mask.deterministic
    assert moved.mask.tables(TileShape(4, 4)) is packed.mask.tables(TileShape(4, 4))


def test_to_another_device_moves_every_tensor() -> None:
    packed = example(pad_to_multiple_of=4).with_options(backend="sdpa")
    moved = packed.to("meta")
    for name in ("input_ids", "position_ids", "subtree_end", "predictor", "multiplicity"):
        tensor = getattr(moved, name)
        assert tensor.device.type == "meta", name
        assert tensor.shape == getattr(packed, name).shape
        assert tensor.dtype == getattr(packed, name).dtype
    assert moved.device.type == moved.mask.device.type == "meta"
    assert moved.mask.position_ids.device.type == "meta"
    assert moved.mask.backend == "sdpa"
    assert moved.edges().token.device.type == "meta"
    assert moved.mask.tables(TileShape(4, 4)).k_runs.device.type == "meta"
    # the one it came from stays where it was
    assert packed.device.type == packed.mask.device.type == "cpu"
    assert as_lists(packed.unpack(packed.input_ids)) == EXAMPLE


def test_mask_on_another_device_and_its_queries() -> None:
    mask = example().mask.for_queries([(1, 4)]).to("meta")
    assert mask.device.type == "meta"
    assert mask.query_tokens is not None
    assert mask.query_tokens.device.type == "meta"
    assert mask.query_tokens.shape == (3,)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_packed_forest_pickles(protocol: int) -> None:
    packed = example(pad_to_multiple_of=4).with_options(backend="sdpa", deterministic=True)
    again = pickle.loads(pickle.dumps(packed, protocol))
    assert_same_packed(again, packed)
    assert (again.mask.backend, again.mask.deterministic) == ("sdpa", True)
    assert as_lists(again.unpack(again.input_ids)) == EXAMPLE


def test_a_pickle_holds_the_tensors_once() -> None:
    # micro-batches travel to workers: views pickled one by one would each take the whole buffer
    packed = pack(PrefixForest.from_sequences([np.arange(20_000)]))
    tensors = packed.num_tokens * (2 * 8 + 4 * 4)
    forest_and_mask = packed.num_tokens * (8 + 4)
    assert len(pickle.dumps(packed)) < 1.1 * (tensors + forest_and_mask)


def test_packed_forest_deepcopies() -> None:
    packed = example(pad_to_multiple_of=4)
    again = copy.deepcopy(packed)
    assert_same_packed(again, packed)
    again.position_ids[0] = 77
    assert packed.position_ids[0] == 0


def test_a_copy_leaves_the_original_known() -> None:
    """A model that is given known positions waits for no GPU to compare them."""
    packed = example()
    made = [
        packed.with_input_ids(packed.input_ids + 1),
        packed.with_options("sdpa"),
        packed.to("cpu"),
        copy.deepcopy(packed),
        pickle.loads(pickle.dumps(packed)),
    ]
    for a in (packed, *made):
        for b in (packed, *made):
            given = b.model_inputs()["position_ids"][0]
            same = given.data_ptr() == a.position_ids.data_ptr()
            assert a.mask.is_given(given) == same
        assert a.mask.is_given(a.position_ids)
    assert len({a.mask.handle.data_ptr() for a in (packed, *made[:3])}) == 1


def test_other_token_ids() -> None:
    packed = example(pad_to_multiple_of=4)
    other = packed.with_input_ids(torch.arange(12, dtype=torch.int32))
    assert other.input_ids.tolist() == list(range(12)) and other.input_ids.dtype == torch.int64
    assert packed.input_ids.tolist() != list(range(12))
    assert torch.equal(other.position_ids, packed.position_ids)
    structure = pack(PrefixForest.from_parents([-1], [3]))
    with pytest.raises(ForestError, match="this forest has no token ids"):
        structure.with_input_ids(torch.arange(3))


def test_a_deepcopy_stays_on_its_device() -> None:
    packed = example().to("meta")
    assert copy.deepcopy(packed.mask).device.type == "meta"
    again = copy.deepcopy(packed)
    assert again.device == again.mask.device


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
@pytest.mark.parametrize("ranges", [None, [], [(1, 4), (6, 7)]])
def test_masks_are_copied_whole(duplicate: Any, ranges: list[tuple[int, int]] | None) -> None:
    mask = example().mask.with_options(backend="reference", deterministic=True)
    mask = mask if ranges is None else mask.for_queries(ranges).with_options("sdpa")
    again = duplicate(mask)
    assert (again.backend, again.deterministic) == (mask.backend, mask.deterministic)
    assert (again.num_tokens, again.num_queries) == (mask.num_tokens, mask.num_queries)
    assert torch.equal(again.dense(), mask.dense())
    assert torch.equal(again.position_ids, mask.position_ids)
    ours, theirs = mask.tables(TileShape(2, 2)), again.tables(TileShape(2, 2))
    assert torch.equal(ours.q_runs, theirs.q_runs)


# ---- for_queries ---------------------------------------------------------------------------------


@given(forests(), st.data())
def test_queries_are_rows_of_the_whole_mask(forest: PrefixForest, data: st.DataObject) -> None:
    mask = pack(forest).mask
    ranges = data.draw(query_ranges(forest.num_tokens))
    rows = np.concatenate([np.empty(0, int), *[np.arange(*r) for r in ranges]])
    subset = mask.for_queries(ranges)
    assert subset.num_queries == len(rows)
    assert subset.num_tokens == mask.num_tokens
    assert subset.query_tokens is not None
    assert subset.query_tokens.dtype == torch.int32
    assert subset.query_tokens.tolist() == rows.tolist()
    for window in (None, 1, 3):
        assert torch.equal(subset.dense(window), mask.dense(window)[rows])


def test_queries_may_be_all_tokens_or_given_by_a_generator() -> None:
    mask = example().mask
    subset = mask.for_queries((t, t + 1) for t in range(9))
    assert torch.equal(subset.dense(), mask.dense())


def test_queries_lie_on_the_grid_of_tiles_or_not() -> None:
    mask = example().mask
    # the second run begins at row 3 of q
    some = mask.for_queries([(4, 7), (8, 9)]).host
    assert some.rows_on_grid(3) and not some.rows_on_grid(4)
    # the question is asked for some queries only
    assert not mask.host.rows_on_grid(3)


def test_queries_keep_the_options_given_before() -> None:
    mask = example().mask.with_options(backend="sdpa", deterministic=True).for_queries([(0, 2)])
    assert (mask.backend, mask.deterministic) == ("sdpa", True)


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([(0, 10)], r"within 0 and 9, got \(0, 10\)"),
        ([(-1, 3)], r"got \(-1, 3\) behind 0"),
        ([(3, 3)], r"non-empty ranges .* got \(3, 3\)"),
        ([(4, 3)], r"got \(4, 3\)"),
        ([(0, 4), (3, 5)], r"separate.* got \(3, 5\) behind 4"),
        ([(5, 6), (0, 2)], r"ascending.* got \(0, 2\) behind 6"),
    ],
)
def test_bad_query_ranges_say_expected_and_got(ranges: Any, message: str) -> None:
    with pytest.raises(ForestError, match=message):
        example().mask.for_queries(ranges)


def test_queries_of_queries_are_refused() -> None:
    with pytest.raises(ForestError, match="takes the whole mask; this one holds a subset"):
        example().mask.for_queries([(0, 4)]).for_queries([(0, 1)])


# ---- TreeMask by itself --------------------------------------------------------------------------


def test_mask_and_packed_forest_tell_the_same() -> None:
    packed = example(pad_to_multiple_of=4)
    assert torch.equal(packed.mask.subtree_end, packed.subtree_end)
    assert torch.equal(packed.mask.position_ids.long(), packed.position_ids)
    assert packed.mask.position_ids.dtype == packed.mask.subtree_end.dtype == torch.int32
    assert packed.mask.query_tokens is None
    assert packed.mask.num_tokens == packed.mask.num_queries == packed.num_tokens


@pytest.mark.parametrize(
    "convert",
    [list, np.array, torch.tensor, lambda e: torch.tensor(e, dtype=torch.int32)],
    ids=["list", "numpy", "torch", "torch32"],
)
def test_kinds_of_subtree_ends_agree(convert: Any) -> None:
    ends = [3, 2, 3, 4]
    assert TreeMask(convert(ends)).subtree_end.tolist() == ends


def test_a_mask_does_not_change_with_the_array_it_was_made_of() -> None:
    ends = np.array([3, 3, 3], np.int32)
    mask = TreeMask(ends)
    ends[:] = [1, 2, 3]
    assert mask.dense().tolist() == [[True, False, False], [True, True, False], [True] * 3]
    runs = mask.tables(TileShape(1, 1)).q_runs
    assert (
        runs[:, :2].tolist() == TreeMask([3, 3, 3]).tables(TileShape(1, 1)).q_runs[:, :2].tolist()
    )


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ([0], r"subtree_end\[0\] is 0: expected more than 0"),
        ([2], r"subtree_end\[0\] is 2"),
        ([2, 1], r"subtree_end\[1\] is 1: expected more than 1"),
        # token 1 outlives token 0, which it lies below
        ([2, 3, 3], r"subtree_end\[1\] is 3: .* no more than the subtree end of the tokens"),
        ([4, 2, 4, 5], r"subtree_end\[3\] is 5"),
        ([2**32 + 1], r"subtree_end\[0\] is 4294967297"),
        ([[1]], r"must be 1-D integers, got shape \[1, 1\]"),
        ([1.0], r"must be 1-D integers, got shape \[1\] of float64"),
        (3, r"must be 1-D integers, got shape \[\]"),
    ],
)
def test_bad_subtree_ends_say_expected_and_got(ends: Any, message: str) -> None:
    with pytest.raises(ForestError, match=message):
        TreeMask(ends)


@pytest.mark.parametrize("window", [0, -1, 1.5, True, "3"])
def test_bad_windows_say_expected_and_got(window: Any) -> None:
    mask, shape = example().mask, TileShape(4, 4)
    message = r"window must be None or an integer >= 1 .*, got"
    with pytest.raises(ValueError, match=message):
        mask.dense(window)
    with pytest.raises(ValueError, match=message):
        mask.tables(shape, window)
    with pytest.raises(ValueError, match=message):
        mask.stats(shape, window)


@pytest.mark.parametrize("arguments", [(0, 4), (4, 0), (-1, 4), (4, 4, False, -1)])
def test_bad_tile_shapes_say_expected_and_got(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="at least one query and one key, got TileShape"):
        TileShape(*arguments)


def test_a_handle_finds_its_mask() -> None:
    a, b = example().mask, example().mask
    for mask in (a, b):
        assert mask.handle.device.type == "cpu"
        assert (mask.handle.shape, mask.handle.dtype) == ((1,), torch.int64)
        assert host_of(mask.handle) is mask.host
    assert a.handle.item() != b.handle.item()
    assert host_of(a.for_queries([(0, 2)]).handle) is not a.host


def test_copies_of_a_mask_share_its_handle() -> None:
    mask = example().mask
    assert mask.with_options(deterministic=True).handle is mask.handle
    assert mask.to("meta").handle is mask.handle


def test_a_handle_keeps_the_host_mask_alive() -> None:
    # what autograd saves is a tensor on the handle's storage, not the mask
    mask = example().mask
    host, saved = mask.host, mask.handle.view(1).detach()
    del mask
    assert host_of(saved) is host


def test_a_number_without_a_mask_is_refused() -> None:
    number = example().mask.handle.item()
    with pytest.raises(ForestError, match="no longer exists; keep its PackedForest alive"):
        host_of(torch.tensor([number]))
    assert example().mask.handle.item() != number, "numbers are never reused"


def test_mask_repr_names_tokens_queries_device_and_backend() -> None:
    mask = example().mask
    assert repr(mask) == "TreeMask(9 tokens, cpu, auto)"
    assert repr(mask.for_queries([(0, 2)])) == "TreeMask(9 tokens, 2 queries, cpu, auto)"


def test_pack_takes_a_forest() -> None:
    with pytest.raises(TypeError, match=r"takes a PrefixForest, got list; .*from_sequences"):
        pack([[1, 2]])
