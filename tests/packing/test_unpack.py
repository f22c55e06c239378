"""`unpack`, `unpack_padded` and `pack_values`: round trips, gradients, bad input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefixtree import ForestError, PackedForest, PrefixForest, pack
from prefixtree.loops import sequence_copies
from prefixtree.packing import copies, layout
from tests.conftest import Poison
from tests.support.forest_examples import EXAMPLE, as_lists, example
from tests.support.hooks import limit
from tests.support.strategies import (
    Sequences,
    forests,
    packed_path,
    sequences_of,
    summed_over_copies,
    token_sequences,
)

FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def random_packed(seed: int = 0, num_sequences: int = 40) -> PackedForest:
    """Ragged, shared, repeated sequences, packed with some padding."""
    rng = np.random.default_rng(seed)
    stems = [rng.integers(0, 9, 30) for _ in range(4)]
    sequences = [
        np.concatenate([stems[rng.integers(4)][: rng.integers(1, 31)], rng.integers(0, 3, length)])
        for length in rng.integers(0, 12, num_sequences)
    ]
    return pack(PrefixForest.from_sequences([*sequences, sequences[0]]), pad_to_multiple_of=16)


# ---- unpack --------------------------------------------------------------------------------------


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

    class Counting(copies.GatherIndex):
        def __init__(self, index: np.ndarray, *args: Any) -> None:
            listed.append(len(index))
            super().__init__(index, *args)

    def counted(*args: Any) -> Any:
        index, counts = list_copies(*args)
        listed.append(len(index))
        return index, counts

    list_copies = sequence_copies.copy_index
    monkeypatch.setattr(layout, "GatherIndex", Counting)
    monkeypatch.setattr(sequence_copies, "copy_index", counted)
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
    with pytest.raises(
        IndexError, match=f"sequence {wanted[-1]} does not exist; expected indices 0 to 4"
    ):
        packed.unpack(packed.input_ids, sequences=wanted)


@pytest.mark.parametrize("wanted", [[1.5], [True, False]])
def test_sequence_indices_are_integers(wanted: Any) -> None:
    packed = example()
    with pytest.raises((TypeError, ValueError, IndexError), match="integer"):
        packed.unpack(packed.input_ids, sequences=wanted)


# ---- unpack_padded -------------------------------------------------------------------------------


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
    per_sequence = [grad[s, 8 - len(sequence) :] for s, sequence in enumerate(EXAMPLE)]
    torch.testing.assert_close(values.grad, summed_over_copies(packed, per_sequence))


def test_bad_padding_says_expected_and_got() -> None:
    packed = example()
    with pytest.raises(ValueError, match="padding_side must be 'left' or 'right', got 'middle'"):
        packed.unpack_padded(packed.input_ids, padding_side="middle")
    with pytest.raises(
        ValueError, match="length must be at least 6, that of the longest sequence, got 5"
    ):
        packed.unpack_padded(packed.input_ids, length=5)


# ---- gradients -----------------------------------------------------------------------------------


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
    limit(monkeypatch, "gradients of copies", chunk)
    assert torch.equal(gradient(), whole)
    assert len(calls) > 2, "it was not cut into chunks"
    most = int(packed.multiplicity.max())
    assert max(calls) <= max(chunk, most), "a chunk holds more rows than allowed"
    assert poison.tensors > 0


def test_chunks_of_nothing_but_unselected_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = example()
    values = torch.randn(packed.num_tokens, requires_grad=True)
    limit(monkeypatch, "gradients of copies", 1)
    (out,) = packed.unpack(values, sequences=[3])
    out.backward(torch.tensor([2.0]))
    assert values.grad.tolist() == [0.0] * 8 + [2.0]


def test_no_token_selected_gives_a_zero_gradient(poison: Poison) -> None:
    packed = example()
    values = torch.randn(packed.num_tokens, 2, requires_grad=True)
    out = packed.unpack(values, loss_mask=[[0] * len(s) for s in EXAMPLE])
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
        parts = list(grad.split([len(s) for s in EXAMPLE]))
        torch.testing.assert_close(out, summed_over_copies(packed, parts))


def test_gradcheck() -> None:
    packed = example(pad_to_multiple_of=4)
    values = torch.randn(packed.num_tokens, 2, dtype=torch.float64, requires_grad=True)
    masks = [[0, 1, 0, 1], [0, 1, 0], [0, 0, 0, 1, 0, 0], [1], [0] * 3]
    assert torch.autograd.gradcheck(lambda v: tuple(packed.unpack(v)), values)
    assert torch.autograd.gradcheck(lambda v: torch.cat(packed.unpack(v, loss_mask=masks)), values)
    assert torch.autograd.gradcheck(lambda v: packed.unpack_padded(v, 3.0), values)


# ---- pack_values ---------------------------------------------------------------------------------


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
    out = packed.pack_values([convert(s) for s in EXAMPLE])
    assert torch.equal(out, packed.input_ids)


def test_unequal_values_on_a_shared_token_are_refused() -> None:
    packed = example()
    values = [torch.tensor(s, dtype=torch.float32) for s in EXAMPLE]
    values[2][1] = 7.0
    with pytest.raises(ForestError, match=r"values\[2\]\[1\] differs .* \(packed token 1\)"):
        packed.pack_values(values)


def test_one_unequal_entry_of_a_vector_is_enough() -> None:
    packed = example()
    values = [torch.zeros(len(s), 3) for s in EXAMPLE]
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


@given(forests(), st.data())
def test_copies_that_count(forest: PrefixForest, data: st.DataObject) -> None:
    """Those that a loss mask selects are compared and taken: the first of each token."""
    packed = pack(forest, 4)
    lengths = forest.sequence_lengths.tolist()
    lists = [st.lists(st.booleans(), min_size=n, max_size=n) for n in lengths]
    masks = [data.draw(each) for each in lists]
    of_token = packed.unpack(torch.arange(packed.num_tokens))
    values = [
        torch.where(torch.tensor(mask)[:, None], 2 * tokens[:, None] + torch.arange(1, 3), i + 77)
        for i, (tokens, mask) in enumerate(zip(of_token, masks, strict=True))
    ]
    counts = packed.selected_tokens(packed.flat_selection(masks))
    every = 2 * torch.arange(packed.num_tokens)[:, None] + torch.arange(1, 3)
    expected = every * torch.from_numpy(counts)[:, None]
    assert torch.equal(packed.pack_values(values, loss_mask=masks), expected)


def test_copies_that_count_and_differ_are_refused() -> None:
    """Each error names what mends it."""
    packed = pack(PrefixForest.from_sequences([[1, 2, 3], [1, 2, 4]]))
    values, masks = [[0, 5, 6], [0, 0, 7]], [[0, 1, 1], [0, 0, 1]]
    assert packed.pack_values(values, masks).tolist() == [0, 5, 6, 7]
    with pytest.raises(ForestError, match=r"values\[1\]\[1\] differs .*: give loss_mask= where"):
        packed.pack_values(values)
    both = r"values\[1\]\[1\] differs .* \(packed token 1\).* cannot be packed: give the forest"
    with pytest.raises(ForestError, match=both):
        packed.pack_values(values, [[0, 1, 1], [0, 1, 1]])
    with pytest.raises(ForestError, match="loss_mask must hold one entry per sequence"):
        packed.pack_values(values, masks[:1])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([[1.0]], "values must hold one entry per sequence: expected 2, got 1"),
        ([], "expected 2, got 0"),
        ([[1.0, 2.0], [1.0]], r"values\[1\] must have the sequence's length 2, got length 1"),
        ([[1.0, 2.0], 3.0], r"values\[1\] .* length 2, got no 1-D array"),
        ([torch.ones(2, requires_grad=True), torch.ones(2)], r"values\[0\] requires a gradient"),
    ],
)
def test_bad_values_say_expected_and_got(values: Any, message: str) -> None:
    packed = pack(PrefixForest.from_sequences([[1, 2], [1, 3]]))
    with pytest.raises(ForestError, match=message):
        packed.pack_values(values)


# ---- wrong lengths and devices -------------------------------------------------------------------


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
        example().unpack(np.zeros(9))
