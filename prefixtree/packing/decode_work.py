"""`DecodeWork`: the work list of attention from new tokens to keys kept in a pool.

What a step reads depends on tensors of fixed size alone, so one CUDA graph serves all steps, and
all forests that fit.

Legend: B rows (query tokens of a forward), N runs, H query heads, Hk kv heads.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from prefixtree import loops
from prefixtree.packing.transfers import lasting, move

# a run of keys is read once for all rows below it if that saves more than so many reads of a key
# per head; otherwise every row reads it with its tail. A starting rule, not measured yet
SHARE_FROM = 512
# Pairs of (item, kv head) per multiprocessor that the length of items aims at, and the shortest
# item: its partial result is as large as 2 or 4 of its keys and values, written and read once
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


class DecodeTables(NamedTuple):
    """The tensors of a work list, as kernels read them: int32 unless said.

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

    def __init__(
        self,
        capacity: Capacity,
        num_keys: int,
        device: torch.device,
        window: int,
        group: int,
        kv_heads: int,
        live: torch.Tensor | None,
        chunk: int | None,
    ) -> None:
        """An empty list; see `build`."""
        self.capacity, self.device, self.window = capacity, device, window
        self.block = max(1, WIDE // group)
        self.narrow_block = max(1, NARROW // group)
        self.num_keys, self._kv_heads, self._chunk = num_keys, kv_heads, chunk
        rows = capacity.rows
        if live is not None and (
            live.dtype != torch.bool or live.shape != (rows,) or live.device != device
        ):
            raise ValueError(
                f"live must be bool [{rows}] on {device}, one per row of the capacity, got "
                f"{live.dtype} {list(live.shape)} on {live.device}"
            )
        self._given_live = live is not None
        shapes: list[tuple[int, ...]] = [
            (capacity.wide, 5),
            (capacity.narrow, 5),
            (capacity.pieces, 3),
        ]
        shapes += [(rows + 1,), (capacity.slots,), (rows, 3), (rows,)]
        # addresses that are multiples of 64 bytes, in one tensor: one copy fills them all
        self._sizes = [-(-int(np.prod(shape)) // 16) * 16 for shape in shapes]
        self._shapes = shapes
        self._flat = torch.zeros(sum(self._sizes), dtype=torch.int32, device=device)
        wide, narrow, pieces, slot_ptr, slots, tails, self._written = self._views(self._flat)
        if live is None:
            live = torch.zeros(rows, dtype=torch.bool, device=device)
        # changed by a step, so apart from what a step only reads
        written = torch.zeros(rows, dtype=torch.int32, device=device)
        self.tables = DecodeTables(wide, narrow, pieces, slot_ptr, slots, tails, written, live)

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
    ) -> DecodeWork:
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
                their key, see their keys and go on. The caller changes it in place. Default: all
                rows of `tails`, and every one of them must have room.
            capacity: room for other rows and runs that `refill` may bring. Default: what these
                need.
            num_keys: keys of the pools, beyond which runs and tails are refused. Default: as many
                as these runs and tails reach to.
            chunk: most keys of an item. Default: so many that the device's multiprocessors have
                about 4 programs each; on a CPU, items are not cut.

        Raises:
            ValueError: runs and tails that do not fit together; a capacity that is too small.
        """
        device = torch.empty(0, device=device).device
        if window is not None and window < 1:
            raise ValueError(f"window must be None or at least 1, got {window}")
        if group < 1 or kv_heads < 1:
            raise ValueError(f"group and kv_heads must be at least 1, got {group} and {kv_heads}")
        if num_keys is None:
            ends = (_table("runs", runs, 5)[:, 1], _table("tails", tails, 4)[:, :2].sum(1))
            num_keys = int(max(end.max(initial=0) for end in ends))
        numbers = device, window or 0, group, kv_heads
        # of its numbers alone, to count
        plan = cls(Capacity(len(tails), 0, 0, 0, 0), num_keys, *numbers, None, chunk)
        capacity = capacity or plan.needs(runs, tails)
        work = cls(capacity, num_keys, *numbers, live, chunk)
        work.refill(runs, tails)
        return work

    def needs(self, runs: np.ndarray, tails: np.ndarray) -> Capacity:
        """The capacity that these runs and tails take in a list of this kind.

        Raises:
            ValueError: they do not fit together.
        """
        return self._plan(runs, tails)[0]

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
        needed, tails, streams, chunk, ptr = self._plan(runs, tails)
        if not self.capacity.holds(needed):
            raise ValueError(
                f"a work list for {self.capacity} cannot hold {needed}; build another DecodeWork, "
                "with a capacity that holds both"
            )
        if not self._given_live and (tails[:, 2] >= tails[:, 1]).any():
            row = int(np.flatnonzero(tails[:, 2] >= tails[:, 1])[0])
            raise ValueError(
                f"tails[{row}] has {tails[row, 2]} keys written and room for {tails[row, 1]}: a "
                "live row writes one more; give it more room, or `live` without this row"
            )
        host = torch.zeros(len(self._flat), dtype=torch.int32)
        wide, narrow, pieces, slot_ptr, slots, tail, written = (
            view.numpy() for view in self._views(host)
        )
        rows = len(tails)
        slot_ptr[: rows + 1] = ptr
        where = wide, narrow, pieces, slot_ptr[: rows + 1], slots
        self._cut(streams, chunk, True, *where)
        slot_ptr[rows + 1 :] = slot_ptr[rows]
        tail[:rows], written[:rows] = tails[:, [0, 1, 3]], tails[:, 2]
        self._flat.copy_(move(host, self.device))
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

    # ---- the plan on the host --------------------------------------------------------------------

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        parts = flat.split(self._sizes)
        return [
            part[: int(np.prod(shape))].view(shape)
            for part, shape in zip(parts, self._shapes, strict=True)
        ]

    def _plan(self, runs: Any, tails: Any) -> tuple[Capacity, np.ndarray, Any, int, np.ndarray]:
        """-> what is needed, the tails, streams, the length of items, slots of each row."""
        runs, tails = _table("runs", runs, 5), _table("tails", tails, 4)
        runs = runs[runs[:, 1] > runs[:, 0]]
        _check(runs, tails, self.num_keys)
        runs = runs[np.lexsort((runs[:, 4], runs[:, 3], runs[:, 2]))]
        leaf, leaf_start = loops.decode_items.leaves_of(tails)
        bad, why = loops.decode_items.first_bad_run(runs, tails, leaf)
        if bad >= 0:
            wrong = {
                1: "ends between two rows that write into one tail",
                2: "holds keys that are deeper than the first key of a tail below it",
            }
            raise ValueError(f"the run {runs[bad].tolist()} {wrong[why]}")
        streams = loops.decode_items.streams(runs, tails, leaf, leaf_start, self.window, SHARE_FROM)
        chunk = self._chunk or self._length(loops.decode_items.reads(*streams, self.block))
        ptr = np.zeros(len(tails) + 1, np.int32)
        table, none = np.empty((0, 5), np.int32), np.empty(0, np.int32)
        nothing = table, table, np.empty((0, 3), np.int32), ptr, none
        counts = self._cut(streams, chunk, False, *nothing)
        return Capacity(len(tails), *map(int, counts)), tails, streams, chunk, ptr

    def _length(self, reads: int) -> int:
        """Keys of an item, so that the device has enough of them."""
        if self.device.type != "cuda":
            return _UNCUT
        processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        length = -(-reads * self._kv_heads // (PROGRAMS * processors))
        return max(SHORTEST, -(-length // STEP) * STEP)

    def _cut(self, streams: Any, chunk: int, fill: bool, *arrays: np.ndarray) -> Any:
        step = min(STEP, chunk)
        blocks = self.block, self.narrow_block
        return loops.decode_items.items(*streams, *blocks, chunk, step, fill, *arrays)


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
    if bad.any():
        row = runs[int(np.flatnonzero(bad)[0])].tolist()
        raise ValueError(
            f"the run {row} is none: expected keys of a pool of {num_keys}, some of the "
            f"{len(tails)} rows, and a depth of 0 or more"
        )
    bad = (tails < 0).any(1) | (tails[:, 2] > tails[:, 1])
    bad |= tails[:, 0] + tails[:, 1] > num_keys
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        raise ValueError(
            f"tails[{row}] is {tails[row].tolist()}: expected room in a pool of {num_keys} keys, "
            "no more keys written than there is room for, and no negative numbers"
        )
