"""Four ranks of a gloo group: context parallelism beside data, tensor and pipeline parallelism."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integrations.megatron import context_stages
from tests.integrations.megatron.context_ranks import DATA, EXPERT, MISTAKES, ON_STAGES, TENSOR
from tests.support.spawn import run_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of the ranks."""
    folder = tmp_path_factory.mktemp("context")
    return run_ranks("tests.integrations.megatron.context_ranks", folder, 4)


@pytest.mark.parametrize("name", [*DATA, *TENSOR, *EXPERT, "outputs"])
def test_equals_sequences(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        assert rank[name]["worst"] < 1e-13, rank[name]


@pytest.mark.parametrize("name", context_stages.CASES)
def test_equals_sequences_on_pipeline_stages(ranks: list[dict[str, Any]], name: str) -> None:
    # the ranks of a context-parallel group are neighbours
    assert [rank[name]["has loss"] for rank in ranks] == [False, False, True, True]
    for rank in ranks:
        assert rank[name]["worst"] < 1e-13, rank[name]


def test_stages_without_shapes_refuse_unequal_parts(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "ranks have [56, 55] tokens" in rank["unequal shares"]


@pytest.mark.parametrize("name", [*MISTAKES, *(f"CP 2, PP 2: {name}" for name in ON_STAGES)])
def test_a_mistake_is_seen(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        assert rank[name]["worst"] > 1e-2


@pytest.mark.parametrize(
    ("call", "messages"),
    [
        ("other forests", ["the ranks of a group must pass the same forest"] * 2),
        ("other masks", ["the ranks of a group must score the same tokens"] * 2),
        (
            "a rank refuses",
            ["RuntimeError: rank 1 of the group refused", "ValueError: token id 1000"],
        ),
        (
            "another size",
            ["context_parallel_size=4 of the configuration, and the model's group has 2 ranks"] * 2,
        ),
    ],
)
def test_what_ranks_refuse(ranks: list[dict[str, Any]], call: str, messages: list[str]) -> None:
    for index, rank in enumerate(ranks):
        assert messages[index % 2] in rank["refused"][call]
