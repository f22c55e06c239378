"""The selection in Triton: the choice of `kernels.best_keys` in torch, in the interpreter too."""

from __future__ import annotations

import pytest
import torch

from prefixtree.kernels import best_keys
from prefixtree.kernels import indexer_kernels as kernels
from prefixtree.kernels.chosen import from_bits, to_bits, words
from tests.support.full import each_once
from tests.support.hooks import inner, put
from tests.support.triton_tiles import DEVICE

INF, NAN = float("inf"), float("nan")
# up to both programs' sizes and beyond
WIDTHS = (1, 31, 32, 33, 64, 65, 150)


def _scores(kind: str, width: int, g: torch.Generator) -> torch.Tensor:
    """[4, width]: of few values with ties everywhere, or of many."""
    if kind == "ties":
        scores = torch.randint(-1, 2, (4, width), generator=g).float()
        return scores.where(torch.rand(4, width, generator=g) < 0.7, -0.0)
    scores = torch.randn(4, width, generator=g)
    if kind == "masked":
        return scores.where(torch.rand(4, width, generator=g) < 0.4, -INF)
    scores[0] *= 1e-42  # denormal
    scores[1] *= 1e38
    scores[2] = scores[2].where(torch.rand(width, generator=g) < 0.8, INF)
    scores[3] = 1.0 + torch.randint(0, 4, (width,), generator=g) * 2.0**-23  # neighbours
    return scores


@pytest.fixture(autouse=True)
def small_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SIZES", {32: 1, 64: 1})


def _same(scores: torch.Tensor, count: int, position: torch.Tensor) -> torch.Tensor:
    """Of a word more than the columns have, which stays 0."""
    num_words = words(scores.shape[1]) + 1
    want = to_bits(best_keys.best_keys(scores, count, position), num_words)
    got = kernels.best_bits(scores.to(DEVICE), count, position.to(DEVICE), num_words).cpu()
    assert got.dtype == torch.int32 and torch.equal(got, want)
    return got


@pytest.mark.parametrize(("width", "kind"), each_once(WIDTHS, ["ties", "masked", "many"]))
def test_the_choice_is_that_of_torch(kind: str, width: int) -> None:
    g = torch.Generator().manual_seed(width)
    scores = _scores(kind, width, g)
    # the last query sees what there is and would see more
    position = torch.tensor([width // 3, width // 2, width - 1, width + 5])
    for row, last in enumerate(position.tolist()):
        scores[row, last + 1 :] = (NAN, INF, 9.0, 0.0)[row]
    for count in {1, max(1, width // 2), width // 2 + 1, width + 1}:
        _same(scores, count, position)


def test_of_a_nan_nothing_is_chosen_and_one_behind_the_query_is_nothing() -> None:
    scores = torch.tensor([1.0, 5.0, NAN, 2.0]).expand(3, 4).contiguous()
    bits = _same(scores, 2, torch.tensor([1, 2, 3]))
    assert bits[:, 0].tolist() == [3, 0, 0]
    assert _same(scores, 9, torch.tensor([1, 2, 3]))[:, 0].tolist() == [3, 0, 0]


def test_of_ties_the_lowest_position_wins() -> None:
    """Whole words before, a word that is cut, and none behind, within and across programs."""
    for width, count in ((40, 33), (64, 5), (150, 64), (150, 97), (150, 149)):
        found = from_bits(_same(torch.zeros(1, width), count, torch.tensor([width - 1])), 0, width)
        assert found[0].tolist() == [at < count for at in range(width)]


def test_nothing_is_written_behind_the_words(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = torch.full((8,), 7, dtype=torch.int32, device=DEVICE)
    monkeypatch.setattr(torch, "zeros", lambda n, num, **_: buffer[: n * num].view(n, num).zero_())
    scores, position = torch.ones(1, 150, device=DEVICE), torch.tensor([149], device=DEVICE)
    kernels.best_bits(scores, 150, position, 5)
    assert buffer.tolist() == [-1, -1, -1, -1, (1 << 22) - 1, 7, 7, 7]


def test_of_no_columns_none_is_chosen() -> None:
    assert not kernels.best_bits(
        torch.zeros(3, 0, device=DEVICE), 7, torch.arange(3, device=DEVICE), 2
    ).any()
    assert kernels.best_bits(
        torch.zeros(0, 5, device=DEVICE), 7, torch.arange(0, device=DEVICE), 2
    ).shape == (0, 2)


def test_a_gpu_selects_with_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.randint(-1, 2, (4, 40), generator=torch.Generator().manual_seed(0)).float()
    position = torch.tensor([3, 20, 39, 50])
    want = best_keys.best_keys(scores, 7, position)
    kernels_for = inner("kernels of best keys")
    assert kernels_for(scores) is None
    assert (kernels_for(scores.cuda()) is kernels) if DEVICE == "cuda" else True
    put(monkeypatch, "kernels of best keys", lambda scores: kernels)
    given = scores.to(DEVICE), 7, position.to(DEVICE)
    assert torch.equal(best_keys.best_keys(*given).cpu(), want)
    assert torch.equal(best_keys.best_bits(*given, 3).cpu(), to_bits(want, 3))


def test_what_is_served() -> None:
    scores = torch.zeros(1, device=DEVICE)
    assert kernels.serves_choice(scores) == (DEVICE == "cuda") and not kernels.serves_choice(
        scores.double()
    )
