"""Rows copied by runs, by slices and by an index, against indexing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefixtree.packing.copies import RowRuns
from tests.support.hooks import inner

CPU = torch.device("cpu")


@pytest.mark.parametrize("by_slices", [True, False])
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=6), st.integers(0, 3))
def test_rows_are_those_of_indexing(
    by_slices: bool, runs: list[tuple[int, int]], behind: int
) -> None:
    """(gap before, length) of each run."""
    length = np.array([n for _, n in runs], np.int64)
    first = np.cumsum([gap for gap, _ in runs], dtype=np.int64) + np.cumsum(length) - length
    count = int(first[-1] + length[-1]) + behind if runs else behind
    rows = RowRuns(first, length, CPU)
    rows._by_slices = by_slices
    at = np.concatenate([np.arange(a, a + n) for a, n in zip(first, length, strict=True)] or [[]])
    index = torch.from_numpy(at.astype(np.int64))
    assert rows.count == len(index) and torch.equal(rows.index, index)

    source = torch.arange(2.0 * count).view(count, 2)
    assert torch.equal(rows.take(source, source.new_empty(rows.count, 2)), source[index])
    # what is askew too
    turned = source.t().contiguous().t()
    assert torch.equal(rows.take(turned, source.new_empty(rows.count, 2)), source[index])

    some = -1.0 - torch.arange(2.0 * rows.count).view(-1, 2)
    want = source.clone()
    want[index] = some
    put = source.clone()
    rows.put(put, some)
    assert torch.equal(put, want)
    want = source.clone()
    want[index] += some
    added = source.clone()
    rows.add(added, some)
    assert torch.equal(added, want)
    want = torch.zeros_like(source)
    want[index] = some
    assert torch.equal(rows.spread(some, count), want)


def test_few_long_runs_are_copied_by_slices() -> None:
    def runs(count: int, length: int) -> RowRuns:
        return RowRuns(np.arange(count) * 2 * length, np.full(count, length), CPU)

    assert runs(8, 100)._by_slices
    assert not runs(8, 10)._by_slices and not runs(inner("sliced runs") + 1, 100)._by_slices
