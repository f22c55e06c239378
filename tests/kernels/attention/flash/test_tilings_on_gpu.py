"""Head dim 256 on a Hopper GPU, its backward in tiles of 48 keys and of 64, whatever the rule says.

`test_on_gpu.py` runs what the rule takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from prefixtree import PrefixForest
from prefixtree.kernels.attention.flash import block_lists, launch
from prefixtree.kernels.attention.flash.block_lists import ForestLists, Tiles, lists_of
from prefixtree.kernels.attention.protocol import AttentionCall
from tests.support.attention_checks import Case, assert_numerics, ours, run
from tests.support.flash_on_gpu import ON_HOPPER, assert_like_triton, assert_wide_gradients
from tests.support.gpu_cases import FOREST, HALVES, OPTIONS, cuda_mask
from tests.support.strategies import random_forest

pytestmark = ON_HOPPER


@pytest.fixture(params=[48, 64], ids=["48 keys", "64 keys"])
def keys(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Either tiling, forced; every call with block lists runs it."""
    monkeypatch.setattr(launch, "DENSE_TILES_FROM", 0 if request.param == 48 else math.inf)
    taken, decide = set(), launch.lists_and_tiles

    def decided(call: AttentionCall) -> tuple[ForestLists, Tiles]:
        lists, tiles = decide(call)
        taken.add(tiles.backward_keys)
        return lists, tiles

    monkeypatch.setattr(launch, "lists_and_tiles", decided)
    yield request.param
    assert taken == {request.param}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (24, 4), (7, 1)], ids=str)
@pytest.mark.parametrize("heads_first", [False, True], ids=["tiles first", "heads first"])
def test_numerics_of_either_tiling(
    monkeypatch: pytest.MonkeyPatch,
    keys: int,
    heads_first: bool,
    heads: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    monkeypatch.setattr(launch, "heads_first", lambda lists, heads, processors: heads_first)
    mask = cuda_mask(FOREST)
    case = Case.random(mask, heads, (256, 256), dtype).to("cuda")
    assert_numerics(FOREST, mask, case, ours(mask, backend="flash"))


@pytest.mark.parametrize("options", OPTIONS[1:])
@pytest.mark.parametrize("extras", [{}, {"sinks": True, "dlse": True}])
def test_numerics_of_features_of_either_tiling(keys: int, options: dict, extras: dict) -> None:
    mask = cuda_mask(FOREST)
    case = Case.random(mask, (8, 2), (256, 256), torch.bfloat16, **extras, **options).to("cuda")
    assert_numerics(FOREST, mask, case, ours(mask, backend="flash"))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("of_part", [False, True])
def test_numerics_of_ragged_forests_in_either_tiling(keys: int, of_part: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    forest = random_forest(rng, 40, [3, 40, 200][seed % 3])
    mask = cuda_mask(forest)
    if of_part:
        middle = mask.num_tokens // 2
        mask = mask.for_queries([(middle // 2, middle), (middle + 1, mask.num_tokens)])
    case = Case.random(mask, (8, 2), (256, 256), torch.bfloat16, seed).to("cuda")
    assert_numerics(forest, mask, case, ours(mask, backend="flash"))


# a key tile and one more key of either tiling, two tiles, a query tile
@pytest.mark.parametrize("tokens", [3, 47, 48, 49, 64, 65, 96, 97, 128, 129, 193, 1025])
def test_lengths_around_a_tile_of_either_tiling(keys: int, tokens: int) -> None:
    forest = PrefixForest.from_parents([-1, 0, 0], [tokens - 2, 1, 1])
    mask = cuda_mask(forest)
    case = Case.random(mask, (8, 2), (256, 256), torch.bfloat16).to("cuda")
    assert_numerics(forest, mask, case, ours(mask, backend="flash"))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("of_part", [False, True])
def test_gradients_in_float32_of_either_tiling(
    keys: int, of_part: bool, dtype: torch.dtype
) -> None:
    mask = cuda_mask(FOREST)
    mask = mask.for_queries([(100, mask.num_tokens - 70)]) if of_part else mask
    assert_wide_gradients(mask, Case.random(mask, (8, 2), (256, 256), dtype).to("cuda"))


@pytest.mark.parametrize("kind", ["partial", "full"])
def test_a_gradient_left_out_is_seen(monkeypatch: pytest.MonkeyPatch, keys: int, kind: str) -> None:
    """One tile of one list of the backward."""
    forest = PrefixForest.from_parents([-1, 0, 0], [300, 300, 200])
    mask = cuda_mask(forest)
    case = Case.random(mask, (8, 2), (256, 256), torch.bfloat16).to("cuda")
    assert_numerics(forest, mask, case, ours(mask, backend="flash"))
    tiles = launch.tiles_for(256, 256) if keys == 64 else launch.dense_tiles_for(256, 256)
    count = getattr(lists_of(mask.host, tiles, 0, case.q.device).backward, f"{kind}_count")
    assert count[0, 0, 1] > 0
    count[0, 0, 1] -= 1
    with pytest.raises(AssertionError):
        assert_numerics(forest, mask, case, ours(mask, backend="flash"))


@pytest.mark.parametrize("heads", [(16, 2), (32, 8)], ids=str)
def test_many_tokens_like_triton_in_either_tiling(keys: int, heads: tuple[int, int]) -> None:
    assert_like_triton(heads, (256, 256))


@pytest.mark.parametrize(
    "forest, taken",
    [
        (PrefixForest.from_parents([-1, *[0] * 8], [512, *[1024] * 8]), 64),
        (PrefixForest.from_parents([-1, 0, 0], [3000, 1500, 1500]), 48),
    ],
    ids=["prompt", "long nodes"],
)
def test_the_tiling_of_the_rule(forest: PrefixForest, taken: int) -> None:
    mask = cuda_mask(forest)
    case = Case.random(mask, (4, 1), (256, 256), torch.bfloat16).to("cuda")
    got = run(case, ours(mask, backend="flash"))
    made = {tiles.backward_keys for tiles, *_ in block_lists._made[mask.host]}
    assert made == {48, taken}
    for name, want in run(case, ours(mask, backend="triton")).items():
        error = (got[name].float() - want.float()).norm() / want.float().norm()
        assert error < 1e-2, (name, float(error))
