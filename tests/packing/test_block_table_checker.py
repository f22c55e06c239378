"""The checker of block tables turns red on every kind of broken table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch

from prefixtree import BlockTables, PrefixForest, TileShape, TreeMask
from prefixtree.loops.block_tables import CAUSAL, END, WINDOW
from tests.support.strategies import mask_of
from tests.support.table_checks import assert_tables_exact, shape_id

Break = Callable[[dict[str, torch.Tensor]], None]


def rich_mask() -> TreeMask:
    """Tables of it hold every kind of run, cut tiles and several pieces."""
    return mask_of(PrefixForest.from_parents([-1, 0, 0, 1, 1, -1], [21, 17, 12, 9, 7, 10]))


RICH_SHAPE = TileShape(4, 4, cut=False, piece_tiles=5)


def broken(change: Break, window: int | None) -> BlockTables:
    tables = rich_mask().tables(RICH_SHAPE, window)
    parts = {field.name: getattr(tables, field.name).clone() for field in fields(tables)}
    change(parts)
    return replace(tables, **parts)


def first_partial(t: dict[str, torch.Tensor], kind: int) -> int:
    return int((t["q_runs"][:, 2] == kind).nonzero()[0])


def query_tile_of(t: dict[str, torch.Tensor], run: int) -> int:
    return int((t["q_ptr"] <= run).sum()) - 1


def drop_forward_run(t: dict[str, torch.Tensor]) -> None:
    last = len(t["q_ptr"]) - 2
    t["q_runs"] = t["q_runs"][:-1]
    t["q_ptr"][-1] -= 1
    t["q_split"][last] = min(t["q_split"][last], t["q_ptr"][-1])


def drop_an_ancestor(t: dict[str, torch.Tensor]) -> None:
    # a full run that starts one tile late
    run = int(((t["q_runs"][:, 2] == 0) & (t["q_runs"][:, 1] - t["q_runs"][:, 0] > 1)).nonzero()[0])
    t["q_runs"][run, 0] += 1


def run_one_tile_too_far(t: dict[str, torch.Tensor]) -> None:
    run = first_partial(t, CAUSAL | END)
    t["q_runs"][run, 1] += 1


def run_one_tile_too_short(t: dict[str, torch.Tensor]) -> None:
    run = int(((t["q_runs"][:, 2] == 0) & (t["q_runs"][:, 1] - t["q_runs"][:, 0] > 1)).nonzero()[0])
    t["q_runs"][run, 1] -= 1


def full_listed_as_partial(t: dict[str, torch.Tensor]) -> None:
    # the last full run of a query tile moves over the split, with an end compare
    i = int((t["q_split"] > t["q_ptr"][:-1]).nonzero()[-1])
    t["q_split"][i] -= 1
    t["q_runs"][t["q_split"][i], 2] = END


def partial_listed_as_full(t: dict[str, torch.Tensor]) -> None:
    i = int((t["q_split"] < t["q_ptr"][1:]).nonzero()[-1])
    t["q_runs"][t["q_split"][i], 2] = 0
    t["q_split"][i] += 1


def kind_on_the_wrong_side_of_the_split(t: dict[str, torch.Tensor]) -> None:
    i = int((t["q_split"] > t["q_ptr"][:-1]).nonzero()[0])
    t["q_split"][i] -= 1


def causal_compare_left_out(t: dict[str, torch.Tensor]) -> None:
    t["q_runs"][first_partial(t, CAUSAL | END), 2] = END


def end_compare_left_out(t: dict[str, torch.Tensor]) -> None:
    t["q_runs"][first_partial(t, CAUSAL | END), 2] = CAUSAL


def key_tile_twice(t: dict[str, torch.Tensor]) -> None:
    i = int((t["q_ptr"][1:] - t["q_ptr"][:-1] > 1).nonzero()[0])
    a = int(t["q_ptr"][i])
    t["q_runs"][a + 1, 0] = t["q_runs"][a, 0]


def query_cost_off(t: dict[str, torch.Tensor]) -> None:
    t["q_cost"][3] += 1


def cheap_query_tile_first(t: dict[str, torch.Tensor]) -> None:
    t["q_order"] = t["q_order"].flip(0)


def query_tile_shifted(t: dict[str, torch.Tensor]) -> None:
    t["q_tiles"][2, 0] += 1


def key_tiles_overlap(t: dict[str, torch.Tensor]) -> None:
    t["k_tiles"][2, 0] -= 1


def backward_run_one_short(t: dict[str, torch.Tensor]) -> None:
    t["k_runs"][-1, 3] -= 1


def backward_run_one_late(t: dict[str, torch.Tensor]) -> None:
    run = int((t["k_runs"][:, 0] < t["k_runs"][:, 1]).nonzero()[0])
    t["k_runs"][run, 0] += 1


def backward_full_begins_early(t: dict[str, torch.Tensor]) -> None:
    run = int((t["k_runs"][:, 0] < t["k_runs"][:, 1]).nonzero()[0])
    t["k_runs"][run, 1] -= 1


def backward_full_ends_late(t: dict[str, torch.Tensor]) -> None:
    run = int((t["k_runs"][:, 2] < t["k_runs"][:, 3]).nonzero()[0])
    t["k_runs"][run, 2] += 1


def backward_full_ends_early(t: dict[str, torch.Tensor]) -> None:
    run = int((t["k_runs"][:, 1] < t["k_runs"][:, 2]).nonzero()[0])
    t["k_runs"][run, 2] -= 1


def piece_dropped(t: dict[str, torch.Tensor]) -> None:
    t["pieces"], t["piece_cost"] = t["pieces"][:-1], t["piece_cost"][:-1]


def piece_twice(t: dict[str, torch.Tensor]) -> None:
    t["pieces"] = torch.cat([t["pieces"], t["pieces"][-1:]])
    t["piece_cost"] = torch.cat([t["piece_cost"], t["piece_cost"][-1:]])


def piece_without_its_last_run(t: dict[str, torch.Tensor]) -> None:
    piece = int((t["pieces"][:, 2] > t["pieces"][:, 1]).nonzero()[0])
    t["pieces"][piece, 2] -= 1


def piece_cost_off(t: dict[str, torch.Tensor]) -> None:
    t["piece_cost"][0] += 1


def cheap_piece_first(t: dict[str, torch.Tensor]) -> None:
    t["pieces"], t["piece_cost"] = t["pieces"].flip(0), t["piece_cost"].flip(0)


def key_cost_off(t: dict[str, torch.Tensor]) -> None:
    t["k_cost"][0] -= 1


def two_tiles_share_a_slot(t: dict[str, torch.Tensor]) -> None:
    t["pieces"][t["pieces"][:, 3] == 1, 3] = 0


def two_pieces_share_a_partial(t: dict[str, torch.Tensor]) -> None:
    t["pieces"][t["pieces"][:, 4] == 1, 4] = 0


def uncut_tile_adds_into_a_slot(t: dict[str, torch.Tensor]) -> None:
    t["pieces"][int((t["pieces"][:, 3] == -1).nonzero()[0]), 3] = 0


def cut_piece_writes_directly(t: dict[str, torch.Tensor]) -> None:
    t["pieces"][int((t["pieces"][:, 3] >= 0).nonzero()[0]), 3:] = -1


def slot_reduces_too_little(t: dict[str, torch.Tensor]) -> None:
    t["slots"][0, 2] -= 1


BREAKS: list[Break] = [
    drop_forward_run,
    drop_an_ancestor,
    run_one_tile_too_far,
    run_one_tile_too_short,
    full_listed_as_partial,
    partial_listed_as_full,
    kind_on_the_wrong_side_of_the_split,
    causal_compare_left_out,
    end_compare_left_out,
    key_tile_twice,
    query_cost_off,
    cheap_query_tile_first,
    query_tile_shifted,
    key_tiles_overlap,
    backward_run_one_short,
    backward_run_one_late,
    backward_full_begins_early,
    backward_full_ends_late,
    backward_full_ends_early,
    piece_dropped,
    piece_twice,
    piece_without_its_last_run,
    piece_cost_off,
    cheap_piece_first,
    key_cost_off,
    two_tiles_share_a_slot,
    two_pieces_share_a_partial,
    uncut_tile_adds_into_a_slot,
    cut_piece_writes_directly,
    slot_reduces_too_little,
]


def test_the_unbroken_tables_pass() -> None:
    for window in (None, 12):
        assert_tables_exact(rich_mask(), RICH_SHAPE, window, broken(lambda t: None, window))


@pytest.mark.parametrize("change", BREAKS, ids=lambda change: change.__name__)
def test_broken_tables_are_caught(change: Break) -> None:
    with pytest.raises(AssertionError):
        assert_tables_exact(rich_mask(), RICH_SHAPE, None, broken(change, None))


def window_compare_left_out(t: dict[str, torch.Tensor]) -> None:
    run = int((t["q_runs"][:, 2] & WINDOW != 0).nonzero()[0])
    t["q_runs"][run, 2] &= ~WINDOW
    if t["q_runs"][run, 2] == 0:
        i = query_tile_of(t, run)
        assert t["q_split"][i] == run
        t["q_split"][i] += 1


@pytest.mark.parametrize(
    "change",
    [window_compare_left_out, backward_full_begins_early, backward_full_ends_late],
    ids=lambda change: change.__name__,
)
def test_broken_windowed_tables_are_caught(change: Break) -> None:
    with pytest.raises(AssertionError):
        assert_tables_exact(rich_mask(), RICH_SHAPE, 12, broken(change, 12))


@pytest.mark.parametrize("shape", [TileShape(4, 4), TileShape(4, 4, True, 3)], ids=shape_id)
@pytest.mark.parametrize(
    "other",
    [
        # plain causal attention over the packed tokens
        [20] * 20,
        # the two siblings swapped
        [20] * 6 + [11] * 5 + [20] * 9,
        # one end off by one
        [20] * 6 + [16] * 10 + [20] * 4,
        # a dropped ancestor: the root ends before its last child
        [15] * 15 + [20] * 5,
    ],
    ids=["causal", "siblings-swapped", "end-off-by-one", "ancestor-dropped"],
)
def test_tables_of_another_mask_are_caught(other: list[int], shape: TileShape) -> None:
    mask = TreeMask([20] * 6 + [15] * 9 + [20] * 5)
    assert_tables_exact(mask, shape)
    with pytest.raises(AssertionError):
        assert_tables_exact(mask, shape, None, TreeMask(other).tables(shape))


def test_tables_of_another_window_are_caught() -> None:
    mask = rich_mask()
    for given_window, true_window in [(12, 13), (13, 12), (None, 12), (12, None)]:
        with pytest.raises(AssertionError):
            assert_tables_exact(
                mask, RICH_SHAPE, true_window, mask.tables(RICH_SHAPE, given_window)
            )


def test_a_short_key_tile_listed_as_full_is_caught() -> None:
    # its dead lanes are the next tile's keys, which then count twice
    mask = mask_of(PrefixForest.from_parents([-1, 0, 0], [6, 6, 6]))
    narrow, wide = TileShape(2, 3, cut=True), TileShape(2, 4, cut=True)
    tables = mask.tables(narrow)
    assert_tables_exact(mask, narrow, None, tables)
    with pytest.raises(AssertionError):
        assert_tables_exact(mask, wide, None, tables)


def test_unequal_pieces_are_caught() -> None:
    mask = rich_mask()
    with pytest.raises(AssertionError):
        assert_tables_exact(mask, RICH_SHAPE, None, mask.tables(TileShape(4, 4, piece_tiles=9)))
