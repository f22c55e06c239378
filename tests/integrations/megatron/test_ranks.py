"""Two ranks of a gloo group: tensor, sequence and expert parallelism."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integrations.megatron.tensor_ranks import (
    EXPERT,
    EXPERT_ROUTERS,
    MISTAKES,
    MTP,
    REPLAY,
    ROUTERS,
    STATES,
    TENSOR,
)
from tests.support.spawn import run_ranks

EXACT = [name for name in TENSOR if "float32" not in name and "experts" not in name]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of both ranks."""
    folder = tmp_path_factory.mktemp("tensor")
    return run_ranks("tests.integrations.megatron.tensor_ranks", folder)


def test_the_model_is_cut(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["shape of the output layer"] == (128, 64) and rank["sequence parallel"]
        assert rank["local experts"] == 2


@pytest.mark.parametrize("name", [*EXACT, *STATES, *REPLAY, *MTP])
def test_equals_sequences_in_float64(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        found = rank[name]
        assert max(found["logprobs"], found["entropy"], found["gradients"]) < 1e-13, found


@pytest.mark.parametrize("name", [name for name in TENSOR if "float32" in name])
def test_equals_sequences_in_float32(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        found = rank[name]
        assert max(found["logprobs"], found["entropy"], found["gradients"]) < 1e-5, found


@pytest.mark.parametrize("name", [*EXPERT, "TP + SP, experts"])
def test_experts(ranks: list[dict[str, Any]], name: str) -> None:
    """The router's softmax is float32 in Megatron."""
    for rank in ranks:
        found = rank[name]
        assert max(found["logprobs"], found["entropy"]) < 1e-13, found
        assert found["gradients"] < 1e-6, found


@pytest.mark.parametrize("name", [*ROUTERS, *EXPERT_ROUTERS])
def test_router_losses_and_counts(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        found = rank[name]
        assert max(found["scores"], found["gradients"], found["routers"]) < 1e-13, found


def test_recorded_routes_are_those_of_sequences(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["records"]["rows"] > 100 and rank["records"]["other"] == 0


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_seen(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        assert rank[f"mistake: {name}"] > 1e-2
