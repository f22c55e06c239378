"""`Draws`: tokens have the softmax's distribution, and numbers that only a counter decides."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from prefixtree.sampling import Draws
from prefixtree.sampling.draws import gumbel, row_keys
from tests.support.hooks import limit

_LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -3.0])


def _chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """Standard deviations by which Pearson's statistic is above its mean; 5 is chance 1e-5."""
    assert expected.min() > 5
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = counts.size - 1
    # Wilson and Hilferty: the cube root is close to normal
    return ((statistic / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / math.sqrt(2 / (9 * freedom))


def _draw(number: int, draws: Draws, along: str) -> torch.Tensor:
    """Tokens of `number` rows at one position, or of one row at so many positions."""
    keys = row_keys(draws.seed, [(0, i) for i in range(number)])
    positions = torch.zeros(number, dtype=torch.int64)
    if along == "positions":
        keys, positions = keys[:1].expand(number), torch.arange(number)
    return draws.choose(_LOGITS.expand(number, -1), keys, positions)[0]


@pytest.mark.parametrize("along", ["rows", "positions"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_tokens_have_the_distribution_of_the_softmax(along, temperature):
    number = 40_000
    tokens = _draw(number, Draws(temperature, seed=3), along)
    probabilities = (_LOGITS / temperature).softmax(0).numpy()
    counts = np.bincount(tokens, minlength=len(_LOGITS))
    assert abs(_chi_square(counts, number * probabilities)) < 4.5
    # a draw knows nothing of the one before it
    four = np.minimum(tokens.numpy(), 3)
    share = np.append(probabilities[:3], probabilities[3:].sum())
    pairs = np.bincount(4 * four[:-1] + four[1:], minlength=16)
    assert abs(_chi_square(pairs, (number - 1) * np.outer(share, share).ravel())) < 4.5


def test_the_comparison_turns_red():
    tokens = _draw(40_000, Draws(0.95, seed=3), "rows")
    counts = np.bincount(tokens, minlength=len(_LOGITS))
    assert _chi_square(counts, len(tokens) * _LOGITS.softmax(0).numpy()) > 4.5


def test_noise_is_gumbels_in_its_tails_too():
    noise = gumbel(row_keys(0, [(0,)]), torch.tensor([5]), 1_000_000)[0]
    assert noise.isfinite().all()
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.01)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.02)
    for level in (3.0, 6.0, 9.0):
        expected = len(noise) * -math.expm1(-math.exp(-level))
        assert abs(int((noise > level).sum()) - expected) < 5 * math.sqrt(expected)
    # float32 of 24 bits would repeat its largest values
    top = noise.topk(1000).values
    assert len(top.unique()) > 990


def test_keys_are_those_of_the_path():
    paths = [p for n in (1, 2, 3) for p in itertools.product(range(9), repeat=n)]
    keys = row_keys(7, paths)
    assert len(keys.unique()) == len(paths)
    assert torch.equal(row_keys(7, paths[::-1]).flip(0), keys)
    for seed in (0, -1, 2**70):
        assert not torch.isin(row_keys(seed, paths), keys).any()
    # SplitMix64's first number for the seed 0
    assert int(row_keys(0, [()])[0]) % 2**64 == 0xE220A8397B1DCDAF


def test_a_draw_does_not_depend_on_the_others(monkeypatch):
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    keys, positions = row_keys(1, [(i,) for i in range(6)]), torch.arange(6)
    draws = Draws(0.8, top_k=9, return_sampling_mask=True)
    whole = draws.choose(logits, keys, positions)
    for rows in ([3], [5, 0, 2]):
        some = draws.choose(logits[rows], keys[rows], positions[rows])
        assert all(torch.equal(a, b[rows]) for a, b in zip(some, whole, strict=True))
    for at_once in (7, 100, 299):
        limit(monkeypatch, "rows drawn at once", at_once)
        parts = draws.choose(logits, keys, positions)
        assert all(torch.equal(a, b) for a, b in zip(parts, whole, strict=True))


@pytest.mark.parametrize(
    "options", [{"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 4, "top_p": 0.9}]
)
def test_truncation_is_that_of_transformers(options):
    draws = Draws(0.7, return_sampling_mask=True, **options)
    number = 4000
    keys = row_keys(0, [(i,) for i in range(number)])
    tokens, logprobs, kept, bits = draws.choose(
        _LOGITS.expand(number, -1), keys, torch.zeros(number, dtype=torch.int64)
    )
    probabilities = (_LOGITS / 0.7).softmax(0)
    order = probabilities.sort(descending=True).values
    count = len(order)
    if "top_k" in options:
        count = options["top_k"]
        order = order[:count] / order[:count].sum()
    if "top_p" in options:
        count = int((order.cumsum(0) < options["top_p"]).sum()) + 1
    if "min_p" in options:
        count = int((order >= 0.2 * order[0]).sum())
    # the logits descend
    assert 1 < count < len(_LOGITS) and tokens.unique().tolist() == list(range(count))
    assert kept is not None
    torch.testing.assert_close(kept, probabilities[:count].sum().log().expand(number))
    assert bits is not None
    found = np.unpackbits(bits.numpy(), axis=1, bitorder="little")
    assert (found == (np.arange(found.shape[1]) < count)).all()
    torch.testing.assert_close(logprobs, probabilities.log()[tokens])
    shares = (probabilities[:count] / probabilities[:count].sum()).numpy()
    assert abs(_chi_square(np.bincount(tokens), number * shares)) < 4.5


def test_temperature_0_is_the_likeliest_token():
    found = Draws(0.0).choose(_LOGITS[None], row_keys(0, [(0,)]), torch.zeros(1))
    tokens, logprobs, kept, bits = found
    assert tokens.tolist() == [0] and kept is None and bits is None
    torch.testing.assert_close(logprobs, _LOGITS.log_softmax(0)[:1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature must be finite, and 0 .*or at least 1e-20, got -0.1"),
        # logits divided by it would be infinite
        ({"temperature": 1e-40}, "at least 1e-20, got 1e-40"),
        ({"temperature": math.inf}, "temperature must be finite"),
        ({"temperature": math.nan}, "temperature must be finite"),
        ({"top_k": 0}, "top_k must be None or an integer >= 1, got 0"),
        ({"top_p": 0.0}, "top_p must be None or above 0 and at most 1, got 0.0"),
        ({"min_p": 1.5}, "min_p must be None or above 0 and at most 1, got 1.5"),
    ],
)
def test_numbers_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        Draws(**options)


def test_integers_of_any_kind():
    """numpy's would wrap around in a seed, and transformers takes none of them as top_k."""
    want = Draws(seed=5, top_k=3)
    for five, three in ((np.int64(5), np.int64(3)), (torch.tensor(5), torch.tensor(3))):
        assert Draws(seed=five, top_k=three) == want
        keys = row_keys(Draws(seed=five).seed, [(0,)])
        assert torch.equal(keys, row_keys(5, [(0,)]))
    for wrong in (None, 1.5):
        with pytest.raises(TypeError, match=f"seed must be an integer, got {wrong}"):
            Draws(seed=wrong)


def test_the_coldest_draws_are_the_likeliest_tokens():
    keys, position = row_keys(0, [(0,)]), torch.zeros(1, dtype=torch.int64)
    tokens, logprobs, *_ = Draws(1e-20).choose(_LOGITS[None] * 1e6, keys, position)
    assert tokens.tolist() == [0] and logprobs.tolist() == [0.0]
