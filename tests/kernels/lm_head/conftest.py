"""The kernels of the head, for tests that ask for them."""

from __future__ import annotations

import pytest

from prefixtree.kernels.lm_head import kernels as fused
from tests.support.hooks import put


@pytest.fixture
def kernels(request, monkeypatch):
    """The kernels that a test of the fused head scores with, in its backward too."""
    params = getattr(request.node, "callspec", None)
    if params is not None and params.params.get("head") == "fused":
        put(monkeypatch, "kernels of the head", lambda hidden: fused)
        # several steps over a small vocabulary, the last one not full
        monkeypatch.setattr(fused, "BLOCK", 16)
