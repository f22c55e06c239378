"""The smallest mistakes of a packed run: one token, or one key of one branch, is wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from prefixtree.models import attention
from prefixtree.scoring import logprobs
from tests.support.hooks import put
from tests.support.models import pack_sequences


@dataclass(frozen=True)
class Spot:
    """Where mistakes are made: in what the last sequence shares with no other.

    Attributes:
        rows: int64 [n], the packed tokens of the sequence.
        num_tokens: of the forest; other forests (of the probe) stay as they are.
        shared: the number of tokens that other sequences have too.
        token: the place of the token that is hit: as a label, and the query before it.
        key: an earlier place of the branch.
    """

    rows: torch.Tensor
    num_tokens: int
    shared: int
    token: int
    key: int

    @classmethod
    def of(cls, sequences: Sequence[Any], logprobs: torch.Tensor | None = None) -> Spot:
        """Takes the least expected token of the last one's second half by its log p [n - 1], as one
        that is certain costs nothing; without log p, the first."""
        packed = pack_sequences(sequences)
        rows = packed.unpack(torch.arange(packed.num_tokens))[-1]
        shared = int((packed.multiplicity[rows] > 1).sum())
        branch = len(rows) - shared
        assert shared and branch > 4
        token = shared + branch // 2
        if logprobs is not None:
            token += int(logprobs[token - 1 :].argmin())
        return cls(rows, packed.num_tokens, shared, token, shared + branch // 4)


def _attend(
    monkeypatch: pytest.MonkeyPatch, spot: Spot, queries: torch.Tensor, key: int, sees: bool
) -> None:
    """Queries at some places of the sequence see a key, or do not see it."""
    n = len(spot.rows)
    visible = torch.ones(n, n, dtype=torch.bool).tril()
    assert bool((visible[queries, key] != sees).all())
    visible[queries, key] = sees
    real = attention.tree_attention

    def damaged(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **options: Any
    ) -> torch.Tensor:
        out: torch.Tensor = real(q, k, v, mask, **options)
        if len(q) != spot.num_tokens:
            return out
        assert not any(options[name] for name in ("window", "softcap", "sinks"))
        query, keys, values = (x[spot.rows].transpose(0, 1)[None] for x in (q, k, v))
        wrong = F.scaled_dot_product_attention(
            query, keys, values, attn_mask=visible, scale=options["scale"], enable_gqa=True
        )
        return out.index_copy(0, spot.rows[queries], wrong[0].transpose(0, 1)[queries])

    monkeypatch.setattr(attention, "tree_attention", damaged)


def _damage(
    monkeypatch: pytest.MonkeyPatch,
    spot: Spot,
    before: Callable[[Any], Any] = lambda packed: packed,
    after: Callable[[Any], None] = lambda scores: None,
) -> None:
    """Changes what is scored, or the scores."""
    real = logprobs.sequence_logprobs

    def damaged(model: Any, packed: Any, **options: Any) -> Any:
        if packed.num_tokens != spot.num_tokens:
            return real(model, packed, **options)
        scores = real(model, before(packed), **options)
        after(scores)
        return scores

    monkeypatch.setattr(logprobs, "sequence_logprobs", damaged)


def hide_a_key(monkeypatch: pytest.MonkeyPatch, spot: Spot) -> None:
    _attend(monkeypatch, spot, torch.tensor([spot.token - 1]), spot.key, False)


def hide_a_key_from_a_branch(monkeypatch: pytest.MonkeyPatch, spot: Spot) -> None:
    branch = torch.arange(spot.shared, len(spot.rows))
    _attend(monkeypatch, spot, branch, spot.shared - 1, False)


def show_a_future_key(monkeypatch: pytest.MonkeyPatch, spot: Spot) -> None:
    _attend(monkeypatch, spot, torch.tensor([spot.token - 1]), spot.token, True)


def shift_a_position(monkeypatch: pytest.MonkeyPatch, spot: Spot) -> None:
    def shifted(packed: Any) -> Any:
        packed = copy.copy(packed)
        packed.position_ids = packed.position_ids.clone()
        packed.position_ids[spot.rows[spot.token - 1]] -= 1
        return packed

    put(monkeypatch, "check of positions", lambda *_: None)
    _damage(monkeypatch, spot, before=shifted)


def leave_a_weight_out(monkeypatch: pytest.MonkeyPatch, spot: Spot) -> None:
    def left_out(scores: Any) -> None:
        is_kept = torch.arange(1, len(spot.rows)) != spot.token
        for values in (scores.logprobs, scores.entropy):
            values[-1] = torch.where(is_kept, values[-1], values[-1].detach())

    _damage(monkeypatch, spot, after=left_out)


MISTAKES = {
    "one key hidden from one token": hide_a_key,
    "one key hidden from a branch": hide_a_key_from_a_branch,
    "one token sees a future key": show_a_future_key,
    "one token's position off by one": shift_a_position,
    "one token's weight left out": leave_a_weight_out,
}
