"""`max_step_tokens` with `group`: the ranks of a group divide each step of a forest.

What goes with it on two ranks is in `ways`; here are ways to divide,
wrappers, mistakes and refusals.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixtree import PrefixForest, pack
from prefixtree.planning.costs import CostModel, ImportCost
from prefixtree.planning.division import Division
from prefixtree.planning.split import split_slots, split_tokens
from prefixtree.planning.steps import plan_steps
from prefixtree.scoring.in_steps import with_at_least
from tests.support.full import mostly
from tests.support.slot_ranks import CASES, MISTAKES, QUICK, WIDE_CASES, WIDE_QUICK
from tests.support.spawn import run_ranks
from tests.support.strategies import forests

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_ranks("tests.support.slot_ranks", tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_ranks("tests.support.slot_ranks", tmp_path_factory.mktemp("four"), 4)


def of(results: Results, name: str) -> list[Any]:
    found = [result[name] for result in results]
    for rank, each in enumerate(found):
        assert not isinstance(each, dict) or "failed" not in each, f"rank {rank}:\n{each['failed']}"
    return found


@pytest.mark.parametrize("name", mostly([*CASES, "values"], [*QUICK, "values"]))
def test_gradients_are_those_of_one_forward(two: Results, name: str) -> None:
    for each in of(two, name):
        assert each["logprobs"] <= 2e-5 and each["gradients"] <= 2e-5, each
        # no fewer than 91 tokens at 40 need, in both passes; the last graph is kept
        assert name == "values" or each["forwards"] >= 2 * 3 - 1


@pytest.mark.parametrize("name", mostly(WIDE_CASES, WIDE_QUICK))
def test_groups_of_other_numbers_of_steps(four: Results, name: str) -> None:
    found = of(four, name)
    for each in found:
        assert each["logprobs"] <= 2e-5 and each["gradients"] <= 2e-5, each
    assert len({each["forwards"] for each in found}) == 1 and found[0]["forwards"] >= 5


@pytest.mark.parametrize("name", MISTAKES)
def test_a_gradient_that_is_left_out_is_seen(two: Results, name: str) -> None:
    found = [result[name] for result in two]
    if any("did not reach" in each.get("failed", "") for each in found):
        return
    for each in of(two, name):
        assert each["logprobs"] <= 2e-5 and each["gradients"] > 1e-2, each


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("other steps", "must make the same call.*max_step_tokens"),
        ("too small", "ForestError: max_step_tokens .* is too little"),
        ("auto", "recompute='auto' is not planned for steps that ranks of a group divide"),
    ],
)
def test_all_ranks_refuse(two: Results, name: str, words: str) -> None:
    for message in of(two, name):
        assert re.search(words, message), message


def test_a_forest_that_fits_is_scored_at_once(two: Results) -> None:
    assert of(two, "fits") == ["scores", "scores"]


# ---- how slots are divided -----------------------------------------------------------------------


@given(forests(max_nodes=12, max_length=40), st.integers(1, 4), st.integers(8, 60))
def test_each_rank_has_tokens_of_each_slot(forest: PrefixForest, ranks: int, size: int) -> None:
    packed = pack(forest, ranks)
    cost = ImportCost(token_bytes=1e9)
    steps = plan_steps(packed, size, import_cost=cost)
    border = with_at_least(steps.runs[0], ranks)
    assert border[0] == 0 and border[-1] == packed.num_tokens
    assert (np.diff(border) >= ranks).all() and len(border) <= len(steps.runs[0])
    parts = split_slots(packed, border, ranks, CostModel(), import_cost=cost)
    division = Division(parts, ranks)
    assert len(division) == len(border) - 1
    slot = np.searchsorted(border, np.arange(packed.num_tokens), side="right") - 1
    assert (parts.owner // ranks == slot).all()
    counts = parts.num_own_tokens.reshape(-1, ranks)
    # equal but for a chunk's tile
    assert (counts > 0).all() and (np.ptp(counts, axis=1) <= counts.mean(1) / 2 + 1).all()
    if len(division) == 1:
        whole = split_tokens(packed, ranks, CostModel(), import_cost=cost)
        assert (whole.owner == parts.owner).all()
