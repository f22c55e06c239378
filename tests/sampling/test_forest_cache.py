"""`ForestCache` alone: calls that the prefill did not make."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prefixtree import UnsupportedError
from prefixtree.sampling.forest_cache import ForestCache


def test_calls_that_were_not_in_the_prefill_are_refused() -> None:
    cache, x = ForestCache(8), torch.zeros(2, 1, 4)
    cache.begin_prefill()
    cache.keep(x, x, x, None)
    cache.end()
    # one row: both keys of the prefill, and room for one
    cache.resume(cache.works(np.array([[0, 2, 0, 1, 0]]), np.array([[2, 1, 0, 2]])))
    with pytest.raises(
        UnsupportedError, match=r"call 0 .*\(window 3\) was not made in the prefill"
    ):
        cache.attend(x[:1], x[:1], x[:1], window=3)
    cache.attend(x[:1], x[:1], x[:1], window=None)
    with pytest.raises(UnsupportedError, match=r"call 1 .*\(window None\) was not made in"):
        cache.attend(x[:1], x[:1], x[:1], window=None)
