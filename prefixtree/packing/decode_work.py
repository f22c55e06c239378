"""`DecodeWork`: the work list of attention from new tokens to keys kept in a pool.

What a step reads depends on tensors of fixed size alone, so one CUDA graph serves all steps, and
all forests that fit.

Legend: B rows (query tokens of a forward), N runs, H query heads, Hk kv heads.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from prefixtree import loops
from prefixtree.packing.transfers import lasting, move

# a run of keys is read once for all rows below it if that saves more than so many reads of a key
# per head; otherwise every row reads it with its tail. A starting rule, not measured yet
SHARE_FROM = 512
# Pairs of (item, kv head) per multiprocessor that the length of items aims at, and the keys of the
# shortest item: a row's partial result takes as many bytes as 4 keys and values (bf16, 4 query
# heads per kv head), and is written and read once
PROGRAMS, SHORTEST = 4, 128
# keys of an item are a multiple of this where they can be: of a tile of keys
STEP = 64
# query heads x rows of an item, up to which it is narrow, and at most
NARROW, WIDE = 16, 64
# pool indices are int32
_MOST_KEYS = 2**31 - 1
_UNCUT = 1 << 40


@dataclass(frozen=True)
class Capacity:
    """What a work list has room for.

    Attributes:
        rows: rows, the number that q has.
        wide, narrow: items of many and of few rows.
        pieces: runs of keys, cut at the ends of items.
        slots: partial results, one per row of an item; a slot takes H x (Dv + 1) float32 while a
            call runs on a GPU.
    """

    rows: int
    wide: int
    narrow: int
    pieces: int
    slots: int

    def holds(self, other: Capacity) -> bool:
        """Whether nothing of `other` is more."""
        return all(a >= b for a, b in zip(astuple(self), astuple(other), strict=True))

    def grown(self, least: Capacity) -> Capacity:
        """At least `least`, and room for up to twice as much beside rows: lists that are alike fit.

        Both kinds of items are among it, so a step launches the same kernels for all of them.
        """
        pairs = zip(astuple(self)[1:], astuple(least)[1:], strict=True)
        rest = [max(8, 1 << (need - 1).bit_length(), other) for need, other in pairs]
        return Capacity(max(self.rows, least.rows), *rest)


class DecodeTables(NamedTuple):
    """The tensors of a work list, as kernels read them: int32, except `live`.

    Attributes:
        wide, narrow: [.., 5], items (first row, rows, first piece, stop piece, first slot); those
            that are not used have no rows.
        pieces: [.., 3], (first key, keys, depth of the first key); keys of a tail reach to the end
            of its room, written or not.
        slot_ptr, slots: [B + 1] and [..], the slots of each row.
        tails: [B, 3], (first key, room, depth of the first key).
        written: [B], keys in each tail.
        live: bool [B].
    """

    wide: torch.Tensor
    narrow: torch.Tensor
    pieces: torch.Tensor
    slot_ptr: torch.Tensor
    slots: torch.Tensor
    tails: torch.Tensor
    written: torch.Tensor
    live: torch.Tensor


@dataclass(frozen=True)
class _Plan:
    """Streams: keys by the rows that read them together, and how they are cut into items.

    Attributes:
        spans, start, size, most: as `loops.decode_items.fill` takes them.
        tails: int64 [B, 4], checked.
        slot_ptr: int32 [B + 1].
        needed: the capacity that this takes.
    """

    spans: np.ndarray
    start: np.ndarray
    size: np.ndarray
    most: np.ndarray
    tails: np.ndarray
    slot_ptr: np.ndarray
    needed: Capacity


class DecodeWork:
    """Which keys of a pool each row sees, laid out for `cascade_attention`.

    A row is a query token. It sees its runs, which other rows may see too, and the written keys of
    its tail, the last of which is its own. Make one with `build`.

    Attributes:
        tables: the tensors that kernels read, on the device.
        capacity: what they have room for.
        window: the sliding window, 0 for none.
        block, narrow_block: most rows of an item, and of a narrow one.
        num_keys: keys that the pools must have.
    """

    tables: DecodeTables
    capacity: Capacity
    window: int
    block: int
    narrow_block: int
    num_keys: int
    _device: torch.device
    _kv_heads: int
    _chunk: int | None
    _given_live: bool
    _flat: torch.Tensor
    _written: torch.Tensor
    _shapes: list[tuple[int, ...]]
    _sizes: list[int]

    @classmethod
    @lasting
    def build(
        cls,
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
    ) -> Self:
        """Lays out the keys of a forward's rows.

        Args:
            runs: int64 [N, 5], each (first key in the pool, stop key, first row, stop row, depth of
                the first key): keys that all of these rows see. The depth is the position of a
                token on its path. Runs of no keys are left out.
            tails: int64 [B, 4], each (first key of the row's tail in the pool, keys it has room
                for, keys written, depth of its first key). Rows that write into the same tail are
                neighbours and see the same runs: tokens of an append, each with one more key
                written than the one before.
            device: of the pools and queries. Default: "cpu".
            window: the sliding window of the layers that use this list. Default: no window.
            group: H / Hk of the layers. Another number costs speed, no exactness. Default: 4.
            kv_heads: Hk, as `group`. Default: 8.
            live: bool [rows of the capacity] on the device, kept and not copied: which rows write
                their key, see their keys and go on. The caller changes it in place; tokens of an
                append stop together. Default: all rows of `tails`, which must have room.
            capacity: room for other rows and runs that `refill` may bring. Default: what these
                need.
            num_keys: keys of the pools, beyond which runs and tails are refused. Default: as many
                as these runs and tails reach to.
            chunk: most keys of an item. Default: so many that the device's multiprocessors have
                about 4 programs each; on a CPU, items are not cut.

        Raises:
            ValueError: runs and tails that do not fit together; a capacity that is too small.
        """
        if window is not None and window < 1:
            raise ValueError(f"window must be None or at least 1, got {window}")
        if group < 1 or kv_heads < 1:
            raise ValueError(f"group and kv_heads must be at least 1, got {group} and {kv_heads}")
        self = cls()
        self._device = device = torch.empty(0, device=device).device
        self._kv_heads, self._chunk, self._given_live = kv_heads, chunk, live is not None
        self.window = window or 0
        self.block, self.narrow_block = max(1, WIDE // group), max(1, NARROW // group)
        if num_keys is None:
            ends = _table("runs", runs, 5)[:, 1], _table("tails", tails, 4)[:, :2].sum(1)
            num_keys = int(max(end.max(initial=0) for end in ends))
        self.num_keys = num_keys
        self.capacity = room = capacity or self.needs(runs, tails)
        if live is None:
            live = torch.zeros(room.rows, dtype=torch.bool, device=device)
        if live.dtype != torch.bool or live.shape != (room.rows,) or live.device != device:
            raise ValueError(
                f"live must be bool [{room.rows}] on {device}, one per row of the capacity, got "
                f"{live.dtype} {list(live.shape)} on {live.device}"
            )
        shapes = [(room.wide, 5), (room.narrow, 5), (room.pieces, 3), (room.rows + 1,)]
        self._shapes = [*shapes, (room.slots,), (room.rows, 3), (room.rows,)]
        # addresses that are multiples of 64 bytes, in one tensor: one copy fills them all
        self._sizes = [-(-math.prod(shape) // 16) * 16 for shape in self._shapes]
        self._flat = torch.zeros(sum(self._sizes), dtype=torch.int32, device=device)
        wide, narrow, pieces, slot_ptr, slots, tail, self._written = self._views(self._flat)
        # changed by a step, so apart from what a step only reads
        written = torch.zeros(room.rows, dtype=torch.int32, device=device)
        self.tables = DecodeTables(wide, narrow, pieces, slot_ptr, slots, tail, written, live)
        self.refill(runs, tails)
        return self

    def needs(self, runs: np.ndarray, tails: np.ndarray) -> Capacity:
        """The capacity that these runs and tails take in a list of this kind.

        Raises:
            ValueError: they do not fit together.
        """
        return self._plan(runs, tails).needed

    @lasting
    def refill(self, runs: np.ndarray, tails: np.ndarray) -> None:
        """Replaces the contents in place; the tensors stay where they are. Waits for no GPU.

        Args:
            runs, tails: as in `build`. Rows of the capacity beyond those of `tails` are not live
                (a `live` of the caller must say so itself).

        Raises:
            ValueError: they do not fit together, or not into the capacity (`needs` tells before);
                nothing has changed then.
        """
        plan = self._plan(runs, tails)
        tails, rows = plan.tails, len(plan.tails)
        if not self.capacity.holds(plan.needed):
            raise ValueError(
                f"a work list for {self.capacity} cannot hold {plan.needed}; build another "
                "DecodeWork, with a capacity that holds both"
            )
        if not self._given_live and (full := tails[:, 2] >= tails[:, 1]).any():
            row = int(full.argmax())
            raise ValueError(
                f"tails[{row}] has {tails[row, 2]} keys written and room for {tails[row, 1]}: a "
                "live row writes one more; give it more room, or `live` without this row"
            )
        host = torch.zeros(len(self._flat), dtype=torch.int32)
        wide, narrow, pieces, slot_ptr, slots, tail, written = (
            view.numpy() for view in self._views(host)
        )
        slot_ptr[: rows + 1], slot_ptr[rows + 1 :] = plan.slot_ptr, plan.slot_ptr[-1]
        cuts = plan.spans, plan.start, plan.size, plan.most, self.narrow_block, slot_ptr
        loops.decode_items.fill(*cuts, slots, wide, narrow, pieces)
        tail[:rows], written[:rows] = tails[:, [0, 1, 3]], tails[:, 2]
        self._flat.copy_(move(host, self._device))
        self.tables.written.copy_(self._written)
        if not self._given_live:
            self.tables.live[:rows] = True
            self.tables.live[rows:] = False

    def advance(self) -> None:
        """One more key is written in the tail of every live row. Runs on the device."""
        self.tables.written.add_(self.tables.live)

    @property
    def num_rows(self) -> int:
        """Rows that q, k and v have: those of the capacity."""
        return self.capacity.rows

    @property
    def positions(self) -> torch.Tensor:
        """int64 [B] on the device: the depth of the key that each row writes next."""
        return (self.tables.tails[:, 2] + self.tables.written).long()

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        parts = zip(flat.split(self._sizes), self._shapes, strict=True)
        return [part[: math.prod(shape)].view(shape) for part, shape in parts]

    def _plan(self, runs: Any, tails: Any) -> _Plan:
        runs, tails = _table("runs", runs, 5), _table("tails", tails, 4)
        runs = runs[runs[:, 1] > runs[:, 0]]
        _check(runs, tails, self.num_keys)
        spans = _spans(runs, tails, self.window)
        start = np.flatnonzero(_changes(spans[:, :2]))
        first, stop = spans[start, 0], spans[start, 1]
        rows, keys = stop - first, np.add.reduceat(spans[:, 3], start)
        blocks = -(-rows // self.block)
        most = -(-rows // np.maximum(blocks, 1))
        chunk = self._chunk or self._length(int((keys * blocks).sum()))
        step = min(STEP, chunk)
        size = -(-keys // (-(-keys // chunk) * step)) * step
        parts = -(-keys // size)
        wide = parts * ((blocks - 1) * (most > self.narrow_block))
        wide += parts * (rows - most * (blocks - 1) > self.narrow_block)
        per_row = np.zeros(len(tails) + 1, np.int64)
        np.add.at(per_row, first, parts)
        np.add.at(per_row, stop, -parts)
        slot_ptr = np.concatenate([[0], np.cumsum(np.cumsum(per_row[:-1]))]).astype(np.int32)
        start = np.append(start, len(spans))
        # a cut adds a piece, unless it is between two spans
        counts = wide.sum(), (parts * blocks - wide).sum(), len(spans) + (parts - 1).sum()
        needed = Capacity(len(tails), *map(int, (*counts, slot_ptr[-1])))
        return _Plan(spans, start, size, most, tails, slot_ptr, needed)

    def _length(self, reads: int) -> int:
        """Keys of an item, so that the device has enough of them."""
        if self._device.type != "cuda":
            return _UNCUT
        processors = torch.cuda.get_device_properties(self._device).multi_processor_count
        length = -(-reads * self._kv_heads // (PROGRAMS * processors))
        return max(SHORTEST, -(-length // STEP) * STEP)


def _changes(table: np.ndarray) -> np.ndarray:
    """bool, where a row differs from the one before it; the first does."""
    out = np.ones(len(table), bool)
    out[1:] = (table[1:] != table[:-1]).any(1)
    return out


def _spans(runs: np.ndarray, tails: np.ndarray, window: int) -> np.ndarray:
    """int64 [E, 5], (first row, stop row, first key, keys, depth), sorted: what rows read together.

    Neighbouring rows that write into one tail are a leaf. Runs of the same rows are read by these
    rows if that saves enough, otherwise by each leaf below, with its tail.
    """
    # a tail without room may begin where another one does
    begins = _changes(tails[:, [0, 3]]) | (tails[:, 1] == 0)
    begins[1:] |= tails[:-1, 1] == 0
    leaf, leaf_first = np.cumsum(begins) - 1, np.flatnonzero(begins)
    leaf_rows = np.stack([leaf_first, np.append(leaf_first[1:], len(tails))], 1)

    runs = runs[np.lexsort((runs[:, 4], runs[:, 3], runs[:, 2]))]
    first, stop, keys = runs[:, 2], runs[:, 3], runs[:, 1] - runs[:, 0]
    _refuse(runs, ~np.append(begins, True)[runs[:, 2:4]].all(1), "ends inside the rows of one tail")

    def least(values: np.ndarray) -> np.ndarray:
        """The least value of the rows of each run."""
        return np.minimum.reduceat(np.append(values, 0), runs[:, 2:4].ravel())[::2]

    deeper = runs[:, 4] + keys > least(tails[:, 3])
    _refuse(runs, deeper, "holds keys that are deeper than the first key of a tail below it")
    tail = tails[leaf_first][:, [0, 1, 3]]
    spans = np.stack([runs[:, 0], keys, runs[:, 4]], 1)
    if window:
        # rows only get deeper, so what is hidden now stays hidden
        now = tails[:, 3] + tails[:, 2] - window + 1
        for span, needed in ((spans, least(now)), (tail, np.minimum.reduceat(now, leaf_first))):
            cut = np.clip(needed - span[:, 2], 0, span[:, 1])
            span += cut[:, None] * np.array([1, -1, 1])

    group = np.cumsum(_changes(runs[:, 2:4])) - 1
    leaves = leaf[stop - 1] - leaf[first] + 1
    total = np.bincount(group, spans[:, 1])[group]
    shared = total * (leaves - 1) > SHARE_FROM
    count = np.where(shared, 1, leaves)
    which = np.repeat(np.arange(len(runs)), count)
    below = leaf[first][which] + np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)
    rows = np.where(shared[which, None], runs[which, 2:4], leaf_rows[below])
    out = np.concatenate([np.hstack([rows, spans[which]]), np.hstack([leaf_rows, tail])])
    out = out[out[:, 3] > 0]
    return out[np.lexsort((out[:, 4], out[:, 1], out[:, 0]))]


def _refuse(table: np.ndarray, bad: np.ndarray, why: str, name: str = "the run ") -> None:
    """Raises for the first bad row of a table."""
    if bad.any():
        row = int(bad.argmax())
        raise ValueError(f"{name}{table[row].tolist()} {why}")


def _table(name: str, values: Any, columns: int) -> np.ndarray:
    out = np.ascontiguousarray(values)
    if out.ndim != 2 or out.shape[1] != columns or out.dtype.kind not in "iu":
        raise ValueError(
            f"{name} must be integers [.., {columns}], got {out.dtype} {list(out.shape)}"
        )
    return out.astype(np.int64, copy=False)


def _check(runs: np.ndarray, tails: np.ndarray, num_keys: int) -> None:
    """Raises where a run or a tail is none by itself."""
    if len(tails) == 0:
        raise ValueError("tails has no rows; a forward has at least one")
    if num_keys > _MOST_KEYS:
        raise ValueError(f"a pool has at most 2^31 - 1 keys, got {num_keys}")
    bad = (runs[:, 0] < 0) | (runs[:, 4] < 0) | (runs[:, 1] > num_keys)
    bad |= (runs[:, 2] < 0) | (runs[:, 3] > len(tails)) | (runs[:, 2] >= runs[:, 3])
    where = f"a pool of {num_keys} keys, some of the {len(tails)} rows, and a depth of 0 or more"
    _refuse(runs, bad, f"is none: expected keys of {where}")
    bad = (tails < 0).any(1) | (tails[:, 2] > tails[:, 1]) | (tails[:, :2].sum(1) > num_keys)
    why = f"is none: expected room in a pool of {num_keys} keys, and no more keys written than room"
    _refuse(tails, bad, why, "the tail ")
