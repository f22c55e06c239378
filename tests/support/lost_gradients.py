"""Gradients that parts in time return to their lenders, left out: what comparisons must notice."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from prefixtree.parallel import states
from prefixtree.parallel.steps import StepExchange


def lose_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of borrowed keys and values."""
    give_back = StepExchange.give_back

    def lost(self: StepExchange, dkey: torch.Tensor, dvalue: torch.Tensor) -> Any:
        for loan in self._step.lent:
            loan.gradients.pop(self._layer, None)
        return give_back(self, dkey, dvalue)

    monkeypatch.setattr(StepExchange, "give_back", lost)


def lose_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of borrowed states."""

    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        ctx.exchange.take()
        return dout, None, None

    monkeypatch.setattr(states._Lent, "backward", staticmethod(backward))


def lose_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the borrowed tails of convolutions."""

    def backward(ctx: Any, dx: torch.Tensor) -> Any:
        ctx.exchange.take()
        return dx, None

    monkeypatch.setattr(states._LentRows, "backward", staticmethod(backward))
