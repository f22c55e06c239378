"""`DecodeWork`: every row reads every key that it sees, once; contents change in place."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefixtree import loops
from prefixtree.kernels.decoding import work as decode_work
from prefixtree.kernels.decoding.work import Capacity, DecodeWork
from tests.support.decode_cases import random_case, random_shape, visible

RUNS = np.array([[0, 100, 0, 3, 0], [100, 107, 1, 3, 100]])
TAILS = np.array([[200, 8, 3, 100], [208, 8, 0, 107], [216, 8, 7, 107]])


def plus(tails: np.ndarray, *change: int) -> np.ndarray:
    return tails + np.array(change)


def reads(work: DecodeWork) -> dict[int, list[tuple[int, int]]]:
    """(key, depth) pairs that each row reads, by the items that its slots name."""
    tables = work.tables
    items = [item for part in (tables.wide, tables.narrow) for item in part.tolist() if item[1]]
    of_slot = {}
    for item in items:
        for i in range(item[1]):
            assert item[4] + i not in of_slot
            of_slot[item[4] + i] = (item[0] + i, item)
    pieces, ptr = tables.pieces.tolist(), tables.slot_ptr.tolist()
    out: dict[int, list[tuple[int, int]]] = {}
    for r in range(work.num_rows):
        out[r] = []
        for slot in tables.slots[ptr[r] : ptr[r + 1]].tolist():
            row, item = of_slot.pop(slot)
            assert row == r
            for first, keys, depth, *seers in pieces[item[2] : item[3]]:
                if r in range(*seers):
                    out[r] += [(first + i, depth + i) for i in range(keys)]
    assert not of_slot
    return out


@given(st.data())
def test_every_row_reads_every_key_once(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    rows, tokens = data.draw(st.integers(1, 20)), data.draw(st.sampled_from([1, 1, 6]))
    runs, tails, _ = random_shape(rng, rows, data.draw(st.sampled_from([3, 90])), 20, tokens)
    group, chunk = data.draw(st.sampled_from([1, 3, 4, 16, 40])), data.draw(st.integers(1, 200))
    work = DecodeWork(runs, tails, group=group, chunk=chunk)
    expected: dict[int, list[tuple[int, int]]] = {r: [] for r in range(len(tails))}
    for a, b, i, j, depth in runs.tolist():
        for r in range(i, j):
            expected[r] += [(key, depth + key - a) for key in range(a, b)]
    for r, (first, room, _, depth) in enumerate(tails.tolist()):
        expected[r] += [(first + i, depth + i) for i in range(room)]
    found = reads(work)
    assert {r: sorted(found[r]) for r in found} == {r: sorted(expected[r]) for r in expected}
    # no item is longer than asked for, nor has more rows
    tables = work.tables
    keys = np.concatenate([[0], np.cumsum(tables.pieces[:, 1].numpy())])
    for part, most in ((tables.wide, max(1, 64 // group)), (tables.narrow, max(1, 16 // group))):
        for first, count, begin, stop, _ in part.tolist():
            assert 0 < count <= most and keys[stop] - keys[begin] <= max(chunk, 1) + 63
            assert first + count <= len(tails)


@pytest.mark.parametrize("seed", range(10))
def test_what_a_window_hides_now_and_later_is_left_out(seed: int) -> None:
    window = 1 + 7 * seed
    case = random_case(seed, 9, window=window)
    found, seen = reads(case.work()), visible(replace(case, live=torch.ones(9, dtype=torch.bool)))
    for r, keys in found.items():
        first, room, written, _ = case.tails[r].tolist()
        wanted = set(seen[r].nonzero()[:, 0].tolist()) | set(range(first + written, first + room))
        assert wanted <= {key for key, _ in keys} and len(keys) == len({key for key, _ in keys})
    # a shared run is cut at what the least deep of its rows still sees
    for start, end, i, j, depth in case.runs.tolist():
        least = min(case.tails[r, 3] + case.tails[r, 2] for r in range(i, j)) - window + 1
        for r in range(i, j):
            run = [d for key, d in found[r] if start <= key < end]
            assert all(d >= least for d in run) and len(run) == min(
                end - start, max(0, depth + end - start - least)
            )


def test_a_run_is_shared_where_that_saves_enough() -> None:
    """Otherwise it is read with the tail of each row."""
    work = DecodeWork(RUNS, TAILS, group=1)
    # 100 keys x 2 and 7 x 1 are too few: one item per row, of all it reads
    assert work.capacity == Capacity(rows=3, wide=0, narrow=3, pieces=2 + 3 + 3, slots=3)
    far = np.array([[0, 1000, 0, 3, 0], [1000, 1007, 1, 3, 1000]])
    tails = plus(TAILS, 2000, 0, 0, 1000)
    work = DecodeWork(far, tails, group=1)
    assert work.capacity == Capacity(rows=3, wide=0, narrow=4, pieces=1 + 1 + 2 + 2, slots=6)
    # runs of the same rows are one
    same = np.array([[0, 300, 0, 3, 0], [500, 800, 0, 3, 300]])
    assert DecodeWork(same, tails, group=1).capacity.slots == 6
    # more rows than a narrow item has
    assert DecodeWork(far, tails, group=8).capacity.wide == 1


@given(st.data())
def test_blocks_are_cut_where_rows_share_least(data: st.DataObject) -> None:
    """Against all ways to cut."""
    rows, most = data.draw(st.integers(0, 7)), data.draw(st.integers(1, 4))
    numbers = st.lists(st.integers(0, 50), min_size=rows + 1, max_size=rows + 1)
    shared, cost = np.array(data.draw(numbers)), data.draw(st.integers(0, 20))

    def total(cuts: Sequence[int]) -> int:
        return sum(int(shared[cut]) + cost for cut in cuts[1:])

    cuts = loops.tile_costs.cheapest_cuts(shared, most, cost)
    ways = [
        [0, *inner, rows]
        for count in range(rows)
        for inner in itertools.combinations(range(1, rows), count)
        if max(np.diff([0, *inner, rows])) <= most
    ]
    assert cuts[0] == 0 and cuts[-1] == rows and (np.diff(cuts) > 0).all()
    assert max(np.diff(cuts), default=0) <= most
    assert total(cuts.tolist()) == min(map(total, ways), default=0)


def test_a_block_reads_all_that_its_rows_share_in_one_item() -> None:
    """Turns of an agent, 4 rows below each: a run per turn, and a partial result per row."""
    turns, keys = 14, 200
    runs = [[keys * t, keys * (t + 1), 4 * t, 4 * turns, keys * t] for t in range(turns)]
    depth = [keys * (t + 1) for t in range(turns) for _ in range(4)]
    tails = [[keys * turns + 8 * r, 8, 3, depth[r]] for r in range(4 * turns)]
    work = DecodeWork(np.array(runs), np.array(tails), group=2)
    # two blocks of at most 32 rows; the last two turns, of at most 8, are narrow items
    assert work.capacity.wide == 2 and work.capacity.narrow == 4 * turns + 2
    assert work.capacity.slots <= (1 + 1) * 4 * turns + 8 + 4
    first, second = work.tables.wide.tolist()
    assert first[0] == 0 and second[0] == first[1] and first[1] + second[1] == 4 * turns
    # as early as 32 rows allow, because later rows share more
    assert second[0] == 4 * turns - 32


def test_the_threshold_is_one_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_work, "SHARE_FROM", 199)
    assert DecodeWork(RUNS, TAILS, group=1).capacity.slots == 6


def test_contents_change_in_place() -> None:
    room = Capacity(rows=5, wide=4, narrow=40, pieces=60, slots=60)
    work = DecodeWork(RUNS, TAILS, capacity=room, num_keys=400, chunk=16)
    where = [x.data_ptr() for x in work.tables]
    first = reads(work)
    assert not first[3] and not first[4]
    assert work.tables.live.tolist() == [True] * 3 + [False] * 2
    assert work.tables.written.tolist() == [3, 0, 7, 0, 0]
    work.advance()
    assert work.tables.written.tolist() == [4, 1, 8, 0, 0]
    work.tables.live[1] = False
    work.advance()
    assert work.tables.written.tolist() == [5, 1, 9, 0, 0]
    more = np.concatenate([TAILS, [[300, 8, 2, 0]]])
    assert work.refill(RUNS[:1], more)
    assert work.tables.written.tolist() == [3, 0, 7, 2, 0]
    assert work.tables.live.tolist() == [True] * 4 + [False]
    assert reads(work) | {4: []} == reads(DecodeWork(RUNS[:1], more, chunk=16)) | {4: []}
    # nothing changes where the pool has too few keys
    before = [x.clone() for x in work.tables]
    with pytest.raises(ValueError, match="have 424 keys, the pool 400"):
        work.refill(RUNS, plus(TAILS, 200, 0, 0, 0))
    assert all(torch.equal(a, b) for a, b in zip(before, work.tables, strict=True))
    assert where == [x.data_ptr() for x in work.tables]
    assert work.refill(RUNS, TAILS) and reads(work) == first
    # other tensors where there is no room, which hold what was there before too
    far = np.concatenate([more, *(plus(more[3:], 8 * i, 0, 0, 0) for i in (1, 2))])
    assert not work.refill(RUNS, far) and len(work.tables.tails) == 6
    assert reads(work) == reads(DecodeWork(RUNS, far, chunk=16))
    assert work.refill(RUNS, TAILS) and work.capacity.holds(room)
    assert {r: keys for r, keys in reads(work).items() if keys} == {r: first[r] for r in range(3)}


def test_the_callers_live_rows_are_kept() -> None:
    live = torch.tensor([True, False, True])
    full = plus(TAILS, 0, 0, 0, 0)
    full[1, 2] = full[1, 1]
    work = DecodeWork(RUNS, full, live=live)
    live[2] = False
    work.advance()
    assert work.tables.written.tolist() == [4, 8, 7]


def test_nothing_to_read() -> None:
    """No run, and no room: rows that are not live."""
    none = np.zeros((0, 5), np.int64)
    stopped = torch.zeros(2, dtype=torch.bool)
    work = DecodeWork(none, np.array([[0, 0, 0, 0], [5, 0, 0, 3]]), live=stopped)
    assert work.capacity == Capacity(rows=2, wide=0, narrow=0, pieces=0, slots=0)
    assert reads(work) == {0: [], 1: []}
