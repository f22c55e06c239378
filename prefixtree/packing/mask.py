"""`TreeMask`: who sees whom in a packed forest, and the block tables that kernels read.

Legend: T packed tokens, Tq query rows, NQ query tiles, NK key tiles.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import torch

from prefixtree import loops
from prefixtree.errors import ForestError


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


# Decorates what makes tensors that outlive the call: those made in inference mode could not be
# saved for a backward later, nor could views of them.
lasting = torch.inference_mode(False)


@lasting
def move(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """To `device`; from pageable host memory to CUDA through a pinned copy, without waiting."""
    device = torch.device(device)
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@lasting
def move_all(tensors: list[torch.Tensor], device: torch.device | str) -> list[torch.Tensor]:
    """`move` for several tensors of one dtype in one copy; each starts at a multiple of 64 bytes.

    Kernels are compiled for what they may assume of an address, so it must not vary by forest.
    """
    step = 64 // tensors[0].element_size()
    room = [-(-tensor.numel() // step) * step for tensor in tensors]
    flat = tensors[0].new_zeros(sum(room))
    for view, tensor in zip(flat.split(room), tensors, strict=True):
        view[: tensor.numel()] = tensor.reshape(-1)
    views = move(flat, device).split(room)
    return [
        view[: tensor.numel()].view(tensor.shape)
        for view, tensor in zip(views, tensors, strict=True)
    ]


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
def _make_handle(plan: MaskPlan) -> torch.Tensor:
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


class TreeMask:
    """Query q sees key k exactly when k <= q < subtree_end[k], in packed (preorder) order.

    Not a dataclass on purpose: wrappers such as FSDP1 take dataclasses among keyword arguments
    apart. Immutable; `with_options`, `for_queries` and `to` return new ones that share the tables.

    Args:
        subtree_end: int32 [T], one past the last packed token below each token. Must nest.

    Attributes:
        subtree_end: int32 [T] on the mask's device.
        position_ids: int32 [T], depth of each token on its path: what windows are measured in.
        query_tokens: None where q holds every packed token, else int32 [Tq], the packed index of
            each row of q.
        backend, deterministic: what `tree_attention` uses where its own arguments are None.
        handle: int64 [1] on the CPU; stands for the mask in the registered operator.
    """

    def __init__(self, subtree_end: Any) -> None:
        array = subtree_end.cpu().numpy() if hasattr(subtree_end, "cpu") else subtree_end
        try:
            array = np.asarray(array)
        except ValueError:  # sequences of several lengths
            array = np.asarray(array, object)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise ForestError(
                f"subtree_end must be 1-D integers, got shape {list(array.shape)} of {array.dtype};"
                " pack(PrefixForest.from_sequences(sequences)).mask is the mask of sequences"
            )
        for bad in np.flatnonzero(array > len(array))[:1]:
            raise ForestError(
                f"subtree_end[{bad}] is {array[bad]}, beyond the {len(array)} tokens there are"
            )
        # a copy: the caller may go on to write into theirs
        self._init(MaskPlan(array.astype(np.int32), None), torch.device("cpu"), "auto", False)

    def _init(
        self,
        plan: MaskPlan,
        device: torch.device,
        backend: str,
        deterministic: bool,
        handle: torch.Tensor | None = None,
    ) -> TreeMask:
        self.plan = plan
        arrays = plan.on(device)
        self.subtree_end = arrays["subtree_end"]
        self.position_ids = arrays["position_ids"]
        self.query_tokens = arrays.get("query_tokens")
        self.backend = backend
        self.deterministic = deterministic
        self.handle = _make_handle(plan) if handle is None else handle
        return self

    @property
    def device(self) -> torch.device:
        """Where `subtree_end` lives."""
        return self.subtree_end.device

    @property
    def num_tokens(self) -> int:
        """T, the packed tokens: rows of k and v."""
        return self.subtree_end.shape[0]

    @property
    def num_queries(self) -> int:
        """Tq, rows of q: T unless the mask is `for_queries`."""
        rows = self.subtree_end if self.query_tokens is None else self.query_tokens
        return rows.shape[0]

    def to(self, device: torch.device | str) -> TreeMask:
        """The same mask on another device, in one asynchronous copy."""
        # a tensor knows the index behind a bare "cuda"
        device = torch.empty(0, device=device).device
        mask = TreeMask.__new__(TreeMask)
        return mask._init(self.plan, device, self.backend, self.deterministic, self.handle)

    def adopt(self, subtree_end: torch.Tensor, position_ids: torch.Tensor) -> TreeMask:
        """The same mask on the device of these two int32 copies of its arrays, using them."""
        arrays = {"subtree_end": subtree_end, "position_ids": position_ids}
        self.plan._arrays.setdefault(subtree_end.device, arrays)
        return self.to(subtree_end.device)

    def with_options(
        self, backend: str | None = None, deterministic: bool | None = None
    ) -> TreeMask:
        """The same mask with other options; those not given stay. They travel into models."""
        mask = TreeMask.__new__(TreeMask)
        return mask._init(
            self.plan,
            self.device,
            self.backend if backend is None else backend,
            self.deterministic if deterministic is None else deterministic,
            self.handle,
        )

    def for_queries(self, ranges: Iterable[tuple[int, int]]) -> TreeMask:
        """The same keys for a q that holds only some runs of the packed tokens.

        Args:
            ranges: (start, end) in packed tokens, ascending, not empty, not overlapping. Row r of q
                is the r-th token that they name.

        Raises:
            ForestError: ranges out of order or out of bounds, or a mask that is a subset already.
        """
        if self.query_tokens is not None:
            raise ForestError("for_queries takes the whole mask; this one holds a subset already")
        runs, row, last = [], 0, 0
        for start, end in ((operator.index(a), operator.index(b)) for a, b in ranges):
            if not last <= start < end <= self.num_tokens:
                raise ForestError(
                    f"for_queries expects ascending, separate, non-empty ranges within 0 and "
                    f"{self.num_tokens}, got ({start}, {end}) behind {last}"
                )
            runs.append((start, row, end - start))
            row, last = row + end - start, end
        plan = MaskPlan(self.plan.subtree_end, np.array(runs, np.int64).reshape(-1, 3))
        mask = TreeMask.__new__(TreeMask)
        return mask._init(plan, self.device, self.backend, self.deterministic)

    def tables(self, shape: TileShape, window: int | None = None) -> BlockTables:
        """The block tables for a tile shape, on the mask's device; built once and kept."""
        return self.plan.tables(shape, check_window(window), self.device)

    def stats(self, shape: TileShape, window: int | None = None) -> MaskStats:
        """Useful share, partial and cut tiles for a tile shape. Counts pairs of one head."""
        window = check_window(window)
        tables = self.plan.tables(shape, window, torch.device("cpu"))
        _, full, partial = loops.tile_costs.query_costs(tables.q_ptr.numpy(), tables.q_runs.numpy())
        visible_pairs = self.plan.visible_pairs(window)
        tile_pairs = int(full.sum()) + int(partial.sum())
        return MaskStats(
            visible_pairs=visible_pairs,
            tile_pairs=tile_pairs,
            partial_tiles=int(partial.sum()),
            useful_share=visible_pairs / max(1, tile_pairs * shape.tile_q * shape.tile_k),
            key_tiles=len(tables.k_tiles),
            cut_tiles=len(tables.slots),
            pieces=len(tables.pieces),
        )

    def dense(self, window: int | None = None) -> torch.Tensor:
        """bool [Tq, T] on the mask's device, for tests and the reference backend: T x T memory."""
        return dense_mask(self.plan, self.device, check_window(window))

    def __copy__(self) -> TreeMask:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> TreeMask:
        # immutable, and a deep copy of what holds it must find its device again
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        plan = self.plan
        runs = plan.query_runs if plan.is_subset else None
        return _rebuild, (plan.subtree_end, runs, self.backend, self.deterministic)

    def __repr__(self) -> str:
        queries = "" if self.query_tokens is None else f", {self.num_queries} queries"
        return f"TreeMask({self.num_tokens} tokens{queries}, {self.device}, {self.backend})"


def _rebuild(
    subtree_end: np.ndarray, runs: np.ndarray | None, backend: str, deterministic: bool
) -> TreeMask:
    """Unpickles a mask, on the CPU: another process has caches and devices of its own."""
    mask = TreeMask.__new__(TreeMask)
    return mask._init(MaskPlan(subtree_end, runs), torch.device("cpu"), backend, deterministic)


def check_mask(mask: Any, name: str = "mask") -> None:
    """Raises a TypeError that says how to make one, unless it is a TreeMask."""
    if not isinstance(mask, TreeMask):
        raise TypeError(
            f"{name} must be a TreeMask, got {type(mask).__name__}; pack makes one: "
            "packed = pack(PrefixForest.from_sequences(sequences)), and then packed.mask"
        )


def check_window(window: int | None) -> int:
    """The window as a number, 0 for none."""
    if window is None:
        return 0
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise ValueError(
            f"window must be None or an integer >= 1 (it counts the token itself), got {window!r}"
        )
    return window


def dense_mask(plan: MaskPlan, device: torch.device, window: int) -> torch.Tensor:
    """bool [Tq, T]: the definition, pair by pair."""
    arrays = plan.on(device)
    end, position = arrays["subtree_end"], arrays["position_ids"]
    key = torch.arange(plan.num_tokens, device=device)
    query = arrays["query_tokens"].long() if plan.is_subset else key
    visible = (key[None] <= query[:, None]) & (query[:, None] < end[None])
    if window:
        visible &= position[query][:, None] - position[None] < window
    return visible
