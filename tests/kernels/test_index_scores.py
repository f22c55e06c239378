"""An indexer's scores of the keys on a path, in Triton: exact where sums are, the red test too."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prefixtree.kernels import indexer_kernels
from prefixtree.kernels.best_keys import best_keys
from prefixtree.kernels.chosen import to_bits, words
from prefixtree.packing.host_mask import HostMask
from tests.conftest import Poison
from tests.support.strategies import mask_of, random_forest
from tests.support.triton_tiles import DEVICE, DTYPES

# numpy warns in the interpreter of keys that nobody sees; what is stored is checked
pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value) encountered:RuntimeWarning"
)


def _case(
    seed: int, heads: int, dim: int, dtype: torch.dtype, most: int = 80
) -> tuple[HostMask, list[torch.Tensor]]:
    """Small integers: sums are exact in any order, and ties are everywhere."""
    mask = mask_of(random_forest(np.random.default_rng(seed), 12, most))
    g = torch.Generator().manual_seed(seed)
    shapes = (mask.num_tokens, heads, dim), (mask.num_tokens, dim), (mask.num_tokens, heads)
    return mask.host, [torch.randint(-2, 3, s, generator=g).to(dtype) for s in shapes]


def _by_path(host: HostMask, q: torch.Tensor, k: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """[T, K] in float64; column d of the key at position d of the query's path, -inf behind it."""
    q, k, w = q.double(), k.double(), w.double()
    position = torch.from_numpy(host.position).long()
    scores = torch.einsum("qh,qhk->qk", w, (torch.einsum("qhd,kd->qhk", q, k) * 0.5).relu())
    out = scores.new_full((host.num_tokens, host.deepest), -torch.inf)
    for row in range(host.num_tokens):
        keys = torch.from_numpy(np.flatnonzero(host.subtree_end[: row + 1] > row))
        out[row, position[keys]] = scores[row, keys]
    return out


def _scores(
    host: HostMask, q: torch.Tensor, k: torch.Tensor, w: torch.Tensor, first: int, last: int
) -> torch.Tensor:
    rows = slice(first, last)
    q, k, w = q[rows].to(DEVICE), k.to(DEVICE), w[rows].float().to(DEVICE)
    return indexer_kernels.index_scores(q, k, w, host, first, 0.5).cpu()


@pytest.mark.parametrize(
    "heads, dim, dtype",
    [
        *((64, 32, DTYPES[0]), (24, 20, DTYPES[1]), (5, 16, DTYPES[0])),
        *((2, 40, DTYPES[1]), (1, 16, DTYPES[0])),
    ],
)
def test_scores_and_the_choice_are_exact(heads: int, dim: int, dtype: torch.dtype) -> None:
    for seed in range(2):
        host, inputs = _case(seed, heads, dim, dtype)
        want, tokens = _by_path(host, *inputs), indexer_kernels.tile_tokens(heads)
        middle = host.num_tokens // 2 // tokens * tokens
        for first, last in ((0, middle), (middle, host.num_tokens)):
            if first == last:
                continue
            got, of_rows = _scores(host, *inputs, first, last), want[first:last]
            assert got.shape == (last - first, host.position[first:last].max() + 1)
            position = torch.from_numpy(host.position[first:last]).long()
            seen = torch.arange(got.shape[1]) <= position[:, None]
            of_rows = of_rows[:, : got.shape[1]]
            assert torch.equal(got.double()[seen], of_rows[seen])
            for count in (1, 7, 40):
                exact = best_keys(of_rows, count, position)
                assert torch.equal(best_keys(got, count, position), exact)
                assert to_bits(exact, words(host.deepest)).dtype == torch.int32


def test_queries_of_a_part_score_as_those_of_the_forest() -> None:
    """In several runs, whose tiles begin with them; in any chunks of whole tiles."""
    host, (q, k, w) = _case(3, 24, 16, DTYPES[1])
    want = _scores(host, q, k, w, 0, host.num_tokens)
    runs = [[2, 0, 7], [11, 7, 1], [20, 8, host.num_tokens - 20]]
    part = HostMask(host.subtree_end, np.array(runs))
    tokens, borders = part.query_tokens, indexer_kernels.tile_borders(part, 24).tolist()
    assert borders[:4] == [0, 4, 7, 8] and borders[-1] == part.num_queries
    for first, last in ((0, 7), (7, borders[5]), (borders[5], part.num_queries)):
        got = _scores(part, q[tokens], k, w[tokens], first, last)
        position = torch.from_numpy(host.position[tokens[first:last]])
        of_rows = want[tokens[first:last], : got.shape[1]]
        seen = torch.arange(got.shape[1]) <= position[:, None]
        assert torch.equal(got[seen], of_rows[seen])


def test_keys_behind_the_queries_may_hold_anything(poison: Poison) -> None:
    """Those of later chunks, and the columns that nobody wrote: not read, or not kept."""
    host, (q, k, w) = _case(5, 24, 16, DTYPES[1])
    middle = (
        host.num_tokens // 2 // indexer_kernels.tile_tokens(24) * indexer_kernels.tile_tokens(24)
    )
    position = torch.from_numpy(host.position[:middle]).long()
    want = best_keys(_scores(host, q, k, w, 0, middle), 7, position)
    k = k.clone()
    k[middle:] = float("nan")
    assert torch.equal(best_keys(_scores(host, q, k, w, 0, middle), 7, position), want)
    assert poison.tensors > 0


def test_scores_by_packed_order_would_not_pass() -> None:
    host, (q, k, w) = _case(4, 5, 16, DTYPES[1])
    chain = HostMask(np.full(host.num_tokens, host.num_tokens, np.int32), None)
    want = _by_path(host, q, k, w)
    got = _scores(chain, q, k, w, 0, host.num_tokens)[:, : host.deepest].double()
    seen = want > -torch.inf
    assert host.deepest < host.num_tokens and (got[seen] != want[seen]).double().mean() > 0.2


def test_what_is_served() -> None:
    x = torch.zeros(1, device=DEVICE)
    assert all(indexer_kernels.serves_scores(x.to(dtype), 128) for dtype in DTYPES)
    assert not indexer_kernels.serves_scores(x.double(), 128)
    assert not indexer_kernels.serves_scores(x.to(DTYPES[0]), 192)
