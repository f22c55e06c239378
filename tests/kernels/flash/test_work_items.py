"""How the backward's tiles are shared out: every head of every tile of every list, once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefixtree import PrefixForest
from prefixtree.kernels.flash import work_items
from prefixtree.kernels.flash.block_lists import Tiles, lists_of
from prefixtree.kernels.flash.work_items import FIELDS
from tests.support.strategies import mask_of

CPU = torch.device("cpu")


def done(items: np.ndarray) -> list[tuple[int, int, int, int]]:
    """(key tile, head, 0 of the partial or 1 of the full list, entry), as often as it is done."""
    found = []
    for tile, head, heads, *spans, _slot in items.tolist():
        for kind in (0, 1):
            first, count = spans[2 * kind : 2 * kind + 2]
            assert first >= 0 and count >= 0
            found += [
                (tile, h, kind, entry)
                for h in range(head, head + heads)
                for entry in range(first, first + count)
            ]
    return found


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 40)).filter(any), min_size=1, max_size=12
    ),
    st.sampled_from([1, 2, 3, 4, 7, 8]),
    st.sampled_from([1, 8]),
    st.sampled_from([1, 20, 132]),
    st.sampled_from([1, 2, 5, 64]),
)
def test_every_entry_is_done_once_by_every_head(
    counts: list[tuple[int, int]], group: int, kv_heads: int, processors: int, least: int
) -> None:
    partial, full = np.array(counts, np.int64).T
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work_items, "LEAST", least)
        items, split = work_items.work_items(partial, full, group, kv_heads, processors)
    assert items.dtype == np.int32 and items.shape[1:] == (FIELDS,)
    want = [
        (tile, head, kind, entry)
        for tile, both in enumerate(counts)
        for head in range(group)
        for kind in (0, 1)
        for entry in range(both[kind])
    ]
    assert sorted(done(items)) == want
    # key tiles of several items have a place each, the others none
    several = np.flatnonzero(np.bincount(items[:, 0]) > 1)
    assert split.tolist() == several.tolist()
    of_slot = np.where(items[:, 7] < 0, -1, split[items[:, 7]] if len(split) else -1)
    assert (of_slot == np.where(np.isin(items[:, 0], split), items[:, 0], -1)).all()
    # no item is empty, and long ones come first
    length = items[:, 2] * (items[:, 4] + items[:, 6])
    assert (length > 0).all()
    assert (np.diff(np.floor(np.log2(length))) <= 0).all()
    most = max(least, int((partial + full).sum()) * group * kv_heads // (processors * 24))
    if group > 1:
        assert length.max() <= most
    else:
        # dk and dv are stored: nobody else may
        assert sorted(items[:, 0]) == list(range(len(counts)))


PROMPT = PrefixForest.from_parents([-1, *[0] * 1024], [256, *[256] * 1024])
CATERPILLAR = PrefixForest.from_parents([-1, *[0] * 30], [1300, *[500] * 30])


def test_short_lists_are_joined_and_long_ones_cut() -> None:
    """A prompt's two key tiles have 4,100 queries' blocks each, a response's eight at most."""
    lists = lists_of(mask_of(PROMPT).host, Tiles(128, 128, 128, 64), 0, CPU)
    assert len(lists.partial_visits) == 2050 and lists.longest_list_share == 4100 / 14342
    items, split = work_items.work_items(lists.partial_visits, lists.full_visits, 4, 8, 132)
    assert split.tolist() == [0, 1]
    leaves = items[items[:, 0] >= 2]
    assert len(leaves) == 2048 and (leaves[:, 2] == 4).all()
    # a multiprocessor's part is 3,476 visits, and 1 / 24 of that the longest item
    prompt = items[items[:, 0] < 2]
    assert len(prompt) == 2 * 4 * 29 and (prompt[:, 4] + prompt[:, 6]).max() <= 144
    assert (items[: len(prompt), 0] < 2).all()


def test_lists_of_the_backward_may_have_other_queries() -> None:
    """Half the queries of a tile: the lists are those of the whole tiles, halved, less what nobody
    sees."""
    host = mask_of(CATERPILLAR).host
    whole, half = (lists_of(host, tiles, 0, CPU) for tiles in (Tiles(8, 8, 8), Tiles(8, 8, 8, 4)))
    assert torch.equal(whole.forward.partial_index, half.forward.partial_index)
    assert torch.equal(whole.forward.full_index, half.forward.full_index)

    def tiles(lists: object, rows: int, queries: int) -> tuple[np.ndarray, np.ndarray]:
        found = np.zeros((2, rows, queries), bool)
        for kind, name in enumerate(("partial", "full")):
            count = getattr(lists, f"{name}_count")[0, 0].tolist()
            for row, n in enumerate(count):
                found[kind, row, getattr(lists, f"{name}_index")[0, 0, row, :n]] = True
        return found[0], found[1]

    rows, halves = (-(-host.num_tokens // tile) for tile in (8, 4))
    partial, full = (x.repeat(2, 1)[:, :halves] for x in tiles(whole.backward, rows, rows))
    partial_, full_ = tiles(half.backward, rows, halves)
    assert not (partial_ & full_).any() and not (full & ~full_).any()
    assert not ((partial_ | full_) & ~(partial | full)).any()
    assert (full_ | partial_).sum() < (full | partial).sum()
