"""`Samples`: what rows of a growing forest hold, as training takes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from prefixtree.forest import PrefixForest


@dataclass(frozen=True)
class Samples:
    """The sequences of all rows, in the rows' order.

    Attributes:
        forest: their PrefixForest, for `pack`; its sequences are in this order.
        sequences: int64 token ids, [n] each: the history, sampled tokens and replies.
        loss_masks: bool [n] each, true where the token was sampled.
        logprobs: float32 [n - 1] per sequence on the CPU, aligned with those of
            `sequence_logprobs`: of tokens 1 .. n - 1, over the full vocabulary at the temperature
            of their draw, before truncation; 0 where the token was not sampled.
        log_kept_mass: float32 [n - 1] per sequence: the log of the probability that truncation
            (top_k, top_p, min_p) left; 0 where the token was not sampled, or without truncation.
        source: int64 [S], the sequence of the forest at the start that each one continues.
        parents: int64 [S]: sequences with the same number branched from the same row (the last
            branching above them); -1 where a row never branched.
        paths: of each sequence its place in the tree of branchings: its source, then its number
            among the rows of each branching above it.
        finished: bool [S], whether the last token is a stop token that was sampled.
    """

    forest: PrefixForest
    sequences: list[np.ndarray]
    loss_masks: list[np.ndarray]
    logprobs: list[torch.Tensor]
    log_kept_mass: list[torch.Tensor]
    source: np.ndarray
    parents: np.ndarray
    paths: list[tuple[int, ...]]
    finished: np.ndarray


class Piece(NamedTuple):
    """n tokens that came to a row at once, as `Samples` has them."""

    tokens: np.ndarray
    sampled: np.ndarray
    logprobs: np.ndarray
    kept: np.ndarray

    @classmethod
    def said(cls, tokens: Sequence[int] | np.ndarray) -> Piece:
        """Tokens that were not sampled."""
        zeros = np.zeros(len(tokens), np.float32)
        return cls(np.array(tokens, np.int64), zeros.astype(bool), zeros, zeros)


@dataclass(frozen=True)
class Row:
    """The contents of one row, beside its keys.

    Attributes:
        path: as `Samples.paths` has it.
        pieces: the history, then what was sampled and appended.
        pending: the last tokens, where the model has not read them yet.
        logits: [V], of the token that comes next; None where tokens are pending.
        stopped: whether the last token is a stop token that was sampled.
        new: tokens sampled by the last `generate`.
    """

    path: tuple[int, ...]
    pieces: tuple[Piece, ...]
    pending: tuple[int, ...] = ()
    logits: torch.Tensor | None = field(default=None, repr=False)
    stopped: bool = False
    new: tuple[int, ...] = ()

    def with_sampled(self, piece: Piece, stop: frozenset[int]) -> Row:
        """The row with sampled tokens, of which the model has read all but the last."""
        tokens = tuple(piece.tokens.tolist())
        if not tokens:
            return self
        return replace(
            self,
            pieces=(*self.pieces, piece),
            pending=tokens[-1:],
            logits=None,
            stopped=tokens[-1] in stop,
            new=self.new + tokens,
        )

    def with_reply(self, tokens: Sequence[int]) -> Row:
        """The row with tokens that others said."""
        return replace(
            self,
            pieces=(*self.pieces, Piece.said(tokens)),
            pending=self.pending + tuple(tokens),
            logits=None if tokens else self.logits,
            stopped=False,
        )


def samples_of(rows: Sequence[Row]) -> Samples:
    """Gathers what rows hold."""
    columns = [[np.concatenate(parts) for parts in zip(*row.pieces, strict=True)] for row in rows]
    sequences = [tokens for tokens, *_ in columns]
    branchings: dict[tuple[int, ...], int] = {}
    parents = [
        branchings.setdefault(row.path[:-1], len(branchings)) if len(row.path) > 1 else -1
        for row in rows
    ]
    return Samples(
        forest=PrefixForest.from_sequences(sequences),
        sequences=sequences,
        loss_masks=[sampled for _, sampled, *_ in columns],
        logprobs=[torch.from_numpy(logprobs[1:]) for _, _, logprobs, _ in columns],
        log_kept_mass=[torch.from_numpy(kept[1:]) for *_, kept in columns],
        source=np.array([row.path[0] for row in rows]),
        parents=np.array(parents),
        paths=[row.path for row in rows],
        finished=np.array([row.stopped for row in rows]),
    )
