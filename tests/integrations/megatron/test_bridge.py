"""Megatron-Bridge: a tiny Qwen3 of transformers, the two lines of docs/megatron.md, and back.

In a process of its own, as the stub of TransformerEngine stays; the first version tested alone has
Megatron-Bridge.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.support.spawn import run_ranks

if importlib.util.find_spec("megatron.bridge") is None:
    pytest.skip("this environment has no Megatron-Bridge", allow_module_level=True)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("bridge")
    return run_ranks("tests.integrations.megatron.bridge_rank", folder, 1)[0]


def test_the_two_lines_are_those_of_the_guide(found: dict[str, Any]) -> None:
    guide = (Path(__file__).parents[3] / "docs" / "megatron.md").read_text()
    for line in found["lines"]:
        assert f"\n{line}\n" in guide


def test_the_model_is_made_for_forests(found: dict[str, Any]) -> None:
    assert found["attention"] == "ForestSelfAttention"
    assert found["core"] == "ForestDotProductAttention"
    assert found["rows"] == found["distinct"] < found["tokens"]


@pytest.mark.parametrize("way", ["pack_batches", "scored edges"])
def test_log_probabilities_are_those_of_transformers(found: dict[str, Any], way: str) -> None:
    assert found[way] < 1e-5


def test_weights_come_back_as_they_were(found: dict[str, Any]) -> None:
    assert found["names"] == found["names back"] and found["equal"]
    assert len(found["names"]) > 20


def test_the_backend_local_is_refused(found: dict[str, Any]) -> None:
    """Megatron-Bridge then puts Megatron's core attention in the place of ours."""
    assert "core_attention is a DotProductAttention" in found["local"]
