"""tree_attention within the bounds of docs/design.md, and checks that can fail."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prefixtree import PrefixForest, TreeMask
from tests.support.attention_checks import Case, assert_numerics, ours
from tests.support.forest_examples import CATERPILLAR
from tests.support.full import each_once, mostly
from tests.support.pairs import pairwise
from tests.support.strategies import mask_of, random_forest

# ---- numerics ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, dtype",
    each_once(
        [
            ((4, 4), (64, 64)),
            ((4, 1), (80, 80)),
            ((8, 1), (96, 96)),
            ((8, 2), (128, 128)),
            ((2, 1), (192, 192)),
            ((2, 2), (256, 256)),
            ((2, 2), (192, 128)),
        ],
        [torch.float32, torch.bfloat16, torch.float16],
    ),
)
def test_numerics(shape: tuple[tuple[int, int], tuple[int, int]], dtype: torch.dtype) -> None:
    heads, dims = shape
    mask = mask_of(CATERPILLAR)
    case = Case.random(mask, heads, dims, dtype)
    assert_numerics(CATERPILLAR, mask, case, ours(mask))


_EXTRAS = [
    {},
    {"sinks": True},
    {"dlse": True},
    {"sinks": True, "dlse": True},
    {"sinks": True, "dlse": True, "sink_level": 12.0},
    {"spread": 12.0},
]
_OPTIONS = [{"window": 20}, {"softcap": 4.0}, {"scale": 0.4}]


@pytest.mark.parametrize(
    "dtype, options, extras", pairwise([torch.float32, torch.bfloat16], _OPTIONS, _EXTRAS)
)
def test_numerics_of_features(dtype: torch.dtype, options: dict, extras: dict) -> None:
    rng = np.random.default_rng(3)
    forest = random_forest(rng, 14, 60)
    mask = mask_of(forest)
    case = Case.random(mask, (4, 2), (32, 32), dtype, **extras, **options)
    assert_numerics(forest, mask, case, ours(mask))


@pytest.mark.parametrize(
    ("sink_level", "dtype"), each_once([0.0, 8.0], [torch.float32, torch.bfloat16])
)
@pytest.mark.parametrize("seed", mostly(range(2), [0]))
def test_sinks_of_one_head(seed: int, sink_level: float, dtype: torch.dtype) -> None:
    """One number for all rows, whose terms may cancel."""
    forest = random_forest(np.random.default_rng(seed), 40, 80)
    mask = mask_of(forest)
    options = {"sinks": True, "dlse": True, "sink_level": sink_level}
    case = Case.random(mask, (1, 1), (64, 64), dtype, seed, **options)
    assert_numerics(forest, mask, case, ours(mask))


def test_numerics_of_large_logits_and_real_looking_activations() -> None:
    mask = mask_of(CATERPILLAR)
    case = Case.random(mask, (4, 2), (64, 64), torch.bfloat16)
    # activations of trained models: a few channels hundreds of times larger, tokens nearly alike
    case.k[..., 5] += 30
    case.q[..., 5] += 30
    case.k[10:30] = case.k[10]
    case.v[..., :3] *= 100
    assert_numerics(CATERPILLAR, mask, case, ours(mask))


# ---- the checker must be able to fail ------------------------------------------------------------


def _causal(mask: TreeMask) -> TreeMask:
    return TreeMask(np.full(mask.num_tokens, mask.num_tokens, np.int32))


def _dropped_ancestor(mask: TreeMask) -> TreeMask:
    # the last node of one branch no longer sees the node above it
    forest = PrefixForest.from_parents(
        [-1, 0, 0, 2, 2, 4, 4, 4, -1, 8, 8], [40, 33, 20, 3, 17, 50, 1, 30, 5, 21, 18]
    )
    return mask_of(forest)


def _swapped_siblings(mask: TreeMask) -> TreeMask:
    # the root's two subtrees change places in packed order, the data does not
    return mask_of(
        PrefixForest.from_parents(
            [-1, 0, 0, 2, 2, 4, 4, 6, -1, 8, 8],
            [40, 33, 20, 3, 17, 50, 1, 30, 5, 21, 18],
            order="input",
        )
    )


@pytest.mark.parametrize("wrong", [_causal, _dropped_ancestor, _swapped_siblings])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checker_rejects_a_wrong_mask(wrong, dtype: torch.dtype) -> None:
    mask = mask_of(CATERPILLAR)
    other = wrong(mask)
    assert not torch.equal(other.subtree_end, mask.subtree_end)
    with pytest.raises(AssertionError, match=r"over the limit|mean error"):
        assert_numerics(CATERPILLAR, mask, Case.random(mask, dtype=dtype), ours(other))


@pytest.mark.parametrize("sink_level", [0.0, 8.0])
def test_checker_rejects_dsinks_that_are_off_by_a_tenth(sink_level: float) -> None:
    mask = mask_of(CATERPILLAR)
    case = Case.random(mask, dtype=torch.bfloat16, sinks=True, dlse=True, sink_level=sink_level)

    def off(q, k, v, sinks, **options):
        return ours(mask)(q, k, v, sinks + 0.1 * (sinks - sinks.detach()), **options)

    with pytest.raises(AssertionError, match="dsinks: "):
        assert_numerics(CATERPILLAR, mask, case, off)


def test_checker_rejects_an_off_by_one_group_and_a_lost_gradient() -> None:
    mask = mask_of(CATERPILLAR)
    case = Case.random(mask, heads=(4, 2))

    def shifted_group(q, k, v, sinks, **options):
        out, lse = ours(mask)(q.roll(1, 1), k, v, sinks, **options)
        return out.roll(-1, 1), lse.roll(-1, 0)

    def one_child_unseen(q, k, v, sinks, **options):
        # right values, but the root's gradient misses what the last branch owes it
        out, lse = ours(mask)(q, k, v, sinks, **options)
        root = torch.cat([k[:1].detach(), k[1:]])
        return ours(mask)(q, root, v, sinks, **options)[0] * 1, lse + 0 * out.sum()

    for wrong in (shifted_group, one_child_unseen):
        with pytest.raises(AssertionError, match=r"over the limit|mean error"):
            assert_numerics(CATERPILLAR, mask, case, wrong)
