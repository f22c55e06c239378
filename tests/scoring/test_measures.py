"""`sequence_logprobs(measure=)` beside each sequence alone, in every way a model runs."""

from __future__ import annotations

import pickle
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

import prefixtree as pt
from prefixtree.scoring import forward
from prefixtree.scoring.logprobs import sequence_logprobs
from tests.scoring import kept_cases
from tests.scoring.steps_cases import MAX_STEP_TOKENS
from tests.support.models import (
    AdaptedHead,
    assert_same,
    build,
    logprob_and_entropy,
    numbers_and_logprob,
    pack_sequences,
    ragged_objective,
    ragged_packed,
    run_eager,
    run_packed,
)
from tests.support.step_ranks import LIGHT


def run(model: Any, **options: Any) -> Any:
    return run_packed(model, ragged_packed(), ragged_objective(), measured=True, **options)


def test_a_head_with_an_adapter():
    """Three temperatures, masks, and a weight per copy; softcaps."""
    model = build("gemma2")
    model.lm_head = AdaptedHead(model.lm_head)
    assert_same(run(model), run_eager(model))


def test_tied_embeddings():
    model = build("llama", tie_word_embeddings=True)
    assert_same(run(model), run_eager(model))


def test_what_a_measure_takes_is_planned_for(monkeypatch):
    """Sixteen tensors of float32 logits, of all edges where these are few."""
    held: list[int] = []

    def note(_: Any, causal_lm: Any, *of: Any) -> Any:
        _, scored, _, bytes_, *_ = of
        held.append(bytes_ - 16 * 4 * scored * causal_lm.config.vocab_size)
        return None, nullcontext()

    monkeypatch.setattr(forward, "recomputed", note)
    run(build("qwen3"))
    assert held == [0]


@pytest.mark.parametrize("steps", [False, True])
def test_what_edges_are_called(steps):
    """`edge` counts the rows of `packed.edges`, `scored_edge` those of `measured_edges`."""
    packed, masks = ragged_packed(), ragged_objective().loss_masks
    options: dict[str, Any] = (
        {"max_step_tokens": MAX_STEP_TOKENS, "import_cost": LIGHT} if steps else {}
    )
    for temperatures in (0.7, ragged_objective().temperatures):
        with torch.no_grad():
            scores = sequence_logprobs(
                build("qwen3"),
                packed,
                temperatures,
                masks,
                measure=numbers_and_logprob,
                chunk_size=7,
                **options,
            )
        found = scores.measured_edges
        assert found.dtype == torch.float32 and not found.requires_grad
        edge, scored_edge = found[:, 0].long(), found[:, 1].long()
        assert scored_edge.tolist() == list(range(len(found)))
        edges = packed.edges(masks)
        assert set(edge.tolist()) == set(range(len(edges.token)))
        if isinstance(temperatures, float):
            assert torch.equal(edge, scored_edge)
        packed_tokens = packed.unpack(torch.arange(packed.num_tokens))
        for values, tokens, mask in zip(scores.measured, packed_tokens, masks, strict=True):
            scored = torch.from_numpy(mask[1:] != 0)
            assert values.shape == (len(tokens) - 1, 4)
            assert not values[~scored].any()
            assert torch.equal(edges.token[values[scored, 0].long()], tokens[1:][scored])
            assert torch.equal(values[scored, 3].long(), tokens[1:][scored])
            assert torch.equal(found[values[scored, 1].long()], values[scored])


@pytest.mark.parametrize("measured", [False, True])
def test_only_where_asked(measured):
    scores = sequence_logprobs(
        build("qwen3"), ragged_packed(), measure=logprob_and_entropy if measured else None
    )
    assert (scores.measured is None) == (scores.measured_edges is None) == (not measured)
    if measured:
        for values, logprobs in zip(scores.measured, scores.logprobs, strict=True):
            assert values.requires_grad
            torch.testing.assert_close(values[:, 0], logprobs, atol=2e-6, rtol=1e-5)


def test_nothing_scored():
    masks = [np.zeros(len(s)) for s in ragged_objective().sequences]
    scores = sequence_logprobs(
        build("qwen3"), ragged_packed(), loss_mask=masks, measure=logprob_and_entropy
    )
    assert scores.measured_edges.shape == (0, 2)
    assert not any(v.any() for v in scores.measured)
    torch.cat(scores.measured).sum().backward()


def test_refused():
    """Before the model's backward, by the name of what is wrong."""
    teacher = build("llama", "eager")

    def measure(logits: torch.Tensor, edges: Any) -> torch.Tensor:
        return (logits @ teacher.lm_head.weight).sum(-1, keepdim=True)

    with pytest.raises(pt.UnsupportedError, match=r"uses a tensor of shape .* requires a gradient"):
        sequence_logprobs(build("qwen3"), ragged_packed(), measure=measure)
    with pytest.raises(TypeError, match="measure must be a function of logits"):
        sequence_logprobs(build("qwen3"), ragged_packed(), measure="kl")  # type: ignore[arg-type]


# ---- kept trunks ---------------------------------------------------------------------------------


def test_the_numbers_of_edges_in_kept_trunks():
    """They are those of the forest of the rank's sequences, also where nothing is scored."""
    model, objective = build("qwen3"), ragged_objective()
    batches = kept_cases.plan_of(objective)[0]
    given = objective.temperatures, objective.loss_masks
    with torch.no_grad():
        with pt.kept_trunks(model, batches, *given, measure=numbers_and_logprob) as scored:
            packed = scored.packed
            found = []
            for batch, scores in scored:
                found += zip(batch.sequence_indices.tolist(), scores.measured, strict=True)
                assert scores.measured_edges is None
        whole = sequence_logprobs(model, packed, *given, measure=numbers_and_logprob)
    assert len(found) == len(whole.measured) and packed.num_tokens == ragged_packed().num_tokens
    for i, measured in found:
        assert torch.equal(measured[:, [0, 1, 3]], whole.measured[i][:, [0, 1, 3]])
        assert torch.allclose(measured, whole.measured[i], atol=1e-5)
    nothing = [np.zeros(len(x), bool) for x in objective.sequences]
    with pt.kept_trunks(model, batches, loss_mask=nothing, measure=logprob_and_entropy) as scored:
        for _, scores in scored:
            assert all(m.shape[1] == 2 for m in scores.measured)
            (torch.cat(scores.measured).sum() + torch.cat(scores.logprobs).sum()).backward()


# ---- edges of other calls ------------------------------------------------------------------------


def _ids(logits: torch.Tensor, edges: Any) -> torch.Tensor:
    """What tells edges apart: their token and temperature, and a number of the distribution."""
    columns = edges.token.float(), edges.temperature, logits[:, 5] * edges.temperature
    return torch.stack(columns, -1)


@torch.no_grad()
def _read(best: Any, packed: Any, *given: Any, **options: Any) -> float:
    """How far what another call measured is from what this one gets at the same edges."""

    def measure(logits: torch.Tensor, edges: Any) -> torch.Tensor:
        return (best.of_edges(edges) - _ids(logits, edges)).abs()

    scores = sequence_logprobs(build("qwen3"), packed, *given, measure=measure, **options)
    return max(float(values.max()) for values in scores.measured)


@pytest.mark.parametrize("temperatures", [0.7, ragged_objective().temperatures])
def test_what_another_call_measured(temperatures):
    """Of the same forest, of one with more scored edges, and of more sequences."""
    packed, masks = ragged_packed(), ragged_objective().loss_masks
    plan = kept_cases.plan_of(ragged_objective())
    with torch.no_grad():
        every, masked = (
            sequence_logprobs(build("qwen3"), packed, temperatures, m, measure=_ids)
            for m in (None, masks)
        )
    assert _read(every, packed, temperatures, masks, chunk_size=5) < 1e-5
    assert _read(masked, packed, temperatures, masks) < 1e-5
    assert (
        _read(every, packed, temperatures, max_step_tokens=MAX_STEP_TOKENS, import_cost=LIGHT)
        < 1e-5
    )
    for batch in plan[0]:
        assert _read(pickle.loads(pickle.dumps(every)), batch, temperatures, masks) < 1e-5
    with pytest.raises(
        pt.ForestError, match=r"\d+ of \d+ scored edges \(the first: token .*\) were not"
    ):
        _read(masked, packed, temperatures)
    with pytest.raises(ValueError, match=r"at temperature 3, and the call .* give both calls the"):
        _read(every, packed, 3.0)
    with pytest.raises(ValueError, match="have no measured_edges"):
        _read(sequence_logprobs(build("qwen3"), packed), packed)


def test_values_at_the_tokens_of_a_forest():
    """Of the scored one, and of one that holds its edges; others are refused by name."""
    sequences, model = [[1, 2, 3], [1, 2, 4, 5]], build("qwen3")

    def found(packed: Any, scored: list[list[int]] = sequences, **options: Any) -> Any:
        values = packed.input_ids.double()

        def measure(logits: torch.Tensor, edges: Any) -> torch.Tensor:
            return values[edges.tokens_in(packed)][:, None].float()

        scores = sequence_logprobs(model, pack_sequences(scored), measure=measure, **options)
        return [m[:, 0].tolist() for m in scores.measured]

    expected = [[2, 3], [2, 4, 5]]
    assert found(pack_sequences(sequences)) == expected
    assert found(pack_sequences([[1, 9], [7], *sequences[::-1]])) == expected
    with pytest.raises(
        pt.ForestError, match=r"1 of 4 .*first: token 2 \(id 3\) of sequence 0\) are"
    ):
        found(pack_sequences(sequences[1:]))
    apart = pt.pack(pt.PrefixForest.from_sequences(sequences, namespaces=[0, 1]))
    with pytest.raises(pt.ForestError, match="more than once"):
        found(apart)
    by_hand = pt.MeasuredEdges(*[torch.zeros(1, dtype=torch.int64)] * 4)
    with pytest.raises(ValueError, match="made by hand"):
        by_hand.tokens_in(apart)
