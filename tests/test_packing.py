"""`pack`, `PackedForest` and `TreeMask`: layout, round trips, gradients, copies, bad input."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Poison
from hypothesis import given
from hypothesis import strategies as st
from strategies import (
    Sequences,
    forests,
    packed_path,
    positions_of,
    predictors_of,
    query_ranges,
    sequences_of,
    subtree_ends,
    summed_over_copies,
    token_sequences,
)

from prefixtree import ForestError, PackedForest, PrefixForest, TileShape, TreeMask, pack
from prefixtree.packing import copies, gather, layout
from prefixtree.packing.mask import plan_of

SEQUENCES: Sequences = [[1, 2, 3, 4], [1, 2, 3], [1, 2, 5, 6, 7, 8], [9], [1, 2, 3]]
FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def example(**kwargs: Any) -> PackedForest:
    """Packed as 1 2 | 5 6 7 8 | 3 | 4 and 9."""
    return pack(PrefixForest.from_sequences(SEQUENCES), **kwargs)


def random_packed(seed: int = 0, num_sequences: int = 40) -> PackedForest:
    """Ragged, shared, repeated sequences, packed with some padding."""
    rng = np.random.default_rng(seed)
    stems = [rng.integers(0, 9, 30) for _ in range(4)]
    sequences = [
        np.concatenate([stems[rng.integers(4)][: rng.integers(1, 31)], rng.integers(0, 3, length)])
        for length in rng.integers(0, 12, num_sequences)
    ]
    return pack(PrefixForest.from_sequences([*sequences, sequences[0]]), pad_to_multiple_of=16)


def pickled(mask: TreeMask) -> TreeMask:
    return pickle.loads(pickle.dumps(mask))


def as_lists(tensors: list[torch.Tensor]) -> list[Any]:
    return [t.tolist() for t in tensors]


# ---- layout -------------------------------------------------------------------------------------


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
    assert as_lists(packed.unpack(packed.input_ids)) == SEQUENCES


@pytest.mark.parametrize("multiple", [1, 3, 9])
def test_a_multiple_that_fits_adds_nothing(multiple: int) -> None:
    assert example(pad_to_multiple_of=multiple).num_padding == 0


def test_model_inputs() -> None:
    packed = example()
    inputs = packed.model_inputs()
    assert list(inputs) == ["input_ids", "position_ids", "tree_mask", "use_cache"]
    assert torch.equal(inputs["input_ids"], packed.input_ids[None])
    assert torch.equal(inputs["position_ids"], packed.position_ids[None])
    assert inputs["tree_mask"] is packed.mask
    assert inputs["use_cache"] is False


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


# ---- edges --------------------------------------------------------------------------------------


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
    bits = st.integers(0, 2)
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
    masks = [[1] + [0] * (len(s) - 1) for s in SEQUENCES]
    edges = example().edges(masks)
    assert edges.token.shape == edges.predictor.shape == (0,)


@pytest.mark.parametrize(
    "convert",
    [
        np.array,
        torch.tensor,
        lambda m: torch.tensor(m, dtype=torch.bool),
        lambda m: torch.tensor(m, dtype=torch.float32) * 0.5,
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
        ([], "one mask a sequence, got none"),
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


# ---- unpack -------------------------------------------------------------------------------------


@given(token_sequences(), st.integers(1, 5))
def test_unpack_returns_every_sequence(sequences: Sequences, multiple: int) -> None:
    packed = pack(PrefixForest.from_sequences(sequences), multiple)
    assert as_lists(packed.unpack(packed.input_ids)) == sequences


@given(forests(), st.data())
def test_unpack_of_some_sequences(forest: PrefixForest, data: st.DataObject) -> None:
    packed = pack(forest)
    wanted = data.draw(st.lists(st.integers(0, forest.num_sequences - 1), max_size=4))
    everything = sequences_of(forest)
    expected = [everything[s] for s in wanted]
    assert as_lists(packed.unpack(packed.input_ids, sequences=wanted)) == expected


@given(forests(), st.data())
def test_unpack_of_selected_tokens(forest: PrefixForest, data: st.DataObject) -> None:
    packed = pack(forest)
    masks = [
        data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
        for n in forest.sequence_lengths.tolist()
    ]
    wanted = data.draw(st.lists(st.integers(0, forest.num_sequences - 1), max_size=4))
    everything = sequences_of(forest)
    expected = [
        [token for token, kept in zip(everything[s], masks[s], strict=True) if kept] for s in wanted
    ]
    out = packed.unpack(packed.input_ids, sequences=wanted, loss_mask=masks)
    assert as_lists(out) == expected


def test_only_what_is_asked_for_is_indexed(monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[int] = []

    class Counting(gather.GatherPlan):
        def __init__(self, index: np.ndarray, *args: Any) -> None:
            listed.append(len(index))
            super().__init__(index, *args)

    def counted(*args: Any) -> Any:
        index, counts = list_copies(*args)
        listed.append(len(index))
        return index, counts

    list_copies = copies.copy_index
    monkeypatch.setattr(layout, "GatherPlan", Counting)
    monkeypatch.setattr(copies, "copy_index", counted)
    packed = example()
    values = packed.position_ids
    masks = [[0, 0, 0, 1], [0] * 3, [0, 0, 1, 1, 0, 0], [0], [0] * 3]
    for arguments, expected in [
        ({}, 17),
        ({"loss_mask": masks}, 3),
        ({"sequences": [1, 3]}, 4),
        ({"sequences": [2], "loss_mask": masks}, 2),
        ({"sequences": [3], "loss_mask": masks}, 0),
    ]:
        listed.clear()
        packed.unpack(values, **arguments)
        assert listed == [expected, expected], arguments


@pytest.mark.parametrize("trailing", [(), (3,), (2, 3), (0,), (3, 0, 2)])
def test_trailing_dimensions_travel(trailing: tuple[int, ...]) -> None:
    packed = example(pad_to_multiple_of=4)
    values = torch.randn(packed.num_tokens, *trailing)
    for s, out in enumerate(packed.unpack(values)):
        assert torch.equal(out, values[packed_path(packed.forest, s)])


def test_strided_values() -> None:
    packed = example()
    values = torch.randn(3, packed.num_tokens).T
    for s, out in enumerate(packed.unpack(values)):
        assert torch.equal(out, values[packed_path(packed.forest, s)])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.uint8])
def test_values_without_a_gradient(dtype: torch.dtype) -> None:
    packed = example()
    values = (torch.arange(packed.num_tokens) % 2).to(dtype)
    out = packed.unpack(values)
    assert all(t.dtype == dtype for t in out)
    assert torch.equal(
        torch.cat(out), torch.cat([values[packed_path(packed.forest, s)] for s in range(5)])
    )


@pytest.mark.parametrize("wanted", [[5], [-1], [0, 17]])
def test_a_sequence_that_does_not_exist(wanted: list[int]) -> None:
    packed = example()
    with pytest.raises(IndexError, match=f"sequence {wanted[-1]} does not exist; there are 5"):
        packed.unpack(packed.input_ids, sequences=wanted)


@pytest.mark.parametrize("wanted", [[1.5], [True, False]])
def test_sequence_indices_are_integers(wanted: Any) -> None:
    packed = example()
    with pytest.raises((TypeError, ValueError, IndexError), match="integer"):
        packed.unpack(packed.input_ids, sequences=wanted)


# ---- unpack_padded ------------------------------------------------------------------------------


def test_padded_right_and_left() -> None:
    packed = pack(PrefixForest.from_sequences([[1, 2], [1, 2, 3], [4]]))
    ids = packed.input_ids
    assert packed.unpack_padded(ids).tolist() == [[1, 2, 0], [1, 2, 3], [4, 0, 0]]
    right = packed.unpack_padded(ids, padding_value=-1, padding_side="right", length=4)
    assert right.tolist() == [[1, 2, -1, -1], [1, 2, 3, -1], [4, -1, -1, -1]]
    left = packed.unpack_padded(ids, padding_value=-1, padding_side="left")
    assert left.tolist() == [[-1, 1, 2], [1, 2, 3], [-1, -1, 4]]
    left = packed.unpack_padded(ids, padding_side="left", length=4)
    assert left.tolist() == [[0, 0, 1, 2], [0, 1, 2, 3], [0, 0, 0, 4]]


@given(token_sequences(), st.integers(0, 3), st.data())
def test_a_padded_batch_comes_back_in_its_own_columns(
    sequences: Sequences, spare: int, data: st.DataObject
) -> None:
    length = max(map(len, sequences)) + spare
    ids = np.full((len(sequences), length), -100)
    mask = np.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        start = data.draw(st.integers(0, length - len(sequence)))
        ids[row, start : start + len(sequence)] = sequence
        mask[row, start : start + len(sequence)] = 1
    packed = pack(PrefixForest.from_padded(ids, mask), pad_to_multiple_of=4)
    np.testing.assert_array_equal(packed.unpack_padded(packed.input_ids, -100), ids)
    # told otherwise, columns give way
    right = packed.unpack_padded(packed.input_ids, -100, padding_side="right")
    assert right.shape[1] == max(map(len, sequences))
    for row, sequence in zip(right.tolist(), sequences, strict=True):
        assert row == sequence + [-100] * (len(row) - len(sequence))


def test_padded_batch_with_a_length_of_its_own_is_padded_on_the_right() -> None:
    packed = pack(PrefixForest.from_padded([[0, 1]], [[0, 1]]))
    assert packed.unpack_padded(packed.input_ids, length=3).tolist() == [[1, 0, 0]]


def test_padding_value_fills_every_trailing_entry() -> None:
    packed = pack(PrefixForest.from_sequences([[1, 2], [3]]))
    values = torch.arange(6, dtype=torch.float32).view(3, 2)
    out = packed.unpack_padded(values, padding_value=float("-inf"))
    assert out.tolist() == [[[0, 1], [2, 3]], [[4, 5], [float("-inf")] * 2]]


@pytest.mark.parametrize("padding_value", [0.0, 7.0])
def test_padding_takes_no_gradient(padding_value: float) -> None:
    packed = example(pad_to_multiple_of=4)
    values = torch.randn(packed.num_tokens, dtype=torch.float64, requires_grad=True)
    out = packed.unpack_padded(values, padding_value, padding_side="left", length=8)
    grad = torch.randn(out.shape, dtype=torch.float64)
    out.backward(grad)
    per_sequence = [grad[s, 8 - len(sequence) :] for s, sequence in enumerate(SEQUENCES)]
    torch.testing.assert_close(values.grad, summed_over_copies(packed, per_sequence))


def test_bad_padding_says_expected_and_got() -> None:
    packed = example()
    with pytest.raises(ValueError, match="padding_side must be 'left' or 'right', got 'middle'"):
        packed.unpack_padded(packed.input_ids, padding_side="middle")
    with pytest.raises(ValueError, match="length 5 is below the longest sequence, 6"):
        packed.unpack_padded(packed.input_ids, length=5)


# ---- gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize("trailing", [(), (5,), (2, 3)])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gradient_is_the_sum_over_copies(
    dtype: torch.dtype, trailing: tuple[int, ...], poison: Poison
) -> None:
    packed = random_packed()
    assert packed.num_padding > 0
    values = torch.randn(packed.num_tokens, *trailing).to(dtype).requires_grad_()
    out = packed.unpack(values)
    grads = [torch.randn(t.shape).to(dtype) for t in out]
    before = poison.tensors
    torch.autograd.backward(out, grads)
    assert poison.tensors > before, "the backward allocated nothing: the poison checks nothing"
    expected = summed_over_copies(packed, grads)
    # summed in fp32 (fp64 for fp64), rounded once
    accumulated = torch.float64 if dtype == torch.float64 else torch.float32
    absolute = summed_over_copies(packed, [g.abs() for g in grads])
    bound = torch.finfo(dtype).eps / 2 * expected.abs() * 1.01
    bound += packed.multiplicity.max() * torch.finfo(accumulated).eps * absolute + 1e-7
    assert values.grad is not None
    assert values.grad.dtype == dtype
    assert ((values.grad.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_half_precision_sum_is_exact_in_float32(dtype: torch.dtype) -> None:
    # a bf16 running sum of ones stops at 256, an fp16 one at 2048
    packed = pack(PrefixForest.from_sequences([[1]] * 5000))
    values = torch.zeros(1, dtype=dtype, requires_grad=True)
    torch.cat(packed.unpack(values)).sum().backward()
    assert values.grad.item() == torch.tensor(5000.0).to(dtype).item()


def test_gradient_of_ones_is_the_multiplicity() -> None:
    packed = random_packed()
    values = torch.zeros(packed.num_tokens, requires_grad=True)
    torch.cat(packed.unpack(values)).sum().backward()
    assert torch.equal(values.grad, packed.multiplicity.float())


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("trailing", [(), (3,)])
def test_gradient_in_chunks_is_the_same_bit_for_bit(
    chunk: int, trailing: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, poison: Poison
) -> None:
    packed = random_packed()
    values = torch.randn(packed.num_tokens, *trailing, requires_grad=True)
    grad = torch.randn(packed.forest.num_replicated_tokens, *trailing)
    calls: list[int] = []
    reduce = torch.segment_reduce

    def counted(data: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(len(data))
        return reduce(data, *args, **kwargs)

    def gradient() -> torch.Tensor:
        calls.clear()
        return torch.autograd.grad(torch.cat(packed.unpack(values)), values, grad)[0]

    monkeypatch.setattr(torch, "segment_reduce", counted)
    whole = gradient()
    assert len(calls) == 1
    monkeypatch.setattr(gather, "_CHUNK", chunk)
    assert torch.equal(gradient(), whole)
    assert len(calls) > 2, "it was not cut into chunks"
    most = int(packed.multiplicity.max())
    assert max(calls) <= max(chunk, most), "a chunk holds more rows than allowed"
    assert poison.tensors > 0


def test_chunks_of_nothing_but_unselected_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = example()
    values = torch.randn(packed.num_tokens, requires_grad=True)
    monkeypatch.setattr(gather, "_CHUNK", 1)
    (out,) = packed.unpack(values, sequences=[3])
    out.backward(torch.tensor([2.0]))
    assert values.grad.tolist() == [0.0] * 8 + [2.0]


def test_no_token_selected_gives_a_zero_gradient(poison: Poison) -> None:
    packed = example()
    values = torch.randn(packed.num_tokens, 2, requires_grad=True)
    out = packed.unpack(values, loss_mask=[[0] * len(s) for s in SEQUENCES])
    assert [t.shape for t in out] == [(0, 2)] * 5
    torch.cat(out).sum().backward()
    assert torch.equal(values.grad, torch.zeros_like(values))
    assert poison.tensors > 0


def test_width_zero_has_a_gradient_of_width_zero() -> None:
    packed = example()
    values = torch.randn(packed.num_tokens, 0, requires_grad=True)
    torch.cat(packed.unpack(values)).sum().backward()
    assert values.grad.shape == (packed.num_tokens, 0)


def test_selected_tokens_alone_get_a_gradient() -> None:
    packed = example()
    values = torch.randn(packed.num_tokens, requires_grad=True)
    masks = [[0, 1, 0, 1], [0, 1, 0], [0, 0, 0, 1, 0, 0], [0], [0] * 3]
    torch.cat(packed.unpack(values, loss_mask=masks)).sum().backward()
    assert values.grad.tolist() == [0, 2, 0, 1, 0, 0, 0, 1, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradient_is_bitwise_repeatable(dtype: torch.dtype) -> None:
    packed = random_packed(num_sequences=200)
    values = torch.randn(packed.num_tokens, 8).to(dtype).requires_grad_()
    grad = torch.randn(packed.forest.num_replicated_tokens, 8).to(dtype)
    first, *others = (
        torch.autograd.grad(torch.cat(packed.unpack(values)), values, grad)[0] for _ in range(10)
    )
    assert all(torch.equal(first, other) for other in others)


def test_strided_and_expanded_gradients() -> None:
    packed = example()
    values = torch.randn(packed.num_tokens, 4, dtype=torch.float64, requires_grad=True)
    num_rows = packed.forest.num_replicated_tokens
    wide = torch.randn(4, num_rows, dtype=torch.float64).T
    for grad in (wide, torch.ones(1, 1, dtype=torch.float64).expand(num_rows, 4)):
        (out,) = torch.autograd.grad(torch.cat(packed.unpack(values)), values, grad)
        parts = list(grad.split([len(s) for s in SEQUENCES]))
        torch.testing.assert_close(out, summed_over_copies(packed, parts))


def test_gradcheck() -> None:
    packed = example(pad_to_multiple_of=4)
    values = torch.randn(packed.num_tokens, 2, dtype=torch.float64, requires_grad=True)
    masks = [[0, 1, 0, 1], [0, 1, 0], [0, 0, 0, 1, 0, 0], [1], [0] * 3]
    assert torch.autograd.gradcheck(lambda v: tuple(packed.unpack(v)), values)
    assert torch.autograd.gradcheck(lambda v: torch.cat(packed.unpack(v, loss_mask=masks)), values)
    assert torch.autograd.gradcheck(lambda v: packed.unpack_padded(v, 3.0), values)


# ---- pack_values --------------------------------------------------------------------------------


@given(forests(), st.integers(1, 4))
def test_pack_values_is_the_inverse_of_unpack(forest: PrefixForest, multiple: int) -> None:
    packed = pack(forest, multiple)
    values = torch.arange(1, packed.num_tokens + 1).view(-1, 1) * torch.tensor([1, 1000])
    again = packed.pack_values(packed.unpack(values))
    assert torch.equal(again[: forest.num_tokens], values[: forest.num_tokens])
    assert not again[forest.num_tokens :].any()
    assert again.shape == values.shape


@pytest.mark.parametrize("convert", [list, np.array, torch.tensor])
def test_kinds_of_values_agree(convert: Callable[[list[int]], Any]) -> None:
    packed = example()
    out = packed.pack_values([convert(s) for s in SEQUENCES])
    assert torch.equal(out, packed.input_ids)


def test_unequal_values_on_a_shared_token_are_refused() -> None:
    packed = example()
    values = [torch.tensor(s, dtype=torch.float32) for s in SEQUENCES]
    values[2][1] = 7.0
    with pytest.raises(ForestError, match=r"values\[2\]\[1\] differs .* \(packed token 1\)"):
        packed.pack_values(values)


def test_one_unequal_entry_of_a_vector_is_enough() -> None:
    packed = example()
    values = [torch.zeros(len(s), 3) for s in SEQUENCES]
    values[4][2, 1] = 1.0
    with pytest.raises(ForestError, match=r"values\[4\]\[2\] differs .* \(packed token 6\)"):
        packed.pack_values(values)


def test_nan_on_a_shared_token_equals_nan_alone() -> None:
    packed = pack(PrefixForest.from_sequences([[1, 2], [1, 3]]))
    out = packed.pack_values([[float("nan"), 1.0], [float("nan"), 2.0]])
    assert out[0].isnan()
    for first, second in ((float("nan"), 0.0), (0.0, float("nan"))):
        with pytest.raises(ForestError, match=r"values\[1\]\[0\] differs"):
            packed.pack_values([[first, 1.0], [second, 2.0]])


def test_nan_on_a_token_of_one_sequence_is_that_sequences_business() -> None:
    packed = pack(PrefixForest.from_sequences([[1, 2], [1, 3]]))
    out = packed.pack_values([[0.0, float("nan")], [0.0, 2.0]])
    assert out[0] == 0.0
    assert out[1].isnan()
    assert out[2] == 2.0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([[1.0]], "values must hold one entry a sequence: expected 2, got 1"),
        ([], "expected 2, got 0"),
        ([[1.0, 2.0], [1.0]], r"values\[1\] must have the sequence's length 2, got length 1"),
        ([[1.0, 2.0], 3.0], r"values\[1\] .* length 2, got no 1-D array"),
        ([torch.ones(2, requires_grad=True), torch.ones(2)], "without a gradient; detach them"),
    ],
)
def test_bad_values_say_expected_and_got(values: Any, message: str) -> None:
    packed = pack(PrefixForest.from_sequences([[1, 2], [1, 3]]))
    with pytest.raises(ForestError, match=message):
        packed.pack_values(values)


# ---- wrong lengths and devices ------------------------------------------------------------------


@pytest.mark.parametrize("method", ["unpack", "unpack_padded"])
def test_values_of_another_length_or_device_are_refused(method: str) -> None:
    packed = example()
    call = getattr(packed, method)
    with pytest.raises(ForestError, match=r"T = 9 packed tokens, got shape \[8, 2\]"):
        call(torch.zeros(8, 2))
    with pytest.raises(ForestError, match=r"T = 9 packed tokens, got shape \[17\]"):
        call(torch.zeros(17))
    with pytest.raises(ForestError, match=r"T = 9 packed tokens, got shape \[\]"):
        call(torch.tensor(1.0))
    with pytest.raises(ForestError, match="values are on meta, the packed forest is on cpu"):
        call(torch.zeros(9, device="meta"))


def test_values_that_are_no_tensor_are_refused() -> None:
    with pytest.raises((ForestError, TypeError), match="tensor"):
        example().unpack(np.zeros(9))  # type: ignore[arg-type]


@pytest.mark.parametrize("multiple", [0, -4])
def test_bad_multiple_says_expected_and_got(multiple: int) -> None:
    with pytest.raises(ValueError, match=f"must be None or >= 1, got {multiple}"):
        example(pad_to_multiple_of=multiple)


# ---- moving and copying -------------------------------------------------------------------------


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
    assert as_lists(packed.unpack(packed.input_ids)) == SEQUENCES


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
    assert as_lists(again.unpack(again.input_ids)) == SEQUENCES


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


# ---- for_queries --------------------------------------------------------------------------------


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


# ---- TreeMask by itself -------------------------------------------------------------------------


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


def test_a_handle_finds_its_plan() -> None:
    a, b = example().mask, example().mask
    for mask in (a, b):
        assert mask.handle.device.type == "cpu"
        assert (mask.handle.shape, mask.handle.dtype) == ((1,), torch.int64)
        assert plan_of(mask.handle) is mask.plan
    assert a.handle.item() != b.handle.item()
    assert plan_of(a.for_queries([(0, 2)]).handle) is not a.plan


def test_copies_of_a_mask_share_its_handle() -> None:
    mask = example().mask
    assert mask.with_options(deterministic=True).handle is mask.handle
    assert mask.to("meta").handle is mask.handle


def test_a_handle_keeps_the_plan_alive_without_its_mask() -> None:
    # what autograd saves is a tensor on the handle's storage, not the mask
    mask = example().mask
    plan, saved = mask.plan, mask.handle.view(1).detach()
    del mask
    assert plan_of(saved) is plan


def test_a_number_without_a_mask_is_refused() -> None:
    number = example().mask.handle.item()
    with pytest.raises(ForestError, match="no longer exists; keep its PackedForest alive"):
        plan_of(torch.tensor([number]))
    assert example().mask.handle.item() != number, "numbers are never reused"


def test_mask_repr_names_tokens_queries_device_and_backend() -> None:
    mask = example().mask
    assert repr(mask) == "TreeMask(9 tokens, cpu, auto)"
    assert repr(mask.for_queries([(0, 2)])) == "TreeMask(9 tokens, 2 queries, cpu, auto)"


def test_pack_takes_a_forest() -> None:
    with pytest.raises(TypeError, match=r"takes a PrefixForest, got list; .*from_sequences"):
        pack([[1, 2]])
