"""Attention to gathered latents: its definition against tiles of expanded keys, in float64."""

from __future__ import annotations

import numpy as np
import pytest

from prefixtree import PrefixForest, TreeMask
from prefixtree.kernels.latents import definition
from tests.support.choices import random_choice
from tests.support.hooks import limit
from tests.support.latents import LatentCase
from tests.support.strategies import mask_of, random_forest

FOREST = PrefixForest.from_parents([-1, 0, 0, 2, 2, 4, -1, 6], [45, 14, 5, 31, 1, 16, 6, 9])


def _assert_exact(mask: TreeMask, case: LatentCase, seed: int = 0) -> None:
    bits, visible = random_choice(mask, seed)
    most = int(visible.sum(-1).max())
    want = case.expanded(mask, bits, backend="reference")
    for name, value in case.gathered(mask, bits, most, definition).items():
        error = float((value - want[name]).abs().max()) if value.numel() else 0.0
        assert error < 1e-12 * max(1.0, float(want[name].abs().max())), (name, error)


@pytest.mark.parametrize("chunk", [1 << 26, 500])
def test_float64_is_exact(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any chunks: as tiles of expanded keys, which each sequence alone is compared with."""
    limit(monkeypatch, "latents' queries", chunk)
    limit(monkeypatch, "latents by definition", chunk)
    limit(monkeypatch, "latents' lists of keys", 20 * chunk)
    mask = mask_of(FOREST)
    _assert_exact(mask, LatentCase.random(mask.num_tokens))


@pytest.mark.parametrize("seed", range(6))
def test_any_forest(seed: int) -> None:
    mask = mask_of(random_forest(np.random.default_rng(seed), 12, 30))
    _assert_exact(mask, LatentCase.random(mask.num_tokens, heads=1 + seed % 3), seed)
