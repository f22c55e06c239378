"""Counts the attentions that run, those of recomputations included."""

from __future__ import annotations

from typing import Any

import pytest

from prefixtree.kernels.attention import operator


def count_attentions(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """A list that gets an entry per run of the operator."""
    ran: list[None] = []
    before = operator.note_call

    def note(mask: Any, of: Any) -> None:
        ran.append(None)
        before(mask, of)

    monkeypatch.setattr(operator, "note_call", note)
    return ran
