"""`Parts`: the tokens of a packed forest divided among ranks or steps.

A part is its own tokens and the ancestors that it imports from other parts. A set of packed tokens
that holds every token's ancestors is a packed forest again, with the same positions. So a part has
a `TreeMask` like any other, and kernels, tables and windows need to know nothing of parts. Parts
that import from ranks are context parallelism. Parts that import from earlier steps reuse a trunk
over time. Nothing here communicates.

Legend: T packed tokens, n parts, t own tokens of a part, K rows of a part (own and imported).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from prefixtree import loops
from prefixtree._numbers import integers
from prefixtree.errors import ForestError
from prefixtree.packing.arguments import at_least_one, check_packed
from prefixtree.packing.copies import lasting, move, rows_of_runs
from prefixtree.packing.layout import PackedForest
from prefixtree.packing.mask import TreeMask, make_mask


class Part:
    """The tokens that a rank or a step computes, and the ancestors whose keys it imports.

    Rows of q are the own tokens, rows of k and v all rows of the part, ascending in packed order.

    Attributes:
        tokens: int32 [K], the packed token of each row.
        own_runs: int64 [*, 3], the own tokens as runs (packed start, row of the part, length).
        own_tokens, own_rows: int32 [t], the own tokens, and their rows of the part.
        num_exported: how many own rows other parts import, once per importer.
    """

    def __init__(
        self, packed: PackedForest, index: int, pieces: np.ndarray, exported: np.ndarray
    ) -> None:
        self.index = index
        self._exported = exported
        self.num_exported = int(exported[:, 1].sum())
        self._whole = mask = packed.mask
        self.host, self._home = mask.host, packed.device
        self._options = mask.backend, mask.deterministic
        self.tokens, self._subtree_end = loops.parts.lay_out(
            self.host.subtree_end, pieces[:, 0], pieces[:, 1]
        )
        row = np.cumsum(pieces[:, 1]) - pieces[:, 1]
        own = pieces[:, 2] == index
        self.own_runs = np.stack([pieces[own, 0], row[own], pieces[own, 1]], 1)
        self.own_tokens = _expand(self.own_runs[:, 0], self.own_runs[:, 2])
        self.own_rows = _expand(self.own_runs[:, 1], self.own_runs[:, 2])
        self._indices: dict[torch.device, torch.Tensor] = {}

    @property
    def num_tokens(self) -> int:
        """t, the number of own tokens."""
        return len(self.own_tokens)

    @property
    def num_rows(self) -> int:
        """K, the number of own and imported tokens: the rows of k and v."""
        return len(self.tokens)

    @property
    def num_imported(self) -> int:
        """K - t, the number of other parts' tokens among the rows."""
        return self.num_rows - self.num_tokens

    @cached_property
    def imported_tokens(self) -> np.ndarray:
        """int32 [K - t], the packed tokens of other parts' rows, ascending."""
        return np.delete(self.tokens, self.own_rows)

    @cached_property
    def exported_rows(self) -> np.ndarray:
        """int64, the own rows that any other part imports, ascending, each once."""
        return np.searchsorted(self.own_tokens, np.unique(_expand(*self._exported.T)))

    @cached_property
    def mask(self) -> TreeMask:
        """The mask of q [t] over k and v [K]; without imports for all queries."""
        # on the packed forest's device, with its positions, backend and `deterministic`
        runs = None
        if self.num_tokens == len(self.host.subtree_end):
            return self._whole
        if self.num_imported:
            row, length = self.own_runs[:, 1], self.own_runs[:, 2]
            # (row of the part, row of q, length)
            runs = np.stack([row, np.cumsum(length) - length, length], 1)
        return make_mask(self._subtree_end, runs, *self._options, self._home)

    @lasting
    def index_on(self, device: torch.device) -> torch.Tensor:
        """The own tokens, int32 [t], on a device; moved there once."""
        if device not in self._indices:
            self._indices[device] = move(torch.from_numpy(self.own_tokens), device)
        return self._indices[device]

    def own(self, values: torch.Tensor) -> torch.Tensor:
        """Selects the own tokens' values: [T, ...] of any dtype -> [t, ...] on the same device."""
        return values.index_select(0, self.index_on(values.device))

    def scored(self, predictor: Any) -> tuple[np.ndarray, np.ndarray]:
        """Finds the edges that this part scores, int64 ascending, and the own row that scores each.

        They are those whose predictor it owns: `Edges.predictor`, [E] integers. Rows are int64.
        """
        # the token after an edge may belong to another part; scoring needs only its id, which each
        # part knows
        tokens = integers("predictor", predictor, self.host.num_tokens, "packed tokens")
        place = np.full(self.host.num_tokens, -1)
        place[self.own_tokens] = np.arange(self.num_tokens)
        row = place[tokens]
        which = np.flatnonzero(row >= 0)
        return which, row[which]

    def __repr__(self) -> str:
        return f"Part({self.index}: {self.num_tokens} own tokens, {self.num_imported} imported)"


class Parts:
    """A packed forest whose tokens are divided among parts, ranks or steps: a sequence of `Part`s.

    owner is [T] integers, 0 .. num_parts - 1: the part that owns each packed token, padding
    included. A part may own nothing. It is made at its first access and kept, so a rank pays only
    for its own.
    """

    def __init__(self, packed: PackedForest, owner: Any, num_parts: int) -> None:
        check_packed(packed, type(self).__name__)
        num_parts = at_least_one("num_parts", num_parts)
        owner = integers("owner", owner, num_parts, "parts")
        if len(owner) != packed.num_tokens:
            raise ForestError(
                f"owner must name a part for each of the {packed.num_tokens} packed tokens, got "
                f"{len(owner)}"
            )
        change = np.flatnonzero(owner[1:] != owner[:-1]) + 1
        first = np.concatenate([np.zeros(min(1, len(owner)), np.int64), change])
        self._init(packed, first, owner[first], num_parts)

    def _init(
        self, packed: PackedForest, start: np.ndarray, part: np.ndarray, num_parts: int
    ) -> None:
        """Takes runs of tokens with one owner each, start int64 [Q] and part int64 [Q]."""
        self.packed = packed
        self._run_start = np.append(start, packed.num_tokens)
        self._run_part = part
        self._ptr, self._pieces = find_pieces(packed, self._run_start, part, num_parts)
        self._importer = np.repeat(np.arange(num_parts), np.diff(self._ptr))
        self._parts: dict[int, Part] = {}

    @property
    def runs(self) -> tuple[np.ndarray, np.ndarray]:
        """Borders of runs, int64 [Q + 1] from 0 to T, and owners [Q]; neighbours' differ."""
        return self._run_start, self._run_part

    @cached_property
    def owner(self) -> np.ndarray:
        """int32 [T], the part that owns each packed token."""
        return np.repeat(self._run_part.astype(np.int32), np.diff(self._run_start))

    @cached_property
    def num_own_tokens(self) -> np.ndarray:
        """int64 [n], the own tokens of each part."""
        return _sums(self._run_part, np.diff(self._run_start), len(self))

    @cached_property
    def num_rows(self) -> np.ndarray:
        """int64 [n], the own and imported tokens of each part."""
        return _sums(self._importer, self._pieces[:, 1], len(self))

    @cached_property
    def imported(self) -> np.ndarray:
        """int64 [n, n]: imported[r, s] is the number of rows that part r imports from part s."""
        return imported_rows(self._importer, self._pieces, len(self))

    def exported_runs(self) -> tuple[np.ndarray, np.ndarray]:
        """Borders of runs, int64 [B + 1] from 0 to T, and bool [B]: whether parts import them."""
        foreign = self._pieces[self._pieces[:, 2] != self._importer]
        start, end = foreign[:, 0], foreign[:, 0] + foreign[:, 1]
        border = np.unique(np.concatenate([start, end, [0, self.packed.num_tokens]]))
        # how many pieces cover each run
        change = np.zeros(len(border), np.int64)
        np.add.at(change, np.searchsorted(border, start), 1)
        np.add.at(change, np.searchsorted(border, end), -1)
        return border, np.cumsum(change)[:-1] > 0

    def read_runs(self, read: Sequence[np.ndarray] | None = None) -> tuple[np.ndarray, ...]:
        """Finds the tokens that parts read (default: import) of others, as runs of one owner.

        `read` lists packed tokens of others per part, ascending. Returns int64 [*] each, by reader,
        ascending: the part that reads a run, its first packed token, its length, and its owner.
        """
        if read is not None:
            return _runs_by_reader(read, self.owner)
        is_foreign = self._pieces[:, 2] != self._importer
        start, length, owner = self._pieces[is_foreign].T
        return self._importer[is_foreign], start, length, owner

    def __len__(self) -> int:
        return len(self._ptr) - 1

    def __getitem__(self, index: int) -> Part:
        index = operator.index(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"part {index} does not exist; there are {len(self)} parts")
        index %= len(self)
        if index not in self._parts:
            pieces = self._pieces[self._ptr[index] : self._ptr[index + 1]]
            is_exported = (self._pieces[:, 2] == index) & (self._importer != index)
            self._parts[index] = Part(self.packed, index, pieces, self._pieces[is_exported, :2])
        return self._parts[index]

    def __iter__(self) -> Iterator[Part]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} parts of {self.packed.num_tokens} tokens)"


# ---- shared by planners of parts -----------------------------------------------------------------


def find_pieces(
    packed: PackedForest, run_start: np.ndarray, run_part: np.ndarray, num_parts: int
) -> tuple[np.ndarray, np.ndarray]:
    """Finds the pieces of every part, by the loop `find_pieces`."""
    forest = packed.forest
    node_end = forest.node_start + forest.node_length
    return loops.parts.find_pieces(
        forest.node_parent, forest.node_start, node_end, run_start, run_part, num_parts
    )


def imported_rows(importer: np.ndarray, pieces: np.ndarray, num_parts: int) -> np.ndarray:
    """Counts the rows that each part imports from each, int64 [n, n], from all pieces."""
    foreign = pieces[:, 2] != importer
    pair = importer[foreign] * num_parts + pieces[foreign, 2]
    return _sums(pair, pieces[foreign, 1], num_parts**2).reshape(num_parts, num_parts)


def _runs_by_reader(read: Sequence[np.ndarray], owner: np.ndarray) -> tuple[np.ndarray, ...]:
    reader = np.repeat(np.arange(len(read)), [len(tokens) for tokens in read])
    tokens = np.concatenate(read).astype(np.int64)
    new = np.ones(len(tokens), bool)
    new[1:] = (np.diff(reader) > 0) | (np.diff(tokens) != 1) | (np.diff(owner[tokens]) != 0)
    first = np.flatnonzero(new)
    length = np.diff(first, append=len(tokens))
    return reader[first], tokens[first], length, owner[tokens[first]].astype(np.int64)


def _sums(index: np.ndarray, values: np.ndarray, count: int) -> np.ndarray:
    """Sums `values` by `index`, int64 [count]."""
    out = np.zeros(count, np.int64)
    np.add.at(out, index, values)
    return out


def _expand(start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Lists start, start + 1, .. of every run, int32, one run after another."""
    return rows_of_runs(start, length).astype(np.int32)
