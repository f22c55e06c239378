"""`MaskPlan`: the host side of a mask, and the handle by which a registered operator finds it.

Legend: T packed tokens, Tq query rows.
"""

from __future__ import annotations

import itertools
import weakref
from functools import cached_property
from typing import Any

import numpy as np
import torch

from prefixtree import loops
from prefixtree.errors import ForestError
from prefixtree.packing.block_tables import BlockTables, TileShape
from prefixtree.packing.transfers import lasting, move_all


class MaskPlan:
    """The host side of a `TreeMask`, shared by its copies on every device: arrays and caches."""

    def __init__(self, subtree_end: np.ndarray, query_runs: np.ndarray | None) -> None:
        """subtree_end int32 [T]; query_runs int64 [*, 3] (packed start, row in q, length)."""
        self.subtree_end = subtree_end
        self.predictor, self.position, bad = loops.block_tables.walk(self.subtree_end)
        if bad >= 0:
            raise ForestError(
                f"subtree_end[{bad}] is {self.subtree_end[bad]}: expected more than {bad} and no "
                "more than the subtree end of the tokens it lies below (preorder, nested)"
            )
        self.is_subset = query_runs is not None
        if query_runs is None:
            query_runs = np.array([[0, 0, len(self.subtree_end)]], np.int64)
        self.query_runs = query_runs
        self._tables: dict[Any, BlockTables] = {}
        self._pairs: dict[int, int] = {}
        self._shares: dict[Any, float] = {}
        self._arrays: dict[torch.device, dict[str, torch.Tensor]] = {}

    @property
    def num_tokens(self) -> int:
        return len(self.subtree_end)

    @property
    def num_queries(self) -> int:
        return int(self.query_runs[:, 2].sum())

    @cached_property
    def deepest(self) -> int:
        """Tokens of the longest path."""
        return int(self.position.max(initial=-1)) + 1

    @cached_property
    def query_tokens(self) -> np.ndarray:
        """Packed index of every row of q, int32 [Tq]."""
        runs = [np.arange(start, start + n, dtype=np.int32) for start, _, n in self.query_runs]
        return np.concatenate([np.empty(0, np.int32), *runs])

    @cached_property
    def paths(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Blocks of queries along one path, and the key runs above each: see the loop `paths`."""
        return loops.block_tables.paths(self.predictor, self.query_runs)

    def on(self, device: torch.device) -> dict[str, torch.Tensor]:
        """subtree_end, position_ids and query_tokens (int32) on a device."""
        if device not in self._arrays:
            parts = [self.subtree_end, self.position]
            parts += [self.query_tokens] if self.is_subset else []
            views = move_all([torch.from_numpy(part) for part in parts], device)
            names = ("subtree_end", "position_ids", "query_tokens")
            self._arrays[device] = dict(zip(names, views, strict=False))
        return self._arrays[device]

    def visible_pairs(self, window: int) -> int:
        """(query, key) pairs that attend, a head."""
        if window not in self._pairs:
            visible = self.position[self.query_tokens].astype(np.int64) + 1
            self._pairs[window] = int((np.minimum(visible, window) if window else visible).sum())
        return self._pairs[window]

    def partial_share(self, shape: TileShape, window: int) -> float:
        """Share of the key tiles a forward visits that need a compare."""
        if (shape, window) not in self._shares:
            tables = self.tables(shape, window, torch.device("cpu"))
            _, full, part = loops.tile_costs.query_costs(
                tables.q_ptr.numpy(), tables.q_runs.numpy()
            )
            self._shares[shape, window] = int(part.sum()) / max(1, int(full.sum() + part.sum()))
        return self._shares[shape, window]

    def tables(self, shape: TileShape, window: int, device: torch.device) -> BlockTables:
        """The block tables, built once a (shape, window) and moved once a device."""
        host = (shape, window, torch.device("cpu"))
        if host not in self._tables:
            self._tables[host] = self._build(shape, window)
        if (key := (shape, window, device)) not in self._tables:
            self._tables[key] = self._tables[host].to(device)
        return self._tables[key]

    @lasting
    def _build(self, shape: TileShape, window: int) -> BlockTables:
        ends, positions = self.subtree_end, self.position
        q_tiles = loops.block_tables.query_tiles(self.query_runs, shape.tile_q)
        if shape.cut:
            k_tiles = loops.block_tables.cut_key_tiles(ends, q_tiles, shape.tile_k)
        else:
            k_tiles = loops.block_tables.grid_key_tiles(len(ends), shape.tile_k)
        k_ends = loops.block_tables.tile_ranges(ends, k_tiles[:, 0], k_tiles[:, 1])
        if window:
            k_positions = loops.block_tables.tile_ranges(positions, k_tiles[:, 0], k_tiles[:, 1])
            q_positions = loops.block_tables.tile_ranges(positions, q_tiles[:, 0], q_tiles[:, 2])
        else:
            k_positions, q_positions = k_ends, np.zeros((len(q_tiles), 2), np.int32)
        q_ptr, q_split, q_runs = loops.block_tables.forward_runs(
            q_tiles, k_tiles, shape.tile_k, k_ends, k_positions, q_positions, window
        )
        q_cost, _, _ = loops.tile_costs.query_costs(q_ptr, q_runs)
        if window:
            k_ptr, k_runs = loops.block_tables.transposed_runs(q_ptr, q_runs, len(k_tiles))
        else:
            k_ptr, k_runs = loops.block_tables.backward_runs(q_tiles, k_tiles, k_ends)
        partial_ptr, partial_tiles = loops.tile_costs.partial_tiles(q_ptr, q_split, q_runs, k_tiles)
        k_cost, k_ptr, k_runs, pieces, piece_cost, slots = loops.tile_costs.cut_pieces(
            k_ptr, k_runs, shape.piece_tiles
        )
        arrays = {
            "q_tiles": q_tiles,
            "k_tiles": k_tiles,
            "k_spans": loops.block_tables.key_spans(ends, k_tiles, shape.tile_k),
            "q_order": np.argsort(-q_cost, kind="stable").astype(np.int32),
            "q_cost": q_cost,
            "q_ptr": q_ptr,
            "q_split": q_split,
            "q_runs": q_runs,
            "partial_ptr": partial_ptr,
            "partial_tiles": partial_tiles,
            "k_cost": k_cost,
            "k_ptr": k_ptr,
            "k_runs": k_runs,
            "pieces": pieces,
            "piece_cost": piece_cost,
            "slots": slots,
        }
        return BlockTables(**{name: torch.from_numpy(array) for name, array in arrays.items()})


# A registered torch operator takes tensors, not objects, and torch.compile must see one graph for
# all forests: so a mask travels as a `handle`, a CPU tensor that holds a number. The number finds
# the plan here as long as any tensor on the handle's storage lives, saved for a backward or not:
# the storage owns the buffer object, the buffer object owns the plan. Numbers are never reused.
class _PlanBuffer(bytearray):
    plan: MaskPlan


_numbers = itertools.count(1)
_buffers: weakref.WeakValueDictionary[int, _PlanBuffer] = weakref.WeakValueDictionary()


@lasting
def make_handle(plan: MaskPlan) -> torch.Tensor:
    number = next(_numbers)
    buffer = _PlanBuffer(number.to_bytes(8, "little"))
    buffer.plan = plan
    _buffers[number] = buffer
    return torch.frombuffer(buffer, dtype=torch.int64)


def plan_of(handle: torch.Tensor) -> MaskPlan:
    """The plan behind a `TreeMask.handle`."""
    buffer = _buffers.get(int(handle))
    if buffer is None:
        raise ForestError("the TreeMask of this call no longer exists; keep its PackedForest alive")
    return buffer.plan
