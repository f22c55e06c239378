"""Gathered latents in Triton: in its interpreter on a CPU, natively on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prefixtree import PrefixForest, TreeMask
from prefixtree.kernels.attention import gathered
from prefixtree.kernels.attention.triton import gathered as kernels
from tests.support.choices import random_choice
from tests.support.latents import LatentCase
from tests.support.strategies import mask_of, random_forest
from tests.support.triton_tiles import DEVICE, DTYPES

# a path of 97 tokens; nodes that begin inside a word and inside a tile; two trees
FOREST = PrefixForest.from_parents([-1, 0, 0, 2, 2, 4, -1, 6], [45, 14, 5, 31, 1, 16, 6, 9])


def _check(mask: TreeMask, case: LatentCase, seed: int = 0, share: float = 0.4) -> None:
    bits, visible = random_choice(mask, seed, share)
    most = int(visible.sum(-1).max())
    want = case.to(torch.float64).gathered(mask, bits, most, gathered)
    limit = {torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}[case.q.dtype]
    for name, value in case.gathered(mask, bits, most, kernels).items():
        top = max(1.0, float(want[name].abs().max()))
        assert float((value - want[name]).abs().max()) <= limit * top, name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, dims, rank", [(3, (12, 8, 10), 20), (66, (16, 16, 16), 32)])
def test_numerics(heads: int, dims: tuple[int, int, int], rank: int, dtype: torch.dtype) -> None:
    mask = mask_of(FOREST).to(DEVICE)
    _check(mask, LatentCase.random(mask.num_tokens, heads, dims, rank, dtype, DEVICE))


def test_latents_in_pieces() -> None:
    mask = mask_of(PrefixForest.from_parents([-1, 0, 0], [40, 7, 9])).to(DEVICE)
    _check(mask, LatentCase.random(56, 2, (24, 8, 16), 300, DTYPES[1], DEVICE), share=0.9)


@pytest.mark.parametrize("seed", range(3 if DEVICE == "cpu" else 30))
def test_any_forest_in_any_chunks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered, "_CHUNK", 20 * 3 * 7)
    mask = mask_of(random_forest(np.random.default_rng(seed), 12, 30)).to(DEVICE)
    _check(mask, LatentCase.random(mask.num_tokens, dtype=DTYPES[1], device=DEVICE), seed)
