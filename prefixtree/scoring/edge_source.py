"""`ForestEdges`: the scored edges of a call in their forest, by which other calls find them.

A number of an edge means something in one forest and for one loss mask alone. So what is read by
the edges of another call (a teacher's rows, values at packed tokens, what another call measured) is
found by the edge: its path, and its temperature.

Legend: U scored edges, one per temperature.
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
from prefixtree.packing.placements import described, find_paths

MEND = (
    "give the forest that is scored, or one that holds all its sequences (of a plan "
    "pack(plan.forest))"
)


@dataclass(frozen=True, eq=False)
class ForestEdges:
    """The (edge, temperature) pairs that a call scores, on the host.

    Attributes:
        forest: the forest.
        predictor, token: int64 [U], packed tokens.
        temperature: float32 [U].
        handle: stands for these edges in the operator.
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
        """int64 [U] on a device: the tokens of a packed forest that the edges score.

        Raises:
            TypeError: no packed forest.
            ForestError: an edge that it does not have, or has more than once.
        """
        if not isinstance(packed, PackedForest):
            raise TypeError(f"tokens_in takes a packed forest, got {type(packed).__name__}")
        other = packed.forest
        return self.kept(other, device, lambda: self._tokens_in(other))

    def rows_of(self, other: ForestEdges, device: torch.device) -> torch.Tensor:
        """int64 [U] on a device: the numbers of these pairs among those of another call.

        Raises:
            ForestError: a pair that it does not have. ValueError: at another temperature.
        """
        return self.kept(other, device, lambda: self._rows_of(other))

    def _tokens_in(self, other: PrefixForest) -> np.ndarray:
        found = find_paths(self.forest, other)
        at = found.at[self.token]
        self.refuse(at < 0, f"are not in the forest that they are looked up in; {MEND}")
        self.refuse(
            found.is_one_of_several[self.token],
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
        # the pairs of a call are in order of temperatures, then of tokens
        temperatures, number = np.unique(other.temperature, return_inverse=True)
        most, count = max(len(temperatures) - 1, 0), other.forest.num_tokens
        wanted = np.searchsorted(temperatures, self.temperature).clip(max=most) * count + token
        keys = number * count + other.token
        rows = np.searchsorted(keys, wanted).clip(max=max(len(keys) - 1, 0))
        is_same = (keys[rows] == wanted) & (other.temperature[rows] == self.temperature)
        for one in np.flatnonzero(~is_same)[:1]:
            raise ValueError(
                f"{described(self.forest, int(self.token[one]))} is scored at temperature "
                f"{self.temperature[one]:g}, and the call whose measured_edges are read measured "
                "it at others: give both calls the same temperature"
            )
        return rows

    def refuse(self, which: np.ndarray, problem: str) -> None:
        """Raises a ForestError if any edge has a problem; it says how many, and the first of them.

        Args:
            which: bool [U], the edges. problem: a verb and the mend.
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
        """The result of `find` for these edges and another object, moved to a device once."""
        of_these = _found.setdefault(self, WeakKeyDictionary())
        of_both: dict[torch.device, torch.Tensor] = of_these.setdefault(other, {})
        if device not in of_both:
            of_both[device] = move(torch.from_numpy(find()), device)
        return of_both[device]


# look-ups that were made, by the edges and by what they were looked up in
_found: WeakKeyDictionary[ForestEdges, WeakKeyDictionary[Any, Any]] = WeakKeyDictionary()


# ---- in compiled code --------------------------------------------------------------------------

# A graph holds no look-up on the host, so it is an operator there, in which objects are numbers
_known: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = count()


@lasting
def make_handle(this: Any) -> torch.Tensor:
    """int64 [] on the CPU, which stands for an object in `rows_in` while the object lives."""
    number = next(_numbers)
    _known[number] = this
    return torch.tensor(number)


def _rows_in(edges: torch.Tensor, other: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    of_other = _known[int(other)]
    rows: torch.Tensor = of_other.rows_of(_known[int(edges)], which.device)[which]
    return rows


_edges_library = new_library("_edges_library")
#: (handle of `ForestEdges`, of an object, int64 [r]) -> int64 [r]: for some of the edges what the
#: object's `rows_of(edges, device)` gives for all, int64 [U]
rows_in = register(
    _edges_library,
    "edge_rows_in",
    "(Tensor edges, Tensor other, Tensor which) -> Tensor",
    _rows_in,
    lambda edges, other, which: torch.empty_like(which),
)
