"""`ForestCache` alone: calls that the prefill did not make, and those of compiled code."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch

from prefixtree import UnsupportedError
from prefixtree.sampling.forest_cache import ForestCache


def prefilled() -> tuple[ForestCache, torch.Tensor]:
    """A cache of two keys, one layer and one row, and its next call's q, k and v."""
    cache, x = ForestCache(8), torch.randn(2, 1, 4)
    cache.begin_prefill()
    cache.keep(x, x, x, None)
    cache.end()
    return cache, x[:1]


def resume(cache: ForestCache) -> None:
    # one row: both keys of the prefill, and room for one
    cache.resume(cache.works(np.array([[0, 2, 0, 1, 0]]), np.array([[2, 1, 0, 2]])))


def test_calls_that_were_not_in_the_prefill_are_refused() -> None:
    cache, x = prefilled()
    resume(cache)
    with pytest.raises(
        UnsupportedError, match=r"call 0 .*\(window 3\) was not made in the prefill"
    ):
        cache.attend(x, x, x, window=3)
    cache.attend(x, x, x, window=None)
    with pytest.raises(UnsupportedError, match=r"call 1 .*\(window None\) was not made in"):
        cache.attend(x, x, x, window=None)


def test_compiled_code_finds_the_pools_and_their_errors() -> None:
    cache, x = prefilled()
    resume(cache)
    expected = cache.attend(x, x, x, window=None)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def attend(q: torch.Tensor) -> torch.Tensor:
        return 2 * cache.attend(q, q, q, window=None)

    with torch.no_grad():
        resume(cache)
        assert torch.equal(attend(x), 2 * expected)
        with pytest.raises(UnsupportedError, match=r"call 1 .*\(window None\) was not made in"):
            attend(x)
    torch._dynamo.reset()


def test_a_cache_is_freed_with_its_last_user() -> None:
    """Its handle, which finds it, does not hold it."""
    cache, _ = prefilled()
    found = weakref.ref(cache)
    del cache
    assert found() is None
