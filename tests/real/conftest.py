"""These tests run with a pretrained model (`make test-real`), never with the others."""

from __future__ import annotations

import pytest

from tests.support.real import NEEDED, folder


def pytest_configure(config: pytest.Config) -> None:
    if folder() is None:
        raise pytest.UsageError(f"tests/real {NEEDED}")
