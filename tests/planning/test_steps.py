"""`plan_steps`: steps of a packed forest that import from earlier steps, within a budget."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.lib.workloads import forest_of, single
from prefixtree import (
    CostModel,
    ForestError,
    PackedForest,
    PrefixForest,
    pack,
    plan_micro_batches,
    tree_attention,
)
from prefixtree.planning.costs import ImportCost
from prefixtree.planning.parts import Parts
from prefixtree.planning.steps import Steps, plan_steps
from tests.support.part_exchange import attend_in_steps
from tests.support.strategies import forests, random_forest


def weighing(weight: float) -> ImportCost:
    """Costs under which an imported token counts `weight` own ones."""
    cost = ImportCost()
    return ImportCost(token_bytes=cost.weight * cost.token_bytes / weight)


def can_be_cut(position: list[int], budget: int, weight: float) -> bool:
    """Whether any runs of packed tokens fit the budget, by trying all of them."""
    good = [False] * len(position) + [True]
    for start in reversed(range(len(position))):
        room = int(np.floor(budget - weighing(weight).weight * position[start]))
        good[start] = any(good[start + 1 : start + max(0, room) + 1])
    return good[0]


def attention_cases(packed: PackedForest, seed: int):
    """q, k, v, dout float64, and out, dq, dk, dv of the whole by the reference."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, dout = (
        torch.randn(packed.num_tokens, heads, 4, generator=generator, dtype=torch.float64)
        for heads in (2, 1, 1, 2)
    )
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = tree_attention(*leaves, packed.mask, backend="reference")
    return (q, k, v), dout, [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def worst(got, expected) -> float:
    """Largest difference; NaN counts as infinite."""
    pairs = zip(got, expected, strict=True)
    return max(float((a - b).abs().nan_to_num(torch.inf).max()) for a, b in pairs)


# ---- the plan ------------------------------------------------------------------------------------


@given(forests(), st.integers(1, 60), st.sampled_from([0.05, 0.3, 0.61, 1.0, 1.7]), st.booleans())
def test_steps_fit_the_budget_and_import_from_earlier_ones(forest, budget, weight, pad) -> None:
    packed = pack(forest, 4 if pad else None)
    cost = weighing(weight)
    if not can_be_cut(packed.position_ids.tolist(), budget, weight):
        with pytest.raises(
            ForestError, match=f"max_step_tokens {budget} is too little for packed tok"
        ):
            plan_steps(packed, budget, import_cost=cost)
        return
    steps = plan_steps(packed, budget, import_cost=cost)
    tokens = np.concatenate([step.own_tokens for step in steps])
    assert tokens.tolist() == list(range(packed.num_tokens))
    assert (np.triu(steps.imported) == 0).all()
    for step, own, imported in zip(
        steps, steps.stats.own_tokens, steps.stats.imported_tokens, strict=True
    ):
        assert (own, imported) == (step.num_tokens, step.num_imported) and own >= 1
        assert own + weight * imported <= budget + 1e-9
    assert steps.stats.peak <= budget + 1e-9
    again = plan_steps(pack(forest, 4 if pad else None), budget, import_cost=cost)
    assert all((a == b).all() for a, b in zip(again.runs, steps.runs, strict=True))


@given(forests(), st.integers(5, 40))
def test_stats_count_the_tokens_one_by_one(forest, budget) -> None:
    packed = pack(forest)
    steps = plan_steps(packed, budget + forest.num_tokens // 4, import_cost=weighing(0.1))
    cost = CostModel()
    exported = {token for step in steps for token in step.imported_tokens.tolist()}
    assert steps.stats.exported_tokens == len(exported)
    assert steps.stats.own_exported_tokens == tuple(
        sum(token in exported for token in step.own_tokens.tolist()) for step in steps
    )
    assert steps.stats.exported_bytes == len(exported) * 36 * 8 * 256 * 2
    total = again = 0.0
    for token, position in enumerate(packed.position_ids.tolist()):
        total += cost.linear + cost.attention * (position + 1)
        if token in exported:
            again += cost.linear / 3 + cost.attention * (position + 1) / 3.5
    assert steps.stats.again == pytest.approx(again / total)
    assert f"{packed.num_tokens:,} tokens in {len(steps):,} steps" in str(steps.stats)


def test_a_sequence_longer_than_the_budget_is_cut() -> None:
    packed = pack(PrefixForest.from_sequences([np.arange(1000)]))
    steps = plan_steps(packed, 400, import_cost=weighing(0.3))
    # 400, then 0.7 of what was left each time
    assert steps.stats.own_tokens == (400, 280, 196, 124)
    assert steps.stats.imported_tokens == (0, 400, 680, 876)


def test_steps_end_where_branches_end() -> None:
    """Half a branch would be exported to the next step."""
    packed = pack(forest_of(single(240, 12, 80)))
    steps = plan_steps(packed, 420, import_cost=weighing(0.5))
    assert set(steps.stats.imported_tokens[1:]) == {240}
    assert steps.stats.own_tokens == (400, 240, 240, 240, 80)


def test_room_is_not_given_up_for_little() -> None:
    """Every turn leaves a leaf of 10 and goes on by 1, so a turn less gains one token of 11."""

    def turn(left: int):
        return (1, [(10, []), turn(left - 1)] if left else [])

    packed = pack(forest_of([turn(100)], order="input"))
    steps = plan_steps(packed, 200, import_cost=weighing(0.5))
    for own, imported in list(
        zip(steps.stats.own_tokens, steps.stats.imported_tokens, strict=True)
    )[:-1]:
        assert own + 0.5 * imported > 200 - 11


def test_imported_tokens_may_weigh_more_than_own_ones() -> None:
    """A path is then cheapest in one step, so a step leaves what it cannot finish to the next."""
    sequences = [np.arange(12), np.arange(30) + 50]
    packed = pack(PrefixForest.from_sequences(sequences, order="input"))
    steps = plan_steps(packed, 32, import_cost=weighing(1.7))
    assert steps.stats.own_tokens == (12, 30)
    assert steps.stats.imported_tokens == (0, 0)
    with pytest.raises(ForestError, match="max_step_tokens 29 is too little for packed token"):
        plan_steps(packed, 29, import_cost=weighing(1.7))


def test_trunk_reuse_against_cuts_of_the_planner() -> None:
    """A prompt of 24K with 128 responses of 8K, at 32K."""
    forest = forest_of(single(24576, 128, 8192))
    steps = plan_steps(pack(forest), 32768)
    cost = CostModel()
    once = cost.cost(forest.node_position.astype(np.int64), forest.node_length.astype(np.int64))
    plan = plan_micro_batches(forest, 32768)
    assert sum(plan.stats.rank_costs) / once.sum() == pytest.approx(2.99, abs=0.01)
    assert 1 + steps.stats.again < 1.01
    assert steps.stats.peak <= 32768


# ---- attention -----------------------------------------------------------------------------------


@settings(max_examples=40)
@given(forests(max_nodes=8), st.integers(0, 99), st.integers(1, 9), st.booleans())
def test_attention_of_all_steps_is_that_of_the_whole(forest, seed, size, by_position) -> None:
    packed = pack(forest)
    if by_position:
        # no runs at all: every step is a slice of all paths
        position = packed.position_ids.numpy()
        steps = Steps(packed, position // size, int(position.max()) // size + 1)
    else:
        steps = plan_steps(packed, 1 + size + forest.num_tokens // 3, import_cost=weighing(0.01))
    qkv, dout, expected = attention_cases(packed, seed)
    got = attend_in_steps(steps, qkv, dout, list(range(len(steps))))
    assert worst(got, expected) < 1e-12


def test_the_check_turns_red_in_another_order() -> None:
    rng = np.random.default_rng(0)
    checked = 0
    for seed in range(40):
        packed = pack(random_forest(rng, 8, 8))
        steps = plan_steps(packed, 8 + packed.num_tokens // 3, import_cost=weighing(0.01))
        order = list(range(len(steps)))
        if not steps.imported.any():
            continue
        qkv, dout, expected = attention_cases(packed, seed)
        # keys that are not there yet
        assert worst(attend_in_steps(steps, qkv, dout, order[::-1])[:1], expected[:1]) == np.inf
        # gradients that come when the exporter's backward is over
        lost = attend_in_steps(steps, qkv, dout, order, backwards=order)
        assert worst(lost[:2], expected[:2]) < 1e-12 and worst(lost[2:], expected[2:]) > 1e-6
        # of the same parts in another order no Steps can be made
        backwards = len(steps) - 1 - steps.owner
        Parts(packed, backwards, len(steps))
        with pytest.raises(ForestError, match=r"imports packed token \d+ from step \d+, which"):
            Steps(packed, backwards, len(steps))
        checked += 1
    assert checked > 5


# ---- bad input -----------------------------------------------------------------------------------


def test_bad_input() -> None:
    packed = pack(PrefixForest.from_sequences([[1, 2, 3], [1, 2, 4]]))
    for bad in (0, 1.0, True):
        with pytest.raises(ValueError, match="max_step_tokens must be an integer >= 1, got"):
            plan_steps(packed, bad)
    with pytest.raises(TypeError, match="plan_steps takes a packed forest, got TreeMask"):
        plan_steps(packed.mask, 10)
    subset = PackedForest(packed.forest, packed._buffer, packed.mask.for_queries([(0, 3)]))
    with pytest.raises(ForestError, match=r"plan_steps takes .* got a mask for 3 of 4"):
        plan_steps(subset, 10)


def test_a_budget_below_a_paths_imported_bytes() -> None:
    packed = pack(PrefixForest.from_sequences([np.arange(1000)]))
    with pytest.raises(ForestError, match="for packed token 199, whose path has 200") as told:
        plan_steps(packed, 100, import_cost=weighing(0.5))
    assert "imports 199, which count 0.50 each by their bytes, 99.5 in all" in str(told.value)
    least = int(str(told.value).split()[-1])
    steps = plan_steps(packed, least, import_cost=weighing(0.5))
    assert steps.stats.peak <= least <= 501
    with pytest.raises(ForestError, match=f"works for this forest is {least}$"):
        plan_steps(packed, least - 1, import_cost=weighing(0.5))
