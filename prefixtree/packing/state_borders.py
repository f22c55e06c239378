"""`StateBorders`: where states of a recurrence enter and leave the tokens of a mask.

Legend: E roots that states enter, I states that enter, F that leave.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from prefixtree._numbers import integer, integers
from prefixtree.errors import ForestError
from prefixtree.packing.host_mask import make_handle
from prefixtree.packing.mask import TreeMask, check_mask
from prefixtree.packing.segments import with_borders


class StateBorders:
    """Borders at which states enter and leave a mask, for `tree_delta_rule` and `tree_ssd`.

    A recurrence over a whole forest starts from zeros at its roots, and keeps no state. Over a part
    of a forest, a root starts from the state after the token above it, which was computed
    elsewhere. Other parts need the states after some of this part's tokens. A convolution has no
    state: it reads the W - 1 tokens above. So it runs over a mask that has these tokens, too.

    Args:
        mask: the tokens' mask.
        entries: [E] roots of the mask that a given state enters, ascending.
        rows: [E] the row of the given states that enters each root; roots may share one. Default:
            one row per root, in their order.
        exits: [F] any tokens, ascending; the state after each is returned.
        num_entries: I, the number of given states. Default: as many as `rows` names.

    Attributes:
        mask: the tokens' mask.
        entries, rows, exits: int32 arrays.
        num_entries, num_exits: I and F.
        handle: int64 [1] on the CPU; stands for the mask and its borders in the operators.

    Raises:
        TypeError: a mask that is no TreeMask.
        ForestError: entries that are no roots, or anything out of order or out of range.
    """

    def __init__(
        self,
        mask: TreeMask,
        entries: Any = (),
        rows: Any = None,
        exits: Any = (),
        num_entries: int | None = None,
    ) -> None:
        check_mask(mask)
        self.mask = mask
        predictor = mask.host.predictor
        self.entries = _ascending("entries", entries, len(predictor))
        self.exits = _ascending("exits", exits, len(predictor))
        for bad in self.entries[predictor[self.entries] >= 0][:1]:
            raise ForestError(
                f"a state enters at a root; token {bad} continues token {predictor[bad]} of the "
                "same mask, whose state it takes"
            )
        row_of_entry = np.arange(len(self.entries)) if rows is None else integers("rows", rows)
        if len(row_of_entry) != len(self.entries):
            raise ForestError(
                f"rows must name a state for each of the {len(self.entries)} entries, got "
                f"{len(row_of_entry)}"
            )
        rows_named = int(row_of_entry.max(initial=-1)) + 1
        self.num_entries = (
            rows_named if num_entries is None else integer("num_entries", num_entries, 0)
        )
        if row_of_entry.min(initial=0) < 0 or rows_named > self.num_entries:
            raise ForestError(
                f"rows must be within the {self.num_entries} states that are given, got "
                f"{row_of_entry.min()} to {row_of_entry.max()}"
            )
        self.rows = row_of_entry.astype(np.int32)
        self.num_exits = len(self.exits)
        self.host = with_borders(mask.host, self.entries, self.rows, self.exits, self.num_entries)
        self.handle: torch.Tensor = make_handle(self.host)

    def __repr__(self) -> str:
        return (
            f"StateBorders({self.mask.num_tokens} tokens, {self.num_entries} states enter at "
            f"{len(self.entries)} roots, {self.num_exits} leave)"
        )


def _ascending(name: str, given: Any, tokens: int) -> np.ndarray:
    array = integers(name, given)
    if np.any(np.diff(array) <= 0) or array.min(initial=0) < 0 or array.max(initial=-1) >= tokens:
        raise ForestError(
            f"{name} must be ascending tokens of the mask, each once, within 0 and {tokens}, got "
            f"{array[:8].tolist()}{' ..' * (len(array) > 8)}"
        )
    return array.astype(np.int32)
