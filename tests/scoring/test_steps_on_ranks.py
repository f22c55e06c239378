"""`sequence_logprobs(max_step_tokens=)` on two ranks of DDP, FSDP2, tensor and expert parallelism.

Both ranks run each case of tests/support/step_ranks.py once.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.full import mostly
from tests.support.spawn import run_ranks
from tests.support.step_ranks import CASES, QUICK

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The results of each rank."""
    pytest.importorskip("peft")
    return run_ranks("tests.support.step_ranks", tmp_path_factory.mktemp("ranks"))


def of(results: Results, case: str) -> list[Any]:
    """The results of both ranks in a case."""
    found = [result[case] for result in results]
    for rank, each in enumerate(found):
        assert not isinstance(each, dict) or "failed" not in each, f"rank {rank}:\n{each['failed']}"
    return found


@pytest.mark.parametrize("name", mostly(CASES, QUICK))
def test_gradients_are_those_of_one_forward(results: Results, name: str) -> None:
    case, found = CASES[name], of(results, name)
    for each in found:
        if case.half:
            # both are as far from float32, by the rounding of weights and activations
            allowed = 1.5 * each["in one forward"]
            assert 1e-3 < each["gradients"] <= allowed, (name, each)
            continue
        assert each["logprobs"] <= 1e-5, (name, each)
        assert each["gradients"] <= 1e-5, (name, each)
    # to the bit
    assert found[0]["sum"] == found[1]["sum"]


@pytest.mark.parametrize("name", mostly(CASES, QUICK))
def test_every_rank_runs_the_model_as_often_as_the_one_with_most_steps(
    results: Results, name: str
) -> None:
    case = CASES[name]
    first, second = (each["forwards"] for each in of(results, name))
    assert first == second and len(first) == case.updates * case.micro_batches, name
    if case.micro_batches == 1:
        # no fewer than 91 tokens at 20 need, in both passes; the last graph is kept
        assert first[0] >= 2 * 5 - 1


def test_a_rank_that_cannot_tells_the_others(results: Results) -> None:
    first, second = of(results, "one rank cannot")
    another = "ForestError: another rank cannot compute its forest in steps of"
    assert first["path"].startswith(
        "ForestError: max_step_tokens 30 is too little for packed token"
    )
    assert second["path"].startswith(another)
    # one of them has a forest that fits
    for told in (first, second):
        assert told["static graph"].startswith("UnsupportedError: DistributedDataParallel with sta")


def test_scores_without_gradients(results: Results) -> None:
    assert max(of(results, "without gradients")) <= 1e-5
