"""Gradients left out, of copies and of what parts in time borrow: what comparisons must notice."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from prefixtree.packing.copies import gather
from prefixtree.parallel import states
from prefixtree.parallel.ledger import KeyExchange
from prefixtree.scoring import edges


def lose_copies(monkeypatch: pytest.MonkeyPatch, behind: int = 2) -> None:
    """Of the scores of edges from column `behind` on, the gradient of the first copy stands for the
    sum over all; the values are exact."""

    def gather_alone(values: torch.Tensor, index: Any) -> torch.Tensor:
        scores = gather(values, index)
        _, number = index.rows.unique(return_inverse=True)
        is_first = (number[:, None] == number).float().argmax(1) == torch.arange(len(number))
        measured = scores[:, behind:]
        alone = torch.where(is_first[:, None], measured, measured.detach())
        return torch.cat([scores[:, :behind], alone], 1)

    monkeypatch.setattr(edges, "gather", gather_alone)


def lose_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of borrowed keys and values."""
    give_back = KeyExchange.give_back

    def lost(self: KeyExchange, dkey: torch.Tensor, dvalue: torch.Tensor) -> Any:
        self.exchange.take()
        return give_back(self, dkey, dvalue)

    monkeypatch.setattr(KeyExchange, "give_back", lost)


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
