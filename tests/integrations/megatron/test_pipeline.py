"""Two pipeline stages under Megatron's own schedules, in gradient buffers of its DDP."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integrations.megatron.pipeline_ranks import CASES, INTERLEAVED, ROUTERS
from tests.support.spawn import run_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of both stages."""
    folder = tmp_path_factory.mktemp("pipeline")
    return run_ranks("tests.integrations.megatron.pipeline_ranks", folder)


@pytest.mark.parametrize("name", [*CASES, *ROUTERS, *INTERLEAVED])
def test_equals_sequences(ranks: list[dict[str, Any]], name: str) -> None:
    first, last = ranks[0][name], ranks[1][name]
    assert first["layers"] == last["layers"] == ([1, 1] if name in INTERLEAVED else [2])
    assert last["has loss"] and not first["has loss"]
    for stage in (first, last):
        assert stage["parameters"] > 10 and (name not in ROUTERS or stage["routers"])
        assert stage["gradients"] < 1e-13 and stage["loss"] < 1e-13, stage
