"""The probe of layers, left out: it runs forwards of its own."""

from __future__ import annotations

import pytest


@pytest.fixture
def unprobed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are not probed: for tests that count forwards, or that see mistakes turn them red."""
    from prefixtree.models import rows_alone

    monkeypatch.setattr(rows_alone, "_difference", lambda *_: None)
