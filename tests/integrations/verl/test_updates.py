"""Old log-probabilities, reference, values and updates: the same as with verl's own engines.

Four updates of one rank in this process, two of ranks in processes of their own (FSDP and gloo).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.verl.cases import CASES, SEQUENCE_PARALLEL_CASES
from tests.integrations.verl.compare import check_same
from tests.integrations.verl.runs import run, run_ranks
from tests.support.full import asked_for, mostly

# each algorithm, model, strategy and setting of both, on one rank or on several
ONE = ("grpo, a temperature a sample", "grpo, one micro-batch", "grpo, AdamW", "ppo", "ppo, fsdp1")
# every time; the others with --full
TWO = (
    *("grpo, ranks unlike", "grpo, fixed size", "grpo, padded to buckets", "grpo, lora"),
    *("grpo, offloaded", "ppo, tied", "ppo, experts", "ppo, fsdp1, original parameters"),
)
# what neither one rank nor those have
TWO_WITH_FULL = ("grpo, gradients reduced every time", "grpo, offload policy")
FOUR = ("grpo, two ranks a forest", "ppo, two ranks a forest, fsdp1")


@pytest.fixture(scope="module")
def two_ranks(models: Path) -> list[dict[tuple[str, str], Any]]:
    """The results of two ranks, all cases with both engines."""
    return run_ranks(models, asked_for((*TWO, *TWO_WITH_FULL), TWO))


@pytest.fixture(scope="module")
def four_ranks(models: Path) -> list[dict[tuple[str, str], Any]]:
    """The results of four ranks, verl's engine by Ulysses and ours by parts of forests."""
    return run_ranks(models, asked_for(SEQUENCE_PARALLEL_CASES, FOUR), 4)


@pytest.mark.parametrize("name", ONE)
def test_one_rank(name: str, models: Path, record_property: Callable[..., None]) -> None:
    stock = run("stock", models, CASES[name])
    packed = run("prefixtree", models, CASES[name])
    differences = check_same(stock, packed, CASES[name])
    print("DIFF", name, {k: f"{v:.1e}" for k, v in differences.items()})
    record_property("differences", differences)


@pytest.mark.parametrize("name", mostly((*TWO, *TWO_WITH_FULL), TWO))
def test_two_ranks(
    name: str, two_ranks: list[dict[tuple[str, str], Any]], record_property: Callable[..., None]
) -> None:
    for rank, results in enumerate(two_ranks):
        differences = check_same(results[name, "stock"], results[name, "prefixtree"], CASES[name])
        record_property(f"differences of rank {rank}", differences)


@pytest.mark.parametrize("name", mostly(SEQUENCE_PARALLEL_CASES, FOUR))
def test_two_ranks_with_the_same_data(
    name: str, four_ranks: list[dict[tuple[str, str], Any]], record_property: Callable[..., None]
) -> None:
    settings = SEQUENCE_PARALLEL_CASES[name]
    for rank, results in enumerate(four_ranks):
        assert results[name, "stock"]["exchanges"].keys() == {"heads"}
        assert results[name, "prefixtree"]["exchanges"].keys() == {"keys"}
        differences = check_same(results[name, "stock"], results[name, "prefixtree"], settings)
        record_property(f"differences of rank {rank}", differences)
        print("DIFF", name, rank, {k: f"{v:.1e}" for k, v in differences.items()})


def test_ranks_agree_on_their_micro_batches(two_ranks: list[dict[Any, Any]]) -> None:
    first, second = (results["steps"] for results in two_ranks)
    assert first["alone"] != second["alone"]
    assert first["together"] == second["together"] == max(first["alone"], second["alone"])
    assert first["samples"] == second["samples"] == list(range(16))
    # what one rank cannot do, all refuse: none waits for the others
    assert "more than max_token_len_per_gpu=10" in first["too long"]
    assert "one rank needs 6 micro-batches, another has only 3 sequences" in first["too few"]
    for reason in ("too long", "too few"):
        assert first[reason] == second[reason]
