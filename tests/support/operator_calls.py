"""Counts the attentions that run, those of recomputations included."""

from __future__ import annotations

from typing import Any

import pytest

from prefixtree.kernels.attention import operator
from prefixtree.recompute import probes


def count_attentions(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """A list that gets an entry per run of the operator, those of probes of memory left out."""
    ran: list[None] = []
    before = operator.note_call

    def note(mask: Any, of: Any) -> None:
        ran.append(None)
        before(mask, of)

    def probe(*given: Any, **more: Any) -> Any:
        count = len(ran)
        try:
            return [*probed(*given, **more)]
        finally:
            del ran[count:]

    probed = probes.probe
    monkeypatch.setattr(probes, "probe", probe)
    monkeypatch.setattr(operator, "note_call", note)
    return ran
