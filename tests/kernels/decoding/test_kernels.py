"""Decoding's Triton kernels: in Triton's interpreter on a CPU, natively where there is a GPU.

Every feature, forests of all kinds, heads and dims, against float64.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixtree import UnsupportedError
from prefixtree.kernels.decoding import work as decode_work
from prefixtree.kernels.decoding.work import Capacity
from tests.conftest import Poison
from tests.support.decode_cases import DecodeCase, assert_exact, random_case
from tests.support.full import mostly
from tests.support.triton_tiles import DEVICE, DTYPES

# numpy warns where dead lanes overflow in the interpreter; what is stored is checked
pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value) encountered:RuntimeWarning"
)

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 13},
    "softcap": {"softcap": 2.0},
    "scale": {"scale": -0.7},
    "sinks": {"sinks": True},
    "all": {"window": 21, "softcap": 3.0, "sinks": True, "scale": 0.4},
}
# probabilities are rounded to the pools' dtype
LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def small_case(seed: int, rows: int = 6, *arguments: Any, **options: Any) -> DecodeCase:
    return random_case(seed, rows, *arguments, **({"most": 30, "room": 12} | options)).to(DEVICE)


def check(case: DecodeCase, **options: Any) -> None:
    assert_exact(case, LIMITS[case.q.dtype], case.work(**options), backend="triton")


@pytest.mark.parametrize("feature", mostly(FEATURES, ["scale", "all"]))
def test_features(feature: str, poison: Poison) -> None:
    """Over what torch.empty returns, and pools that are NaN where nothing is written."""
    for dtype in DTYPES if feature == "all" else DTYPES[-1:]:
        case = small_case(3, 4, (4, 2), (16, 16), dtype, stopped=0.2, **FEATURES[feature])
        check(case, chunk=32)
    assert poison.tensors > 0


@pytest.mark.parametrize(
    "heads, dims",
    mostly(
        [
            ((2, 2), (64, 64)),
            ((3, 1), (96, 96)),
            ((4, 1), (128, 128)),
            ((5, 1), (24, 40)),
            ((14, 2), (16, 16)),
            ((16, 1), (192, 128)),
            ((2, 1), (256, 256)),
            ((40, 2), (16, 8)),
        ],
        [((5, 1), (24, 40)), ((2, 1), (256, 256)), ((40, 2), (16, 8))],
    ),
)
def test_heads(heads: tuple[int, int], dims: tuple[int, int]) -> None:
    case = small_case(5, 3, heads, dims, DTYPES[-1], most=20, room=8)
    check(case, chunk=32)


@pytest.mark.parametrize(
    "tokens, rows, options",
    mostly([(1, 16, {}), (7, 3, {}), (7, 3, {"window": 9})], [(1, 16, {}), (7, 3, {"window": 9})]),
)
def test_wide_items(tokens: int, rows: int, options: dict[str, Any]) -> None:
    """More rows than a block has; tokens of an append, each of which sees one key more."""
    case = small_case(8, rows, (8, 1), dtype=DTYPES[0], tokens=tokens, **options)
    work = case.work()
    assert work.capacity.wide > 0
    assert_exact(case, LIMITS[DTYPES[0]], work, backend="triton")


@pytest.mark.parametrize("chunk", [10, None])
def test_a_window_over_rows_that_all_stopped(chunk: int | None) -> None:
    """Nothing is read for them: no row says where the window begins."""
    case = small_case(962838, 3, tokens=4, stopped=1.0, window=13)
    assert not case.live.any()
    check(case, group=9, chunk=chunk)


@pytest.mark.parametrize(
    "seed, tokens, feature",
    mostly(
        [(3, 1, "plain"), (3, 1, "all"), (4, 3, "plain"), (4, 3, "all")],
        [(4, 3, "all")],
    ),
)
def test_rows_of_a_block_see_their_own_runs(
    seed: int, tokens: int, feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Items with runs that only some of their rows see."""
    monkeypatch.setattr(decode_work, "SHARE_FROM", 0)
    options = FEATURES[feature] | {"stopped": 0.2, "tokens": tokens}
    case = small_case(seed, 16, (8, 1), dtype=DTYPES[0], most=40, **options)
    work = case.work()
    parts = [
        work.tables.pieces[begin:stop]
        for _, _, begin, stop, _ in work.tables.wide.tolist()
        if len(work.tables.pieces[begin:stop, 3:].unique(dim=0)) > 1
    ]
    assert parts
    assert_exact(case, LIMITS[DTYPES[0]], work, backend="triton")


@settings(max_examples=5 if DEVICE == "cpu" else 60)
@given(st.data())
def test_any_forest(data: st.DataObject) -> None:
    case = small_case(
        data.draw(st.integers(0, 10**6)),
        data.draw(st.integers(1, 6)),
        most=data.draw(st.sampled_from([4, 30])),
        tokens=data.draw(st.sampled_from([1, 4])),
        stopped=data.draw(st.sampled_from([0.0, 0.5, 1.0])),
        **FEATURES[data.draw(st.sampled_from(list(FEATURES)))],
    )
    # a list for another group of heads is as right
    group, chunk = data.draw(st.sampled_from([1, 2, 9])), data.draw(st.sampled_from([10, None]))
    needed = case.work(group=group, chunk=chunk).capacity
    # items, pieces and slots that are not used
    room = {"wide": needed.wide + 1, "narrow": needed.narrow + 2, "slots": needed.slots + 3}
    capacity = Capacity(rows=needed.rows, pieces=needed.pieces + 1, **room)
    check(case, group=group, chunk=chunk, capacity=capacity)


def test_rows_of_the_capacity_beyond_the_forest() -> None:
    case = small_case(2, 4)
    case.live = torch.cat([case.live, case.live.new_zeros(2)])
    case.q, case.k, case.v = (torch.cat([x, x[:2]]) for x in (case.q, case.k, case.v))
    needed = case.work(live=None).capacity
    work = case.work(capacity=needed._replace(rows=6))
    # what tests/support compares with has a tail per row; those that are not live have none
    case.tails = np.concatenate([case.tails, np.zeros((2, 4), np.int64)])
    assert_exact(case, 1e-5 if case.q.dtype == torch.float32 else 2e-3, work, backend="triton")


def test_strides_and_steps() -> None:
    """Tensors that are views, and a list that advances: what plain torch gives."""
    case = small_case(9, 4, most=20, stopped=0.3, sinks=True)
    case.tails[:, 2] = np.minimum(case.tails[:, 2], case.tails[:, 1] - 3)

    def strided(x: torch.Tensor) -> torch.Tensor:
        room = x.new_full((len(x), x.shape[1] + 1, x.shape[2] + 3), torch.nan)
        room[:, 1:, :-3] = x
        return room[:, 1:, :-3]

    ours = replace(case, **{name: strided(getattr(case, name)) for name in ("q", "k", "v")})
    theirs = replace(case, key_pool=case.key_pool.clone(), value_pool=case.value_pool.clone())
    work = case.work()
    for _ in range(2):
        got, want = ours.attend(work, backend="triton"), theirs.attend(work, backend="torch")
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
        work.advance()
    for a, b in ((ours.key_pool, theirs.key_pool), (ours.value_pool, theirs.value_pool)):
        assert torch.equal(a.nan_to_num(9e4), b.nan_to_num(9e4))


def test_the_check_rejects_wrong_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """One slot that is not merged; a window that ends a key early; sinks left out."""
    case = small_case(3, 3, most=12, window=15, sinks=True)

    def pools() -> dict[str, torch.Tensor]:
        return {"key_pool": case.key_pool.clone(), "value_pool": case.value_pool.clone()}

    work = case.work(chunk=16)
    # each row's last slot becomes the next row's
    work.tables.slot_ptr[1:-1] -= 1
    with pytest.raises(AssertionError):
        assert_exact(replace(case, **pools()), 1e-5, work, backend="triton")
    for wrong in ({"window": 14}, {"sinks": None}):
        other = replace(case, options=case.options | wrong)
        out = replace(other, **pools()).attend(backend="triton")
        want = replace(case, **pools()).attend(backend="triton")
        assert float((out - want).abs().max()) > 1e-3


def test_refusals() -> None:
    wide = small_case(1, 2, dims=(300, 16))
    with pytest.raises(UnsupportedError, match=r"1 to 256, and are 300 and 16; use backend='torch"):
        wide.attend(backend="triton")
    double = small_case(1, 2, dtype=torch.float64)
    with pytest.raises(UnsupportedError, match=r"and q is torch\.float64"):
        double.attend(backend="triton")
    case = small_case(1, 2)
    case.key_pool = case.key_pool.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(UnsupportedError, match="writes into contiguous pools"):
        case.attend(backend="triton")
    # auto falls back
    assert wide.attend().isfinite().all() and double.attend().isfinite().all()
