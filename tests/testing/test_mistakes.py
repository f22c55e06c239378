"""`verify` finds the smallest mistakes in the lines that they change; the page has their cost."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import prefixtree as pt
from tests.support.family_configs import VOCABULARY
from tests.support.mistakes import MISTAKES, Spot
from tests.support.models import build
from tests.support.verdicts import LINES, RESULTS, table

PAGE = Path(__file__).parents[2] / "docs" / "exactness.md"
GRADIENTS = LINES[2:]
# a token's weight is in the loss alone
RED = dict.fromkeys(MISTAKES, LINES) | {"one token's weight left out": GRADIENTS}


def _sequences() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    start = rng.integers(0, VOCABULARY, 20)
    return [np.concatenate([start, rng.integers(0, VOCABULARY, 20)]) for _ in range(3)]


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_turns_it_red(monkeypatch, name):
    sequences = _sequences()
    MISTAKES[name](monkeypatch, Spot.of(sequences))
    verdict = pt.verify(build("llama"), sequences)
    assert verdict.reference == "float64"
    assert tuple(check.name for check in verdict.checks if not check.passed) == RED[name]
    # not just so: the limit of each parameter is the widest
    assert all(check.value > 4 * check.limit for check in verdict.checks if not check.passed)


def test_real_weights_and_real_text() -> None:
    """What was measured: right runs are green, each mistake red; the page has the table."""
    results = json.loads(RESULTS.read_text())
    assert len(results["slices"]) == 20
    assert not any(found["red"] for found in results["slices"])
    assert [found["mistake"] for found in results["mistakes"]] == list(MISTAKES)
    for found in results["mistakes"]:
        assert tuple(found["red"]) == RED[found["mistake"]]
    assert table(results) in PAGE.read_text()
