"""On a GPU: attention to chosen keys with the tiles that it ships with, on nodes of many words."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import prefixtree as pt
from prefixtree import PrefixForest, tree_attention
from prefixtree.kernels import best_keys, indexer_kernels
from prefixtree.kernels.chosen import from_bits
from prefixtree.models import attention
from tests.support.attention_checks import Case, assert_numerics, ours, run
from tests.support.choices import random_choice
from tests.support.gpu_cases import FOREST, HALVES, cuda_mask, inputs_of
from tests.support.models import build, ragged_packed
from tests.support.strategies import random_forest

pytestmark = pytest.mark.gpu

# DeepSeek V3.2's and GLM-5's head dims, and grouped heads
SHAPES = [((4, 4), (192, 128)), ((4, 4), (256, 256)), ((8, 2), (128, 128)), ((8, 1), (64, 64))]
# its nodes are long, for which some head dims have other tiles
LONG = PrefixForest.from_parents([-1, 0, 0], [1500, 600, 900])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("heads, dims", SHAPES)
@pytest.mark.parametrize("forest", [FOREST, LONG], ids=["short", "long"])
def test_numerics(
    dtype: torch.dtype, heads: tuple[int, int], dims: tuple[int, int], forest: PrefixForest
) -> None:
    for deterministic in (False, True):
        mask = cuda_mask(forest, deterministic=deterministic)
        bits, visible = random_choice(mask)
        case = Case.random(mask, heads, dims, dtype).to("cuda")
        assert_numerics(forest, mask, case, ours(mask, backend="triton", chosen=bits), visible)


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

    def update(forest: pt.PrefixForest) -> None:
        mask = cuda_mask(forest)
        bits, _ = random_choice(mask)
        # a slice, as of groups of heads, which starts anywhere
        bits = torch.cat([bits[:1], bits])[1:]
        case = Case.random(mask, (4, 4), (192, 128), torch.bfloat16).to("cuda")
        inputs = inputs_of(case)
        out = tree_attention(*inputs, mask, chosen=bits, backend="triton")
        torch.autograd.grad(out, inputs, case.dout)

    # of the second, sums of key tiles are cut, which takes a kernel more
    for forest in (random_forest(np.random.default_rng(0), 30, 120), FOREST):
        update(forest)
    compiled: list[object] = []
    note = lambda **facts: compiled.append(facts)  # noqa: E731
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    for seed in range(1, 8):
        update(random_forest(np.random.default_rng(seed), 30, 120))
    assert not compiled


@pytest.mark.parametrize("heads", [64, 32])
@pytest.mark.parametrize("dtype", HALVES)
def test_scores_of_an_indexer(heads: int, dtype: torch.dtype) -> None:
    """Of small integers, whose sums are exact; the keys of each query's path in their columns."""
    mask = cuda_mask(FOREST)
    g = torch.Generator("cuda").manual_seed(0)
    count, position = mask.num_tokens, mask.position_ids.long()
    shapes = (count, heads, 128), (count, 128), (count, heads)
    q, k, w = (torch.randint(-1, 2, s, generator=g, device="cuda").to(dtype) for s in shapes)
    want = torch.zeros(count, count, dtype=torch.float64, device="cuda")
    for head in range(heads):
        products = q[:, head].double() @ k.double().T
        want += w[:, head, None].double() * (products * 0.5).relu()
    half = count // 2 // indexer_kernels.tile_tokens(heads) * indexer_kernels.tile_tokens(heads)
    for rows in (slice(0, half), slice(half, count)):
        given = q[rows], k, w[rows].float(), mask.host, rows.start, 0.5
        got = indexer_kernels.index_scores(*given)
        seen = mask.dense()[rows]
        at = position[None].expand_as(seen).clamp(max=got.shape[1] - 1)
        assert torch.equal(got.gather(1, at)[seen].double(), want[rows][seen])


@pytest.mark.parametrize("width", [2048, 5000, 16384, 20001])
@pytest.mark.parametrize("are_ties", [False, True])
def test_the_selection_is_that_of_torch(width: int, are_ties: bool) -> None:
    g = torch.Generator().manual_seed(width)
    scores = torch.randn(64, width, generator=g)
    scores = scores.mul(8).round() if are_ties else scores
    position = torch.arange(width - 1, 0, -(width // 64))[:64]
    want = best_keys.best_keys(scores, 2048, position)
    assert torch.equal(best_keys.best_keys(scores.cuda(), 2048, position.cuda()).cpu(), want)


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_a_model_chooses_as_its_own_products_do(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its first layer, which both give the same numbers; but for near-ties of rounded sums."""
    pytest.importorskip("transformers", "5.23")
    model = pt.prepare(build(family).to("cuda", torch.bfloat16))
    packed, inner = ragged_packed().to("cuda"), attention.tree_attention
    found: list[torch.Tensor] = []

    def noted(*args: torch.Tensor, chosen: torch.Tensor, **options: object) -> torch.Tensor:
        found.append(chosen)
        return inner(*args, chosen=chosen, **options)

    monkeypatch.setattr(attention, "tree_attention", noted)
    first = []
    for backend in ("auto", "sdpa"):
        packed.mask = packed.mask.with_options(backend=backend)
        with torch.no_grad():
            logits = model(**packed.model_inputs()).logits
        assert torch.isfinite(logits).all()
        first.append(from_bits(found[0], 0, packed.mask.host.deepest))
        found.clear()
    differ, chosen = int((first[0] ^ first[1]).sum()), int(first[1].sum())
    print(f"{family}: {differ} of {chosen} keys differ")
    assert differ <= 0.03 * chosen
