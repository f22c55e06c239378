"""Gathered latents in Triton: in its interpreter on a CPU, natively on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prefixtree import PrefixForest, TreeMask
from prefixtree.kernels.latents import definition
from prefixtree.kernels.latents import launch as kernels
from prefixtree.kernels.latents.definition import Chunk
from tests.conftest import Poison
from tests.support.choices import random_choice
from tests.support.full import mostly
from tests.support.hooks import limit
from tests.support.latents import LatentCase
from tests.support.strategies import mask_of, random_forest
from tests.support.triton_tiles import DEVICE, DTYPES

# a path of 75 tokens; nodes that begin inside a word and inside a tile; two trees
FOREST = PrefixForest.from_parents([-1, 0, 0, 2, -1], [40, 4, 5, 30, 3])


def _check(mask: TreeMask, case: LatentCase, seed: int = 0, share: float = 0.4) -> None:
    bits, visible = random_choice(mask, seed, share)
    most = int(visible.sum(-1).max())
    want = case.to(torch.float64).gathered(mask, bits, most, definition)
    limit = {torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 3e-2}[case.q.dtype]
    for name, value in case.gathered(mask, bits, most, kernels).items():
        top = max(1.0, float(want[name].abs().max()))
        assert float((value - want[name]).abs().max()) <= limit * top, name


@pytest.mark.parametrize(
    "heads, dims, rank, dtype",
    [(3, (12, 8, 10), 20, DTYPES[1]), (66, (16, 16, 16), 32, DTYPES[0])],
)
def test_numerics(heads: int, dims: tuple[int, int, int], rank: int, dtype: torch.dtype) -> None:
    forest = FOREST if heads < 64 else PrefixForest.from_parents([-1, 0, 0], [20, 7, 9])
    mask = mask_of(forest).to(DEVICE)
    _check(mask, LatentCase.random(mask.num_tokens, heads, dims, rank, dtype, DEVICE))


def test_latents_in_pieces() -> None:
    mask = mask_of(PrefixForest.from_parents([-1, 0, 0], [33, 3, 4])).to(DEVICE)
    _check(mask, LatentCase.random(40, 2, (24, 8, 16), 300, DTYPES[1], DEVICE), share=0.9)


@pytest.mark.gpu
@pytest.mark.parametrize("heads, dims", [(128, (128, 64, 128)), (64, (192, 64, 256))])
def test_shapes_of_models(heads: int, dims: tuple[int, int, int]) -> None:
    """DeepSeek V3.2's and GLM-5's, several tiles of keys a query."""
    mask = mask_of(PrefixForest.from_parents([-1, 0, 0], [700, 200, 300])).to(DEVICE)
    _check(mask, LatentCase.random(1200, heads, dims, 512, torch.bfloat16, DEVICE))


@pytest.mark.parametrize("seed", mostly(range(2 if DEVICE == "cpu" else 30), [0]))
def test_any_forest_in_any_chunks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, "latents' queries", 20 * 3 * 7)
    limit(monkeypatch, "latents' lists of keys", 500)
    mask = mask_of(random_forest(np.random.default_rng(seed), 9, 20)).to(DEVICE)
    _check(mask, LatentCase.random(mask.num_tokens, dtype=DTYPES[1], device=DEVICE), seed)


def test_lists_are_the_choice_in_the_order_of_paths() -> None:
    mask = mask_of(FOREST).to(DEVICE)
    bits, visible = random_choice(mask, 3)
    for rows in (slice(0, 50), slice(50, mask.num_tokens)):
        index, count = kernels.indices(bits, mask.host, rows, 60)
        for own, keys, seen in zip(index, count.tolist(), visible[rows], strict=True):
            assert torch.equal(own[:keys].long(), seen.nonzero()[:, 0])


def test_no_key_and_too_many_are_no_numbers(poison: Poison) -> None:
    """Rather than a softmax over some of what was chosen; other rows are as they were."""
    mask = mask_of(PrefixForest.from_parents([-1, 0, 0, -1], [20, 4, 12, 3])).to(DEVICE)
    bits, visible = random_choice(mask)
    case = LatentCase.random(mask.num_tokens, dtype=DTYPES[0], device=DEVICE)
    most = int(visible.sum(-1).max())
    before = case.gathered(mask, bits, most, kernels)
    assert all(torch.isfinite(x).all() for x in before.values()) and poison.tensors
    bits[30], few = 0, int(visible.sum(-1).float().quantile(0.8))
    for module in (kernels, definition):
        after = case.gathered(mask, bits, few, module)
        lost = visible.sum(-1) > few
        lost[30] = True
        assert after["out"][lost].isnan().all() and lost.any()
        assert torch.allclose(after["out"][~lost], before["out"][~lost], atol=1e-3)


@pytest.mark.parametrize("lost", mostly(["dq", "dlatents"], ["dlatents"]))
def test_a_gradient_that_is_lost_turns_red(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = kernels.backward

    def losing(chunk: Chunk, *rest: torch.Tensor) -> torch.Tensor:
        if lost == "dq":
            return inner(chunk, *rest).zero_()
        # the first token's, an ancestor's
        found = inner(chunk, *rest)
        rest[-1][0] = 0
        return found

    monkeypatch.setattr(kernels, "backward", losing)
    mask = mask_of(PrefixForest.from_parents([-1, 0, 0], [20, 7, 9])).to(DEVICE)
    with pytest.raises(AssertionError, match=lost):
        _check(mask, LatentCase.random(36, dtype=DTYPES[1], device=DEVICE))
