"""On a GPU: decoding with the tiles it ships with, and what only hardware can show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from prefixtree.kernels.decoding.cascade import cascade_attention
from prefixtree.kernels.decoding.work import Capacity, DecodeWork
from tests.support.decode_cases import DecodeCase, assert_exact, random_case
from tests.support.gpu_cases import peak_bytes

pytestmark = pytest.mark.gpu

# beside float64, of values that are about 1: probabilities and results are rounded
LIMITS = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3, torch.float32: 1e-5}


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(
    "heads, dims",
    [
        ((32, 8), (128, 128)),
        ((4, 4), (64, 64)),
        ((3, 1), (96, 96)),
        ((10, 2), (128, 128)),
        ((7, 1), (80, 80)),
        ((16, 1), (128, 128)),
        ((8, 2), (256, 256)),
        ((4, 4), (192, 128)),
        ((2, 1), (16, 8)),
    ],
)
def test_numerics(dtype: torch.dtype, heads: tuple[int, int], dims: tuple[int, int]) -> None:
    options: dict[str, Any] = {"window": 700, "softcap": 20.0, "sinks": True}
    for seed, extras in enumerate([{}, options]):
        case = random_case(seed, 40, heads, dims, dtype, most=400, room=300, stopped=0.1, **extras)
        assert_exact(case.to("cuda"), LIMITS[dtype])
    append = random_case(3, 9, heads, dims, dtype, most=300, room=60, tokens=50, **options)
    assert_exact(append.to("cuda"), LIMITS[dtype])


def same_room(cases: list[DecodeCase], **options: Any) -> tuple[Capacity, int]:
    """Room that holds each case, and keys of a pool that holds each."""
    needs = [case.work(live=None, **options).capacity for case in cases]
    fields = ("rows", "wide", "narrow", "pieces", "slots")
    most = {name: max(getattr(need, name) for need in needs) + 1 for name in fields}
    return Capacity(**most), max(len(case.key_pool) for case in cases)


def cases_of_graph() -> list[DecodeCase]:
    out = []
    for seed in range(4):
        case = random_case(seed, 20 + seed, (8, 2), (128, 128), torch.bfloat16, most=300, room=50)
        case.tails[:, 2] = np.minimum(case.tails[:, 2], case.tails[:, 1] - 4)
        case.key_pool.nan_to_num_(0.0), case.value_pool.nan_to_num_(0.0)
        out.append(case.to("cuda"))
    return out


def test_a_graph_replays_for_other_forests_and_steps() -> None:
    cases = cases_of_graph()
    capacity, num_keys = same_room(cases)
    work = cases[0].work(live=None, capacity=capacity, num_keys=num_keys)
    rows = capacity.rows
    q = torch.zeros(rows, 8, 128, dtype=torch.bfloat16, device="cuda")
    k, v = q.new_zeros(rows, 2, 128), q.new_zeros(rows, 2, 128)
    pools = [q.new_zeros(num_keys, 2, 128) for _ in range(2)]

    def step() -> torch.Tensor:
        out = cascade_attention(q, k, v, *pools, work, backend="triton")
        work.advance()
        return out

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for case in cases:
        count = len(case.tails)
        for mine, given in zip((q, k, v), (case.q, case.k, case.v), strict=True):
            mine[:count] = given
        for pool, given in zip(pools, (case.key_pool, case.value_pool), strict=True):
            pool[: len(given)] = given
        work.refill(case.runs, case.tails)
        for _ in range(3):
            out.fill_(torch.nan)
            graph.replay()
            found = out.clone()
            assert not found[count:].any()
            # of the same list, in plain torch, one step behind
            again = replace(case, live=torch.ones_like(case.live))
            want = again.attend(backend="torch")
            case.tails[:, 2] += 1
            torch.testing.assert_close(found[:count], want, atol=2e-2, rtol=2e-2)
            assert torch.equal(pools[0][: len(case.key_pool)], case.key_pool)


def test_nothing_waits_for_the_gpu_and_nothing_is_compiled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import triton

    cases = cases_of_graph()
    # the same addresses modulo 16, other numbers of everything
    cases[0].attend(backend="triton")
    torch.cuda.synchronize()
    compiled: list[object] = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **facts: compiled.append(facts)
    )
    works = [case.work() for case in cases]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for case, work in zip(cases, works, strict=True):
            case.attend(work, backend="triton")
            work.advance()
            work.refill(case.runs, case.tails)
            case.attend(work, backend="triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not compiled


def test_auto_is_triton_and_the_default_list_fills_the_gpu() -> None:
    case = random_case(0, 30, (32, 8), (128, 128), torch.bfloat16, most=2000, room=100).to("cuda")
    assert torch.equal(case.attend(), case.attend(backend="triton"))
    work = case.work()
    programs = 8 * (work.capacity.wide + work.capacity.narrow)
    assert programs > torch.cuda.get_device_properties(0).multi_processor_count


def test_offsets_beyond_int32() -> None:
    """The last keys of pools of more than 2^31 numbers, written and read."""
    num_keys, kv_heads, dim = 2**31 // 1024 + 5000, 8, 128
    generator = torch.Generator("cuda").manual_seed(0)
    pools = [
        torch.empty(num_keys, kv_heads, dim, dtype=torch.bfloat16, device="cuda") for _ in range(2)
    ]
    assert pools[0].numel() > 2**31
    small = random_case(1, 8, (32, 8), (128, 128), torch.bfloat16, most=100, room=20).to("cuda")
    used, shift = len(small.key_pool), num_keys - len(small.key_pool)
    for pool, given in zip(pools, (small.key_pool, small.value_pool), strict=True):
        pool[shift:] = given
        pool[:shift].normal_(generator=generator)
    moved = replace(small, runs=small.runs + np.array([shift, shift, 0, 0, 0]))
    moved = replace(moved, tails=small.tails + np.array([shift, 0, 0, 0]))
    moved.key_pool, moved.value_pool = pools
    out, want = moved.attend(backend="triton"), small.attend(backend="triton")
    assert torch.equal(out, want)
    assert torch.equal(pools[0][-used:].nan_to_num(9.0), small.key_pool.nan_to_num(9.0))


def test_peak_memory_is_the_slots() -> None:
    case = random_case(2, 64, (32, 8), (128, 128), torch.bfloat16, most=600, room=64).to("cuda")
    work = case.work()
    formula = work.capacity.slots * 32 * 129 * 4 + case.q.numel() * 2
    peak = peak_bytes(lambda: case.attend(work))
    assert peak <= 1.02 * formula + (1 << 16), (peak, formula)


def test_compiled_by_inductor() -> None:
    torch._dynamo.reset()
    cases = cases_of_graph()
    capacity, num_keys = same_room(cases)
    work = cases[0].work(live=None, capacity=capacity, num_keys=num_keys)
    pools = [torch.zeros(num_keys, 2, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2)]

    @torch.compile(fullgraph=True)
    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = cascade_attention(q * 1.0, k, v, *pools, work)
        work.advance()
        return out * 1.0

    for case in cases:
        count = len(case.tails)
        for pool, given in zip(pools, (case.key_pool, case.value_pool), strict=True):
            pool[: len(given)] = given
        work.refill(case.runs, case.tails)
        padding = capacity.rows - count
        padded = [torch.cat([x, x[:padding]]) for x in (case.q, case.k, case.v)]
        with torch.no_grad():
            found = step(*padded)[:count]
        want = case.attend(backend="torch")
        torch.testing.assert_close(found, want, atol=2e-2, rtol=2e-2)
        assert torch.equal(pools[0][: len(case.key_pool)], case.key_pool)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)])
def test_sanitize_decoding(dims: tuple[int, int]) -> None:
    """Short: every kernel once, over pools that end with the last key."""
    case = random_case(4, 9, (8, 2), dims, torch.bfloat16, most=80, room=20, sinks=True, window=90)
    last = int(max(case.runs[:, 1].max(), case.tails[:, :2].sum(1).max()))
    case.key_pool, case.value_pool = case.key_pool[:last].clone(), case.value_pool[:last].clone()
    assert isinstance(case.work(), DecodeWork)
    assert_exact(case.to("cuda"), LIMITS[torch.bfloat16], backend="triton")
