"""`sequence_logprobs(sampling_masks=)`: forms of sets, scored edges, and sets that are refused.

`test_ways.py` compares it with each sequence alone, in every way a model runs.
"""

from __future__ import annotations

from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import prefixtree as pt
from prefixtree.scoring.edges import find_edges
from prefixtree.scoring.sampling_masks import KeptSets, OverSets
from tests.support.models import build, gradients, logprob_and_entropy, pack_sequences

# two rollouts that begin alike, and the next turn of the first: what it sampled is now prompt
TURN = [3, 4, 5, 6, 7]
SEQUENCES = [TURN, [3, 4, 5, 6, 8], [*TURN, 20, 9, 10]]
MASKS = [[0, 0, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1, 1]]
# per scored token; 5 was drawn from two sets, 6 from the whole vocabulary in one rollout
SETS = [[[5, 30], [6, 1], [2, 40, 7]], [[31, 5], [], [8, 7]], [[9], [11, 10, 12]]]


def _per_token(sets: list[list[int]], mask: list[int]) -> list[list[int]]:
    left = iter(sets)
    return [next(left) if scored else [96] for scored in mask]


def _csr(sets: list[list[int]]) -> dict[str, Any]:
    counts = [len(ids) for ids in sets]
    return {"token_ids": torch.tensor([*chain(*sets)]), "offsets": np.cumsum([0, *counts])}


def _counted(sets: list[list[int]]) -> dict[str, Any]:
    return {"ids": [*chain(*sets)], "counts": np.array([len(ids) for ids in sets])}


FORMS = {
    "per scored token": SETS,
    "per token": [_per_token(*of) for of in zip(SETS, MASKS, strict=True)],
    "offsets": [_csr(sets) for sets in SETS],
    "an object": [SimpleNamespace(**_csr(sets)) for sets in SETS],
    "counts": [_counted(_per_token(*of)) for of in zip(SETS, MASKS, strict=True)],
}


def _alone(
    dtype: torch.dtype, temperature: float = 0.7
) -> tuple[list[torch.Tensor], list[torch.Tensor], Any]:
    """Log p and entropies of scored tokens, of dense logits with -inf outside of each set."""
    model = build("gemma2", "eager").to(dtype)
    logprobs, entropies = [], []
    for tokens, mask, sets in zip(SEQUENCES, MASKS, SETS, strict=True):
        ids = torch.tensor(tokens)
        logits = model(ids[None], use_cache=False).logits[0, :-1] / temperature
        for at, kept in zip(np.flatnonzero(mask), sets, strict=True):
            others = [v for v in range(logits.shape[1]) if kept and v not in kept]
            log_p = logits[at - 1].index_fill(0, torch.tensor(others, dtype=torch.long), -torch.inf)
            log_p = log_p.log_softmax(0)
            logprobs.append(log_p[tokens[at]])
            entropies.append(-(log_p.exp() * log_p.clamp(min=-1e4)).sum())
    return logprobs, entropies, model


def _scored(model: Any, sets: Any, temperature: float = 0.7, **options: Any) -> Any:
    packed = pack_sequences(SEQUENCES)
    return pt.sequence_logprobs(model, packed, temperature, MASKS, sampling_masks=sets, **options)


def _loss(logprobs: list[torch.Tensor], entropies: list[torch.Tensor]) -> torch.Tensor:
    weights = torch.linspace(1.0, -0.7, len(logprobs))
    return (torch.stack(logprobs) * weights).sum() + 0.3 * (torch.stack(entropies) * weights).sum()


@pytest.mark.parametrize(
    ("form", "dtype"),
    [*((form, torch.float32) for form in FORMS), ("counts", torch.float64)],
)
def test_each_form_beside_dense_logits(form, dtype):
    expected = _alone(dtype)
    model = build("gemma2").to(dtype)
    scores = _scored(model, FORMS[form], return_entropy=True)
    is_scored = [torch.tensor(mask[1:], dtype=torch.bool) for mask in MASKS]
    found = [
        [x for row, mask in zip(rows, is_scored, strict=True) for x in row[mask]]
        for rows in (scores.logprobs, scores.entropy)
    ]
    for values, wanted in zip(found, expected, strict=False):
        wanted = torch.stack(wanted).float()
        torch.testing.assert_close(torch.stack(values), wanted, atol=2e-6, rtol=1e-5)
    # an edge without a set makes no NaN, not even one that is multiplied by 0
    with torch.autograd.set_detect_anomaly(True):
        _loss(*found).backward()
    _loss(*expected[:2]).backward()
    for name, gradient in gradients(expected[2]).items():
        error = (gradients(model)[name] - gradient).norm() / gradient.norm()
        assert error < 1e-5, name


def test_large_logits_do_not_cancel():
    """As at a low temperature: what all logits have in common changes nothing."""
    sets = KeptSets(np.array([1, 4, 7]), np.array([3]))
    edges: Any = SimpleNamespace(scored_edge=torch.tensor([0]), token=torch.tensor([4]))
    logits = torch.linspace(0, 1.75, 8)[None]
    measure = OverSets(sets, None, logits.device)
    torch.testing.assert_close(
        measure(logits + 2**16, edges), measure(logits, edges), atol=1e-6, rtol=0
    )


def test_the_set_of_a_first_token_is_not_read():
    sets = [[[9], [4], [5]]]
    scores = pt.sequence_logprobs(build("gemma2"), pack_sequences([[3, 4, 5]]), sampling_masks=sets)
    # of one token each
    assert scores.logprobs[0].tolist() == [0, 0]


def test_one_edge_with_two_sets_is_two_scored_edges():
    packed = pack_sequences(SEQUENCES)
    plain, apart = find_edges(packed, 0.7, MASKS), find_edges(packed, 0.7, MASKS, SETS)
    # 5 and 6 twice; a set that is equal but for its order is one
    assert apart.count == plain.count + 2
    assert find_edges(packed, 0.7, MASKS, [SETS[0], [[30, 5], [1, 6], [8, 7]], SETS[2]]).count == (
        plain.count
    )
    # and each temperature once more
    temperatures = [0.7, 1.0, 1.0]
    assert find_edges(packed, temperatures, MASKS, SETS).count == plain.count + 2
    temperatures = [[t] * len(s) for t, s in zip([0.7, 0.7, 1.0], SEQUENCES, strict=True)]
    found = find_edges(packed, temperatures, MASKS, SETS)
    assert sorted(found.temperature.tolist()) == pytest.approx([0.7] * 6 + [1.0] * 2)


def test_a_measure_sees_the_whole_vocabulary_and_other_calls_find_its_edges():
    model = build("gemma2")
    with torch.no_grad():
        plain = _scored(model, None, measure=logprob_and_entropy)

    def both(logits: Any, edges: Any) -> torch.Tensor:
        own = logprob_and_entropy(logits, edges)
        return torch.cat([own, plain.of_edges(edges)], 1)

    scores = _scored(model, SETS, measure=both, return_statistics=("is_top1",))
    found = torch.cat(scores.measured)
    torch.testing.assert_close(found[:, :2], found[:, 2:], atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(found[:, :2], torch.cat(plain.measured), atol=2e-6, rtol=1e-5)
    assert len(scores.measured_edges) == len(plain.measured_edges) + 2
    # edges without sets find those with several
    again = _scored(model, None, measure=lambda logits, edges: scores.of_edges(edges)[:, :2])
    torch.testing.assert_close(torch.cat(again.measured), torch.cat(plain.measured))


def test_a_plan_and_a_batch():
    model = build("gemma2")
    wanted = _scored(model, SETS).logprobs
    plan = pt.plan_micro_batches(SEQUENCES, 8)
    assert len(plan[0]) == 2
    for batch in plan[0]:
        own = pt.sequence_logprobs(model, batch, 0.7, MASKS, sampling_masks=SETS).logprobs
        for i, row in zip(batch.sequence_indices.tolist(), own, strict=True):
            torch.testing.assert_close(row, wanted[i], atol=2e-6, rtol=1e-5)
    # a row without a token is no sequence
    ids, mask, scored = (torch.zeros(4, 8, dtype=torch.long) for _ in range(3))
    for row, (tokens, of_loss) in zip([0, 2, 3], zip(SEQUENCES, MASKS, strict=True), strict=True):
        ids[row, -len(tokens) :] = torch.tensor(tokens)
        mask[row, -len(tokens) :] = 1
        scored[row, -len(tokens) :] = torch.tensor(of_loss)
    found = pt.batch_logprobs(
        model, ids, mask, temperature=0.7, loss_mask=scored, sampling_masks=SETS
    ).logprobs
    for row, values in zip([0, 2, 3], wanted, strict=True):
        torch.testing.assert_close(found[row, -len(values) :], values, atol=2e-6, rtol=1e-5)
    nothing = torch.zeros_like(mask)
    assert not pt.batch_logprobs(model, ids, nothing, sampling_masks=SETS).logprobs.any()


def _with(at: int, ids: list[int]) -> list[Any]:
    """The sets, with another for a scored token of the first sequence."""
    return [[*SETS[0][:at], ids, *SETS[0][at + 1 :]], *SETS[1:]]


@pytest.mark.parametrize(
    ("sets", "error", "message"),
    [
        (SETS[:2], pt.ForestError, "sampling_masks must hold one entry per sequence: expected 3"),
        (
            [SETS[0][:2], *SETS[1:]],
            pt.ForestError,
            r"sampling_masks\[0\] must hold one set per token of the sequence \(5\) or per token "
            r"that loss_mask scores \(3\), got 2",
        ),
        (_with(1, [1, 2]), pt.ForestError, r"\[0\], for token 3 of .* does not hold that token"),
        (_with(2, [7, 97]), ValueError, "token id 97 is beyond the model's vocabulary of 97"),
        (_with(2, [7, -1]), pt.ForestError, r"\[0\], for token 4 .* a number that is no token id"),
        (_with(0, [5, 2**40]), pt.ForestError, r"\[0\], for token 2 .* that is no token id"),
        (_with(2, [7, 8, 7]), pt.ForestError, r"\[0\], for token 4 .* holds a token id twice"),
        (_with(0, [5.0]), pt.ForestError, r"sampling_masks\[0\]\[0\] must be 1-D integers"),
        (
            [{"ids": [5, 6, 7], "counts": [1, 1, 2]}, None, None],
            pt.ForestError,
            r"sampling_masks\[0\] does not divide its 3 token ids among tokens",
        ),
        ({"ids": [5], "counts": [1]}, pt.ForestError, "a list of one entry per sequence"),
    ],
)
def test_sets_that_do_not_fit(sets, error, message):
    with pytest.raises(error, match=message):
        _scored(build("gemma2"), sets)
