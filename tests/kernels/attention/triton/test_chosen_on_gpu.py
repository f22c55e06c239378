"""On a GPU: attention to chosen keys with the tiles that it ships with, on nodes of many words."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prefixtree import tree_attention
from tests.support.attention_checks import Case, assert_numerics, ours, run
from tests.support.choices import random_choice
from tests.support.gpu_cases import FOREST, HALVES, cuda_mask, inputs_of
from tests.support.strategies import random_forest

pytestmark = pytest.mark.gpu

# DeepSeek V3.2's and GLM-5's head dims, and grouped heads
SHAPES = [((4, 4), (192, 128)), ((4, 4), (256, 256)), ((8, 2), (128, 128)), ((8, 1), (64, 64))]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("heads, dims", SHAPES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_numerics(
    dtype: torch.dtype, heads: tuple[int, int], dims: tuple[int, int], deterministic: bool
) -> None:
    mask = cuda_mask(FOREST, deterministic=deterministic)
    bits, visible = random_choice(mask)
    case = Case.random(mask, heads, dims, dtype).to("cuda")
    assert_numerics(FOREST, mask, case, ours(mask, backend="triton", chosen=bits), visible)


def test_float32_runs_on_sdpa() -> None:
    mask = cuda_mask(FOREST)
    bits, visible = random_choice(mask)
    case = Case.random(mask, (4, 4), (192, 128), torch.float32).to("cuda")
    assert_numerics(FOREST, mask, case, ours(mask, chosen=bits), visible)


@pytest.mark.parametrize("seed", range(10))
def test_numerics_of_ragged_forests(seed: int) -> None:
    rng = np.random.default_rng(seed)
    forest = random_forest(rng, 40, int(rng.choice([3, 40, 200])))
    mask = cuda_mask(forest)
    if seed % 3 == 2:
        middle = mask.num_tokens // 2
        mask = mask.for_queries([(middle // 2, middle), (middle + 1, mask.num_tokens)])
    options = [{}, {"window": 200}, {"softcap": 4.0}][seed % 3]
    heads, dims = SHAPES[seed % len(SHAPES)]
    bits, visible = random_choice(mask, seed, 0.1 + 0.2 * (seed % 4))
    case = Case.random(mask, heads, dims, torch.bfloat16, seed, **options).to("cuda")
    assert_numerics(forest, mask, case, ours(mask, backend="triton", chosen=bits), visible)


@pytest.mark.parametrize("heads, dims", SHAPES[:2])
def test_a_hundred_repeats(heads: tuple[int, int], dims: tuple[int, int]) -> None:
    mask = cuda_mask(FOREST, deterministic=True)
    bits, _ = random_choice(mask)
    case = Case.random(mask, heads, dims, torch.bfloat16, sinks=True, dlse=True).to("cuda")
    want = run(case, ours(mask, backend="triton", chosen=bits))
    for repeat in range(100):
        for name, value in run(case, ours(mask, backend="triton", chosen=bits)).items():
            assert torch.equal(value, want[name]), (repeat, name)


def test_a_new_forest_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    def update(seed: int) -> None:
        mask = cuda_mask(random_forest(np.random.default_rng(seed), 30, 120))
        bits, _ = random_choice(mask)
        case = Case.random(mask, (4, 4), (192, 128), torch.bfloat16).to("cuda")
        inputs = inputs_of(case)
        out = tree_attention(*inputs, mask, chosen=bits, backend="triton")
        torch.autograd.grad(out, inputs, case.dout)

    update(0)
    compiled: list[object] = []
    note = lambda **facts: compiled.append(facts)  # noqa: E731
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    for seed in range(1, 8):
        update(seed)
    assert not compiled
