"""Old log-probabilities, reference, values and four updates: the same as with verl's own engines.

One rank in this process, two ranks in processes of their own (FSDP2 and gloo).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.verl.compare import check_same
from tests.integrations.verl.runs import CASES, run

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def two_ranks(models: Path) -> list[dict[tuple[str, str], Any]]:
    """What two ranks computed, all cases with both engines."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.integrations.verl.rank"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), "2", str(models), *CASES],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    logs = [process.communicate(timeout=500)[0] for process in processes]
    for process, log in zip(processes, logs, strict=True):
        assert process.returncode == 0, log[-4000:]
    return [torch.load(models / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_one_rank(name: str, models: Path, record_property: Callable[..., None]) -> None:
    stock = run("stock", models, CASES[name])
    packed = run("prefixtree", models, CASES[name])
    differences = check_same(stock, packed, CASES[name])
    print("DIFF", name, {k: f"{v:.1e}" for k, v in differences.items()})
    record_property("differences", differences)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks(
    name: str, two_ranks: list[dict[tuple[str, str], Any]], record_property: Callable[..., None]
) -> None:
    for rank, results in enumerate(two_ranks):
        differences = check_same(results[name, "stock"], results[name, "prefixtree"], CASES[name])
        record_property(f"differences of rank {rank}", differences)


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
