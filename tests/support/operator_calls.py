"""Counts the attentions that run, those of recomputations included."""

from __future__ import annotations

from typing import Any

import pytest

from prefixtree.kernels.attention import operator
from prefixtree.recompute import probes


def count_attentions(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """A list that gets an entry per run of the operator, those of probes of memory left out."""
    ran: list[None] = []
    noted = operator.note_call

    def note(mask: Any, of: Any) -> None:
        ran.append(None)
        noted(mask, of)

    def probe(*given: Any) -> Any:
        before = len(ran)
        runs = list(probed(*given))
        assert len(ran) > before
        del ran[before:]
        return runs

    probed = probes.probe
    monkeypatch.setattr(probes, "probe", probe)
    monkeypatch.setattr(operator, "note_call", note)
    return ran
