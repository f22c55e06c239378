"""Block tables and key-tile cuts against the dense mask."""

from __future__ import annotations

import itertools
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixtree import BlockTables, PrefixForest, TileShape, TreeMask
from prefixtree.loops import block_tables as loops
from prefixtree.loops.block_tables import CAUSAL, END, WINDOW
from tests.support.full import each_once, mostly
from tests.support.strategies import (
    ancestors_or_self,
    forests,
    mask_of,
    positions_of,
    predictors_of,
    query_ranges,
    random_forest,
    subtree_ends,
)
from tests.support.table_checks import assert_tables_exact, listed_forward, shape_id, visible_pairs

SHAPES = [
    TileShape(16, 64),
    TileShape(8, 8, cut=True, piece_tiles=4),
    TileShape(64, 16, piece_tiles=2),
    TileShape(5, 7, cut=True, piece_tiles=3),
    TileShape(128, 128),
]
WINDOWS = [None, 1, 3, 30]


def arrays(tables: BlockTables) -> dict[str, np.ndarray]:
    return {field.name: getattr(tables, field.name).numpy() for field in fields(tables)}


def assert_same_tables(a: BlockTables, b: BlockTables) -> None:
    for field in fields(a):
        ours, theirs = getattr(a, field.name), getattr(b, field.name)
        assert ours.shape == theirs.shape, field.name
        assert torch.equal(ours, theirs), field.name


# ---- the mask itself -----------------------------------------------------------------------------


@given(forests())
def test_the_mask_is_the_path_definition(forest: PrefixForest) -> None:
    mask = mask_of(forest)
    visible = ancestors_or_self(forest)
    np.testing.assert_array_equal(mask.dense(), visible)
    position = positions_of(forest)
    np.testing.assert_array_equal(mask.position_ids, position)
    for window in (1, 2, 5):
        near = position[:, None] - position[None] < window
        np.testing.assert_array_equal(mask.dense(window), visible & near)


@given(forests())
def test_the_walk_finds_predictors_and_positions(forest: PrefixForest) -> None:
    predictor, position, bad = loops.walk(subtree_ends(forest))
    assert bad == -1
    np.testing.assert_array_equal(predictor, predictors_of(forest))
    np.testing.assert_array_equal(position, positions_of(forest))


@given(forests(), st.data())
def test_paths_hold_every_query_with_its_ancestors(
    forest: PrefixForest, data: st.DataObject
) -> None:
    mask = mask_of(forest)
    if data.draw(st.booleans()):
        mask = mask.for_queries(data.draw(query_ranges(forest.num_tokens)))
    dense = mask.dense().numpy()
    blocks, prefix_ptr, prefix_runs = mask.host.paths
    seen = np.zeros_like(dense)
    row = 0
    for b, (start, first_row, length) in enumerate(blocks):
        assert first_row == row
        row += length
        for start_key, end_key in prefix_runs[prefix_ptr[b] : prefix_ptr[b + 1]]:
            assert start_key < end_key <= start
            assert not seen[first_row:row, start_key:end_key].any()
            seen[first_row:row, start_key:end_key] = True
        seen[first_row:row, start : start + length] |= np.tri(length, dtype=bool)
    assert row == mask.num_queries
    np.testing.assert_array_equal(seen, dense)


# ---- tables against the mask ---------------------------------------------------------------------

small_shapes = st.builds(
    TileShape,
    tile_q=st.integers(1, 9),
    tile_k=st.integers(1, 9),
    cut=st.booleans(),
    piece_tiles=st.integers(0, 4),
)


@settings(max_examples=300)
@given(forests(max_nodes=12), small_shapes, st.sampled_from([None, 1, 2, 3, 7]), st.data())
def test_tables_are_exact_on_small_forests(
    forest: PrefixForest, shape: TileShape, window: int | None, data: st.DataObject
) -> None:
    mask = mask_of(forest)
    if data.draw(st.booleans()):
        mask = mask.for_queries(data.draw(query_ranges(forest.num_tokens)))
    assert_tables_exact(mask, shape, window)


@pytest.mark.parametrize(
    "shape, subset",
    each_once(SHAPES, [False, True]),
    ids=lambda x: shape_id(x) if isinstance(x, TileShape) else "for_queries" if x else "all",
)
def test_tables_are_exact_on_many_tiles(shape: TileShape, subset: bool) -> None:
    rng = np.random.default_rng(7)
    widest = 0
    for max_length in [2, 5, 40, 90] * 3:
        forest = random_forest(rng, 25, max_length)
        mask = mask_of(forest)
        widest = max(widest, mask.num_tokens)
        if subset:
            cuts = np.unique(rng.integers(0, mask.num_tokens + 1, 6)).tolist()
            mask = mask.for_queries(zip(cuts[:-1:2], cuts[1::2], strict=False))
        for window in WINDOWS:
            assert_tables_exact(mask, shape, window)
    assert widest > 4 * 128


@pytest.mark.parametrize(
    "length",
    mostly(
        [7, 8, 9, 15, 16, 17, 63, 64, 65, 127, 128, 129], [7, 8, 9, 15, 16, 17, 63, 64, 65, 129]
    ),
)
def test_lengths_at_a_tile_and_one_off(length: int) -> None:
    forest = PrefixForest.from_parents([-1, 0, 0, 1, 1], [length] * 5)
    for shape in [*SHAPES, TileShape(64, 64, cut=True, piece_tiles=1)]:
        for window in (None, length):
            assert_tables_exact(mask_of(forest), shape, window)


def test_compares_are_bits_of_their_own() -> None:
    assert (CAUSAL, END, WINDOW) == (1, 2, 4)


@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
@pytest.mark.parametrize(
    "parents",
    [
        [-1] * 200,
        [-1, *range(199)],
        [-1] + [0] * 199,
        [-1, *[i // 2 for i in range(199)]],
        # a spine with a leaf at every step
        [-1, *[i - i % 2 for i in range(199)]],
    ],
    ids=["documents", "chain", "star", "binary", "caterpillar"],
)
def test_one_token_nodes(parents: list[int], shape: TileShape) -> None:
    mask = mask_of(PrefixForest.from_parents(parents, [1] * 200))
    for window in (None, 1, 5):
        assert_tables_exact(mask, shape, window)


def test_padding_is_tiles_of_one_token_trees() -> None:
    mask = TreeMask([6, 6, 4, 4, 6, 6, *range(7, 25)])
    for shape in SHAPES:
        assert_tables_exact(mask, shape)


def test_one_token() -> None:
    for shape, window in itertools.product(SHAPES, WINDOWS):
        assert_tables_exact(TreeMask([1]), shape, window)


@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
@pytest.mark.parametrize("window", WINDOWS)
def test_no_queries(shape: TileShape, window: int | None) -> None:
    mask = mask_of(random_forest(np.random.default_rng(1), 9, 9)).for_queries([])
    assert_tables_exact(mask, shape, window)
    tables = mask.tables(shape, window)
    assert tables.q_tiles.shape == (0, 3)
    assert tables.q_ptr.tolist() == [0]
    assert tables.q_runs.shape == (0, 3)
    # every key's gradient is zero, and a piece without runs writes it
    assert sorted(tables.pieces[:, 0].tolist()) == list(range(len(tables.k_tiles)))
    assert (tables.pieces[:, 1] == tables.pieces[:, 2]).all()
    assert not tables.piece_cost.any()


@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
@pytest.mark.parametrize("window", WINDOWS)
def test_no_tokens(shape: TileShape, window: int | None) -> None:
    mask = TreeMask([])
    assert (mask.num_tokens, mask.num_queries) == (0, 0)
    assert mask.dense(window).shape == (0, 0)
    assert_tables_exact(mask, shape, window)
    assert mask.stats(shape, window).visible_pairs == 0


@pytest.mark.parametrize("cut", [False, True])
def test_key_tiles_no_query_sees_have_an_empty_piece(cut: bool) -> None:
    # a root of 8, children of 8 and 8; only the second child asks
    mask = mask_of(PrefixForest.from_parents([-1, 0, 0], [8, 8, 8])).for_queries([(16, 24)])
    shape = TileShape(4, 4, cut=cut, piece_tiles=1)
    assert_tables_exact(mask, shape)
    tables = mask.tables(shape)
    starts = tables.k_tiles[:, 0][tables.pieces[:, 0].long()]
    empty = tables.pieces[:, 1] == tables.pieces[:, 2]
    assert empty.any()
    assert ((starts >= 8) & (starts < 16))[empty].all()
    assert not ((starts >= 8) & (starts < 16))[~empty].any()


# ---- windows -------------------------------------------------------------------------------------


@given(forests(max_nodes=12), small_shapes)
def test_a_window_beyond_the_longest_path_changes_nothing_forward(
    forest: PrefixForest, shape: TileShape
) -> None:
    mask = mask_of(forest)
    window = int(mask.position_ids.max()) + 1
    plain, wide = arrays(mask.tables(shape)), arrays(mask.tables(shape, window))
    for name in ("q_tiles", "k_tiles", "q_order", "q_cost", "q_ptr", "q_split", "q_runs"):
        np.testing.assert_array_equal(plain[name], wide[name], err_msg=name)


def test_a_window_bounds_the_work() -> None:
    mask = mask_of(PrefixForest.from_parents([-1], [1000]))
    assert mask.stats(TileShape(10, 10)).tile_pairs == 100 * 101 / 2
    # a tile of 10 queries reaches back 29 tokens and so into at most 4 tiles
    windowed = mask.stats(TileShape(10, 10), 20)
    assert windowed.tile_pairs <= 100 * 4
    assert windowed.visible_pairs == 1000 * 20 - 20 * 19 / 2


def test_a_window_gives_a_key_tile_several_query_runs() -> None:
    # the root's end is seen from the beginnings of both children, not from their ends
    mask = mask_of(PrefixForest.from_parents([-1, 0, 0], [8, 20, 20]))
    shape = TileShape(4, 4)
    tables = arrays(mask.tables(shape, 6))
    runs = tables["k_runs"][tables["k_ptr"][1] : tables["k_ptr"][2]]
    assert runs[:, [0, 3]].tolist() == [[1, 4], [7, 9]]
    assert_tables_exact(mask, shape, 6)


def test_windows_measure_positions_and_not_packed_distance() -> None:
    # token 6 stands right below the root, 5 packed tokens behind it
    mask = mask_of(PrefixForest.from_parents([-1, 0, 0], [1, 5, 1]))
    assert mask.dense(2)[6].nonzero().flatten().tolist() == [0, 6]
    assert_tables_exact(mask, TileShape(2, 2), 2)


# ---- key-tile cuts -------------------------------------------------------------------------------


def query_run_total(mask: TreeMask, shape: TileShape) -> int:
    """The key tiles' query runs together: what the cuts minimise."""
    runs = mask.tables(shape).k_runs
    return int((runs[:, 3] - runs[:, 0]).sum())


def cheapest_cuts(mask: TreeMask, tile_q: int, tile_k: int) -> tuple[int, int]:
    """Least total of query runs over all ways to cut, and the fewest tiles that reach it."""
    q_tiles = mask.tables(TileShape(tile_q, tile_k)).q_tiles.numpy()
    dense = mask.dense().numpy()
    num_tokens = mask.num_tokens
    best = [(0, 0)] + [(10**9, 10**9)] * num_tokens
    for start, end in itertools.combinations(range(num_tokens + 1), 2):
        if end - start <= tile_k:
            seen = [dense[row : row + n, start:end].any() for _, row, n in q_tiles]
            total, tiles = best[start]
            best[end] = min(best[end], (total + sum(map(bool, seen)), tiles + 1))
    return best[num_tokens]


@given(forests(max_nodes=7, max_length=3), st.integers(1, 4), st.integers(1, 5), st.data())
def test_cuts_are_the_best_there_are(
    forest: PrefixForest, tile_q: int, tile_k: int, data: st.DataObject
) -> None:
    mask = mask_of(forest)
    if data.draw(st.booleans()):
        mask = mask.for_queries(data.draw(query_ranges(forest.num_tokens)))
    shape = TileShape(tile_q, tile_k, cut=True)
    ours = query_run_total(mask, shape), len(mask.tables(shape).k_tiles)
    assert ours == cheapest_cuts(mask, tile_q, tile_k)


def test_of_equally_good_cuts_the_fewest_tiles_are_taken() -> None:
    # found by search: here the first best total uses one tile more than it must
    ends = [22] * 8 + [12] * 4 + [17] * 5 + [22] * 5 + [25] * 3 + [38] * 4 + [30] + [34] * 4
    mask = TreeMask(ends + [38] * 4 + [42] * 4)
    shape = TileShape(4, 4, cut=True)
    ours = query_run_total(mask, shape), len(mask.tables(shape).k_tiles)
    assert ours == cheapest_cuts(mask, 4, 4)
    assert ours[1] == 11


@given(forests(max_nodes=12), st.integers(1, 9), st.integers(1, 9))
def test_cuts_never_cost_more_than_the_grid(forest: PrefixForest, tile_q: int, tile_k: int) -> None:
    mask = mask_of(forest)
    cut, grid = (TileShape(tile_q, tile_k, cut=cut) for cut in (True, False))
    assert query_run_total(mask, cut) <= query_run_total(mask, grid)
    assert mask.stats(cut).useful_share >= mask.stats(grid).useful_share


def test_cuts_pay_on_a_caterpillar() -> None:
    rng = np.random.default_rng(0)
    parents = [-1, *[i - i % 2 for i in range(99)]]
    mask = mask_of(PrefixForest.from_parents(parents, rng.integers(5, 60, 100)))
    cut, grid = (mask.stats(TileShape(16, 64, cut=cut)).useful_share for cut in (True, False))
    assert cut > grid


def test_a_forest_of_long_documents_is_cut_where_they_end() -> None:
    tables = mask_of(PrefixForest.from_parents([-1, -1], [6, 6])).tables(TileShape(2, 4, cut=True))
    starts = tables.k_tiles[:, 0].tolist()
    assert 6 in starts
    assert len(starts) == 4


# ---- pieces --------------------------------------------------------------------------------------


def test_a_long_query_run_is_cut_into_equal_pieces() -> None:
    # 4 keys seen by 40 full and 1 diagonal query tile: 83 half tiles, at most 20 a piece
    mask = mask_of(PrefixForest.from_parents([-1] + [0] * 40, [4] * 41))
    tables = mask.tables(TileShape(4, 4, piece_tiles=10))
    root = tables.pieces[tables.pieces[:, 0] == 0]
    assert tables.k_cost[0] == 83
    assert len(root) == 5
    assert tables.piece_cost[:5].sum() == 83
    assert tables.piece_cost[:5].max() <= 20
    assert tables.slots.tolist() == [[0, 0, 5]]
    assert_tables_exact(mask, TileShape(4, 4, piece_tiles=10))


@pytest.mark.parametrize("piece_tiles", [0, 1, 2, 5, 1000])
def test_pieces_of_every_size(piece_tiles: int) -> None:
    rng = np.random.default_rng(3)
    for _ in range(5):
        mask = mask_of(random_forest(rng, 30, 12))
        for window in (None, 9):
            assert_tables_exact(mask, TileShape(3, 4, piece_tiles=piece_tiles), window)
            assert_tables_exact(mask, TileShape(3, 4, True, piece_tiles), window)


def test_no_piece_size_cuts_nothing() -> None:
    mask = mask_of(PrefixForest.from_parents([-1] + [0] * 40, [4] * 41))
    tables = mask.tables(TileShape(4, 4))
    assert len(tables.slots) == 0
    assert (tables.pieces[:, 3:] == -1).all()


# ---- stats ---------------------------------------------------------------------------------------


@given(forests(max_nodes=12), small_shapes, st.sampled_from([None, 1, 4]), st.booleans(), st.data())
def test_stats_by_definition(
    forest: PrefixForest, shape: TileShape, window: int | None, subset: bool, data: st.DataObject
) -> None:
    mask = mask_of(forest)
    if subset:
        mask = mask.for_queries(data.draw(query_ranges(forest.num_tokens)))
    stats = mask.stats(shape, window)
    tables = arrays(mask.tables(shape, window))
    kinds = listed_forward(tables)
    assert stats.visible_pairs == int(mask.dense(window).sum())
    assert stats.tile_pairs == (kinds >= 0).sum()
    assert stats.partial_tiles == (kinds > 0).sum()
    computed = stats.tile_pairs * shape.tile_q * shape.tile_k
    assert stats.useful_share == pytest.approx(stats.visible_pairs / max(1, computed))
    assert stats.key_tiles == len(tables["k_tiles"])
    pieces_of = np.bincount(tables["pieces"][:, 0], minlength=stats.key_tiles)
    assert stats.cut_tiles == (pieces_of > 1).sum()
    assert stats.pieces == pieces_of.sum()
    if window is None:
        assert stats.tile_pairs == (visible_pairs(tables, mask, None) > 0).sum()


def test_a_full_square_is_all_useful() -> None:
    # 64 queries of the child over 64 keys of the root, nothing else asked for
    mask = mask_of(PrefixForest.from_parents([-1, 0], [64, 64])).for_queries([(64, 128)])
    stats = mask.stats(TileShape(64, 64))
    assert (stats.tile_pairs, stats.partial_tiles) == (2, 1)
    assert stats.useful_share == pytest.approx((64 * 64 + 64 * 65 / 2) / (2 * 64 * 64))


# ---- caching -------------------------------------------------------------------------------------


def test_tables_are_built_once_a_shape_and_window() -> None:
    mask = mask_of(PrefixForest.from_parents([-1, 0, 0], [5, 4, 3]))
    tables = mask.tables(TileShape(2, 2))
    assert mask.tables(TileShape(2, 2)) is tables
    assert mask.tables(TileShape(2, 2, cut=True)) is not tables
    assert mask.tables(TileShape(2, 2, piece_tiles=1)) is not tables
    assert mask.tables(TileShape(2, 3)) is not tables
    windowed = mask.tables(TileShape(2, 2), 3)
    assert windowed is not tables
    assert mask.tables(TileShape(2, 2), 3) is windowed
    assert mask.tables(TileShape(2, 2), 4) is not windowed


def test_copies_with_other_options_share_the_tables() -> None:
    mask = mask_of(PrefixForest.from_parents([-1, 0, 0], [5, 4, 3]))
    changed = mask.with_options(backend="sdpa", deterministic=True)
    tables = changed.tables(TileShape(2, 2))
    assert mask.tables(TileShape(2, 2)) is tables
    assert mask.to("cpu").tables(TileShape(2, 2)) is tables


def test_different_masks_share_nothing() -> None:
    ends = subtree_ends(PrefixForest.from_parents([-1, 0, 0], [5, 4, 3]))
    a, b = TreeMask(ends), TreeMask(ends)
    assert a.tables(TileShape(2, 2)) is not b.tables(TileShape(2, 2))
    subset = a.for_queries([(0, 3)])
    assert subset.tables(TileShape(2, 2)) is not a.tables(TileShape(2, 2))
    assert len(subset.tables(TileShape(2, 2)).q_tiles) == 2


def test_tables_do_not_outlive_their_mask_by_address() -> None:
    # a cache by id() or data_ptr() would hand one mask the tables of another, long gone
    shape = TileShape(4, 4)
    for length in range(1, 40):
        mask = mask_of(PrefixForest.from_parents([-1, 0, 0], [length, 40 - length, 3]))
        assert_tables_exact(mask, shape)
        del mask


def test_tables_move_whole() -> None:
    mask = mask_of(random_forest(np.random.default_rng(5), 20, 9))
    for subset in (mask, mask.for_queries([])):
        tables = subset.tables(TileShape(4, 4, True, 2))
        assert_same_tables(tables.to("cpu"), tables)


def test_partial_sums_are_counted_from_shapes() -> None:
    mask = mask_of(random_forest(np.random.default_rng(5), 20, 9))
    counts = {}
    for shape in SHAPES:
        tables = mask.tables(shape)
        counts[shape] = tables.num_partials
        assert counts[shape] == int((tables.pieces[:, 4] >= 0).sum())
    assert max(counts.values()) > 2 > min(counts.values())
