"""Chosen keys: the selection by score with its rule of ties, its bits, and attention to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from prefixtree import TreeMask, tree_attention
from prefixtree.kernels.attention import operator
from prefixtree.kernels.attention.flash import launch
from prefixtree.kernels.attention.protocol import CHOSEN, AttentionCall
from prefixtree.kernels.best_keys import best_keys
from prefixtree.kernels.chosen import from_bits, to_bits, words
from tests.support.choices import random_choice
from tests.support.strategies import mask_of, random_forest


@pytest.mark.parametrize("seed", range(40))
def test_selection_is_a_stable_sort(seed: int) -> None:
    """Small integers: sums are exact, ties are everywhere, -0.0 and 0.0 among them."""
    g = torch.Generator().manual_seed(seed)
    n, first, count = 1 + seed % 7, seed * 3 % 50, 1 + seed % 13
    width = first + n
    scores = torch.randint(-2, 3, (n, width), generator=g).float()
    scores[torch.rand(n, width, generator=g) < 0.3] = -0.0
    got = best_keys(scores, count, torch.arange(first, width))
    for row in range(n):
        seen = scores[row, : first + row + 1]
        order = seen.sort(descending=True, stable=True).indices[:count]
        expected = torch.zeros(width, dtype=torch.bool).index_fill(0, order, True)
        assert torch.equal(got[row], expected)
    bits = to_bits(got, words(width) + 1)
    assert bits.dtype == torch.int32 and torch.equal(from_bits(bits, 0, width), got)
    assert not from_bits(bits, width, bits.shape[1] * 32).any()
    start, end = sorted(np.random.default_rng(seed).integers(0, width + 1, 2))
    assert torch.equal(from_bits(bits, start, end), got[:, start:end])
    for position in range(width):  # where the contract says a kernel finds it
        bit = (bits[:, position // 32] >> (position % 32)) & 1
        assert torch.equal(bit.bool(), got[:, position])


def _case(seed: int, dtype: torch.dtype = torch.float64) -> tuple[TreeMask, list[torch.Tensor]]:
    mask = mask_of(random_forest(np.random.default_rng(seed), 12, 20))
    g = torch.Generator().manual_seed(seed)
    shapes = [(mask.num_tokens, 4, 8), (mask.num_tokens, 2, 8), (mask.num_tokens, 2, 6)]
    return mask, [torch.randn(*s, generator=g, dtype=dtype).requires_grad_() for s in shapes]


def _pair_by_pair(
    mask: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bits: torch.Tensor,
    window: int | None,
) -> torch.Tensor:
    """The definition: a softmax per query and head over the chosen ones of the keys it sees."""
    seen, position, rows = mask.dense(window), mask.position_ids.tolist(), []
    for t in range(mask.num_tokens):
        keys = [
            j
            for j in seen[t].nonzero()[:, 0].tolist()
            if int(bits[t, position[j] // 32]) >> (position[j] % 32) & 1
        ]
        heads = [
            (q[t, h] @ k[keys, h // 2].T * 0.3).softmax(-1) @ v[keys, h // 2] for h in range(4)
        ]
        rows.append(torch.stack(heads))
    return torch.stack(rows)


def test_of_no_keys_none_is_chosen() -> None:
    """As the first queries of a path have no compressed ones."""
    assert best_keys(torch.zeros(3, 0), 7, torch.arange(3)).shape == (3, 0)


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize("window", [None, 9])
def test_attention_to_chosen_keys_is_the_definition(backend: str, window: int | None) -> None:
    mask, (q, k, v) = _case(3)
    bits = random_choice(mask, 3)[0]
    expected = _pair_by_pair(mask, q, k, v, bits, window)
    g = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=q.dtype)
    want = torch.autograd.grad(expected, (q, k, v), g)
    options = {"scale": 0.3, "window": window, "backend": backend}
    out = tree_attention(q, k, v, mask, chosen=bits, **options)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-11)
    for got, grad in zip(torch.autograd.grad(out, (q, k, v), g), want, strict=True):
        torch.testing.assert_close(got, grad, atol=1e-12, rtol=1e-11)
    everything = tree_attention(q, k, v, mask, **options)
    assert (out - everything).abs().max() > 0.1, "a choice that is ignored would pass"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_keys_chosen_is_attention_without_a_choice(dtype: torch.dtype) -> None:
    mask, (q, k, v) = _case(5, dtype)
    bits = torch.full((mask.num_tokens, words(mask.host.deepest)), -1, dtype=torch.int32)
    for sinks in (None, torch.randn(4)):
        given = {"sinks": sinks, "return_lse": True}
        out, lse = tree_attention(q, k, v, mask, chosen=bits, **given)
        expected, expected_lse = tree_attention(q, k, v, mask, **given)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(lse, expected_lse)


def test_some_queries_with_their_rows_of_the_choice() -> None:
    mask, (q, k, v) = _case(6)
    bits, rows = random_choice(mask, 6)[0], torch.tensor([*range(2, 6), *range(9, 15)])
    part = mask.for_queries([(2, 6), (9, 15)])
    whole = tree_attention(q, k, v, mask, chosen=bits)
    for backend in ("sdpa", "reference"):
        got = tree_attention(q[rows], k, v, part, chosen=bits[rows], backend=backend)
        torch.testing.assert_close(got, whole[rows], atol=1e-12, rtol=1e-11)


def test_opcheck() -> None:
    mask, inputs = _case(7, torch.float32)
    for chosen in (None, random_choice(mask, 7)[0]):
        options = (0.3, 0, 0.0, False, "sdpa", False, True, chosen)
        torch.library.opcheck(operator.TREE_ATTENTION, (*inputs, None, mask.handle, *options))


def test_bad_choices() -> None:
    mask, (q, k, v) = _case(8, torch.float32)
    bits = random_choice(mask, 8)[0]
    for wrong in (bits[:-1], bits.long(), torch.cat([bits, bits], 1), bits[0]):
        with pytest.raises(ValueError, match="chosen must be int32"):
            tree_attention(q, k, v, mask, chosen=wrong)
    with pytest.raises(TypeError, match="chosen must be a tensor"):
        tree_attention(q, k, v, mask, chosen=[[1]])  # type: ignore[call-overload]
    q, k = q.bfloat16(), k.bfloat16()
    call = AttentionCall(q, k, k, None, mask.host, 0.3, chosen=bits)
    assert launch.refused_features(call) == CHOSEN
