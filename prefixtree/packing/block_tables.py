"""`BlockTables`: the part of a mask that kernels read, in the tiles of a `TileShape`.

Legend: T packed tokens, NQ query tiles, NK key tiles.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch

from prefixtree import loops
from prefixtree._numbers import integer
from prefixtree.packing.copies import lasting, move_all


@dataclass(frozen=True)
class TileShape:
    """The tiles in which a kernel works.

    The builder of tables and the launch of the kernel read the same object.

    Attributes:
        tile_q: query tokens per tile. They are tokens, not rows: a kernel may hold several heads of
            each.
        tile_k: keys per tile.
        cut: False for the aligned grid. True cuts key tiles at node borders where that saves work.
            They may then start anywhere and be shorter than `tile_k`.
        piece_tiles: the number of query tiles after which the backward cuts a key tile's query run
            into another piece; 0 never cuts.
        masked: whether `BlockTables.partial_tiles` lists all tiles that a forward visits, for
            queries that choose their keys.

    Raises:
        ValueError: numbers that are no integers, tile_q or tile_k below 1, or piece_tiles below 0.
    """

    tile_q: int
    tile_k: int
    cut: bool = False
    piece_tiles: int = 0
    masked: bool = False

    def __post_init__(self) -> None:
        for name in ("tile_q", "tile_k", "piece_tiles"):
            object.__setattr__(self, name, integer(name, getattr(self, name)))
        if self.tile_q < 1 or self.tile_k < 1 or self.piece_tiles < 0:
            raise ValueError(f"a tile has at least one query and one key, got {self}")


@dataclass(frozen=True, eq=False)
class BlockTables:
    """The tables that a kernel reads, with q, k, v and `subtree_end`.

    With a window a kernel also reads `position_ids`. All tables are int32, on the mask's device,
    and were moved there as one buffer. Query tiles and key tiles ascend in packed order. The unit
    of a cost is half a full tile: a full tile costs 2, a partial one 3.

    Attributes:
        q_tiles: [NQ, 3] packed start, first row in q, length.
        k_tiles: [NK, 2] packed start, length. If a tile is shorter than `tile_k`, its trailing
            lanes hold the next tile's keys. The forward and dQ must mask them, as if their subtree
            end were 0.
        k_spans: [NK, tile_k] subtree_end[k] - k per lane, 0 in the lanes to be masked. Query q sees
            the key k of a lane exactly when q - k, as an unsigned number, is less than the span
            (and the window allows it).
        q_order: [NQ] query tiles, costliest first.
        q_cost: [NQ] cost of each query tile.
        q_ptr: [NQ + 1] query tile i has the runs q_ptr[i]:q_ptr[i + 1] of `q_runs`.
        q_split: [NQ] the runs q_ptr[i]:q_split[i] are full, the runs q_split[i]:q_ptr[i + 1]
            partial.
        q_runs: [*, 3] first key tile, end key tile, compares needed (the bits of
            `loops.block_tables`; 0 for a full run). A key tile shorter than `tile_k` is never full
            here: the END compare masks its trailing lanes too.
        partial_ptr: [NQ + 1] query tile i has the rows partial_ptr[i]:partial_ptr[i + 1] of
            `partial_tiles`.
        partial_tiles: [*, 2] key tile, packed start. These are the partial runs again, one row per
            key tile, for kernels whose loop must read one table only. In `masked` tiles the full
            ones come first.
        k_cost: [NK] cost of each key tile.
        k_ptr: [NK + 1] key tile j has the runs k_ptr[j]:k_ptr[j + 1] of `k_runs`.
        k_runs: [*, 4] first query tile, full begin, full end, end. Query tiles before `full begin`
            need the causal and the end compare. Those from `full end` on need the end compare
            alone. With a window, both need the window compare too. Trailing lanes need no mask
            here: their rows are not stored.
        pieces: [P, 5] key tile, first run, end run, slot, partial; costliest first. One program
            processes one piece. If the key tile was not cut, slot and partial are -1, and the
            program writes the gradient directly. Otherwise it adds into accumulator `slot` or, to
            be deterministic, writes partial sum `partial`.
        piece_cost: [P] cost of each piece.
        slots: [*, 3] key tile, first partial, end partial: the tiles to be reduced and cast.
    """

    q_tiles: torch.Tensor
    k_tiles: torch.Tensor
    k_spans: torch.Tensor
    q_order: torch.Tensor
    q_cost: torch.Tensor
    q_ptr: torch.Tensor
    q_split: torch.Tensor
    q_runs: torch.Tensor
    partial_ptr: torch.Tensor
    partial_tiles: torch.Tensor
    k_cost: torch.Tensor
    k_ptr: torch.Tensor
    k_runs: torch.Tensor
    pieces: torch.Tensor
    piece_cost: torch.Tensor
    slots: torch.Tensor

    @property
    def num_partials(self) -> int:
        """The number of partial sums that the pieces of cut key tiles write."""
        # from shapes alone: an uncut tile has one piece, and every piece of a cut one has a partial
        return len(self.pieces) - (len(self.k_tiles) - len(self.slots))

    def to(self, device: torch.device | str) -> BlockTables:
        """Copies the tables to a device, in one asynchronous copy."""
        names = [field.name for field in fields(self)]
        moved = move_all([getattr(self, name) for name in names], device)
        return BlockTables(**dict(zip(names, moved, strict=True)))


@dataclass(frozen=True)
class MaskStats:
    """Counts that say how well tiles of a shape fit a mask.

    Attributes:
        visible_pairs: the number of visible (query, key) pairs, per head.
        tile_pairs: the number of (query tile, key tile) pairs that a forward visits.
        partial_tiles: the number of these pairs that need a compare.
        useful_share: visible pairs divided by the pairs that the visited tiles compute, 0 .. 1.
        key_tiles: the number of key tiles; with `TileShape.cut` it can exceed that of the grid.
        cut_tiles: the number of key tiles whose query run was cut into pieces.
        pieces: the number of programs of the backward over keys.
    """

    visible_pairs: int
    tile_pairs: int
    partial_tiles: int
    useful_share: float
    key_tiles: int
    cut_tiles: int
    pieces: int


@lasting
def build_tables(
    subtree_end: np.ndarray,
    position: np.ndarray,
    query_runs: np.ndarray,
    shape: TileShape,
    window: int,
) -> BlockTables:
    """Builds block tables on the CPU, of subtree_end and position, int32 [T]; window 0 for none.

    query_runs int64 [*, 3] (packed start, row in q, length) are the tokens that q holds.
    """
    tables, costs = loops.block_tables, loops.tile_costs
    q_tiles = tables.query_tiles(query_runs, shape.tile_q)
    if shape.cut:
        k_tiles = tables.cut_key_tiles(subtree_end, q_tiles, shape.tile_k)
    else:
        k_tiles = tables.grid_key_tiles(len(subtree_end), shape.tile_k)
    k_ends = tables.tile_ranges(subtree_end, k_tiles[:, 0], k_tiles[:, 1])
    if window:
        k_positions = tables.tile_ranges(position, k_tiles[:, 0], k_tiles[:, 1])
        q_positions = tables.tile_ranges(position, q_tiles[:, 0], q_tiles[:, 2])
    else:
        k_positions, q_positions = k_ends, np.zeros((len(q_tiles), 2), np.int32)
    q_ptr, q_split, q_runs = tables.forward_runs(
        q_tiles, k_tiles, shape.tile_k, k_ends, k_positions, q_positions, window
    )
    q_cost, _, _ = costs.query_costs(q_ptr, q_runs)
    if window:
        k_ptr, k_runs = tables.transposed_runs(q_ptr, q_runs, len(k_tiles))
    else:
        k_ptr, k_runs = tables.backward_runs(q_tiles, k_tiles, k_ends)
    listed = q_ptr[:-1] if shape.masked else q_split
    partial_ptr, partial_tiles = costs.partial_tiles(q_ptr, listed, q_runs, k_tiles)
    k_cost, k_ptr, k_runs, pieces, piece_cost, slots = costs.cut_pieces(
        k_ptr, k_runs, shape.piece_tiles
    )
    costliest_first = np.argsort(-piece_cost, kind="stable")
    arrays = {
        "q_tiles": q_tiles,
        "k_tiles": k_tiles,
        "k_spans": tables.key_spans(subtree_end, k_tiles, shape.tile_k),
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
        "pieces": pieces[costliest_first],
        "piece_cost": piece_cost[costliest_first],
        "slots": slots,
    }
    return BlockTables(**{name: torch.from_numpy(array) for name, array in arrays.items()})


def chain_tile_costs(lengths: np.ndarray, tile: int, window: int) -> np.ndarray:
    """Lists `BlockTables.q_cost` of tiles that begin anew with each chain, in chain order."""
    tiles = -(-lengths // tile)
    # each query tile's place in its chain, which is the key tile on its diagonal
    place = np.arange(tiles.sum()) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    first = first_full = np.zeros_like(place)
    if window:
        # the first key of the first query, and where the last query sees all keys of a tile
        first = np.maximum(place * tile - window + 1, 0) // tile
        first_full = np.minimum(
            np.maximum(-(-(place * tile + tile - window) // tile), first), place
        )
    costs, full = loops.tile_costs, place - first_full
    return costs.FULL_COST * full + costs.PARTIAL_COST * (place - first + 1 - full)


def visited_tiles(tables: BlockTables) -> tuple[int, int]:
    """Counts the full and the partial tile pairs that a forward visits; tables on the CPU."""
    _, full, partial = loops.tile_costs.query_costs(tables.q_ptr.numpy(), tables.q_runs.numpy())
    return int(full.sum()), int(partial.sum())
