"""Recorded routes of experts are data of a token: two tokens with other routes are two tokens."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import prefixtree as pt
from prefixtree.planning.micro_batch import cut_out
from prefixtree.scoring.edges import find_edges
from tests.support.hooks import inner

LAYERS, CHOSEN = 3, 2
numbers_of = inner("numbers of tokens and choices")


def _route(*experts: int) -> np.ndarray:
    """One token per number: its experts are (number, number + 1) in all layers."""
    first = np.array(experts)[:, None, None] + np.zeros((1, LAYERS, 1), np.int64)
    return np.concatenate([first, first + 1], -1)


def test_the_tree_parts_at_another_route():
    sequences = [[5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 9]]
    routes = [_route(0, 0, 0, 0), _route(0, 2, 0, 0), _route(0, 0, 0, 0)]
    forest = pt.PrefixForest.from_sequences(sequences, routes=routes)
    # 5; then 6 7 of the first and the third with their ends, and 6 7 8 of the second
    assert forest.num_tokens == 1 + 2 + 1 + 1 + 3
    assert pt.PrefixForest.from_sequences(sequences).num_tokens == 5
    packed = pt.pack(forest)
    _assert_holds(packed, sequences, routes)
    assert forest.routes is not None and forest.routes.dtype == np.int16
    assert not forest.routes.flags.writeable
    copy = pickle.loads(pickle.dumps(forest))
    np.testing.assert_array_equal(copy.routes, forest.routes)


def _assert_holds(packed: pt.PackedForest, sequences: Any, routes: Any) -> None:
    """Every sequence finds its tokens and its routes on its path, whatever is padded."""
    inputs = packed.model_inputs()
    assert inputs["tree_routes"].shape[0] == packed.num_tokens
    ids = packed.unpack(inputs["input_ids"][0])
    found = packed.unpack(inputs["tree_routes"])
    for tokens, route, a, b in zip(sequences, routes, ids, found, strict=True):
        assert a.tolist() == list(tokens)
        np.testing.assert_array_equal(b.numpy(), np.sort(route, -1))


def test_the_order_of_experts_is_no_difference():
    routes = [_route(0, 3, 6), _route(0, 3, 6)[..., ::-1]]
    forest = pt.PrefixForest.from_sequences([[1, 2, 3]] * 2, routes=routes)
    assert forest.num_tokens == 3


def test_tensors_and_lists_are_taken():
    arrays = [_route(0, 1), _route(0, 2)]
    wanted = pt.PrefixForest.from_sequences([[1, 2]] * 2, routes=arrays).routes
    for kind in (torch.tensor, lambda a: torch.tensor(a, dtype=torch.uint8), np.ndarray.tolist):
        found = pt.PrefixForest.from_sequences([[1, 2]] * 2, routes=map(kind, arrays)).routes
        np.testing.assert_array_equal(found, wanted)


def test_a_last_token_without_routes():
    """Engines record none, or fill the row with zeros or -1; the first experts run."""
    for last in ([], [np.zeros((1, LAYERS, CHOSEN), int)], [np.full((1, LAYERS, CHOSEN), -1)]):
        route = np.concatenate([_route(4, 4), *last])
        forest = pt.PrefixForest.from_sequences([[1, 2, 3]], routes=[route])
        assert forest.routes is not None
        assert forest.routes[:, 0].tolist() == [[4, 5], [4, 5], [-1, -1]]
        run = pt.pack(forest).model_inputs()["tree_routes"]
        assert run[:, 0].tolist() == [[4, 5], [4, 5], [0, 1]]


@pytest.mark.parametrize(
    "rows",
    [[], [[-1, -1]] * 3, [[0, 0]] * 2, [[0, 0], [7, 8]]],
    ids=["left out", "-1", "zeros", "one recorded after all"],
)
def test_an_end_that_is_not_recorded(rows: list[list[int]]):
    """Verl's zeros after the last generation, tunix's -1: any experts, where nothing that depends
    on them is scored; a row that is recorded stays."""
    end = np.array(rows, int).reshape(-1, 1, CHOSEN).repeat(LAYERS, 1)
    route = np.concatenate([_route(4, 4), end])
    mask = [0, 1, 1, 0, 0]
    forest = pt.PrefixForest.from_sequences([[1, 2, 3, 4, 5]], routes=[route], loss_mask=[mask])
    assert forest.routes is not None
    recorded = [[7, 8] if [7, 8] in rows and at == 1 else [-1, -1] for at in range(3)]
    assert forest.routes[:, 1].tolist() == [[4, 5], [4, 5], *recorded]
    # the row on which the last scored token depends is needed
    for later in ([0, 1, 1, 1, 0], torch.tensor([0, 0, 0, 0, 1]), None):
        masks = None if later is None else [later]
        with pytest.raises(pt.ForestError, match=r"rows for 5 tokens|did not record: record it"):
            pt.PrefixForest.from_sequences([[1, 2, 3, 4, 5]], routes=[route], loss_mask=masks)


def test_a_sequence_of_which_nothing_is_scored():
    """Verl's padding."""
    routes = [_route(4, 4), np.zeros((2, LAYERS, CHOSEN), int)]
    masks = [[0, 1], [0, 0]]
    forest = pt.PrefixForest.from_sequences([[1, 2], [1, 3]], routes=routes, loss_mask=masks)
    found = pt.pack(forest).unpack(torch.from_numpy(np.array(forest.routes)))
    assert [of[:, 0].tolist() for of in found] == [[[4, 5]] * 2, [[-1, -1]] * 2]


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "of a plan"])
def test_a_score_that_depends_on_what_is_not_recorded(cut: bool):
    """The forest knows its loss_mask: another one does not score what ran any experts."""
    route, mask = _route(4, 4, -1, 4, 4), [0, 1, 1, 0, 0]
    route[2] = -1
    sequences, routes = [[1, 2, 3, 4, 5], [1, 2]], [route, _route(4, 4)]
    made = {"routes": routes, "loss_mask": [mask, [1, 1]]}
    forest = pt.PrefixForest.from_sequences(sequences, **made)
    packed = pt.pack(cut_out(forest, np.arange(2)) if cut else forest)
    for fine in (mask, [0, 0, 1, 0, 0]):
        assert find_edges(packed, 1.0, [fine, [1, 1]]).count
    for more in ([0, 0, 0, 1, 0], [0, 0, 0, 0, 1], None):
        message = "scored edges .* depend on a token whose experts are not recorded; score with"
        with pytest.raises(pt.ForestError, match=message):
            find_edges(packed, 1.0, None if more is None else [more, [1, 1]])


@pytest.mark.parametrize(
    ("routes", "masks", "message"),
    [
        ([_route(0, 0)] * 2, [[1, 1]], "loss_mask has 1 masks for 2 sequences"),
        (
            [_route(0, 0)] * 2,
            [[1, 1], [1]],
            r"loss_mask\[1\] has shape \[1\]; expected .* length 2",
        ),
        ([_route(0, 0)] * 2, [[1, 1], [1, 0.5]], r"loss_mask\[1\]\[1\] is 0.5; a mask is 0 or 1"),
        (None, [[1, 1], [1, 1]], "loss_mask says which routes may be missing, and there are none"),
    ],
)
def test_bad_masks(routes: Any, masks: Any, message: str):
    with pytest.raises(pt.ForestError, match=message):
        pt.PrefixForest.from_sequences([[1, 2], [1, 3]], routes=routes, loss_mask=masks)


def test_a_forest_carries_routes_once_per_distinct_token():
    """What crosses between processes shrinks as tokens do, and comes back per sequence."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 50, 40).tolist()
    sequences = [prompt + rng.integers(0, 50, 10).tolist() for _ in range(8)]
    routes = [_route(*(np.array(s) % 7)) for s in sequences]
    forest = pt.PrefixForest.from_sequences(sequences, routes=routes)
    assert forest.routes is not None
    given = sum(route.astype(np.int16).nbytes for route in routes)
    assert forest.routes.nbytes * 8 * 50 == given * forest.num_tokens < 0.4 * given * 8 * 50
    received = pt.pack(pickle.loads(pickle.dumps(forest)))
    _assert_holds(received, sequences, routes)


@given(st.integers(0, 10_000))
def test_nothing_else_parts_it(seed: int):
    """As many distinct tokens as there are distinct (token, route) prefixes; each its own."""
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(0, 2, rng.integers(1, 7)).tolist() for _ in range(8)]
    routes = [_route(*(rng.random(len(s)) < 0.2).astype(int)) for s in sequences]
    prefixes = {
        tuple((t, int(r[0, 0])) for t, r in zip(s[:n], route, strict=False))
        for s, route in zip(sequences, routes, strict=True)
        for n in range(1, len(s) + 1)
    }
    forest = pt.PrefixForest.from_sequences(sequences, routes=routes)
    assert forest.num_tokens == len(prefixes)
    _assert_holds(pt.pack(forest, pad_to_multiple_of=8), sequences, routes)


def test_micro_batches_keep_routes():
    rng = np.random.default_rng(0)
    sequences = [[1, 2, *rng.integers(3, 9, 4).tolist()] for _ in range(10)]
    routes = [_route(*rng.integers(0, 2, 6)) for _ in range(10)]
    forest = pt.PrefixForest.from_sequences(sequences, routes=routes)
    plan = pt.plan_micro_batches(forest, max_tokens=20, num_ranks=2, min_micro_batches=4)
    empty = 0
    for batch in (batch for rank in plan for batch in rank):
        if len(batch.sequence_indices) == 0:
            empty += 1
            assert batch.packed.forest.routes.shape == (1, LAYERS, CHOSEN)
            continue
        _assert_holds(batch.packed, batch.take(sequences), batch.take(routes))
    assert empty and len(plan[0]) > 1


def test_sums_that_collide_are_drawn_again(monkeypatch: pytest.MonkeyPatch):
    """Equal numbers only for equal rows, whatever the factors are."""

    class Zeros:
        drawn = 0

        def integers(self, *args: Any, size: int, **kwargs: Any) -> np.ndarray:
            Zeros.drawn += 1
            # made odd: at first all 1, by which rows with equal sums collide
            value = 0 if Zeros.drawn == 1 else 2 * (np.arange(size, dtype=np.uint64) + 7) ** 5
            return np.zeros(size, np.uint64) + np.uint64(value)

    monkeypatch.setattr(np.random, "default_rng", lambda seed: Zeros())
    keys = np.array([[0, 3], [3, 0], [0, 3], [1, 2]])
    found = numbers_of(np.array([4, 4, 4, 4]), keys)
    assert Zeros.drawn == 2
    assert found[0] == found[2] and len(set(found.tolist())) == 3


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        ([_route(0, 0, 0)], "one array per sequence: got 1 for 2 sequences"),
        (
            [_route(0, 0, 0), _route(0)],
            r"routes\[1\] has 1 rows for 3 tokens; expected one per token, or at le",
        ),
        ([_route(0, 0, 0), _route(0, 0, 0, 0)], r"routes\[1\] has 4 rows for 3 tokens"),
        (
            [_route(0, 0, 0), _route(0, 0, 0)[:, :2]],
            r"routes\[1\] has 2 layers of 2 experts per token, and routes\[0\] 3 of 2",
        ),
        ([_route(0, 0, 0), _route(0, 0, 0)[..., :1]], r"3 layers of 1 experts per token, and"),
        ([_route(0, 0, 0), _route(0, -1, 0)], r"routes\[1\]\[1\] names expert -1; .*not record: "),
        ([_route(0, 0, 0), _route(0, 0, -1)], r"routes\[1\]\[2\] names expert -1; .*not record: "),
        ([_route(0, 0, 0), _route(0, -2, 0)], r"names expert -2; experts .* at most 32767$"),
        ([_route(0, 0, 0), _route(0, 40_000, 0)], "names expert 40001; .* at most 32767"),
        ([_route(0, 0, 0), np.zeros((3, LAYERS, CHOSEN), int)], r"routes\[1\]\[0\] names an exper"),
        ([_route(0, 0, 0), _route(0, 0, 0).astype(float)], r"\[3, 3, 2\] of float64; expected int"),
        ([_route(0, 0, 0), _route(0, 0, 0)[:, 0]], r"shape \[3, 2\] of int64; expected integers"),
        ([np.zeros(3, int), _route(0, 0, 0)], r"routes\[0\] has shape \[3\] of int64; expected"),
        ([np.zeros((3, 0, 2), int)] * 2, r"routes\[0\] has shape \[3, 0, 2\]"),
    ],
)
def test_bad_routes(routes: Any, message: str):
    with pytest.raises(pt.ForestError, match=message):
        pt.PrefixForest.from_sequences([[1, 2, 3], [1, 2, 4]], routes=routes)


def test_a_known_structure():
    routes = _route(3, 4, 5, 6)
    forest = pt.PrefixForest.from_parents(
        [-1, 0, 0], [2, 1, 1], [7, 8, 9, 9], order="input", routes=routes
    )
    np.testing.assert_array_equal(forest.routes, routes)
    for wrong, message in (
        (routes[:3], "routes has 3 rows; lengths add up to 4"),
        (routes[:2], "routes has 2 rows for 4 tokens"),
        (routes[..., :1].repeat(2, -1), r"routes\[0\] names an expert twice"),
    ):
        with pytest.raises(pt.ForestError, match=message):
            pt.PrefixForest.from_parents([-1, 0, 0], [2, 1, 1], [7, 8, 9, 9], routes=wrong)
    with pytest.raises(pt.ForestError, match=r"routes must be \[4, layers, .* beside tokens"):
        pt.PrefixForest.from_parents([-1, 0, 0], [2, 1, 1], routes=routes)


@pytest.mark.parametrize("columns", [1, 3, 8, 13])
@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int64])
def test_numbers_are_equal_where_rows_are(columns: int, dtype: Any):
    """Of keys of every width in bytes, in more rows than a block has."""
    rng = np.random.default_rng(columns)
    tokens = rng.integers(0, 3, 5000)
    keys = rng.integers(0, 2, (5000, columns)).astype(dtype)
    numbers = numbers_of(tokens, keys)
    rows = [(t, *key) for t, key in zip(tokens.tolist(), keys.tolist(), strict=True)]
    assert len(set(zip(rows, numbers.tolist(), strict=True))) == len(set(rows))
    assert len(set(numbers.tolist())) == len(set(rows))
