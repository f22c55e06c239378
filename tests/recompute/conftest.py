"""Traces of some modes alone: each mode takes as long as every other."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import pytest

from prefixtree.recompute import trace
from prefixtree.recompute.layers import Mode
from tests.support.hooks import inner, put


@pytest.fixture
def trace_only(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Traces made from now on have these modes; none of them is kept for another test."""

    def only(*modes: Mode) -> None:
        monkeypatch.setattr(trace, "MODES", modes)
        put(monkeypatch, "memory of a model", lru_cache(inner("memory of a model").__wrapped__))

    return only
