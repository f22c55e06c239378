"""`PartStates`: where states of recurrent layers enter and leave a part of a packed forest.

A part's segments are those of the whole forest, cut where parts meet. So a state that enters is
that after the token above a run. A state that leaves is that after an own token that others
continue.

Legend: T packed tokens, t own tokens of a part, I states that enter, F that leave, W taps.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from prefixtree import loops
from prefixtree.packing.copies import move
from prefixtree.packing.mask import TreeMask, make_mask
from prefixtree.packing.state_borders import StateBorders
from prefixtree.planning.parts import Part

#: Kinds of rows that parts hand on: keys and values, or the keys of an indexer; and states. Inputs
#: of a convolution are known by its taps.
KEYS, STATES = -1, 0


class Tails(NamedTuple):
    """The tokens of others that a convolution with W taps reads, or all above the own tokens."""

    # int32 [b], ascending packed tokens: the foreign ones of the W - 1 above each place where a
    # state enters; without a W, all above it
    tokens: np.ndarray
    # over [b + t] rows, these and the own tokens in packed order; the nearest W - 1 ancestors of an
    # own token are the true ones
    mask: TreeMask
    # int64 [t], the rows of the own tokens, on the mask's device
    own_rows: torch.Tensor
    # int64 [b + t], the place of each row in [tails, own tokens]
    joined: torch.Tensor
    # whether all tails stand before the own tokens, so that no row moves
    are_first: bool

    def join(self, tails: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Joins rows [b, ..] of the tails with x [t, ..] of the own tokens to [b + t, ..]."""
        if not len(tails):
            return x
        rows = torch.cat([tails, x])
        return rows if self.are_first else rows.index_select(0, self.joined)

    def own(self, rows: torch.Tensor) -> torch.Tensor:
        """Selects the own rows: [b + t, ..] -> [t, ..]."""
        if self.are_first:
            return rows[len(self.tokens) :]
        return rows.index_select(0, self.own_rows)


class PartStates:
    """The places where states enter and leave the own tokens of a part.

    Attributes:
        entered: int32 [I], the packed tokens of other parts whose states enter, ascending.
        left: int32 [F], the own packed tokens that other parts continue, ascending.
    """

    def __init__(self, part: Part) -> None:
        self.part = part
        own_tokens, predictor = part.own_tokens, part.host.predictor
        self._is_own = is_own = np.zeros(len(predictor), bool)
        is_own[own_tokens] = True
        above = predictor[own_tokens]
        self._entries = np.flatnonzero((above >= 0) & ~is_own[above])
        self.entered, self._rows = np.unique(above[self._entries], return_inverse=True)
        above_others = predictor[~is_own]
        above_others = above_others[above_others >= 0]
        self.left = np.unique(above_others[is_own[above_others]])
        self._tails: dict[int | None, Tails] = {}

    @cached_property
    def borders(self) -> StateBorders:
        """The borders of states for the own tokens' mask, in the orders of `entered` and `left`."""
        # parts must be steps, or keep their order: no token in an earlier part than a token above
        # it
        exits = np.searchsorted(self.part.own_tokens, self.left)
        part = self.part
        mask = self._mask(part.own_tokens) if part.num_imported else part.mask
        return StateBorders(mask, self._entries, self._rows, exits, len(self.entered))

    def tails(self, width: int | None) -> Tails:
        """The tokens that a convolution with `width` taps reads; for None all above the own."""
        if width not in self._tails:
            own_tokens = self.part.own_tokens
            tokens = self.part.imported_tokens
            if width is not None:
                tokens = tokens_read(self.part.host.predictor, self._is_own, width)
            own_rows = np.arange(len(own_tokens)) + np.searchsorted(tokens, own_tokens)
            tail_rows = np.arange(len(tokens)) + np.searchsorted(own_tokens, tokens)
            joined = np.empty(len(tokens) + len(own_tokens), np.int64)
            joined[tail_rows] = np.arange(len(tokens))
            joined[own_rows] = len(tokens) + np.arange(len(own_tokens))
            mask = self._mask(np.concatenate([tokens, own_tokens])[joined])
            self._tails[width] = Tails(
                tokens=tokens,
                mask=mask,
                own_rows=move(torch.from_numpy(own_rows), mask.device),
                joined=move(torch.from_numpy(joined), mask.device),
                are_first=bool((joined == np.arange(len(joined))).all()),
            )
        return self._tails[width]

    def _mask(self, tokens: np.ndarray) -> TreeMask:
        """Makes the mask of ascending packed tokens, each of which sees the nearest above it."""
        lengths = np.ones(len(tokens), np.int64)
        ends = loops.parts.lay_out(self.part.host.subtree_end, tokens.astype(np.int64), lengths)[1]
        whole = self.part.mask
        return make_mask(ends, None, whole.backend, whole.deterministic, whole.device)

    def __repr__(self) -> str:
        return f"PartStates({self.part!r}, {len(self.entered)} enter, {len(self.left)} leave)"


def tokens_read(predictor: np.ndarray, is_own: np.ndarray, kind: int) -> np.ndarray:
    """Tokens of others, int32 [b] ascending, that recurrent layers over some packed tokens read.

    predictor int32 [T] is the token above each, -1 for none; is_own bool [T] the tokens that the
    layers compute; kind STATES, or the taps W of a convolution, which reads the W - 1 tokens above.
    """
    above = predictor[is_own]
    above = above[above >= 0]
    # few are left, as most tokens continue one of their own part
    tokens_above = np.unique(above[~is_own[above]])
    if kind == STATES:
        return tokens_above
    read = [tokens_above[:0]]
    for _ in range(kind - 1):
        read.append(tokens_above)
        tokens_above = predictor[tokens_above]
        tokens_above = np.unique(tokens_above[tokens_above >= 0])
    tokens = np.unique(np.concatenate(read))
    return tokens[~is_own[tokens]]
