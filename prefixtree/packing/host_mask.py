"""`HostMask`: the host side of a mask, and the handle by which a registered operator finds it.

Legend: T packed tokens, Tq query rows.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch

from prefixtree import loops
from prefixtree.errors import ForestError
from prefixtree.packing.block_tables import BlockTables, TileShape, build_tables, visited_tiles
from prefixtree.packing.copies import lasting, move_all
from prefixtree.packing.visible import visible_keys

_Kept = TypeVar("_Kept")


class HostMask:
    """The arrays and caches of a `TreeMask`, which its copies on every device share."""

    def __init__(
        self,
        subtree_end: np.ndarray,
        query_runs: np.ndarray | None,
        whole: HostMask | None = None,
    ) -> None:
        """Finds predecessors and positions of subtree_end, int32 [T], which must nest.

        query_runs int64 [*, 3] are (packed start, row in q, length), None for all tokens. `whole`
        is the mask of all queries from which this one is made.
        """
        self.subtree_end = subtree_end
        if whole is None:
            self.predictor, self.position, bad = loops.block_tables.walk(self.subtree_end)
            if bad >= 0:
                raise ForestError(
                    f"subtree_end[{bad}] is {self.subtree_end[bad]}: expected more than {bad} and "
                    "no more than the subtree end of the tokens it lies below (preorder, nested)"
                )
        else:
            self.predictor, self.position = whole.predictor, whole.position
        self._whole = whole
        # in a copy of `with_kept`: the mask as which its calls count
        self.counts_as: HostMask | None = None
        # tokens of the shortest sequence, if the mask belongs to a packed forest
        self.shortest: int | None = None
        self.is_subset = query_runs is not None
        if query_runs is None:
            query_runs = np.array([[0, 0, len(self.subtree_end)]], np.int64)
        self.query_runs = query_runs
        self._tables: dict[Any, BlockTables] = {}
        self._pairs: dict[int, int] = {}
        self._shares: dict[Any, float] = {}
        self._arrays: dict[torch.device, dict[str, torch.Tensor]] = {}
        self._kept: dict[Any, Any] = {}

    @property
    def num_tokens(self) -> int:
        return len(self.subtree_end)

    @property
    def num_queries(self) -> int:
        return int(self.query_runs[:, 2].sum())

    @cached_property
    def deepest(self) -> int:
        """The number of tokens of the longest path."""
        return int(self.position.max(initial=-1)) + 1

    @cached_property
    def query_tokens(self) -> np.ndarray:
        """The packed index of every row of q, int32 [Tq]."""
        runs = [np.arange(start, start + n, dtype=np.int32) for start, _, n in self.query_runs]
        return np.concatenate([np.empty(0, np.int32), *runs])

    @cached_property
    def whole(self) -> HostMask:
        """The mask of a q that holds every packed token."""
        if not self.is_subset:
            return self
        return self._whole or HostMask(self.subtree_end, None)

    def asked_tiles(self, tile: int) -> np.ndarray:
        """Finds the tiles of the grid over all packed tokens that hold a row of q, bool [tiles]."""
        asked = np.zeros(-(-self.num_tokens // tile), bool)
        for start, _, length in self.query_runs:
            if length:
                asked[start // tile : (start + length - 1) // tile + 1] = True
        return asked

    def rows_on_grid(self, tile: int) -> bool:
        """Whether q is a subset, and each tile of its rows holds neighbouring tokens."""
        return self.is_subset and not (self.query_runs[:, 1] % tile).any()

    @cached_property
    def paths(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Blocks of queries along one path, and the key runs above each: see the loop `paths`."""
        return loops.block_tables.paths(self.predictor, self.query_runs)

    def blocks(self) -> Iterator[tuple[int, int, list[tuple[int, int, bool]]]]:
        """Yields (row, length, key runs (start, end, causal)) per block of `paths`, root first."""
        blocks, prefix_ptr, prefix_runs = self.paths
        above = prefix_runs.tolist()
        for (start, row, length), first_run, stop_run in zip(
            blocks.tolist(), prefix_ptr[:-1].tolist(), prefix_ptr[1:].tolist(), strict=True
        ):
            # the block's own tokens are the one causal run; if it begins inside a path, that path's
            # beginning is among the runs above it
            runs = [(first, end, False) for first, end in above[first_run:stop_run]]
            yield row, length, [*runs, (start, start + length, True)]

    @cached_property
    def chain_starts(self) -> np.ndarray | None:
        """The first token of each tree, then T, int32; None if a tree branches or q is a subset."""
        if self.is_subset:
            return None
        is_root = self.predictor < 0
        follows = self.predictor == np.arange(-1, self.num_tokens - 1, dtype=self.predictor.dtype)
        if not np.all(is_root | follows):
            return None
        return np.append(np.flatnonzero(is_root), self.num_tokens).astype(np.int32)

    def kept(self, name: Any, make: Callable[[], _Kept]) -> _Kept:
        """Returns what `make` gives, made once and kept with this mask."""
        if name not in self._kept:
            self._kept[name] = make()
        value: _Kept = self._kept[name]
        return value

    def with_kept(self, name: Any, value: Any) -> HostMask:
        """Copies the mask; the copy keeps only this value."""
        other = copy.copy(self)
        other.counts_as, other._kept = self, {name: value}
        return other

    def on(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Copies subtree_end, position_ids and query_tokens (int32) to a device, once."""
        if device not in self._arrays:
            parts = [self.subtree_end, self.position]
            parts += [self.query_tokens] if self.is_subset else []
            views = move_all([torch.from_numpy(part) for part in parts], device)
            names = ("subtree_end", "position_ids", "query_tokens")
            self._arrays[device] = dict(zip(names, views, strict=False))
        return self._arrays[device]

    def query_positions(self, device: torch.device) -> torch.Tensor:
        """Gives the position of every row of q on a device, int32 [Tq]."""
        on = self.on(device)
        if not self.is_subset:
            return on["position_ids"]
        return on["position_ids"].index_select(0, on["query_tokens"])

    def adopt(self, subtree_end: torch.Tensor, position_ids: torch.Tensor) -> None:
        """Takes these int32 [T] copies for `on` their device, unless `on` has arrays there."""
        assert not self.is_subset
        arrays = {"subtree_end": subtree_end, "position_ids": position_ids}
        self._arrays.setdefault(subtree_end.device, arrays)

    def visible_pairs(self, window: int) -> int:
        """Counts the visible (query, key) pairs per head; window 0 for none."""
        if window not in self._pairs:
            position = self.position[self.query_tokens].astype(np.int64)
            self._pairs[window] = int(visible_keys(position, window or None).sum())
        return self._pairs[window]

    def partial_share(self, shape: TileShape, window: int) -> float:
        """Computes the share of visited key tiles that need a compare, 0 .. 1."""
        if (shape, window) not in self._shares:
            full, partial = visited_tiles(self.tables(shape, window, torch.device("cpu")))
            self._shares[shape, window] = partial / max(1, full + partial)
        return self._shares[shape, window]

    def tables(self, shape: TileShape, window: int, device: torch.device) -> BlockTables:
        """Builds the block tables once per (shape, window), and copies them once per device."""
        host = (shape, window, torch.device("cpu"))
        if host not in self._tables:
            self._tables[host] = build_tables(
                self.subtree_end, self.position, self.query_runs, shape, window
            )
        if (key := (shape, window, device)) not in self._tables:
            self._tables[key] = self._tables[host].to(device)
        return self._tables[key]


# A registered torch operator takes tensors, not objects, and torch.compile must see one graph for
# all forests: so a mask, or what else a call needs, travels as a `handle`, a CPU tensor that holds
# a number. The number finds the object here as long as any tensor on the handle's storage lives,
# saved for a backward or not: the storage owns the buffer, which owns the object. Numbers are never
# reused.
class _Buffer(bytearray):
    held: Any


_numbers = itertools.count(1)
_buffers: weakref.WeakValueDictionary[int, _Buffer] = weakref.WeakValueDictionary()


@lasting
def make_handle(held: Any) -> torch.Tensor:
    """Makes an int64 [1] on the CPU, which must not be in a circle with the object it holds."""
    number = next(_numbers)
    buffer = _Buffer(number.to_bytes(8, "little"))
    buffer.held = held
    _buffers[number] = buffer
    return torch.frombuffer(buffer, dtype=torch.int64)


def held_by(handle: torch.Tensor) -> Any:
    """Finds the object of a handle."""
    buffer = _buffers.get(int(handle))
    if buffer is None:
        raise ForestError("the TreeMask of this call no longer exists; keep its PackedForest alive")
    return buffer.held


def host_of(handle: torch.Tensor) -> HostMask:
    """Finds the host side of the mask of a `TreeMask.handle`."""
    host: HostMask = held_by(handle)
    return host
