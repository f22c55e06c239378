"""`cascade_attention` in plain torch: against float64, step by step, in one graph, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from prefixtree import UnsupportedError
from prefixtree.kernels.decoding.cascade import cascade_attention
from prefixtree.kernels.decoding.work import Capacity, DecodeWork
from tests.conftest import Poison
from tests.support.decode_cases import DecodeCase, assert_exact, exact, random_case
from tests.support.hooks import limit
from tests.support.pairs import pairwise

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 13},
    "softcap": {"softcap": 2.0},
    "scale": {"scale": 0.7},
    "sinks": {"sinks": True},
    "all": {"window": 21, "softcap": 3.0, "sinks": True, "scale": 0.4},
}


_LIMITS = {torch.float32: 4e-6, torch.float64: 1e-13}
_HEADS = [((4, 2), (16, 16)), ((6, 1), (24, 40)), ((1, 1), (8, 8))]


@pytest.mark.parametrize("feature, dtype, sizes", pairwise(FEATURES, _LIMITS, _HEADS))
def test_features(feature: str, dtype: torch.dtype, sizes: Any) -> None:
    for tokens in (1, 5):
        case = random_case(7, 12, *sizes, dtype, stopped=0.2, tokens=tokens, **FEATURES[feature])
        assert_exact(case, _LIMITS[dtype], case.work(chunk=24))


@pytest.mark.parametrize("numbers", [1, 3000])
def test_gathered_in_parts(numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An item at a time where one gathers more than the limit, and a few at a time."""
    case = random_case(7, 12, (4, 2), (16, 16), torch.float64, stopped=0.2)
    limit(monkeypatch, "keys gathered in a cascade", numbers)
    assert_exact(case, 1e-13, case.work(chunk=24))


@settings(max_examples=40)
@given(st.data())
def test_any_forest(data: st.DataObject) -> None:
    feature = FEATURES[data.draw(st.sampled_from(list(FEATURES)))]
    case = random_case(
        data.draw(st.integers(0, 10**6)),
        data.draw(st.integers(1, 12)),
        most=data.draw(st.sampled_from([4, 60])),
        tokens=data.draw(st.sampled_from([1, 4])),
        stopped=data.draw(st.sampled_from([0.0, 0.5, 1.0])),
        **feature,
    )
    group, chunk = data.draw(st.sampled_from([1, 2, 30])), data.draw(st.sampled_from([1, 20, None]))
    assert_exact(case, 4e-6, case.work(group=group, chunk=chunk))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    """float32 inside: no error but the last rounding."""
    assert_exact(random_case(3, 9, dtype=dtype), torch.finfo(dtype).eps)


def test_nothing_unwritten_is_read(poison: Poison) -> None:
    """Neither of memory that torch.empty returns; the pools' unwritten keys are always NaN."""
    assert_exact(random_case(5, 9, stopped=0.3, sinks=True), 4e-6)


@pytest.mark.parametrize("wrong", ["window", "softcap", "sinks", "scale", "depth", "run", "tail"])
def test_the_check_sees_what_is_wrong(wrong: str) -> None:
    case = random_case(11, 8, most=60, window=40, softcap=3.0, sinks=True, scale=0.4)
    assert_exact(replace(case, key_pool=case.key_pool.clone()), 4e-6)
    options, runs, tails = dict(case.options), case.runs.copy(), case.tails.copy()
    if wrong == "depth":
        runs[:, 4] = 0
    elif wrong == "run":
        runs = runs[runs[:, 1] - runs[:, 0] < (runs[:, 1] - runs[:, 0]).max()]
    elif wrong == "tail":
        tails[:, 2] = np.maximum(tails[:, 2] - 1, 0)
    else:
        options[wrong] = {"window": 39, "softcap": 3.2, "sinks": None, "scale": 0.42}[wrong]
    other = replace(case, options=options, runs=runs, tails=tails)
    want, *_ = exact(case)
    error = float((other.attend().double() - want).abs().max())
    assert error > 1e-3


@pytest.mark.parametrize("window", [None, 11])
def test_an_append_equals_its_tokens_one_by_one(window: int | None) -> None:
    """And a list that advances equals one that is built anew every step."""
    steps, generator = 5, torch.Generator().manual_seed(0)
    options = {} if window is None else {"window": window}
    case = random_case(21, 6, room=steps, **options)
    case.tails[:, 2], case.live = 0, torch.ones(6, dtype=torch.bool)
    case.key_pool.nan_to_num_(0.5), case.value_pool.nan_to_num_(0.5)
    for first, room, _, _ in case.tails.tolist():
        case.key_pool[first : first + room] = torch.nan
    q, k, v = (
        torch.randn(6, steps, *x.shape[1:], generator=generator) for x in (case.q, case.k, case.v)
    )

    def fresh(**changes: Any) -> DecodeCase:
        pools = {"key_pool": case.key_pool.clone(), "value_pool": case.value_pool.clone()}
        return replace(case, **(pools | changes))

    # token j of row r is row r x steps + j
    runs = case.runs * [1, 1, steps, steps, 1]
    tails = np.repeat(case.tails, steps, 0)
    tails[:, 2] += np.tile(np.arange(steps), 6)
    flat = {"q": q.flatten(0, 1), "k": k.flatten(0, 1), "v": v.flatten(0, 1)}
    live = torch.ones(6 * steps, dtype=torch.bool)
    together = fresh(runs=runs, tails=tails, live=live, **flat)
    want = together.attend().unflatten(0, (6, steps))
    one = fresh()
    work = one.work()
    for j in range(steps):
        one.q, one.k, one.v = q[:, j], k[:, j], v[:, j]
        torch.testing.assert_close(one.attend(work), want[:, j], atol=2e-6, rtol=0)
        work.advance()
    assert torch.equal(one.key_pool.nan_to_num(9e4), together.key_pool.nan_to_num(9e4))
    # a row whose tail is full writes nowhere
    before = one.key_pool.clone()
    assert one.attend(work).isfinite().all()
    assert torch.equal(one.key_pool.nan_to_num(9e4), before.nan_to_num(9e4))


def test_one_graph_for_all_forests() -> None:
    """A compiled step, whose list is refilled and advances; no graph break."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    shape = {"heads": (4, 2), "dims": (16, 16)}
    num_keys = max(len(random_case(seed, 6, **shape).key_pool) for seed in range(4))
    room = Capacity(rows=8, wide=20, narrow=90, pieces=200, slots=400)
    first = random_case(0, 6, **shape)
    work = DecodeWork(
        first.runs, first.tails, capacity=room, num_keys=num_keys, group=2, kv_heads=2, chunk=16
    )
    pools = [torch.zeros(num_keys, 2, 16) for _ in range(2)]

    @torch.compile(fullgraph=True, backend=counter)
    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = cascade_attention(q * 1.0, k, v, *pools, work)
        work.advance()
        return out + work.tables.written[:, None, None]

    for seed in range(4):
        case = random_case(seed, 6, **shape)
        case.tails[:, 2] = np.minimum(case.tails[:, 2], case.tails[:, 1] - 3)
        case.live = torch.ones(6, dtype=torch.bool)
        for pool, given_pool in zip(pools, (case.key_pool, case.value_pool), strict=True):
            pool.zero_()
            given_pool.nan_to_num_(0.0)
            pool[: len(given_pool)] = given_pool
        work.refill(case.runs, case.tails)
        for _ in range(3):
            padded = [torch.cat([x, x[:2]]) for x in (case.q, case.k, case.v)]
            with torch.no_grad():
                found = step(*padded)
            want = exact(case)[0]
            case.attend()
            case.tails[:, 2] += 1
            found = found[:6].double() - torch.as_tensor(case.tails[:, 2])[:, None, None]
            torch.testing.assert_close(found, want, atol=4e-5, rtol=0)
            assert torch.equal(pools[0][: len(case.key_pool)], case.key_pool)
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_autocast_does_not_reach_inside() -> None:
    case = random_case(2, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_exact(case, 4e-6)


def test_operator_check() -> None:
    """Schema, mutations, the fake, under torch's own tests of registered operators."""
    case = random_case(4, 5, sinks=True)
    work = case.work()
    tensors = case.q, case.k, case.v, case.key_pool.nan_to_num(0.0), case.value_pool.nan_to_num(0.0)
    numbers = 0.25, 0, 0.0, work.block, work.narrow_block
    arguments = (*tensors, case.options["sinks"], list(work.tables), *numbers, "auto")
    torch.library.opcheck(
        torch.ops.prefixtree.cascade_attention.default,
        arguments,
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            {"q": torch.zeros(4, 4, 16)},
            r"q must be \(\[5, 4, 16\], torch.float32, .*got \(\[4, 4, 16",
        ),
        ({"k": torch.zeros(5, 2, 16).half()}, "k must be .*float32.*got .*float16"),
        ({"q": torch.zeros(5, 3, 16)}, "3 query heads are no multiple of 2"),
        ({"q": torch.zeros(5, 4, 8)}, r"k must be \(\[5, 2, 8\]"),
        ({"value_pool": torch.zeros(900, 2, 16)}, "value_pool must be"),
        ({"options": {"window": 3}}, "window is 3, and the work list was built for None"),
        ({"options": {"sinks": torch.zeros(3)}}, r"sinks must be \[4\], one per query head"),
    ],
)
def test_refusals(changes: dict, words: str) -> None:
    case = random_case(2, 5)
    work = case.work()
    with pytest.raises(ValueError, match=words):
        replace(case, **changes).attend(work)


def test_other_refusals() -> None:
    case = random_case(2, 5)
    work = case.work()
    short = {"key_pool": case.key_pool[:9], "value_pool": case.value_pool[:9]}
    with pytest.raises(ValueError, match="the pools have 9"):
        replace(case, **short).attend(work)
    with pytest.raises(RuntimeError, match=r"no gradient, and q requires one.*no_grad"):
        replace(case, q=case.q.requires_grad_()).attend(work)
    with torch.no_grad():
        case.attend(work)
    case.q.requires_grad_(False)
    with pytest.raises(UnsupportedError, match="'fused' is none of 'auto'"):
        case.attend(work, backend="fused")
