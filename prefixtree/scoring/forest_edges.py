"""Scored edges in their forest, by which other calls find them.

The number of an edge has a meaning in one forest and for one loss mask alone. Another call (a
teacher's rows, values at packed tokens, an earlier measure) finds an edge by its path and its
temperature. Legend: U scored edges.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import torch

from prefixtree.errors import ForestError
from prefixtree.forest import PrefixForest
from prefixtree.kernels.operators import new_library, register
from prefixtree.packing.copies import lasting, move
from prefixtree.packing.layout import PackedForest
from prefixtree.packing.same_paths import described, find_paths

MEND = (
    "give the forest that is scored, or one that holds all its sequences (of a plan "
    "pack(plan.forest))"
)


@dataclass(frozen=True, eq=False)
class ForestEdges:
    """The (edge, temperature) pairs that a call scores, on the host; one with several sets of kept
    tokens stands there once per set.

    Attributes:
        predictor, token: int64 [U], packed tokens.
        temperature: float32 [U].
        handle: int64 [], the number of this object in the operator `rows_in`.
    """

    forest: PrefixForest
    predictor: np.ndarray
    token: np.ndarray
    temperature: np.ndarray
    handle: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "handle", make_handle(self))

    def __reduce__(self) -> tuple[Any, ...]:
        # through the constructor: a handle means nothing in another process
        return type(self), (self.forest, self.predictor, self.token, self.temperature)

    def tokens_in(self, packed: PackedForest, device: torch.device) -> torch.Tensor:
        """Finds the tokens that the edges score in another packed forest: int64 [U] on a device.

        Raises:
            ForestError: an edge that the forest lacks, or holds more than once.
        """
        if not isinstance(packed, PackedForest):
            raise TypeError(f"tokens_in takes a packed forest, got {type(packed).__name__}")
        other = packed.forest
        return self.kept(other, device, lambda: self._tokens_in(other))

    def rows_of(self, other: ForestEdges, device: torch.device) -> torch.Tensor:
        """Finds the numbers of these pairs among those of another call: int64 [U] on a device.

        Raises:
            ForestError: a pair that the other call lacks. ValueError: one at another temperature.
        """
        return self.kept(other, device, lambda: self._rows_of(other))

    def _tokens_in(self, other: PrefixForest) -> np.ndarray:
        paths = find_paths(self.forest, other)
        at = paths.at[self.token]
        self.refuse(at < 0, f"are not in the forest that they are looked up in; {MEND}")
        self.refuse(
            paths.is_one_of_several[self.token],
            "are in the forest that they are looked up in more than once (namespaces, routes, "
            "from_groups), and which is meant nobody knows; give the forest that is scored",
        )
        return at

    def _rows_of(self, other: ForestEdges) -> np.ndarray:
        token = self._tokens_in(other.forest)
        self.refuse(
            ~np.isin(token, other.token),
            "were not measured in the call whose measured_edges are read; measure there with the "
            "same loss_mask, or without one",
        )
        temperatures, number = np.unique(other.temperature, return_inverse=True)
        most, count = max(len(temperatures) - 1, 0), other.forest.num_tokens
        sought = np.searchsorted(temperatures, self.temperature).clip(max=most) * count + token
        keys = number * count + other.token
        # those of several sets are measured alike
        order = np.argsort(keys, kind="stable")
        rows = order[np.searchsorted(keys, sought, sorter=order).clip(max=max(len(keys) - 1, 0))]
        is_same = (keys[rows] == sought) & (other.temperature[rows] == self.temperature)
        for one in np.flatnonzero(~is_same)[:1]:
            raise ValueError(
                f"{described(self.forest, int(self.token[one]))} is scored at temperature "
                f"{self.temperature[one]:g}, and the call whose measured_edges are read measured "
                "it at others: give both calls the same temperature"
            )
        return rows

    def refuse(self, which: np.ndarray, problem: str) -> None:
        """Raises a ForestError if an edge of bool [U] `which` is True.

        Args:
            problem: a verb and the mend, for the message.
        """
        for first in np.flatnonzero(which)[:1]:
            raise ForestError(
                f"{which.sum()} of {len(which)} scored edges (the first: "
                f"{described(self.forest, int(self.token[first]))}) {problem}"
            )

    @lasting
    def kept(
        self, other: Any, device: torch.device, find: Callable[[], np.ndarray]
    ) -> torch.Tensor:
        """Moves the result of `find` for these edges and another object to a device, once."""
        of_these = _found.setdefault(self, WeakKeyDictionary())
        of_both: dict[torch.device, torch.Tensor] = of_these.setdefault(other, {})
        if device not in of_both:
            of_both[device] = move(torch.from_numpy(find()), device)
        return of_both[device]


# look-ups already made, by the edges and by the object they were looked up in
_found: WeakKeyDictionary[ForestEdges, WeakKeyDictionary[Any, Any]] = WeakKeyDictionary()


# ---- in compiled code ----------------------------------------------------------------------------

# A compiled graph holds no look-up on the host: it calls an operator that gets objects as numbers
_known: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = count()


@lasting
def make_handle(this: Any) -> torch.Tensor:
    """Makes an int64 [] on the CPU that stands for a live object in `rows_in`."""
    number = next(_numbers)
    _known[number] = this
    return torch.tensor(number)


def _rows_in(edges: torch.Tensor, other: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    of_other = _known[int(other)]
    rows: torch.Tensor = of_other.rows_of(_known[int(edges)], which.device)[which]
    return rows


_edges_library = new_library("_edges_library")
#: (handle of `ForestEdges`, handle of an object, int64 [r]) -> int64 [r]: those rows of what the
#: object's `rows_of(edges, device)` gives for all edges, int64 [U]
rows_in = register(
    _edges_library,
    "edge_rows_in",
    "(Tensor edges, Tensor other, Tensor which) -> Tensor",
    _rows_in,
    lambda edges, other, which: torch.empty_like(which),
)
