"""Block lists, by which flash-attn-4's kernels read a mask: the tiles to visit, from `BlockTables`.

For every query tile (in the backward: every key tile) lists are two counts and two rows of tile
numbers: tiles that need the mask, and tiles that do not. A row is as long as the longest list. So
index arrays are [rows, longest], quadratic only if the forest is. The host builds and sends runs
alone, and the device expands them.

If no tree branches, the kernels read sequences of variable lengths. Their tiles begin anew with
each sequence. Those of block lists lie on one grid over all tokens, so a tile may hold the end of
one sequence and the beginning of the next.

Legend: T packed tokens, R rows (tiles of one kind).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from prefixtree.errors import UnsupportedError
from prefixtree.packing.block_tables import BlockTables, TileShape
from prefixtree.packing.copies import lasting, move, move_all
from prefixtree.packing.host_mask import HostMask

# places in an index array are sent as int32 numbers
MOST_ENTRIES = 2**31 - 1


@dataclass(frozen=True)
class Tiles:
    """Query tokens and keys of flash-attn-4's tiles, which its block lists must match."""

    queries: int
    forward_keys: int
    backward_keys: int


@dataclass(frozen=True, eq=False)
class Lists:
    """The lists of one direction, int32, in shapes that flash-attn-4 broadcasts over heads."""

    # [1, 1, R]; indices after a row's count are never read
    partial_count: torch.Tensor
    # [1, 1, R, longest list], ascending; rows may overlap in memory
    partial_index: torch.Tensor
    # of the same shapes
    full_count: torch.Tensor
    full_index: torch.Tensor


@dataclass(frozen=True, eq=False)
class ForestLists:
    """The arrays that the kernels read in addition to q, k and v, for one forest on one device."""

    # key tiles of each query tile
    forward: Lists
    # query tiles of each key tile
    backward: Lists
    # int32 [T + a tile]: subtree_end[k] - k, then zeros for the lanes after the last key; query q
    # sees key k exactly when q - k, as an unsigned number, is less
    spans: torch.Tensor
    # int32 like `spans`, each token's on its path, then zeros; None without a window; with
    # `query_tokens`, those of the rows of q
    positions: torch.Tensor | None
    # int32 like `spans`, the first position from which a token's window hides it; or None
    reach: torch.Tensor | None
    # the longest list's share of all query tiles in `backward`'s lists
    longest_list_share: float
    # query tokens in the tiles of one of `backward`'s lists, on average
    mean_list: float
    # int32 [rows of q + a tile], if query tiles are of the rows of q: the packed token of each,
    # then T, which sees no key; None if they are of all packed tokens
    query_tokens: torch.Tensor | None = None


# lists live as long as their mask
_made: weakref.WeakKeyDictionary[HostMask, dict[Any, ForestLists]] = weakref.WeakKeyDictionary()


def lists_of(mask: HostMask, tiles: Tiles, window: int, device: torch.device) -> ForestLists:
    """Builds lists once per (tiles, window, device); refuses more than `MOST_ENTRIES` entries."""
    kept = _made.setdefault(mask, {})
    if (key := (tiles, window, device)) not in kept:
        kept[key] = _build(mask, tiles, window, device)
    return kept[key]


@lasting
def _build(mask: HostMask, tiles: Tiles, window: int, device: torch.device) -> ForestLists:
    host = torch.device("cpu")
    on_grid = mask.rows_on_grid(tiles.queries)
    source = mask if on_grid else mask.whole
    tables = source.tables(TileShape(tiles.queries, tiles.forward_keys), window, host)
    back = source.tables(TileShape(tiles.queries, tiles.backward_keys), window, host)
    # after its diagonal key tile j has the query tiles j + 1, j + 2, .. in full: one row of numbers
    # serves all key tiles, each from another place on, and stays linear in T. Not so if a window or
    # a part takes tiles out of the middle, or tiles of q and k differ in length
    linear = window == 0 and tiles.queries == tiles.backward_keys and not mask.is_subset
    of_queries, of_keys = _forward_spans(tables), _backward_spans(back, linear)
    keys = len(back.k_tiles)
    if on_grid:
        is_asked = np.ones(len(tables.q_tiles), bool)
        unseen = np.setdiff1d(np.arange(keys), np.concatenate([row for row, *_ in of_keys]))
        # a key tile that no query sees gets the first query tile, in which the mask hides all of it
        of_keys = _with(of_keys[0], unseen, np.zeros_like(unseen)), of_keys[1]
    else:
        is_asked = mask.asked_tiles(tiles.queries)
    if not is_asked.all():
        of_queries = _of_asked_rows(of_queries, is_asked, tiles)
        of_keys = _of_asked_columns(of_keys, is_asked, tiles, keys)
    runs = [_runs(len(is_asked), *spans) for spans in of_queries]
    runs += [_runs(keys, *spans) for spans in of_keys]
    sent = move_all([part for r in runs for part in (r.count, r.place, r.jump)], device)
    arrays: list[torch.Tensor] = []
    for i, r in enumerate(runs):
        count, place, jump = sent[3 * i : 3 * i + 3]
        shared = linear and i == len(runs) - 1
        index = _following(r, device) if shared else _expanded(r, place, jump)
        arrays += [count.view(1, 1, -1), index]
    on = mask.on(device)
    spans = on["subtree_end"] - torch.arange(mask.num_tokens, dtype=torch.int32, device=device)
    room = (0, max(tiles.queries, tiles.forward_keys, tiles.backward_keys))
    positions = reach = query_tokens = None
    if on_grid:
        query_tokens = F.pad(on["query_tokens"], room, value=mask.num_tokens)
    if window:
        at = on["position_ids"]
        if on_grid:
            at = at.index_select(0, on["query_tokens"])
        positions = F.pad(at, room)
        reach = F.pad(on["position_ids"] + window, room)
    visits = (runs[2].count + runs[3].count).numpy()
    longest_list_share = int(visits.max(initial=0)) / max(1, int(visits.sum()))
    mean_list = int(visits.sum()) * tiles.queries / max(1, keys)
    forward, backward = Lists(*arrays[:4]), Lists(*arrays[4:])
    return ForestLists(
        forward,
        backward,
        F.pad(spans, room),
        positions,
        reach,
        longest_list_share,
        mean_list,
        query_tokens,
    )


# ---- runs of tiles, on the host ------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Runs:
    """The lists of one kind as runs of neighbouring tiles."""

    # a row of the index array is its column number plus a step function; from flat place `place`
    # (row x width + column) on, to the end of that row, `jump` is added

    width: int
    count: torch.Tensor  # int32 [R]
    place: torch.Tensor  # int32 [runs]
    jump: torch.Tensor  # int32 [runs]


def _runs(rows: int, row: np.ndarray, first: np.ndarray, end: np.ndarray) -> _Runs:
    """Makes runs of tiles [first, end), each of one row; rows ascend, runs may be empty."""
    kept = end > first
    row, first, length = row[kept], first[kept], (end - first)[kept].astype(np.int64)
    tiles_before = np.zeros(rows + 1, np.int64)
    np.add.at(tiles_before, row + 1, length)
    count = tiles_before[1:].copy()
    np.cumsum(tiles_before, out=tiles_before)
    width = max(1, int(count.max(initial=0)))
    if rows * width > MOST_ENTRIES:
        raise UnsupportedError(
            f"backend 'flash': its block lists would have {rows} x {width} entries, more than "
            "32 bits number; use backend='triton'"
        )
    column = np.cumsum(length) - length - tiles_before[row]
    offset = first - column
    jump = np.where(column > 0, offset - np.concatenate([offset[:1], offset[:-1]]), offset)
    arrays = (count, row.astype(np.int64) * width + column, jump)
    return _Runs(width, *(torch.from_numpy(array.astype(np.int32)) for array in arrays))


# runs [first, end) of tiles: the row that each belongs to, first, end
_Spans = tuple[np.ndarray, np.ndarray, np.ndarray]


def _forward_spans(tables: BlockTables) -> tuple[_Spans, _Spans]:
    """Lists the partial and the full key tiles of each query tile."""
    pointer, split, runs = (x.numpy() for x in (tables.q_ptr, tables.q_split, tables.q_runs))
    row = np.repeat(np.arange(len(split)), np.diff(pointer))
    partial = np.arange(len(runs)) >= split[row]
    return tuple(  # type: ignore[return-value]
        (row[of], runs[of, 0], runs[of, 1]) for of in (partial, ~partial)
    )


def _backward_spans(tables: BlockTables, linear: bool) -> tuple[_Spans, _Spans]:
    """Lists each key tile's partial and full query tiles; `linear`: the diagonal one is partial."""
    pointer, runs = tables.k_ptr.numpy(), tables.k_runs.numpy().copy()
    row = np.repeat(np.arange(len(tables.k_tiles)), np.diff(pointer))
    if linear:
        # a diagonal tile is full only at the end of the tokens, where a tile of one key has one
        # query
        runs[:, 1] = np.maximum(runs[:, 1], row + 1)
        runs[:, 2] = np.maximum(runs[:, 2], runs[:, 1])
    # a run is partial before its full part and after it
    partial = np.repeat(row, 2), runs[:, [0, 2]].reshape(-1), runs[:, [1, 3]].reshape(-1)
    return partial, (row, runs[:, 1], runs[:, 2])


# ---- parts whose rows of q are in no grid: query tiles without a row of q ------------------------
# No list may be empty: flash-attn-4 was checked with tiles that have at least one other.


def _of_asked_rows(
    spans: tuple[_Spans, _Spans], asked: np.ndarray, tiles: Tiles
) -> tuple[_Spans, _Spans]:
    """Gives a query tile that nobody asks for the tile on the diagonal alone, as partial."""
    partial, full = ((row[keep := asked[row]], a[keep], b[keep]) for row, a, b in spans)
    others = np.flatnonzero(~asked)
    return _with(partial, others, others * tiles.queries // tiles.forward_keys), full


def _of_asked_columns(
    spans: tuple[_Spans, _Spans], asked: np.ndarray, tiles: Tiles, keys: int
) -> tuple[_Spans, _Spans]:
    """Leaves out query tiles that nobody asks for; `keys` is the number of key tiles."""
    edges = np.flatnonzero(np.diff(asked.astype(np.int8), prepend=0, append=0))
    begins, ends = edges[::2], edges[1::2]
    cut_spans = []
    empty = np.ones(keys, bool)
    for row, first, end in spans:
        # the stretches of asked tiles that a run meets
        low = np.searchsorted(ends, first, side="right")
        count = np.maximum(np.searchsorted(begins, end, side="left") - low, 0)
        count[end <= first] = 0
        source = np.repeat(np.arange(len(row)), count)
        stretch = low[source] + np.arange(len(source)) - np.repeat(np.cumsum(count) - count, count)
        cut = np.maximum(first[source], begins[stretch]), np.minimum(end[source], ends[stretch])
        cut_spans.append((row[source], *cut))
        empty[row[source]] = False
    others = np.flatnonzero(empty)
    return _with(cut_spans[0], others, others * tiles.backward_keys // tiles.queries), cut_spans[1]


def _with(spans: _Spans, row: np.ndarray, tile: np.ndarray) -> _Spans:
    """Adds one tile for each of these rows, which have none."""
    rows, first, end = map(np.concatenate, zip(spans, (row, tile, tile + 1), strict=True))
    order = np.argsort(rows, kind="stable")
    return rows[order], first[order], end[order]


# ---- index arrays, on the device -----------------------------------------------------------------


def _expanded(runs: _Runs, place: torch.Tensor, jump: torch.Tensor) -> torch.Tensor:
    """Expands runs to an index array, int32 [1, 1, R, width]."""
    rows = len(runs.count)
    index = torch.zeros(rows * runs.width, dtype=torch.int32, device=place.device)
    index.scatter_(0, place.long(), jump)
    index = index.view(rows, runs.width).cumsum_(1)
    index += torch.arange(runs.width, dtype=torch.int32, device=place.device)
    return index[None, None]


def _following(runs: _Runs, device: torch.device) -> torch.Tensor:
    """Views row + 1, row + 2, .. as int32 [1, 1, R, width] in R + width - 1 numbers."""
    rows = len(runs.count)
    numbers = torch.arange(1, rows + runs.width, dtype=torch.int32, device=device)
    return numbers.as_strided((1, 1, rows, runs.width), (len(numbers), len(numbers), 1, 1))


@dataclass(frozen=True, eq=False)
class Chains:
    """The sequences of a forest without branches, on one device."""

    # int32 [sequences + 1], where each begins, then the number of tokens (`cu_seqlens`)
    starts: torch.Tensor
    # tokens
    longest: int

    def arguments(self, window: int) -> dict[str, Any]:
        """Names arguments of flash-attn-4's calls; `window` counts the query itself, 0 for none."""
        return {
            "cu_seqlens_q": self.starts,
            "cu_seqlens_k": self.starts,
            "max_seqlen_q": self.longest,
            "max_seqlen_k": self.longest,
            "causal": True,
            # flash-attn-4 counts the tokens before a query that it sees
            "window_size_left": window - 1 if window else None,
        }


# chains live as long as their mask
_chains: weakref.WeakKeyDictionary[HostMask, dict[torch.device, Chains]] = (
    weakref.WeakKeyDictionary()
)


def chains_of(mask: HostMask, device: torch.device) -> Chains | None:
    """Finds a mask's sequences once per device, without waiting for it; None if a tree branches."""
    if mask.chain_starts is None:
        return None
    kept = _chains.setdefault(mask, {})
    if device not in kept:
        kept[device] = _chains_from(mask.chain_starts, device)
    return kept[device]


@lasting
def _chains_from(starts: np.ndarray, device: torch.device) -> Chains:
    return Chains(move(torch.from_numpy(starts), device), int(np.diff(starts).max(initial=0)))
