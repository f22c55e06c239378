"""`kept_trunks` on two ranks of DDP and FSDP2, with other numbers of trunks and micro-batches.

Both ranks run each case of tests/support/trunk_ranks.py once.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.full import mostly
from tests.support.spawn import run_ranks
from tests.support.trunk_ranks import CASES, QUICK, VALUES

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The results of each rank."""
    pytest.importorskip("peft")
    return run_ranks("tests.support.trunk_ranks", tmp_path_factory.mktemp("ranks"))


def of(results: Results, case: str) -> list[Any]:
    """The results of both ranks in a case."""
    found = [result[case] for result in results]
    for rank, each in enumerate(found):
        assert not isinstance(each, dict) or "failed" not in each, f"rank {rank}:\n{each['failed']}"
    return found


@pytest.mark.parametrize("name", mostly(CASES, QUICK))
def test_gradients_are_those_of_micro_batches_alone(results: Results, name: str) -> None:
    found = of(results, name)
    for each in found:
        if CASES[name].half:
            # both are as far from float32, by the rounding of weights and activations
            assert 1e-3 < each["gradients"] <= 1.5 * each["in one forward"], each
            continue
        assert each["logprobs"] <= 1e-5 and each["gradients"] <= 1e-5, each
    # to the bit
    assert found[0]["sum"] == found[1]["sum"]


@pytest.mark.parametrize("name", mostly(CASES, QUICK))
def test_ranks_of_fsdp2_run_in_lockstep_and_those_of_ddp_need_not(
    results: Results, name: str
) -> None:
    first, second = (each["forwards"] for each in of(results, name))
    assert (first == second) == name.startswith("fsdp2"), (first, second)


def test_a_rank_without_trunks_runs_in_lockstep(results: Results) -> None:
    empty = of(results, "one rank is empty")
    assert [each["empty"] for each in empty].count(True) == 1
    assert empty[0]["forwards"] == empty[1]["forwards"]
    assert all(each["gradients"] <= 1e-5 for each in empty)


@pytest.mark.parametrize("wrapper", mostly(VALUES, ["fsdp2"]))
def test_values_are_those_of_micro_batches_alone(results: Results, wrapper: str) -> None:
    for each in of(results, f"values, {wrapper}"):
        assert max(each.values()) <= 1e-5, each


def test_gradients_stay_local_within_no_sync(results: Results) -> None:
    assert max(of(results, "no_sync")) <= 1e-5


def test_a_rank_that_cannot_tells_the_others(results: Results) -> None:
    first, second = of(results, "one rank cannot")
    assert first.startswith("ValueError: batches must be plan[rank] of a plan that keeps")
    assert second.startswith("ForestError: another rank cannot keep its trunks")


def test_wrappers_that_are_not_verified(results: Results) -> None:
    for told in of(results, "fsdp1"):
        assert told.startswith("UnsupportedError: FSDP1 is not verified with kept trunks")
    for told in of(results, "static graph"):
        assert told.startswith("UnsupportedError: DistributedDataParallel with static_graph=True")


def test_scores_without_gradients(results: Results) -> None:
    assert max(of(results, "without gradients")) <= 1e-5
