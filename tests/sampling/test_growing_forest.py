"""`GrowingForest`: rows that branch, grow and end, against lists of tokens per row."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixtree import PrefixForest
from prefixtree.sampling.growing_forest import GrowingForest, _path
from tests.support.strategies import Sequences, packed_path, token_sequences


@dataclass
class Model:
    """A forest that grows, its pool as numbers, and what each row should hold.

    Every written token gets a number of its own, so a key that is lost or overwritten shows.
    """

    sequences: Sequences
    capacity: int
    rows: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        forest = PrefixForest.from_sequences(self.sequences)
        self.growing = GrowingForest(forest, self.capacity)
        self.pool = np.full(self.capacity, -1)
        self.pool[: forest.num_tokens] = np.arange(forest.num_tokens)
        self.rows = [packed_path(forest, s).tolist() for s in self.growing.sources]
        # the tokens that the state of a slot has seen
        self.states = dict(zip(self.growing._slots, map(list, self.rows), strict=True))
        self.written = forest.num_tokens

    def branch(self, counts: list[int]) -> None:
        self.growing.branch(counts)
        before = zip(self.rows, counts, strict=True)
        self.rows = [list(row) for row, count in before for _ in range(count)]

    def reserve(self, rows: list[int], rooms: list[int]) -> None:
        moved = self.growing.reserve(rows, rooms)
        if moved is not None:
            self.pool[: len(moved)] = self.pool[moved]
            self.pool[len(moved) :] = -1

    def write(self, rows: list[int], counts: list[int]) -> None:
        """One forward: rows[i] brings counts[i] tokens, and what each of them sees is checked."""
        runs, tails = self.growing.runs_and_tails(rows, counts)
        first = np.cumsum([0, *counts])
        source, target = (slots.tolist() for slots in self.growing.slots(rows))
        assert all(self.states[s] == self.rows[row] for s, row in zip(source, rows, strict=True))
        for number, row in enumerate(rows):
            for at in range(first[number], first[number + 1]):
                start, room, before, _ = tails[at]
                assert before < room
                self.pool[start + before] = self.written
                self.rows[row].append(self.written)
                self.written += 1
        # after all new keys are there, token by token: each key of its path exactly once
        for number, row in enumerate(rows):
            for at in range(first[number], first[number + 1]):
                seen = self.seen(runs, tails, at)
                before = counts[number] - 1 - (at - first[number])
                expected = self.rows[row][: len(self.rows[row]) - before]
                assert seen == dict(enumerate(expected))
        # at once: no row reads what another one writes, nor do two write one
        for number, slot in enumerate(target):
            others = source[:number] + source[number + 1 :]
            assert slot not in others and target.count(slot) == 1 and slot < self.growing.num_slots
        self.states |= {s: list(self.rows[row]) for s, row in zip(target, rows, strict=True)}
        self.growing.extend(rows, counts)

    def seen(self, runs: np.ndarray, tails: np.ndarray, at: int) -> dict[int, int]:
        """Depth -> key of what a token sees; a key that comes twice is an error."""
        start, _, written, depth = tails[at]
        keys = [(int(depth + i), int(self.pool[start + i])) for i in range(written + 1)]
        for a, b, i, j, below in runs.tolist():
            assert a < b and i < j
            if i <= at < j:
                keys += [(below + n, int(self.pool[a + n])) for n in range(b - a)]
        assert len({d for d, _ in keys}) == len(keys)
        return dict(sorted(keys))

    def check(self) -> None:
        """Runs do not overlap, and all else is free; rows below a node are neighbours."""
        growing = self.growing
        paths = [_path(node) for node in growing._rows]
        nodes = list({id(n): n for path in paths for n in path}.values())
        spans = sorted((n.start, n.start + n.room) for n in nodes if n.room)
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
        assert sum(b - a for a, b in spans) == growing.capacity - growing.num_free
        assert not spans or spans[-1][1] <= growing._used <= growing.capacity
        for node in nodes:
            below = [i for i, path in enumerate(paths) if node in path]
            assert below == list(range(below[0], below[-1] + 1))
            children = {id(p[i + 1]) for p in paths for i in range(len(p) - 1) if p[i] is node}
            assert node.users == len(children) + growing._rows.count(node)
        assert [growing.length(i) for i in range(growing.num_rows)] == list(map(len, self.rows))
        # every row's state has seen its tokens; slots that nobody has are free
        assert [self.states[slot] for slot in growing._slots] == self.rows
        written = growing._targets
        unlike = [t for s, t in zip(growing._slots, written, strict=True) if s != t]
        assert growing._readers == Counter([*growing._slots, *unlike]) and 0 not in written
        had = {*growing._readers, *growing._free}
        assert had == set(range(1, len(had) + 1)) and len(had) == sum(
            map(len, (growing._readers, growing._free))
        )


@settings(max_examples=60, deadline=None)
@given(token_sequences(max_sequences=6), st.data())
def test_any_order_of_branching_growing_and_dropping(sequences, data):
    model = Model(sequences, capacity=220)
    model.check()
    for _ in range(data.draw(st.integers(1, 6))):
        number = model.growing.num_rows
        rows = [i for i in range(number) if data.draw(st.booleans())]
        if data.draw(st.booleans()) and number < 12:
            counts = data.draw(st.lists(st.integers(0, 3), min_size=number, max_size=number))
            model.branch(counts)
        elif rows:
            rooms = [data.draw(st.integers(1, 9)) for _ in rows]
            if sum(rooms) > model.growing.num_free:
                with pytest.raises(MemoryError, match="are free: drop rows"):
                    model.reserve(rows, rooms)
                model.check()
                continue
            model.reserve(rows, rooms)
            model.check()
            counts = [data.draw(st.integers(1, room)) for room in rooms]
            model.write(rows, counts)
            # and on, one token each, where there is room
            on = [(r, 1) for r, room, c in zip(rows, rooms, counts, strict=True) if c < room]
            if on:
                model.write([r for r, _ in on], [1] * len(on))
            model.growing.trim(rows)
        model.check()


def test_scattered_room_is_used_to_the_last_key():
    """Two holes make room for one run; every row keeps its keys."""
    model = Model([[1, 2], [3], [4]], capacity=24)
    model.branch([1, 2, 1])
    model.reserve([0, 1, 2, 3], [5, 5, 5, 5])
    model.write([0, 1, 2, 3], [5, 5, 5, 5])
    model.branch([0, 1, 0, 1])
    assert model.growing.num_free == 12
    model.reserve([0], [12])
    model.write([0], [12])
    model.check()
    assert model.growing.num_free == 0
    with pytest.raises(MemoryError, match=r"1 rows need room for 1 keys, and 0 of the pool's 24"):
        model.reserve([1], [1])


def test_what_does_not_fit_says_both_sizes():
    forest = PrefixForest.from_sequences([[1, 2, 3], [1, 2, 4, 5]])
    with pytest.raises(MemoryError, match=r"5 distinct tokens, the pool room for 4 keys"):
        GrowingForest(forest, 4)
    growing = GrowingForest(forest, 20)
    with pytest.raises(MemoryError, match=r"2 rows need room for 16 keys, and 15 .* 20 are free"):
        growing.reserve([0, 1], [8, 8])
    assert growing.num_free == 15


def test_slots_of_rows_that_branch():
    """Branching takes none; each row takes one as it goes on, and the one they shared is free."""
    model = Model([[1, 2], [1, 2], [3]], capacity=60)
    growing = model.growing
    assert growing._slots == [1, 1, 2] and growing.num_slots == 3
    model.branch([0, 3, 1])
    assert growing._slots == [1, 1, 1, 2] and growing.num_slots == 3
    model.reserve([0, 1, 2, 3], [2, 2, 2, 2])
    assert [s.tolist() for s in growing.slots([0, 1, 2, 3])] == [[1, 1, 1, 2], [3, 4, 5, 2]]
    model.write([0, 1, 3], [1, 1, 1])
    growing.trim([0, 1, 2, 3])
    # row 2 did not go on
    assert growing._slots == [3, 4, 1, 2] and growing._targets == [3, 4, 1, 2]
    model.check()
    model.branch([1, 2, 0, 1])
    assert growing.num_slots == 5
    model.reserve([1], [1])
    assert growing._targets == [3, 1, 4, 2]


def test_a_slot_that_branched_rows_share_turns_red():
    model = Model([[1, 2]], capacity=60)
    model.branch([2])
    model.reserve([0, 1], [1, 1])
    model.growing._targets[0] = model.growing._slots[0]
    with pytest.raises(AssertionError):
        model.write([0, 1], [1, 1])


@pytest.mark.parametrize("mistake", ["order", "lost run", "stale room"])
def test_the_check_turns_red(mistake):
    model = Model([[1, 2, 3], [1, 2, 4], [5]], capacity=60)
    model.branch([2, 1, 1])
    model.reserve([0, 1, 2, 3], [3, 3, 3, 3])
    model.write([0, 1, 2, 3], [1, 1, 1, 1])
    if mistake == "order":
        rows = model.growing._rows
        rows[0], rows[2] = rows[2], rows[0]
    elif mistake == "lost run":
        model.growing._rows[2].parent = model.growing._rows[2].parent.parent
    else:
        model.growing._used -= 3
        model.growing.trim([3])
        model.reserve([0], [3])
    with pytest.raises(AssertionError):
        model.check()
        model.write([0, 1, 2, 3], [1, 1, 1, 1])
