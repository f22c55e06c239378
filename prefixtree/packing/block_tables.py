"""`BlockTables`: what kernels read of a mask, in the tiles of a `TileShape`.

Legend: NQ query tiles, NK key tiles.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from prefixtree.packing.transfers import move_all


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
