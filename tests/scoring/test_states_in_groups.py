"""`sequence_logprobs(group=)` of models with recurrent layers, whose heads the ranks divide, and
with indexers, whose keys they exchange: against each sequence alone, and against one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.support.float64 import Float64
from tests.support.full import mostly
from tests.support.hybrid_cases import SERVED, in_float64, logprobs_alone, long_sequences
from tests.support.models import (
    Run,
    assert_same,
    build,
    errors,
    gradients,
    pack_sequences,
    ragged_objective,
    run_packed,
)
from tests.support.spawn import run_ranks
from tests.support.state_group_ranks import (
    CASES,
    CHOICES,
    HALF,
    MISTAKES,
    QUICK,
    QUICK_CHOICES,
    WIDE_MISTAKES,
    WITH_INDEXERS,
    Case,
    freeze,
    loss_of,
)
from tests.support.ties import LowestFirst

pytestmark = pytest.mark.skipif(not SERVED, reason="recurrent layers of newer transformers")

Results = list[dict[Any, Any]]


def _results(ranks: int, folders: pytest.TempPathFactory) -> Results:
    return run_ranks("tests.support.state_group_ranks", folders.mktemp(f"of{ranks}"), ranks)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Of each of two ranks."""
    return _results(2, tmp_path_factory)


@pytest.fixture(scope="module")
def of_three(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return _results(3, tmp_path_factory)


@pytest.fixture(scope="module")
def of_four(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return _results(4, tmp_path_factory)


@cache
def _alone(family: str, changes: tuple[tuple[str, Any], ...]) -> Any:
    """Log-probabilities and gradients of each sequence alone, by eager in float64."""
    with Float64(), LowestFirst():
        model = in_float64(family, "eager", **dict(changes))
        logprobs = logprobs_alone(model, long_sequences())
        loss_of(logprobs).backward()
    return [p.detach() for p in logprobs], gradients(model)


def _check_exact(results: Results, name: str, case: Case) -> None:
    logprobs, expected = _alone(case.family, case.changes)
    for result in results:
        assert isinstance(result[name], dict), result[name]
        found = result[name]["logprobs"]
        largest = max(float((p - q).abs().max()) for p, q in zip(found, logprobs, strict=True))
        worst = 0.0
        for key, gradient in expected.items():
            if float(gradient.norm()) > 1e-10:
                difference = result[name]["gradients"][key] - gradient
                worst = max(worst, float(difference.norm() / gradient.norm()))
        print(f"{name}: float64 log p {largest:.1e}, gradient {worst:.1e}")
        assert largest < 1e-11 and worst < 1e-10


@pytest.mark.parametrize("name", mostly(CASES[2], QUICK))
def test_float64_is_exact(results: Results, name: str) -> None:
    _check_exact(results, name, CASES[2][name])


@pytest.mark.full
@pytest.mark.parametrize("name", CASES[3])
def test_three_ranks(of_three: Results, name: str) -> None:
    _check_exact(of_three, name, CASES[3][name])


@pytest.mark.full
@pytest.mark.parametrize("name", CASES[4])
def test_four_ranks(of_four: Results, name: str) -> None:
    _check_exact(of_four, name, CASES[4][name])


@cache
def _one_process(family: str, changed: Any = lambda model: model) -> Run:
    objective = ragged_objective()
    return run_packed(changed(build(family)), pack_sequences(objective.sequences), objective)


def test_frozen_layers(results: Results) -> None:
    """Ranks leave the same exchanges out."""
    for result in results:
        assert isinstance(result["frozen"], dict), result["frozen"]
        found = assert_same(Run(**result["frozen"]), _one_process("qwen3_5", freeze))
        assert len(result["frozen"]["gradients"]) > 1, found


def _check_half(results: Results, family: str) -> None:
    objective = ragged_objective()
    exact, model = _one_process(family), build(family).bfloat16()
    whole = errors(run_packed(model, pack_sequences(objective.sequences), objective), exact)
    for result in results:
        assert isinstance(result["half", family], dict), result["half", family]
        found = errors(Run(**result["half", family]), exact)
        print(f"{family}: {whole}, in a group {found}")
        assert 1e-3 < found.gradient < 1.5 * whole.gradient


@pytest.mark.parametrize("family", HALF[2])
def test_half_precision_rounds_as_one_process_does(results: Results, family: str) -> None:
    """Gates in float32 travel with the rest; tails' gradients are summed in float32."""
    _check_half(results, family)


@pytest.mark.full
@pytest.mark.parametrize("family", HALF[4])
def test_half_precision_of_shared_groups(of_four: Results, family: str) -> None:
    _check_half(of_four, family)


# ---- the checks can fail -------------------------------------------------------------------------


def _check_red(results: Results, mistake: str, family: str) -> None:
    for result in results:
        assert isinstance(result["mistake", mistake], dict), result["mistake", mistake]
        found = errors(Run(**result["mistake", mistake]), _one_process(family))
        print(f"{mistake}: {found}")
        assert max(found.logprob, found.entropy) <= 1e-5 and found.gradient > 0.1


@pytest.mark.parametrize("mistake", MISTAKES)
def test_gradients_that_are_left_out_turn_it_red(results: Results, mistake: str) -> None:
    """Scores do not show it."""
    _check_red(results, mistake, MISTAKES[mistake][-1])


@pytest.mark.skipif(not WITH_INDEXERS, reason="transformers before 5.23 has no verified indexer")
@pytest.mark.parametrize("mode", mostly(CHOICES, QUICK_CHOICES))
def test_a_choice_among_own_tokens_turns_it_red(results: Results, mode: str) -> None:
    for result in results:
        assert isinstance(result["choice", mode], dict), result["choice", mode]
        found = errors(Run(**result["choice", mode]), _one_process("glm_moe_dsa"))
        assert found.logprob > 1e-2, found


@pytest.mark.full
@pytest.mark.parametrize("mistake", WIDE_MISTAKES)
def test_copies_that_are_left_out_turn_it_red(of_four: Results, mistake: str) -> None:
    _check_red(of_four, mistake, WIDE_MISTAKES[mistake][-1])


@pytest.mark.full
def test_heads_that_do_not_divide_are_refused(of_three: Results) -> None:
    for result in of_three:
        said = "the 4 heads of a recurrent layer, which share 2 heads of keys"
        assert said in result["odd"] and "do not divide among 3 ranks" in result["odd"]
