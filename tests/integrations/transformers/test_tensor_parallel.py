"""Tensor parallelism on two ranks: what is served gives the results of one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.models import Run, assert_same, build, ragged_objective, run_replicated
from tests.support.spawn import run_ranks
from tests.support.tensor_parallel_ranks import AUTO, HEADS


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank computed, a plan."""
    return run_ranks(
        "tests.support.tensor_parallel_ranks", tmp_path_factory.mktemp("tensor_parallel")
    )


@pytest.mark.parametrize("plan", [AUTO, "head left out"])
def test_served(results, plan):
    """transformers' own plan, and torch's of all layers but the head: what the refusal advises."""
    expected = run_replicated(build("llama", "eager"), ragged_objective())
    for result in results:
        assert_same(Run(**result[plan]), expected)


@pytest.mark.parametrize("plan", [name for name in HEADS if name != "head left out"])
def test_a_head_in_torchs_plan_is_refused(results, plan):
    for result in results:
        message = result[plan]
        assert message.startswith("UnsupportedError: the output embedding is parallelised by torch")
        assert 'parallelize_module\'s plan, or load the model with tp_plan="auto"' in message
