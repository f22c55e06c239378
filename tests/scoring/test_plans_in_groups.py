"""recompute="auto" in groups: ranks of other memory recompute alike, within what was planned."""

from __future__ import annotations

import pytest

from tests.support.full import mostly
from tests.support.group_cases import Case, num_groups
from tests.support.group_checks import Results, check, check_exchanges, check_values
from tests.support.group_plan_ranks import (
    CASES,
    PEAKS,
    QUICK,
    QUICK_OWNERS,
    QUICK_PEAKS,
    WIDE_CASES,
)
from tests.support.spawn import run_ranks
from tests.support.state_group_ranks import OWNERS

pytestmark = [
    # PEFT asks transformers under the old name of the property
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The results of each of two ranks."""
    return run_ranks("tests.support.group_plan_ranks", tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def wide_results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The same of four."""
    return run_ranks("tests.support.group_plan_ranks", tmp_path_factory.mktemp("four"), 4)


def _check_planned(results: Results, name: str, case: Case) -> None:
    """As one process computes it; each group recomputes what its ranks agreed on."""
    check(results, name, case)
    size = len(results) // num_groups(case)
    modes = results[0][name]["modes"]
    for rank, result in enumerate(results):
        assert result[name]["modes"] == modes or num_groups(case) > 1
        # the first rank of a group has memory to recompute nothing
        assert result[name]["modes"] != (own := result[name]["own"]) or rank % size
        assert set(own) == {"nothing"} or rank % size
    check_exchanges(results, name, case, modes)


@pytest.mark.parametrize("name", mostly(CASES, QUICK))
def test_two_ranks(results, name):
    _check_planned(results, name, CASES[name])


@pytest.mark.full
@pytest.mark.parametrize("name", WIDE_CASES)
def test_four_ranks(wide_results, name):
    _check_planned(wide_results, name, WIDE_CASES[name])


@pytest.mark.full
def test_values_per_token(results):
    check_values([result["values"] for result in results], "ragged")


@pytest.mark.parametrize("name", mostly(PEAKS, QUICK_PEAKS))
def test_a_rank_holds_what_was_planned_for_it(results, name):
    for result in results:
        counted, planned, modes = result["peak", name]
        print(f"{name}: counted {counted:,}, {planned / counted:.3f} planned, {modes}")
        assert counted <= planned < 1.3 * counted


@pytest.mark.parametrize("owner", mostly(OWNERS, QUICK_OWNERS))
def test_rows_that_a_backward_has_at_once_are_planned(results, owner):
    """Also on a rank that exports alone, or imports alone, as of runs."""
    for result in results:
        counted, planned = result["rows", owner]
        assert counted == planned
