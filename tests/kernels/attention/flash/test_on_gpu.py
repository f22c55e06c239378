"""The flash backend on a Hopper GPU with flash-attn-4: numerics of every feature, and contracts.

What is not held to the bounds here is refused: `launch.SERVED` is what this file was green on.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from prefixtree import PrefixForest, TreeMask, UnsupportedError, explain, tree_attention
from prefixtree.kernels.attention.flash import launch
from prefixtree.kernels.attention.flash.block_lists import chains_of, lists_of
from tests.support.attention_checks import (
    Case,
    assert_as_promised,
    assert_numerics,
    eager,
    ours,
    run,
)
from tests.support.flash_on_gpu import ON_HOPPER, assert_like_triton, assert_wide_gradients
from tests.support.gpu_cases import (
    EXTRAS,
    FOREST,
    HALVES,
    OPTIONS,
    assert_sinks_of_one_head,
    cuda_mask,
    inputs_of,
)
from tests.support.strategies import random_forest

pytestmark = ON_HOPPER


# sequences that share nothing, shorter and longer than tiles
CHAINS = PrefixForest.from_parents([-1] * 8, [700, 1, 127, 128, 129, 64, 300, 385], order="input")


def grown(seed: int) -> PrefixForest:
    """Of more than one tile: flash-attn-4 compiles a backward of its own for a single one."""
    return PrefixForest.from_parents([-1, 0, 0, 1, -1], [130 + 37 * seed, 60, 9 + seed, 200, 77])


# ---- numerics ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "heads, dims",
    [
        # grouped heads and not: dk and dv of a group take another way
        *[((4, 4), dims) for dims in launch.SERVED],
        *[((8, 2), dims) for dims in launch.SERVED if dims[0] == dims[1]],
        ((32, 8), (128, 128)),
        ((7, 1), (128, 128)),
        ((10, 2), (64, 64)),
        ((16, 1), (128, 128)),
        ((8, 1), (96, 96)),
        ((2, 1), (192, 192)),
    ],
)
def test_numerics(dtype: torch.dtype, heads: tuple[int, int], dims: tuple[int, int]) -> None:
    mask = cuda_mask(FOREST)
    case = Case.random(mask, heads, dims, dtype).to("cuda")
    assert_numerics(FOREST, mask, case, ours(mask, backend="flash"))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("extras", EXTRAS)
def test_numerics_of_features(dtype: torch.dtype, options: dict, extras: dict) -> None:
    mask = cuda_mask(FOREST)
    case = Case.random(mask, (8, 2), (128, 128), dtype, **extras, **options).to("cuda")
    assert_numerics(FOREST, mask, case, ours(mask, backend="flash"))


# ---- of parts: some of the queries, gradients in float32 -----------------------------------------


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("dims", [(128, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("on_grid", [False, True])
def test_numerics_of_some_queries(on_grid: bool, dims: tuple[int, int], seed: int) -> None:
    forest = random_forest(np.random.default_rng(seed), 40, [40, 200, 400][seed % 3])
    whole = cuda_mask(forest)
    middle = whole.num_tokens // 2
    first = middle // 2
    # an odd number of rows, or whole tiles of them, before the second run
    rows = (middle - first) // 128 * 128 if on_grid else (middle - first) // 2 * 2 - 1
    ranges = [(first, first + rows), (middle + 1, whole.num_tokens)]
    mask = whole.for_queries(ranges if rows else ranges[1:])
    assert mask.host.rows_on_grid(128) == on_grid
    extras = [{}, {"window": 150, "softcap": 9.0}, {"sinks": True, "dlse": True}][seed % 3]
    case = Case.random(mask, (8, 2), dims, torch.bfloat16, seed, **extras).to("cuda")
    assert_numerics(forest, mask, case, ours(mask, backend="flash"))


@pytest.mark.parametrize("of_part", [False, True])
@pytest.mark.parametrize(
    "dims", [dims for dims in launch.SERVED if dims[0] == dims[1]] + [(128, 128)], ids=str
)
@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_in_float32(dtype: torch.dtype, dims: tuple[int, int], of_part: bool) -> None:
    """The accumulators in rows: rounded they are what flash-attn-4 gives, and closer to float64."""
    mask = cuda_mask(FOREST)
    mask = mask.for_queries([(100, mask.num_tokens - 70)]) if of_part else mask
    case = Case.random(mask, (8, 2), dims, dtype).to("cuda")
    assert_wide_gradients(mask, case)


# ---- of forests without branches, by its variable-length kernels ---------------------------------


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "heads, dims",
    [
        *[((4, 4), dims) for dims in launch.SERVED],
        *[((8, 2), dims) for dims in launch.SERVED if dims[0] == dims[1]],
        ((32, 8), (128, 128)),
        ((7, 1), (128, 128)),
        # groups that do not divide a tile's rows
        ((10, 2), (64, 64)),
        ((12, 2), (96, 96)),
        ((14, 2), (256, 256)),
    ],
)
def test_numerics_of_chains(
    dtype: torch.dtype, heads: tuple[int, int], dims: tuple[int, int]
) -> None:
    mask = cuda_mask(CHAINS)
    assert chains_of(mask.host, mask.device) is not None
    case = Case.random(mask, heads, dims, dtype).to("cuda")
    assert_numerics(CHAINS, mask, case, ours(mask, backend="flash"))


# (A window of one token has a dq of exactly 0, where the bound is eager's own rounding: 2.00e-6 for
# 1.91e-6 allowed, on an H200.)
@pytest.mark.parametrize("options", [*OPTIONS, {"window": 2}, {"window": 129}])
@pytest.mark.parametrize("extras", EXTRAS)
def test_numerics_of_features_of_chains(options: dict, extras: dict) -> None:
    mask = cuda_mask(CHAINS)
    case = Case.random(mask, (8, 2), (128, 128), torch.bfloat16, **extras, **options).to("cuda")
    assert_numerics(CHAINS, mask, case, ours(mask, backend="flash"))


@pytest.mark.parametrize("dims", [dims for dims in launch.SERVED if dims[0] == dims[1]], ids=str)
def test_numerics_of_features_of_chains_where_tiles_differ(dims: tuple[int, int]) -> None:
    mask = cuda_mask(CHAINS)
    options = {"window": 200, "softcap": 9.0, "sinks": True, "dlse": True}
    case = Case.random(mask, (4, 2), dims, torch.bfloat16, **options).to("cuda")
    assert_numerics(CHAINS, mask, case, ours(mask, backend="flash"))


# beyond 256 sequences flash-attn-4 looks them up in another way
@pytest.mark.parametrize("count", [2, 40, 256, 257, 2000])
@pytest.mark.parametrize("window", [0, 90])
def test_numerics_of_many_chains(count: int, window: int) -> None:
    # few tokens in all: the reference is dense
    most = {2: 2000, 40: 200, 2000: 6}.get(count, 40)
    lengths = np.random.default_rng(count).integers(1, most, count)
    forest = PrefixForest.from_parents([-1] * count, lengths)
    mask = cuda_mask(forest)
    assert chains_of(mask.host, mask.device) is not None
    options = {"window": window} if window else {}
    case = Case.random(mask, (4, 1), (128, 128), torch.bfloat16, **options).to("cuda")
    assert_numerics(forest, mask, case, ours(mask, backend="flash"))


def test_chains_like_block_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same forest, too large for a dense reference; and nothing waits for the GPU."""
    lengths = np.random.default_rng(0).integers(256, 8193, 8)
    forest = PrefixForest.from_parents([-1] * 8, lengths)
    mask = cuda_mask(forest, backend="flash")
    case = Case.random(mask, (8, 2), (128, 128), torch.bfloat16).to("cuda")
    got = run(case, ours(mask))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fresh = cuda_mask(forest, backend="flash")
        inputs = inputs_of(case)
        torch.autograd.grad(tree_attention(*inputs, fresh), inputs, case.dout)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    monkeypatch.setattr(launch, "chains_of", lambda mask, device: None)
    for name, want in run(case, ours(cuda_mask(forest, backend="flash"))).items():
        error = (got[name].float() - want.float()).norm() / want.float().norm()
        assert error < 1e-2, (name, float(error))


def test_new_chains_compile_nothing() -> None:
    from flash_attn.cute import interface

    caches = [x.compile_cache for x in (interface._flash_attn_fwd, interface._flash_attn_bwd)]
    kept: list[int] = []
    for lengths in ([300, 40], [129], [400] * 20, [5000, 17], [1, 2000]):
        for window in (None, 30, 50):
            mask = cuda_mask(PrefixForest.from_parents([-1] * len(lengths), lengths))
            case = Case.random(mask, (8, 2), (128, 128), torch.bfloat16).to("cuda")
            inputs = inputs_of(case)
            out = tree_attention(*inputs, mask, window=window, backend="flash")
            torch.autograd.grad(out, inputs, case.dout)
        kept = kept or [len(cache.cache) for cache in caches]
    assert [len(cache.cache) for cache in caches] == kept


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("sink_level", [0.0, 8.0])
def test_sinks_of_one_head(sink_level: float, seed: int) -> None:
    """One number for all rows, whose terms may cancel; of thousands of rows."""
    assert_sinks_of_one_head("flash", sink_level, seed)


@pytest.mark.parametrize("dims", [(192, 192), (256, 256)])
def test_numerics_of_features_where_tiles_differ(dims: tuple[int, int]) -> None:
    mask = cuda_mask(FOREST)
    options = {"window": 200, "softcap": 9.0, "sinks": True, "dlse": True}
    case = Case.random(mask, (4, 2), dims, torch.bfloat16, **options).to("cuda")
    assert_numerics(FOREST, mask, case, ours(mask, backend="flash"))


# those that divide the 128 rows of a tile and those that do not
@pytest.mark.parametrize("group", [2, 3, 5, 6, 7])
@pytest.mark.parametrize("dims", [dims for dims in launch.SERVED if dims[0] == dims[1]], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["apart", "packed"])
def test_numerics_of_groups(
    monkeypatch: pytest.MonkeyPatch, packed: bool, dims: tuple[int, int], group: int
) -> None:
    """By the rule one of the two runs."""
    monkeypatch.setattr(launch, "packs_heads", lambda group, d: packed)
    mask = cuda_mask(FOREST)
    case = Case.random(mask, (2 * group, 2), dims, torch.bfloat16).to("cuda")
    assert_numerics(FOREST, mask, case, ours(mask, backend="flash"))


@pytest.mark.parametrize("heads, dims", [((6, 1), (256, 256)), ((14, 2), (128, 128))])
@pytest.mark.parametrize("packed", [False, True], ids=["apart", "packed"])
def test_numerics_of_features_of_groups(
    monkeypatch: pytest.MonkeyPatch, packed: bool, heads: tuple[int, int], dims: tuple[int, int]
) -> None:
    """Packed, neighbouring rows have sinks of their own and belong to one token."""
    monkeypatch.setattr(launch, "packs_heads", lambda group, d: packed)
    mask = cuda_mask(FOREST)
    options = {"window": 200, "softcap": 9.0, "sinks": True, "dlse": True}
    case = Case.random(mask, heads, dims, torch.bfloat16, **options).to("cuda")
    assert_numerics(FOREST, mask, case, ours(mask, backend="flash"))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("heads_first", [False, True], ids=["tiles first", "heads first"])
def test_numerics_of_ragged_forests(
    monkeypatch: pytest.MonkeyPatch, heads_first: bool, seed: int
) -> None:
    monkeypatch.setattr(launch, "heads_first", lambda lists, heads, processors: heads_first)
    rng = np.random.default_rng(seed)
    forest = random_forest(rng, 40, int(rng.choice([3, 40, 200])))
    mask = cuda_mask(forest)
    case = Case.random(mask, (8, 2), (128, 128), torch.bfloat16, seed).to("cuda")
    assert_numerics(forest, mask, case, ours(mask, backend="flash"))


@pytest.mark.parametrize(
    "heads, dims",
    [
        *[((4, 4), dims) for dims in launch.SERVED],
        *[((8, 2), dims) for dims in launch.SERVED if dims[0] == dims[1]],
    ],
)
@pytest.mark.parametrize("heads_first", [False, True], ids=["tiles first", "heads first"])
def test_numerics_in_either_order(
    monkeypatch: pytest.MonkeyPatch,
    heads_first: bool,
    heads: tuple[int, int],
    dims: tuple[int, int],
) -> None:
    """By the rule so small a forest takes its heads first, in every other test."""
    monkeypatch.setattr(launch, "heads_first", lambda lists, heads, processors: heads_first)
    mask = cuda_mask(FOREST)
    case = Case.random(mask, heads, dims, torch.bfloat16).to("cuda")
    assert_numerics(FOREST, mask, case, ours(mask, backend="flash"))


@pytest.mark.parametrize(
    "forest, heads_first",
    [
        # a prompt with short responses, and documents
        (PrefixForest.from_parents([-1, *[0] * 30], [256, *[64] * 30]), True),
        (PrefixForest.from_parents([-1] * 40 + [0], [60] * 41), False),
    ],
    ids=["prompt", "documents"],
)
def test_numerics_in_the_order_of_the_rule(forest: PrefixForest, heads_first: bool) -> None:
    mask = cuda_mask(forest)
    case = Case.random(mask, (32, 8), (128, 128), torch.bfloat16).to("cuda")
    made = lists_of(mask.host, launch.tiles_for(128, 128), 0, case.q.device)
    assert launch.heads_first(made, 32, launch.runtime.processors(case.q.device)) == heads_first
    assert_numerics(forest, mask, case, ours(mask, backend="flash"))


@pytest.mark.parametrize("tokens", [1, 2, 127, 128, 129, 256, 257, 1025])
@pytest.mark.parametrize("branches", [False, True])
def test_lengths_around_a_tile(branches: bool, tokens: int) -> None:
    """The first length compiles what the others run: nothing of it may be baked in."""
    if branches and tokens < 3:
        pytest.skip("three tokens are needed to branch")
    parents, lengths = ([-1, 0, 0], [tokens - 2, 1, 1]) if branches else ([-1], [tokens])
    forest = PrefixForest.from_parents(parents, lengths)
    mask = cuda_mask(forest)
    case = Case.random(mask, (8, 2), (128, 128), torch.bfloat16).to("cuda")
    assert_numerics(forest, mask, case, ours(mask, backend="flash"))


def test_sinks_that_take_nearly_everything() -> None:
    mask = cuda_mask(FOREST)
    case = Case.random(mask, (8, 2), (128, 128), torch.bfloat16, sinks=True)
    case.sinks = case.sinks + 12
    position = mask.position_ids.long().cpu()
    dense = eager(mask.dense().cpu(), (position, position))
    want, baseline = run(case, dense, torch.float64), run(case, dense)
    got = run(case.to("cuda"), ours(mask, backend="flash"))
    for name in ("out", "dq", "dk", "dv", "dsinks"):
        errors = [(x[name].double() - want[name]).abs().mean() for x in (got, baseline)]
        assert errors[0] <= 1.5 * errors[1] + 1e-6, (name, errors)


def test_the_gradient_of_a_sum_leaves_nothing_compiled_behind() -> None:
    """Its strides are 0; heads of a number no other test has, so that it compiles first."""
    mask = cuda_mask(FOREST)
    case = Case.random(mask, (6, 2), (128, 128), torch.bfloat16).to("cuda")
    inputs = inputs_of(case)
    out = tree_attention(*inputs, mask, backend="flash")
    got = torch.autograd.grad(out.sum(), inputs, retain_graph=True)
    for a, b in zip(got, torch.autograd.grad(out, inputs, torch.ones_like(out)), strict=True):
        torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)
    assert_numerics(FOREST, mask, case, ours(mask, backend="flash"))


def test_like_triton_on_many_tokens() -> None:
    assert_like_triton((8, 2), (128, 128))


# ---- contracts -----------------------------------------------------------------------------------


def test_refused_on_this_machine_for_what_it_cannot_do() -> None:
    mask = cuda_mask(FOREST)
    case = Case.random(mask, (8, 2), (128, 128), torch.bfloat16).to("cuda")
    with pytest.raises(UnsupportedError, match="no deterministic backward"):
        tree_attention(*inputs_of(case), mask, backend="flash", deterministic=True)
    assert launch.installed() == launch.VERSION


@pytest.mark.parametrize("d", [16, 80])
def test_head_dims_that_were_wrong_are_refused(d: int) -> None:
    """dQ was, on an H200, by 0.4 where 0.004 is allowed: flash-attn-4's own."""
    mask = cuda_mask(FOREST)
    case = Case.random(mask, (4, 2), (d, d), torch.bfloat16).to("cuda")
    with pytest.raises(UnsupportedError, match=f"head dims {d} and {d} are not among"):
        tree_attention(*inputs_of(case), mask, backend="flash")


def test_auto_goes_by_the_work() -> None:
    for forest, backend in (
        (PrefixForest.from_parents([-1], [8192]), "flash"),
        (PrefixForest.from_parents([-1, *[0] * 60], [100] * 61), "triton"),
    ):
        mask = cuda_mask(forest)
        case = Case.random(mask, (8, 2), (128, 128), torch.bfloat16).to("cuda")
        assert f"would run {backend!r}" in explain(mask, case.q, case.k, case.v)
        got, want = (tree_attention(*inputs_of(case), mask, backend=b) for b in ("auto", backend))
        assert torch.equal(got, want)


@pytest.mark.parametrize("extras", [{}, {"sinks": True, "dlse": True}])
def test_results_are_laid_out_as_compiled_code_is_told(extras: dict) -> None:
    mask = cuda_mask(FOREST)
    case = Case.random(mask, (8, 2), (128, 128), torch.bfloat16, **extras).to("cuda")
    assert_as_promised(case, mask, backend="flash")


def test_forward_repeats_and_gradients_nearly() -> None:
    """dq is added up in any order, and so are dk and dv of grouped heads."""
    mask = cuda_mask(FOREST)
    case = Case.random(mask, (8, 2), (128, 128), torch.bfloat16, sinks=True, dlse=True).to("cuda")
    first = run(case, ours(mask, backend="flash"))
    for repeat in range(200):
        for name, value in run(case, ours(mask, backend="flash")).items():
            if name in ("out", "lse"):
                assert torch.equal(value, first[name]), (name, repeat)
            else:
                error = (value.float() - first[name].float()).abs()
                assert (error <= 2**-7 * first[name].float().abs() + 1e-5).all(), (name, repeat)


def test_another_stream_and_lifetimes() -> None:
    mask = cuda_mask(FOREST, backend="flash")
    case = Case.random(mask, (8, 2), (64, 64), torch.bfloat16).to("cuda")
    want = run(case, ours(mask))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = run(case, ours(cuda_mask(FOREST, backend="flash")))
    torch.cuda.current_stream().wait_stream(stream)
    for name in ("out", "lse"):
        assert torch.equal(got[name], want[name]), name


def test_nothing_waits_for_the_gpu() -> None:
    masks = [cuda_mask(grown(seed)) for seed in range(3)]
    cases = [Case.random(m, (8, 2), (128, 128), torch.bfloat16).to("cuda") for m in masks]

    def update(mask: TreeMask, case: Case, window: int | None) -> None:
        inputs = inputs_of(case)
        out = tree_attention(*inputs, mask, window=window, backend="flash")
        torch.autograd.grad(out, inputs, case.dout)

    for window in (None, 60):
        update(masks[0], cases[0], window)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        # new forests too: their lists are built and expanded on the way
        for (mask, case), window in itertools.product(
            zip(masks, cases, strict=True), (None, 60, 70)
        ):
            update(mask, case, window)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_new_forest_compiles_nothing() -> None:
    from flash_attn.cute import interface

    from prefixtree.kernels.attention.flash import backwards

    calls = (
        interface._flash_attn_fwd,
        interface._flash_attn_bwd,
        backwards.heads_first,
    )
    caches = [call.compile_cache for call in calls]

    def update(seed: int, window: int | None) -> None:
        mask = cuda_mask(grown(seed), backend="flash")
        case = Case.random(mask, (8, 2), (128, 128), torch.bfloat16).to("cuda")
        inputs = inputs_of(case)
        out = tree_attention(*inputs, mask, window=window)
        torch.autograd.grad(out, inputs, case.dout)

    for window in (None, 30):
        update(0, window)
    kept = [len(cache.cache) for cache in caches]
    for seed, window in itertools.product(range(1, 12), (None, 30, 50)):
        update(seed, window)
    assert [len(cache.cache) for cache in caches] == kept


def test_cuda_graph_replays_on_new_inputs() -> None:
    mask = cuda_mask(FOREST, backend="flash")
    case = Case.random(mask, (8, 2), (128, 128), torch.bfloat16).to("cuda")
    inputs = inputs_of(case)

    def update() -> list[torch.Tensor]:
        out = tree_attention(*inputs, mask)
        return [out, *torch.autograd.grad(out, inputs, case.dout)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        update()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = update()
    fresh = Case.random(mask, (8, 2), (128, 128), torch.bfloat16, 5).to("cuda")
    with torch.no_grad():
        for x, y in zip((*inputs, case.dout), (fresh.q, fresh.k, fresh.v, fresh.dout), strict=True):
            x.copy_(y)
        for x in results:
            x.fill_(float("nan"))
    graph.replay()
    want = run(fresh, ours(mask))
    for name, value in zip(("out", "dq", "dk", "dv"), results, strict=True):
        torch.testing.assert_close(value.cpu(), want[name], atol=2e-2, rtol=2e-2)


def test_compiled_by_inductor() -> None:
    torch._dynamo.reset()

    def layer(q, k, v, mask):
        return tree_attention(q * 1.5, k, v, mask, backend="flash").float().sin().sum()

    compiled = torch.compile(layer, fullgraph=True)
    for seed in range(3):
        mask = cuda_mask(grown(seed))
        case = Case.random(mask, (8, 2), (64, 64), torch.bfloat16).to("cuda")
        inputs = inputs_of(case)
        got = torch.autograd.grad(compiled(*inputs, mask), inputs)
        for a, b in zip(got, torch.autograd.grad(layer(*inputs, mask), inputs), strict=True):
            torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)
