"""Fixtures of the tests of the flash backend."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.support import flash_emulator


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`backend="flash"` runs the emulator of flash-attn-4."""
    flash_emulator.install(monkeypatch)
    return flash_emulator
