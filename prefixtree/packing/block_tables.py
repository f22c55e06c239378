"""`BlockTables`: what kernels read of a mask, in the tiles of a `TileShape`.

Legend: T packed tokens, NQ query tiles, NK key tiles.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch

from prefixtree import loops
from prefixtree.packing.transfers import lasting, move_all


@dataclass(frozen=True)
class TileShape:
    """The tiles a kernel works in; its table builder and its launch read the same object.

    Attributes:
        tile_q: query tokens a tile (tokens, not rows: a kernel may hold several heads of each).
        tile_k: keys a tile.
        cut: False for the aligned grid; True cuts key tiles at node borders, so that they may
            start anywhere and be shorter than `tile_k`, where that saves work.
        piece_tiles: query tiles of work after which a key tile's query run is cut in the backward;
            0 never cuts.
    """

    tile_q: int
    tile_k: int
    cut: bool = False
    piece_tiles: int = 0

    def __post_init__(self) -> None:
        if self.tile_q < 1 or self.tile_k < 1 or self.piece_tiles < 0:
            raise ValueError(f"a tile has at least one query and one key, got {self}")


@dataclass(frozen=True, eq=False)
class BlockTables:
    """What a kernel reads besides q, k, v, `subtree_end` and, with a window, `position_ids`.

    All int32, on the mask's device (moved there as one buffer). Tiles of either kind ascend in
    packed order. Costs count half full tiles: 2 a full tile, 3 a partial one.

    Attributes:
        q_tiles: [NQ, 3] packed start, first row in q, length.
        k_tiles: [NK, 2] packed start, length. Lanes behind a tile's length belong to the next tile
            and must be dead in the forward and in dQ, as if their subtree end were 0.
        k_spans: [NK, tile_k] subtree_end[k] - k of each lane, 0 where dead: query q sees the key of
            a lane exactly when q - k, as an unsigned number, is less (and the window allows it).
        q_order: [NQ] query tiles, costliest first.
        q_cost: [NQ].
        q_ptr, q_split: [NQ + 1], [NQ]: query tile i has the full runs q_ptr[i]:q_split[i] and the
            partial runs q_split[i]:q_ptr[i + 1].
        q_runs: [*, 3] first key tile, end key tile, compares needed (the bits of
            `loops.mask_compares`; 0 for a full run). A key tile shorter than `tile_k` is never
            full here: END stands for its dead lanes too.
        partial_ptr, partial_tiles: [NQ + 1], [*, 2]: the partial runs once more, a key tile a row
            (key tile, packed start), for kernels whose loop over them must not follow two tables.
        k_cost: [NK].
        k_ptr: [NK + 1]: key tile j has the runs k_ptr[j]:k_ptr[j + 1].
        k_runs: [*, 4] first query tile, full begin, full end, end. Query tiles before `full begin`
            need the causal and the end compare, those from `full end` on the end compare alone,
            and outside the full part the window compare where there is a window. Lanes behind a
            tile's length need no mask here: their rows are not stored.
        pieces: [P, 5] key tile, first run, end run, slot, partial; costliest first. One program
            works off one piece. Slot and partial are -1 where the key tile was not cut: it writes
            its gradient directly. Otherwise it adds into accumulator `slot`, or, to be
            deterministic, writes partial sum `partial`.
        piece_cost: [P].
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
        """Partial sums that the pieces of cut key tiles write; known without a look at them."""
        # an uncut tile has one piece, and every piece of a cut one has a partial
        return len(self.pieces) - (len(self.k_tiles) - len(self.slots))

    def to(self, device: torch.device | str) -> BlockTables:
        """The same tables on another device, moved in one asynchronous copy."""
        names = [field.name for field in fields(self)]
        moved = move_all([getattr(self, name) for name in names], device)
        return BlockTables(**dict(zip(names, moved, strict=True)))


@dataclass(frozen=True)
class MaskStats:
    """How well tiles of a shape fit a mask.

    Attributes:
        visible_pairs: (query, key) pairs that attend, a head.
        tile_pairs: (query tile, key tile) pairs that a forward visits.
        partial_tiles: those of them that need a compare.
        useful_share: visible pairs over the pairs that the visited tiles compute.
        key_tiles: key tiles; more than the grid has where node borders were cut.
        cut_tiles: key tiles whose query run was cut into pieces.
        pieces: programs of the backward over keys.
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
    """The block tables of a mask, on the CPU.

    Args:
        subtree_end, position: int32 [T].
        query_runs: int64 [*, 3] (packed start, row in q, length), the tokens that q holds.
        window: 0 for none.
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
    partial_ptr, partial_tiles = costs.partial_tiles(q_ptr, q_split, q_runs, k_tiles)
    k_cost, k_ptr, k_runs, pieces, piece_cost, slots = costs.cut_pieces(
        k_ptr, k_runs, shape.piece_tiles
    )
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
        "pieces": pieces,
        "piece_cost": piece_cost,
        "slots": slots,
    }
    return BlockTables(**{name: torch.from_numpy(array) for name, array in arrays.items()})


def visited_tiles(tables: BlockTables) -> tuple[int, int]:
    """(query tile, key tile) pairs that a forward visits: full and partial ones. CPU tables."""
    _, full, partial = loops.tile_costs.query_costs(tables.q_ptr.numpy(), tables.q_runs.numpy())
    return int(full.sum()), int(partial.sum())
