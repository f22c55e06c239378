"""Block tables against the dense mask, pair by pair: the one checker of every table test.

Legend: T packed tokens, Tq query rows, NQ query tiles, NK key tiles.
"""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from prefixtree import BlockTables, TileShape, TreeMask
from prefixtree.loops.block_tables import CAUSAL, END, WINDOW

# in half full tiles, as BlockTables documents
FULL, PARTIAL = 2, 3
UNLISTED = -1


def assert_tables_exact(
    mask: TreeMask,
    shape: TileShape,
    window: int | None = None,
    tables: BlockTables | None = None,
) -> None:
    """Every statement of `BlockTables`' docstring, for `mask.tables(shape, window)` or the tables
    given: tiles partition rows and keys; forward and backward cover every visible pair once, with
    the compares it needs and, without a window, no others; costs, order, pieces and slots.
    """
    if tables is None:
        tables = mask.tables(shape, window)
    t = {field.name: getattr(tables, field.name).cpu().numpy() for field in fields(tables)}
    assert all(array.dtype == np.int32 for array in t.values())
    check_query_tiles(t, mask, shape)
    check_key_tiles(t, mask, shape)
    forward = listed_forward(t)
    check_pairs(forward, t, mask, shape, window, "forward")
    if window is None:
        check_no_needless_compare(forward, t, mask, shape)
    check_query_costs(forward, t)
    check_partial_tiles(t)
    check_key_spans(t, mask, shape)
    backward = listed_backward(t, window)
    check_pairs(backward, t, mask, shape, window, "backward")
    check_pieces(t, shape)
    if window is None:
        check_one_backward_run(t)
        check_backward_full_parts(backward, t, mask)


def shape_id(shape: TileShape) -> str:
    """A tile shape as the name of a case."""
    cut = "-cut" if shape.cut else ""
    return f"{shape.tile_q}x{shape.tile_k}{cut}-{shape.piece_tiles}"


# ---- tiles ---------------------------------------------------------------------------------------


def query_tokens(mask: TreeMask) -> np.ndarray:
    """Packed index of each row of q [Tq]."""
    if mask.query_tokens is None:
        return np.arange(mask.num_tokens)
    return mask.query_tokens.cpu().numpy()


def check_query_tiles(t: dict[str, np.ndarray], mask: TreeMask, shape: TileShape) -> None:
    start, row, length = t["q_tiles"].T
    rows = query_tokens(mask)
    assert length.sum() == len(rows)
    assert ((length >= 1) & (length <= shape.tile_q)).all()
    assert (row == np.cumsum(length) - length).all(), "query tiles do not partition the rows"
    named = [np.arange(s, s + n) for s, n in zip(start, length, strict=True)]
    assert (np.concatenate([np.empty(0, int), *named]) == rows).all(), "a tile holds other tokens"
    # a tile may be short only where its run of packed tokens ends
    for i in np.flatnonzero(length[:-1] < shape.tile_q):
        assert start[i] + length[i] <= start[i + 1]
        starts = {r for r, _, _ in mask.host.query_runs.tolist()}
        assert start[i + 1] in starts, "a query tile is short inside a run"


def check_key_tiles(t: dict[str, np.ndarray], mask: TreeMask, shape: TileShape) -> None:
    start, length = t["k_tiles"].T
    assert length.sum() == mask.num_tokens
    assert ((length >= 1) & (length <= shape.tile_k)).all()
    assert (start == np.cumsum(length) - length).all(), "key tiles do not partition the keys"
    ends = mask.subtree_end.cpu().numpy()
    last = start[:-1] + length[:-1]
    if shape.cut:
        border = ends[last - 1] != ends[last]
        assert (border | (length[:-1] == shape.tile_k)).all(), "a tile was cut inside a node"
    else:
        assert (length[:-1] == shape.tile_k).all(), "a tile is off the grid"


# ---- coverage ------------------------------------------------------------------------------------


def listed_forward(t: dict[str, np.ndarray]) -> np.ndarray:
    """[NQ, NK]: compares of each tile pair listed, UNLISTED elsewhere."""
    num_q, num_k = len(t["q_tiles"]), len(t["k_tiles"])
    kinds = np.full((num_q, num_k), UNLISTED)
    ptr, split, runs = t["q_ptr"], t["q_split"], t["q_runs"]
    assert ptr[0] == 0
    assert ptr[-1] == len(runs)
    assert (np.diff(ptr) >= 0).all()
    assert len(split) == num_q
    for i in range(num_q):
        assert ptr[i] <= split[i] <= ptr[i + 1]
        for r in range(ptr[i], ptr[i + 1]):
            first, end, kind = runs[r]
            assert 0 <= first < end <= num_k, f"run {r} is empty or out of range"
            assert (kind == 0) == (r < split[i]), f"run {r} stands on the wrong side of the split"
            assert (kinds[i, first:end] == UNLISTED).all(), f"query tile {i} lists a tile twice"
            kinds[i, first:end] = kind
            if r not in (ptr[i], split[i]):
                before = runs[r - 1]
                assert before[1] <= first, "runs do not ascend"
                assert before[1] < first or before[2] != kind, "runs that touch were not joined"
    return kinds


def check_partial_tiles(t: dict[str, np.ndarray]) -> None:
    """The partial runs, tile by tile."""
    starts = t["k_tiles"][:, 0]
    ptr, rows = t["partial_ptr"], t["partial_tiles"]
    assert ptr[0] == 0
    assert ptr[-1] == len(rows)
    for i in range(len(t["q_tiles"])):
        runs = t["q_runs"][t["q_split"][i] : t["q_ptr"][i + 1]]
        tiles = [tile for first, end, _ in runs for tile in range(first, end)]
        assert rows[ptr[i] : ptr[i + 1], 0].tolist() == tiles
        assert rows[ptr[i] : ptr[i + 1], 1].tolist() == starts[tiles].tolist()


def check_key_spans(t: dict[str, np.ndarray], mask: TreeMask, shape: TileShape) -> None:
    """subtree_end[k] - k of the keys of each tile, nothing behind them."""
    ends = mask.subtree_end.cpu().numpy()
    assert t["k_spans"].shape == (len(t["k_tiles"]), shape.tile_k)
    for (start, length), spans in zip(t["k_tiles"], t["k_spans"], strict=True):
        keys = np.arange(start, start + length)
        assert (spans[:length] == ends[keys] - keys).all()
        assert (spans[length:] == 0).all()


def listed_backward(t: dict[str, np.ndarray], window: int | None) -> np.ndarray:
    """[NQ, NK]: as `listed_forward`, from the runs of all pieces."""
    kinds = np.full((len(t["q_tiles"]), len(t["k_tiles"])), UNLISTED)
    far = WINDOW if window else 0
    ptr = t["k_ptr"]
    assert ptr[0] == 0
    assert ptr[-1] == len(t["k_runs"])
    assert (np.diff(ptr) >= 0).all()
    for j, begin_run, end_run, _, _ in t["pieces"]:
        assert ptr[j] <= begin_run <= end_run <= ptr[j + 1], "a piece holds another tile's runs"
        for first, begin, stop, end in t["k_runs"][begin_run:end_run]:
            assert 0 <= first <= begin <= stop <= end <= len(kinds)
            assert first < end, "a run is empty"
            assert (kinds[first:end, j] == UNLISTED).all(), f"key tile {j} lists a tile twice"
            kinds[first:begin, j] = CAUSAL | END | far
            kinds[begin:stop, j] = 0
            kinds[stop:end, j] = END | far
    return kinds


def visible_pairs(t: dict[str, np.ndarray], mask: TreeMask, window: int | None) -> np.ndarray:
    """[NQ, NK]: visible (query, key) pairs of each tile pair."""
    dense = mask.dense(window).cpu().numpy().astype(np.int64)
    rows = np.repeat(np.eye(len(t["q_tiles"]), dtype=np.int64), t["q_tiles"][:, 2], axis=1)
    keys = np.repeat(np.eye(len(t["k_tiles"]), dtype=np.int64), t["k_tiles"][:, 1], axis=0)
    return rows @ dense @ keys


def check_pairs(
    kinds: np.ndarray,
    t: dict[str, np.ndarray],
    mask: TreeMask,
    shape: TileShape,
    window: int | None,
    name: str,
) -> None:
    """Checks that a kernel that follows the tables computes the dense mask."""
    q = query_tokens(mask)[:, None]
    k = np.arange(mask.num_tokens)[None]
    end = mask.subtree_end.cpu().numpy()
    position = mask.position_ids.cpu().numpy()
    by_row = np.repeat(kinds, t["q_tiles"][:, 2], axis=0)
    kind = np.repeat(by_row, t["k_tiles"][:, 1], axis=1)
    computed = kind != UNLISTED
    computed &= (kind & CAUSAL == 0) | (k <= q)
    computed &= (kind & END == 0) | (q < end[None])
    if window is not None:
        computed &= (kind & WINDOW == 0) | (position[q] - position[k] < window)
    dense = mask.dense(window).cpu().numpy()
    wrong = np.argwhere(computed != dense)
    assert len(wrong) == 0, (
        f"{name}: row {wrong[0][0]} (token {int(q[wrong[0][0], 0])}) and key {wrong[0][1]}: the "
        f"tables say {computed[tuple(wrong[0])]}, the mask says {dense[tuple(wrong[0])]}"
    )
    if name == "forward":
        short = t["k_tiles"][:, 1] < shape.tile_k
        assert (kinds[:, short] != 0).all(), "a short key tile is full: its dead lanes count"
        listed = kinds[:, short]
        assert ((listed == UNLISTED) | (listed & END != 0)).all(), "dead lanes without END"
    if window is None:
        assert not (kinds[kinds != UNLISTED] & WINDOW).any(), "a window compare without a window"
        empty = (kinds != UNLISTED) & (visible_pairs(t, mask, None) == 0)
        assert not empty.any(), f"{name} lists an empty tile: {np.argwhere(empty)[0]}"


def check_no_needless_compare(
    kinds: np.ndarray, t: dict[str, np.ndarray], mask: TreeMask, shape: TileShape
) -> None:
    q0, q1 = t["q_tiles"][:, 0], t["q_tiles"][:, 0] + t["q_tiles"][:, 2]
    k_last = t["k_tiles"].sum(1) - 1
    ends = mask.subtree_end.cpu().numpy()
    least = np.array([ends[start : start + n].min() for start, n in t["k_tiles"]], int)
    short = t["k_tiles"][:, 1] < shape.tile_k
    causal = k_last[None] > q0[:, None]
    ending = (least[None] < q1[:, None]) | short[None]
    expected = np.where(causal, CAUSAL, 0) | np.where(ending, END, 0)
    listed = kinds != UNLISTED
    wrong = np.argwhere(listed & (kinds != expected))
    assert len(wrong) == 0, f"forward: tiles {wrong[0]} ask for compares they do not need"


def check_backward_full_parts(kinds: np.ndarray, t: dict[str, np.ndarray], mask: TreeMask) -> None:
    area = np.outer(t["q_tiles"][:, 2], t["k_tiles"][:, 1])
    whole = visible_pairs(t, mask, None) == area
    listed = kinds != UNLISTED
    wrong = np.argwhere(listed & (whole != (kinds == 0)))
    assert len(wrong) == 0, f"backward: tiles {wrong[0]} are full and not listed so, or the reverse"


# ---- costs, order, pieces ------------------------------------------------------------------------


def check_query_costs(kinds: np.ndarray, t: dict[str, np.ndarray]) -> None:
    cost = FULL * (kinds == 0).sum(1) + PARTIAL * (kinds > 0).sum(1)
    assert t["q_cost"].tolist() == cost.tolist(), "costs of query tiles"
    order = t["q_order"]
    assert sorted(order.tolist()) == list(range(len(cost)))
    assert (np.diff(cost[order]) <= 0).all(), "query tiles do not run costliest first"


def run_costs(runs: np.ndarray) -> np.ndarray:
    first, begin, stop, end = runs.T
    return PARTIAL * (end - first) - (PARTIAL - FULL) * (stop - begin)


def check_one_backward_run(t: dict[str, np.ndarray]) -> None:
    """Without a window the query tiles of a key tile are one run, however it was cut."""
    for j in range(len(t["k_tiles"])):
        runs = t["k_runs"][t["k_ptr"][j] : t["k_ptr"][j + 1]]
        assert (runs[1:, 0] == runs[:-1, 3]).all(), f"key tile {j} has several query runs"


def check_pieces(t: dict[str, np.ndarray], shape: TileShape) -> None:
    cost = run_costs(t["k_runs"])
    pieces, piece_cost = t["pieces"], t["piece_cost"]
    expected = [int(cost[a:b].sum()) for _, a, b, _, _ in pieces]
    assert piece_cost.tolist() == expected, "costs of pieces"
    assert (np.diff(piece_cost) <= 0).all(), "pieces do not run costliest first"
    limit = FULL * shape.piece_tiles
    slots = t["slots"]
    partials: list[int] = []
    cut_tiles: list[int] = []
    assert len(t["k_cost"]) == len(t["k_tiles"])
    for j in range(len(t["k_tiles"])):
        begin, end = t["k_ptr"][j], t["k_ptr"][j + 1]
        total = int(cost[begin:end].sum())
        assert t["k_cost"][j] == total, "costs of key tiles"
        own = pieces[pieces[:, 0] == j]
        own = own[np.argsort(own[:, 1], kind="stable")]
        assert len(own) > 0, f"key tile {j} has no piece: nobody writes its gradient"
        assert own[0, 1] == begin
        assert own[-1, 2] == end
        assert (own[1:, 1] == own[:-1, 2]).all(), f"the pieces of key tile {j} leave runs out"
        if limit == 0 or total <= limit:
            assert len(own) == 1, f"key tile {j} was cut for nothing"
        else:
            each = [int(cost[a:b].sum()) for _, a, b, _, _ in own]
            assert len(own) <= -(-total // limit), f"key tile {j} has too many pieces: {each}"
            # a piece ends with the tile that reaches its share
            assert max(each) < limit + PARTIAL, f"a piece of key tile {j} is too costly: {each}"
            *equal, rest = each
            assert 0 < rest <= min(equal, default=rest) + PARTIAL, f"uneven pieces: {each}"
            assert max(equal, default=0) - min(equal, default=0) < PARTIAL, f"uneven: {each}"
        if len(own) == 1:
            assert own[0, 3:].tolist() == [-1, -1], "an uncut tile must write directly"
        else:
            slot = len(cut_tiles)
            cut_tiles.append(j)
            assert (own[:, 3] == slot).all(), "the pieces of a tile share one slot"
            assert own[:, 4].tolist() == list(range(len(partials), len(partials) + len(own)))
            assert slots[slot].tolist() == [j, len(partials), len(partials) + len(own)]
            partials += own[:, 4].tolist()
    assert len(slots) == len(cut_tiles), "a slot without a cut tile"
    assert pieces.shape[0] == len(t["k_tiles"]) - len(cut_tiles) + len(partials)
