"""Masks `for_queries(...)` and parts of a forest on the flash backend: the lists of tiles without a
row of q, and everything on the host side, through an emulation of flash-attn-4 against float64.
"""

from __future__ import annotations

from types import ModuleType
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefixtree import PrefixForest, TreeMask
from prefixtree.kernels.attention.flash import launch
from prefixtree.kernels.attention.flash.block_lists import Tiles, lists_of
from prefixtree.kernels.attention.protocol import AttentionCall
from prefixtree.packing.host_mask import HostMask
from tests.kernels.attention.flash.test_block_lists import CPU, cells, listed
from tests.support.attention_checks import Case, eager, ours, run
from tests.support.full import mostly
from tests.support.pairs import pairwise
from tests.support.strategies import forests, mask_of, query_ranges, random_forest

# with tiles of imported tokens alone before, between and behind the rows of q
TREE = PrefixForest.from_parents([-1, 0, 1, 1, 0, -1], [300, 150, 40, 200, 390, 200], order="input")
RANGES = [(310, 420), (700, 710), (900, 1100)]
# rows of q in tiles of 128 neighbours
ON_GRID = [(310, 438), (520, 776), (1000, 1100)]


@given(st.data())
def test_lists_of_asked_tiles_are_exact(data: st.DataObject) -> None:
    """Tiles with a row of q have the lists of the whole; of the others none is empty, and forward
    and backward leave them out."""
    whole = mask_of(data.draw(forests()))
    ranges = data.draw(query_ranges(whole.num_tokens))
    part = whole.for_queries(ranges)
    tiles = Tiles(*(data.draw(st.integers(2, 5)) for _ in range(3)))
    window = data.draw(st.sampled_from([0, 0, 3]))
    with patch.object(HostMask, "rows_on_grid", lambda host, tile: False):
        made = lists_of(part.host, tiles, window, CPU)
    assert made.query_tokens is None
    full = lists_of(whole.host, tiles, window, CPU)
    queries = torch.zeros(-(-whole.num_tokens // tiles.queries), dtype=torch.bool)
    queries[part.query_tokens.long() // tiles.queries] = True
    assert part.host.asked_tiles(tiles.queries).tolist() == queries.tolist()

    mine, theirs = listed(made.forward), listed(full.forward)
    for tile, asked in enumerate(queries.tolist()):
        if asked:
            assert [mine[kind][tile] for kind in mine] == [theirs[kind][tile] for kind in theirs]
        else:
            assert mine["full"][tile] == []
            assert mine["partial"][tile] == [tile * tiles.queries // tiles.forward_keys]
    mine, theirs = listed(made.backward), listed(full.backward)
    # the whole's lists tell the tile on the diagonal apart, which changes nothing that is computed
    some, _ = cells(whole.dense(window or None), tiles.queries, tiles.backward_keys)
    for tile in range(some.shape[1]):
        seen = mine["partial"][tile] + mine["full"][tile]
        want = theirs["partial"][tile] + theirs["full"][tile]
        want = [at for at in want if queries[at]]
        assert sorted(seen) == sorted(want) or (
            not want and seen == [tile * tiles.backward_keys // tiles.queries]
        )


@given(st.data())
def test_lists_of_rows_are_exact(data: st.DataObject) -> None:
    """Where tiles of rows are of neighbouring tokens: what a tile needs, from the dense mask."""
    whole = mask_of(data.draw(forests()))
    queries = data.draw(st.integers(2, 4))
    ranges, end = [], 0
    while end + queries <= whole.num_tokens and data.draw(st.booleans()):
        start = data.draw(st.integers(end, whole.num_tokens - queries))
        end = start + queries * data.draw(st.integers(1, (whole.num_tokens - start) // queries))
        ranges.append((start, end))
    if end < whole.num_tokens:
        ranges.append((end, data.draw(st.integers(end + 1, whole.num_tokens))))
    part = whole.for_queries(ranges)
    tiles = Tiles(queries, *(data.draw(st.integers(2, 5)) for _ in range(2)))
    window = data.draw(st.sampled_from([0, 0, 3]))
    made = lists_of(part.host, tiles, window, CPU)
    assert made.query_tokens is not None
    assert made.query_tokens[: part.num_queries].equal(part.query_tokens)
    assert (made.query_tokens[part.num_queries :] == whole.num_tokens).all()
    dense = part.dense(window or None)
    for lists, keys, turned in (
        (made.forward, tiles.forward_keys, False),
        (made.backward, tiles.backward_keys, True),
    ):
        # of key tiles that end early the backward stores no more rows than there are
        behind = -dense.shape[1] % keys if turned else 0
        some, _ = cells(dense, queries, keys)
        _, stored = cells(torch.nn.functional.pad(dense, (0, behind), value=True), queries, keys)
        found = listed(lists)
        for row in range(some.shape[1] if turned else some.shape[0]):
            partial, full = found["partial"][row], found["full"][row]
            seen, filled = (x[:, row] if turned else x[row] for x in (some, stored))
            want = seen.nonzero().flatten().tolist()
            # with a window a tile may be visited in vain
            assert set(want) <= set(partial + full) and len({*partial, *full}) == len(
                partial + full
            )
            if not window and (want or (partial, full) != ([0], [])):
                assert sorted(partial + full) == want
            assert all(filled[at] for at in full)


CASES = pairwise(
    [RANGES, ON_GRID],
    [{}, {"window": 130}, {"softcap": 3.0}],
    [{}, {"sinks": True}, {"sinks": True, "dlse": True}],
)


# each feature once
@pytest.mark.parametrize(("ranges", "options", "extras"), mostly(CASES, CASES[2:5]))
def test_emulated_features(
    emulated: ModuleType, ranges: list[tuple[int, int]], options: dict, extras: dict
) -> None:
    mask = mask_of(TREE).for_queries(ranges)
    assert mask.host.rows_on_grid(128) == (ranges is ON_GRID)
    case = Case.random(mask, (4, 2), (16, 8), torch.float64, **extras, **options)
    assert_exact(mask, case)


@pytest.mark.parametrize("seed", mostly(range(4), [3]))
def test_emulated_forests(emulated: ModuleType, seed: int) -> None:
    whole = mask_of(random_forest(np.random.default_rng(seed), 20, 200))
    middle = whole.num_tokens // 2
    mask = whole.for_queries([(middle // 2, middle), (middle + 1, whole.num_tokens)])
    assert_exact(mask, Case.random(mask, (2, 1), (8, 8), torch.float64))


def assert_exact(mask: TreeMask, case: Case) -> None:
    position = mask.position_ids.long()
    rows = mask.query_tokens.long()
    want = run(case, eager(mask.dense(), (position[rows], position)), torch.float64)
    got = run(case, ours(mask, backend="flash"))
    for name in want:
        torch.testing.assert_close(got[name].double(), want[name], atol=2e-5, rtol=2e-5)


def test_a_part_visits_its_tiles(emulated: ModuleType) -> None:
    whole = mask_of(TREE)
    part = whole.for_queries([(640, 768)])
    visited = {}
    for mask in (whole, part):
        run(Case.random(mask, (2, 1), (8, 8), torch.float64), ours(mask, backend="flash"))
        visited[mask] = {name: sum(counts) for name, counts in emulated.last.items()}
    tiles = -(-whole.num_tokens // 128)
    # its own tile of queries, and one for each of the others
    assert visited[part]["forward"] < visited[whole]["forward"] / 2
    assert visited[part]["forward"] <= 6 + tiles - 1
    assert visited[part]["backward"] <= 6 + tiles


@pytest.mark.parametrize("of_part", mostly([False, True], [True]))
def test_gradients_in_float32(emulated: ModuleType, of_part: bool) -> None:
    """Those of keys and values, not rounded to bfloat16 on their way."""
    mask = mask_of(TREE)
    mask = mask.for_queries(RANGES) if of_part else mask
    case = Case.random(mask, (4, 2), (16, 16), torch.bfloat16)

    def gradients(dtype: torch.dtype, wide: bool) -> tuple[torch.Tensor, ...]:
        q, k, v, dout = (x.to(dtype) for x in (case.q, case.k, case.v, case.dout))
        call = AttentionCall(q, k, v, None, mask.host, 0.25, 0, 0.0, False, wide)
        out, lse = launch.forward(call)
        dq, dk, dv, _ = launch.backward(call, dout, None, out, lse)
        assert dq.dtype == dtype
        return dk, dv

    exact = gradients(torch.float64, False)
    for x, rounded, want in zip(
        gradients(torch.bfloat16, True), gradients(torch.bfloat16, False), exact, strict=True
    ):
        assert x.dtype == torch.float32 and rounded.dtype == torch.bfloat16
        assert torch.equal(x.bfloat16(), rounded) and not torch.equal(x, rounded.float())
        torch.testing.assert_close(x.double(), want, atol=0.02, rtol=0.02)


def test_no_queries_give_zeros(emulated: ModuleType) -> None:
    mask = mask_of(TREE).for_queries([])
    got = run(Case.random(mask, (2, 1), (8, 8), torch.float64), ours(mask, backend="flash"))
    assert got["out"].shape == (0, 2, 8) and got["lse"].shape == (0, 2)
    assert not got["dk"].any() and not got["dv"].any()
