"""Plans whose trees stay whole: `plan_micro_batches(reuse=True)`."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.lib.workloads import airline_sequences, forest_of, single
from prefixtree import CostModel, ForestError, plan_micro_batches
from prefixtree.planning.costs import ImportCost
from prefixtree.planning.steps import plan_steps
from tests.support.step_ranks import LIGHT
from tests.support.strategies import token_sequences

# beside the project, where it is developed
ROLLOUTS = Path(__file__).parents[3] / "shared/data/airline_rollouts.jsonl.gz"


@given(token_sequences(), st.integers(4, 12), st.integers(1, 4), st.data())
def test_trees_stay_whole_on_a_rank(sequences, max_tokens, num_ranks, data) -> None:
    labels = st.sampled_from([None, 0, 1])
    count = len(sequences)
    groups = data.draw(st.none() | st.lists(labels, min_size=count, max_size=count))
    cost = ImportCost(token_bytes=1e12)
    plan = plan_micro_batches(
        sequences, max_tokens, num_ranks, groups, reuse=True, import_cost=cost
    )
    found = np.concatenate([batch.sequence_indices for rank in plan for batch in rank])
    assert sorted(found) == list(range(count))
    for rank in plan:
        trees = [{int(sequences[i][0]) for i in batch.sequence_indices} for batch in rank]
        # a tree begins with one token
        assert sum(map(len, trees)) == len(set().union(*trees))
        for batch in rank:
            assert (batch.steps is not None) == (batch.num_tokens > max_tokens)
            if batch.steps:
                again = plan_steps(batch.packed, max_tokens, import_cost=cost).stats
                assert again == batch.steps == pickle.loads(pickle.dumps(batch)).steps
                assert sum(batch.steps.own_tokens) == batch.num_tokens
    if groups:
        for label in {label for label in groups if label is not None}:
            members = [i for i, of in enumerate(groups) if of == label]
            holders = [
                r
                for r, rank in enumerate(plan)
                for b in rank
                if set(members) & {*b.sequence_indices}
            ]
            assert len(set(holders)) == 1
    if num_ranks == 1:
        assert plan.stats.repeated_tokens == 0


def test_both_costs_are_known() -> None:
    forest = forest_of(single(24, 16, 8))
    cut = plan_micro_batches(forest, 48, import_cost=LIGHT)
    whole = plan_micro_batches(forest, 48, reuse=True, import_cost=LIGHT)
    assert cut.stats.reuse is None
    (batch,) = whole[0]
    assert batch.steps is not None and whole.stats.reuse is not None
    reuse = whole.stats.reuse
    assert (reuse.stepped, reuse.forwards) == (1, len(batch.steps.own_tokens))
    assert reuse.imported_tokens == max(batch.steps.imported_tokens) >= 24
    assert reuse.exported_bytes == batch.steps.exported_bytes
    assert reuse.cut_tokens == cut.stats.packed_tokens > whole.stats.packed_tokens
    assert reuse.cut_cost == pytest.approx(sum(cut.stats.rank_costs), rel=1e-6)
    model = CostModel()
    # all but the last step
    tokens = batch.packed.position_ids.numpy()[: -batch.steps.own_tokens[-1]]
    attention = model.attention * (tokens + 1).sum()
    forward = model.linear * len(tokens) / 3 + attention / 3.5
    assert reuse.second_forward == pytest.approx(forward, rel=1e-6)
    assert f"1 micro-batches in steps, {reuse.forwards} forwards" in str(whole.stats)
    assert "cut trees take" in str(whole.stats)
    assert repr(batch).endswith(f"152 tokens in {reuse.forwards} steps)")


def test_small_trees_share_a_micro_batch_and_need_no_steps() -> None:
    sequences = [[tree, *range(10)] for tree in range(100, 106)]
    plan = plan_micro_batches(sequences, 22, reuse=True)
    assert [batch.num_tokens for batch in plan[0]] == [22, 22, 22]
    assert plan.stats.reuse is not None and plan.stats.reuse.stepped == 0
    assert all(batch.steps is None for batch in plan[0])


def test_a_sequence_may_be_longer_than_the_budget() -> None:
    sequences = [np.arange(100), np.arange(5) + 200]
    with pytest.raises(ForestError, match=r"or compute it in steps \(reuse=True\)"):
        plan_micro_batches(sequences, 60)
    plan = plan_micro_batches(sequences, 60, reuse=True, import_cost=LIGHT)
    assert [batch.num_tokens for batch in plan[0]] == [100, 5]
    assert plan.stats.reuse is not None and plan.stats.reuse.cut_tokens is None
    assert "a sequence is too long to cut trees" in str(plan.stats)
    # what is imported fills the device, and waits on the host
    (batch, _) = plan_micro_batches(sequences, 60, reuse=True)[0]
    assert batch.steps is not None and batch.steps.on_host
    assert batch.steps.import_weight == pytest.approx(ImportCost().weight * 2 / 36)
    assert batch.steps.held_bytes(ImportCost()) == 0
    assert "exported (" in str(batch.steps) and "and imported from the host" in str(batch.steps)
    # one layer's rows alone fill the budget
    heavy = ImportCost(token_bytes=1e4)
    with pytest.raises(
        ForestError, match="the least max_step_tokens that works for this forest is"
    ):
        plan_micro_batches(sequences, 60, reuse=True, import_cost=heavy)


def test_long_prompts() -> None:
    """A prompt of 24K with 128 responses of 8K at 32K: the work in steps, and in cut trees."""
    forest = forest_of(single(24576, 128, 8192))
    plan = plan_micro_batches(forest, 32768, reuse=True)
    (batch,) = plan[0]
    assert plan.stats.packed_tokens == forest.num_tokens and batch.steps is not None
    assert batch.steps.peak <= 32768 and batch.steps.again < 0.01
    assert plan.stats.reuse is not None and plan.stats.reuse.cut_cost is not None
    ratio = plan.stats.reuse.cut_cost / batch.cost
    assert ratio == pytest.approx(2.99, abs=0.01)
    # the second forward is the one that checkpointing in one piece has
    model = CostModel()
    checkpointed = CostModel(model.linear * 4 / 3, model.attention * 4.5 / 3.5)
    whole = checkpointed.cost(
        forest.node_position.astype(np.int64), forest.node_length.astype(np.int64)
    ).sum()
    assert (batch.cost + plan.stats.reuse.second_forward) / whole < 1.001


@pytest.mark.skipif(not ROLLOUTS.exists(), reason=f"{ROLLOUTS} is not there")
@pytest.mark.parametrize("max_tokens", [16_384, 32_768])
def test_real_rollouts(max_tokens: int) -> None:
    """Turns of agents, whose trunks are short beside the budget: little is repeated anyway."""
    sequences = airline_sequences(ROLLOUTS)
    plan = plan_micro_batches(sequences, max_tokens, reuse=True)
    reuse = plan.stats.reuse
    assert reuse is not None and reuse.cut_tokens is not None and reuse.cut_cost is not None
    distinct = plan.stats.distinct_tokens
    assert plan.stats.packed_tokens == distinct < reuse.cut_tokens < 1.3 * distinct
    for batch in plan[0]:
        assert batch.steps is not None and batch.steps.peak <= max_tokens
        assert batch.steps.again < 0.1
    # a second forward costs more than the cuts
    work = sum(plan.stats.rank_costs)
    assert reuse.cut_cost < work + reuse.second_forward
