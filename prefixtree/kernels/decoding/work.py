"""`DecodeWork`: the work list of attention from new tokens to keys kept in a pool.

A step reads tensors of fixed size alone, so one CUDA graph serves all steps and all forests that
fit.

Legend: B rows (query tokens of a forward), N runs, H query heads, Hk kv heads, D and Dv head dims,
C keys of the pools.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from prefixtree import loops
from prefixtree.packing.copies import lasting, move

# a run of keys is read once for all rows below it if that saves more than this many reads of a key
# per head; otherwise every row reads it with its tail. From 64 to 1,024, times are alike (H200)
SHARE_FROM = 512
# pairs of (item, kv head) per multiprocessor at which the length of items aims, and the keys of the
# shortest item: a row's partial result takes as many bytes as 4 keys and values (bf16, 4 query
# heads per kv head), and is written and read once
PROGRAMS, SHORTEST = 4, 128
# keys of an item are a multiple of this, a tile of keys, if they can be
STEP = 64
# query heads x rows of a narrow item, and of any item, at most
NARROW, WIDE = 16, 64
_UNCUT = 1 << 40


class Capacity(NamedTuple):
    """The room in a work list."""

    rows: int
    # items of many rows
    wide: int
    # items of few rows
    narrow: int
    # runs of keys, cut at the ends of items
    pieces: int
    # partial results, one per row of an item, each H x (Dv + 1) float32 on a GPU
    slots: int

    def holds(self, other: Capacity) -> bool:
        """Whether `other` needs no more of anything."""
        return all(a >= b for a, b in zip(self, other, strict=True))

    def grown(self, least: Capacity) -> Capacity:
        """Makes at least `least`, and up to twice as much except of rows: similar lists fit."""
        pairs = zip(self[1:], least[1:], strict=True)
        # both kinds of items, so that a step launches the same kernels for all lists
        rest = [max(8, 1 << (need - 1).bit_length(), other) for need, other in pairs]
        return Capacity(max(self.rows, least.rows), *rest)


class DecodeTables(NamedTuple):
    """The tensors of a work list, as kernels read them: int32, except `live`."""

    # [.., 5], items (first row, rows, first piece, stop piece, first slot)
    wide: torch.Tensor
    # [.., 5], items likewise; unused ones have no rows
    narrow: torch.Tensor
    # [.., 5], (first key, keys, depth of the first key, first row, stop row); keys of a tail reach
    # to the end of its room
    pieces: torch.Tensor
    # [B + 1], into `slots`
    slot_ptr: torch.Tensor
    # [..], those of each row
    slots: torch.Tensor
    # [B, 3], (first key, room, depth of the first key)
    tails: torch.Tensor
    # [B], keys in each tail
    written: torch.Tensor
    live: torch.Tensor


class DecodeCall(NamedTuple):
    """One call of the operator."""

    # [B, H, D], and the keys and values that rows write, [B, Hk, D] and [B, Hk, Dv]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    # [C, Hk, D], [C, Hk, Dv]
    key_pool: torch.Tensor
    value_pool: torch.Tensor
    # [H]
    sinks: torch.Tensor | None
    tables: DecodeTables
    scale: float
    # 0 for none
    window: int
    softcap: float
    # most rows of a wide item and of a narrow one
    block: int
    narrow_block: int


class DecodeWork:
    """The keys of a pool that each row sees, laid out for `cascade_attention`.

    A row is a query token. It sees its runs, which other rows may see too, and the written keys of
    its tail, the last of which is its own.

    Args:
        runs: int64 [N, 5], each (first key in the pool, stop key, first row, stop row, depth of the
            first key): keys that all of these rows see. The depth is the position of a token on its
            path. Runs of no keys are left out.
        tails: int64 [B, 4], each (first key of the row's tail in the pool, keys it has room for,
            keys written, depth of its first key). Rows that write into the same tail are neighbours
            and see the same runs. They are tokens of an append, each with one more key written than
            the one before.
        group, kv_heads: H / Hk and Hk of the layers. Other numbers cost speed, no exactness.
        live: bool [rows of the capacity] on the device, kept and not copied: which rows write their
            key, see their keys and go on. The caller changes it in place; tokens of an append stop
            together. Default: all rows of `tails`, which must have room.
        capacity: room for what `refill` may bring. Default: what these need, or with `spare` up to
            twice as much.
        num_keys: keys of the pools, beyond which runs and tails are refused. Default: as many as
            these runs and tails reach to.
        chunk: most keys of an item. Default: so many that the device's multiprocessors have about 4
            programs each; on a CPU, items are not cut.
    """

    @lasting
    def __init__(
        self,
        runs: np.ndarray,
        tails: np.ndarray,
        *,
        device: torch.device | str = "cpu",
        window: int | None = None,
        group: int = 4,
        kv_heads: int = 8,
        live: torch.Tensor | None = None,
        capacity: Capacity | None = None,
        num_keys: int | None = None,
        chunk: int | None = None,
        spare: bool = False,
    ) -> None:
        self._device = torch.empty(0, device=device).device
        self._kv_heads, self._chunk, self._live = kv_heads, chunk, live
        self.window = window or 0
        # most rows of an item, and of a narrow one
        self.block, self.narrow_block = max(1, WIDE // group), max(1, NARROW // group)
        self.num_keys = _end(runs, tails) if num_keys is None else num_keys
        needed, columns = self._plan(runs, tails)
        if live is not None:
            needed = needed._replace(rows=len(live))
        self._make(capacity or (needed.grown(needed) if spare else needed))
        self._fill(columns)

    @lasting
    def refill(self, runs: np.ndarray, tails: np.ndarray) -> bool:
        """Replaces the contents, without waiting for a GPU; says whether they fit the tensors.

        If not, there are new tensors, with room for their former contents too. Rows beyond those of
        `tails` are not live (a `live` of the caller must say so itself). Keys beyond the pool are
        refused before anything changes.
        """
        needed, columns = self._plan(runs, tails)
        if not (fits := self.capacity.holds(needed)):
            self._make(needed.grown(self.capacity))
        self._fill(columns)
        return fits

    def advance(self) -> None:
        """Counts one more written key in the tail of every live row, on the device."""
        self.tables.written.add_(self.tables.live)

    @property
    def num_rows(self) -> int:
        """The number of rows of q, k and v: that of the capacity."""
        return self.capacity.rows

    def _make(self, room: Capacity) -> None:
        """Makes tensors with so much room."""
        shapes = _shapes(room)
        flat = torch.zeros(sum(map(_padded, shapes)), dtype=torch.int32, device=self._device)
        *read, begun = _views(flat, shapes)
        # changed by a step, so apart from tensors that a step only reads
        written = torch.zeros_like(begun)
        live = torch.zeros_like(begun, dtype=torch.bool) if self._live is None else self._live
        tables = DecodeTables(*(*read, written, live))
        # in one line, so that an interruption leaves all or nothing
        self.capacity, self.tables, self._flat, self._written = room, tables, flat, begun

    def _fill(self, columns: list[np.ndarray]) -> None:
        """Fills in the contents of `_plan`, with zeros after them."""
        rows, host = len(columns[-1]), torch.zeros(len(self._flat), dtype=torch.int32)
        views = [view.numpy() for view in _views(host, _shapes(self.capacity))]
        for view, column in zip(views, columns, strict=True):
            view[: len(column)] = column
        # slot_ptr: the other rows have no slots
        views[3][rows + 1 :] = views[3][rows]
        self._flat.copy_(move(host, self._device))
        self.tables.written.copy_(self._written)
        if self._live is None:
            self.tables.live[:rows] = True
            self.tables.live[rows:] = False

    def _plan(self, runs: np.ndarray, tails: np.ndarray) -> tuple[Capacity, list[np.ndarray]]:
        """Plans the room that runs and tails need, and the contents of the tables but `live`."""
        if (end := _end(runs, tails)) > self.num_keys:
            raise ValueError(f"runs and tails have {end} keys, the pool {self.num_keys}")
        spans = _spans(runs[runs[:, 1] > runs[:, 0]], tails, self.window)
        spans = _in_blocks(spans, len(tails), self.narrow_block, self.block)
        # streams: keys that a block reads, cut at even lengths
        start = np.flatnonzero(_changes(spans[:, :2]))
        keys = np.add.reduceat(spans[:, 3], start)
        chunk = self._chunk or self._length(int(keys.sum()))
        step = min(STEP, chunk)
        size = -(-keys // (-(-keys // chunk) * step)) * step
        stream, number = _counted(-(-keys // size))
        cuts = _before(keys)[stream] + number * size[stream]

        # pieces: keys between two cuts, or between a cut and the end of a span
        begin = _before(spans[:, 3])
        at = np.union1d(begin, cuts)
        span = np.searchsorted(begin, at, "right") - 1
        length, inside = np.diff(at, append=keys.sum()), at - begin[span]
        key, depth = spans[span, 2] + inside, spans[span, 4] + inside
        pieces = np.column_stack([key, length, depth, spans[span, 5:]])

        # items: the keys after every cut, with those rows of the block that see some of them
        piece = np.searchsorted(at, np.append(cuts, keys.sum()))
        first, stop = spans[start][stream, :2].T
        first = np.maximum(first, np.minimum.reduceat(pieces[:, 3], piece[:-1]))
        stop = np.minimum(stop, np.maximum.reduceat(pieces[:, 4], piece[:-1]))
        rows = stop - first
        items = np.stack([first, rows, piece[:-1], piece[1:], _before(rows)], 1)
        wide = rows > self.narrow_block
        # a slot per row of an item, in this order; each row lists its own
        item, number = _counted(rows)
        row = first[item] + number
        slot_ptr = np.append(0, np.cumsum(np.bincount(row, minlength=len(tails))))
        slots = np.argsort(row, kind="stable")
        needed = Capacity(len(tails), int(wide.sum()), int((~wide).sum()), len(pieces), len(slots))
        tail, written = tails[:, [0, 1, 3]], tails[:, 2]
        return needed, [items[wide], items[~wide], pieces, slot_ptr, slots, tail, written]

    def _length(self, reads: int) -> int:
        """Counts the keys of an item, so that the device has enough items."""
        if self._device.type != "cuda":
            return _UNCUT
        processors = torch.cuda.get_device_properties(self._device).multi_processor_count
        length = -(-reads * self._kv_heads // (PROGRAMS * processors))
        return max(SHORTEST, -(-length // STEP) * STEP)


def _shapes(room: Capacity) -> list[tuple[int, ...]]:
    """Lists the shapes of `DecodeTables` but `live`."""
    rows = [(room.rows, 3), (room.rows,)]
    items = [(room.wide, 5), (room.narrow, 5), (room.pieces, 5)]
    return [*items, (room.rows + 1,), (room.slots,), *rows]


def _padded(shape: tuple[int, ...]) -> int:
    """Counts a tensor's numbers, rounded up so that addresses are multiples of 64 bytes."""
    return -(-math.prod(shape) // 16) * 16


def _views(flat: torch.Tensor, shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """Views one tensor as several, so that one copy fills them all."""
    parts = zip(flat.split([_padded(shape) for shape in shapes]), shapes, strict=True)
    return [part[: math.prod(shape)].view(shape) for part, shape in parts]


def _end(runs: np.ndarray, tails: np.ndarray) -> int:
    """Counts the keys up to the last one."""
    return int(max(runs[:, 1].max(initial=0), tails[:, :2].sum(1).max()))


def _before(counts: np.ndarray) -> np.ndarray:
    """Sums all counts before each."""
    return np.cumsum(counts) - counts


def _counted(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Repeats each i counts[i] times, and numbers the repetitions of each i."""
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - _before(counts)[which]


def _changes(table: np.ndarray) -> np.ndarray:
    """Whether a row differs from the one before it, bool; the first does."""
    out = np.ones(len(table), bool)
    out[1:] = (table[1:] != table[:-1]).any(1)
    return out


def _spans(runs: np.ndarray, tails: np.ndarray, window: int) -> np.ndarray:
    """Lists spans of keys that rows read together, int64 [E, 5], sorted.

    A span is (first row, stop row, first key, keys, depth). The rows of a run read it together if
    that saves enough, otherwise each leaf below (rows of one tail) reads it, with its tail.
    """
    begins = _changes(tails[:, [0, 3]])
    leaf, leaf_first = np.cumsum(begins) - 1, np.flatnonzero(begins)
    leaf_rows = np.stack([leaf_first, np.append(leaf_first[1:], len(tails))], 1)

    runs = runs[np.lexsort((runs[:, 4], runs[:, 3], runs[:, 2]))]
    first, stop, keys = runs[:, 2], runs[:, 3], runs[:, 1] - runs[:, 0]

    def least(values: np.ndarray) -> np.ndarray:
        """The least value of the rows of each run."""
        return np.minimum.reduceat(np.append(values, 0), runs[:, 2:4].ravel())[::2]

    tail = tails[leaf_first][:, [0, 1, 3]]
    spans = np.stack([runs[:, 0], keys, runs[:, 4]], 1)
    if window:
        # rows only get deeper, so a key that is hidden now stays hidden
        now = tails[:, 3] + tails[:, 2] - window + 1
        for span, needed in ((spans, least(now)), (tail, np.minimum.reduceat(now, leaf_first))):
            cut = np.clip(needed - span[:, 2], 0, span[:, 1])
            span += cut[:, None] * np.array([1, -1, 1])

    group = np.cumsum(_changes(runs[:, 2:4])) - 1
    leaves = leaf[stop - 1] - leaf[first] + 1
    total = np.bincount(group, spans[:, 1])[group]
    shared = total * (leaves - 1) > SHARE_FROM
    count = np.where(shared, 1, leaves)
    which, number = _counted(count)
    below = leaf[first][which] + number
    rows = np.where(shared[which, None], runs[which, 2:4], leaf_rows[below])
    out = np.concatenate([np.hstack([rows, spans[which]]), np.hstack([leaf_rows, tail])])
    out = out[out[:, 3] > 0]
    return out[np.lexsort((out[:, 4], out[:, 1], out[:, 0]))]


def _in_blocks(spans: np.ndarray, rows: int, few: int, most: int) -> np.ndarray:
    """Cuts spans by the block of rows that reads them, sorted; int64 [.., 7].

    Columns are (first row and stop row of the block, first key, keys, depth, first row, stop row).
    The rows of a span with at most `few` are a block; other spans are in every block of at most
    `most` rows that they reach into. Blocks are cut where rows share few keys.
    """
    # a block reads all its spans one after another, so each of its rows has one partial result
    first, stop, keys = spans[:, 0], spans[:, 1], spans[:, 3]
    is_wide = stop - first > few
    # keys of wide spans that a row has in common with the one before it
    shared = np.zeros(rows + 2, np.int64)
    np.add.at(shared, first[is_wide] + 1, keys[is_wide])
    np.subtract.at(shared, stop[is_wide], keys[is_wide])
    cuts = loops.tile_costs.cheapest_cuts(shared.cumsum()[:-1], most, STEP)
    begin = np.searchsorted(cuts, first, "right") - 1
    end = np.searchsorted(cuts, stop)
    span_of, number = _counted(np.where(is_wide, end - begin, 1))
    block = begin[span_of] + number
    bounds = np.where(
        is_wide[span_of, None], np.stack([cuts[block], cuts[block + 1]], 1), spans[span_of, :2]
    )
    out = np.hstack([bounds, spans[span_of][:, [2, 3, 4, 0, 1]]])
    return out[np.lexsort((out[:, 4], out[:, 1], out[:, 0]))]
