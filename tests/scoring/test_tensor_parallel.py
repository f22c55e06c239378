"""Tensor and expert parallelism, on two ranks and with FSDP2 on four.

What the ranks compute together is what one process computes for every sequence alone.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from prefixtree.scoring.logprobs import sequence_logprobs
from tests.support.full import mostly
from tests.support.models import (
    AdaptedHead,
    Run,
    assert_same,
    build,
    errors,
    ragged_objective,
    ragged_packed,
    run_replicated,
)
from tests.support.spawn import run_ranks
from tests.support.tensor_parallel_ranks import (
    CASES,
    MISTAKES,
    QUICK,
    ROUTED,
    STATISTICS,
    TORCH_HEADS,
    WIDE_CASES,
    WIDE_QUICK,
    Case,
    objective_of,
    place_of,
)

Results = list[dict[str, Any]]


def _run_ranks(cases: dict[str, Case], folder: Path, ranks: int) -> Results:
    for name, case in cases.items():
        build(case.family, **case.changes).save_pretrained(folder / name)
    return run_ranks("tests.support.tensor_parallel_ranks", folder, ranks)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The results of each of two ranks, per case."""
    return _run_ranks(CASES, tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def wide_results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The same of four."""
    return _run_ranks(WIDE_CASES, tmp_path_factory.mktemp("four"), 4)


def _check(results: Results, name: str, case: Case) -> None:
    """Every rank has the scores of its forest, and the gradients: those of one forest, or FSDP2's
    mean over two."""
    model = build(case.family, "eager", **case.changes)
    objectives = [objective_of(case, i) for i in range(1 + case.forests)]
    forests = [run_replicated(model, objective) for objective in objectives]
    if case.balance:
        unbalanced = run_replicated(model, replace(objectives[0], balance=0.0))
        assert errors(unbalanced, forests[0]).gradient > 0.05
    mean = {
        key: sum(run.gradients[key] for run in forests) / len(forests)
        for key in forests[0].gradients
    }
    for rank, result in enumerate(results):
        assert isinstance(result[name], dict), result[name]
        assert result[name]["head"] == [case.head]
        mine, found = forests[place_of(case, rank)], Run(**result[name]["run"])
        assert_same(found, Run(mine.logprobs, mine.entropy, mean))
        # parameters that each rank has whole must not drift apart
        if place_of(case, rank) == place_of(case, 0):
            first = results[0][name]["run"]
            assert all(map(torch.equal, found.logprobs, first["logprobs"]))
            assert all(torch.equal(g, first["gradients"][n]) for n, g in found.gradients.items())


@pytest.mark.parametrize("name", ["llama", "experts, EP with FSDP2"])
def test_in_a_group_it_is_refused(results, name):
    """Ranks of tensor parallelism must not have parts of a forest."""
    for result in results:
        assert "is tensor or expert parallel, which is not verified" in result["in a group", name]


@pytest.mark.parametrize("name", mostly(CASES, QUICK))
def test_two_ranks(results, name):
    _check(results, name, CASES[name])


@pytest.mark.parametrize("name", mostly(WIDE_CASES, WIDE_QUICK))
def test_with_fsdp2_on_four_ranks(wide_results, name):
    _check(wide_results, name, WIDE_CASES[name])


# ---- the lm_head ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_a_rank_leaves_out_is_seen(results, mistake):
    """The comparison fails where one rank's part of the vocabulary is left out of the sums, or of
    the gradient of the hidden states."""
    expected = run_replicated(build("llama", "eager", **CASES["llama"].changes), ragged_objective())
    for result in results:
        assert result[mistake]["head"] == ["sliced"]
        found = errors(Run(**result[mistake]["run"]), expected)
        assert found.gradient > 0.1
        # the scores come from the forward, which is right in the second
        assert (found.logprob > 0.1) == (mistake == "a slice left out")


def test_operator(results):
    """Slices of uneven widths against the whole weight: scores, and gradients of hidden states,
    weight and bias, to rounding in their dtype."""
    for result in results:
        for case, pairs in result["operator"].items():
            for mine, whole in pairs:
                assert mine.dtype == whole.dtype and mine.shape == whole.shape
                # a slice of one row has a small gradient: the rounding of sums shows more. Sums of
                # bf16 parts would be 2e-3 off
                bound = 1e-5 if mine.dtype == torch.float32 else 2e-4
                difference = (mine.float() - whole.float()).norm() / whole.float().norm()
                assert difference <= bound, case


def test_without_gradients_and_with_statistics(results):
    """Statistics come from gathered logits."""
    model = build("llama", **CASES["llama"].changes)
    with torch.no_grad():
        expected = sequence_logprobs(model, ragged_packed(), return_statistics=STATISTICS)
    for result in results:
        assert result["no gradients"]["head"] == ["sliced"]
        torch.testing.assert_close(result["no gradients"]["logprobs"], expected.logprobs)
        found = result["statistics"]
        assert found["head"] == ["gathered"]
        for name in STATISTICS:
            torch.testing.assert_close(found[name], expected.statistics[name])
        torch.testing.assert_close(found["logprobs"], expected.logprobs)


def test_statistics_of_a_part_of_the_vocabulary_are_refused(results):
    for result in results:
        message = result["statistics, head not gathered"]
        assert message.startswith("UnsupportedError: the output embedding (Linear) gives 49 logits")
        assert "expected the 98 of config.vocab_size" in message


@pytest.mark.parametrize("name", ROUTED)
def test_recorded_routes_are_refused(results, name):
    """Routers return a rank's part of the experts there."""
    for result in results:
        message = "UnsupportedError: recorded routes are not verified under tensor or expert para"
        assert str(result[f"routes, {name}"]).startswith(message)


def test_a_measure_gets_gathered_logits(results):
    expected = run_replicated(build("llama", "eager", **CASES["llama"].changes), ragged_objective())
    for result in results:
        assert result["measured"]["head"] == ["gathered"]
        assert_same(Run(**result["measured"]["run"]), expected)


def test_an_adapted_head_scores_gathered_logits(results):
    model = build("llama", "eager", **CASES["llama"].changes)
    model.lm_head = AdaptedHead(model.lm_head)
    expected = run_replicated(model, ragged_objective())
    for result in results:
        assert result["adapted head"]["head"] == ["gathered"]
        assert_same(Run(**result["adapted head"]["run"]), expected)


# ---- torch's own plans ---------------------------------------------------------------------------


def test_torchs_plan_without_the_head(results):
    """The advice of the refusal below."""
    expected = run_replicated(build("llama", "eager"), ragged_objective())
    for result in results:
        assert_same(Run(**result["head left out"]["run"]), expected)


@pytest.mark.parametrize("plan", [name for name in TORCH_HEADS if name != "head left out"])
def test_a_head_in_torchs_plan_is_refused(results, plan):
    for result in results:
        message = result[plan]
        assert message.startswith("UnsupportedError: the output embedding is parallelised by torch")
        assert 'parallelize_module\'s plan, or load the model with tp_plan="auto"' in message
