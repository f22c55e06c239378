"""`plan_trunks`: which micro-batches share which trunks, and what is held at once."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.lib.workloads import caterpillar, forest_of, single
from prefixtree import CostModel, ForestError, ImportCost, PrefixForest, plan_micro_batches
from prefixtree.packing.layout import pack
from prefixtree.planning.schedule import BACKWARD, GIVE, KEEP, kept
from prefixtree.planning.trunks import Trunks, plan_trunks
from tests.support.strategies import forests

# of a trunk a token counts 1.1 with its graph, 0.6 without, and 0.06 on the host
LAYERS = ImportCost(
    layers=20,
    kv_heads=1,
    head_dim=5,
    value_dim=5,
    element_bytes=2,
    token_bytes=2000,
    graph_bytes=1000,
)
# a token of a trunk counts a quarter, and its returned gradients a tenth
COST = ImportCost(
    layers=1, kv_heads=1, head_dim=5, value_dim=5, element_bytes=2, token_bytes=400, graph_bytes=40
)


def held(trunks: Trunks, owner: np.ndarray, cost: ImportCost) -> float:
    """The most that is held at once, run after run as `kept_trunks` runs them."""
    sizes = np.bincount(owner, minlength=len(trunks.spans))
    alive: list[int] = []
    peaks = []

    def weight() -> float:
        return cost.trunk_weight * sum(int(sizes[part]) for part in alive)

    for kind, part in kept(trunks.spans, len(trunks.sequences), trains=True):
        if kind == GIVE:
            peaks.append(weight())
        elif kind == KEEP:
            peaks.append(sizes[part] + weight())
        if kind == KEEP and trunks.spans[part].is_trunk:
            alive.append(part)
        elif kind == BACKWARD and trunks.spans[part].is_trunk:
            alive.remove(part)
            peaks.append(sizes[part] * (1 + cost.returned_weight) + weight())
    assert not alive
    return float(max(peaks))


def states_held(forest: PrefixForest, trunks: Trunks, owner: np.ndarray) -> int:
    """The most states that trunks hold at once for others, token by token."""
    predictor = pack(forest).mask.host.predictor
    exported = {int(p) for t, p in enumerate(predictor) if p >= 0 and owner[p] != owner[t]}
    return max(
        sum(trunks.spans[owner[t]].first <= at <= trunks.spans[owner[t]].last for t in exported)
        for at in range(len(trunks.sequences))
    )


@settings(max_examples=150)
@given(
    forests(max_nodes=12), st.integers(6, 40), st.sampled_from([0, 2]), st.integers(0, 4), st.data()
)
def test_plans_hold_what_they_promise(
    forest: PrefixForest, max_tokens: int, state_weight: int, count: int, data: st.DataObject
) -> None:
    """Of recurrent layers too, and of micro-batches that are given, in any order."""
    # as much as `state_weight` tokens, with its gradient
    cost = replace(COST, state_layers=1, state_bytes=200 * state_weight)
    assert cost.state_weight == state_weight
    batches = None
    if count:
        of = st.lists(
            st.integers(0, count - 1),
            min_size=forest.num_sequences,
            max_size=forest.num_sequences,
        )
        chosen = np.unique(data.draw(of), return_inverse=True)[1]
        batches = [np.flatnonzero(chosen == at) for at in range(chosen.max() + 1)]
    try:
        trunks = plan_trunks(forest, max_tokens, cost, batches)
    except ForestError:
        # a path is too long, whatever waits where
        longest = int(forest.sequence_lengths.max())
        assert state_weight or batches or longest > max_tokens / 2
        return
    if batches is not None:
        assert all(a.tolist() == b.tolist() for a, b in zip(batches, trunks.sequences, strict=True))
    steps = trunks.on(torch.device("cpu"))
    # every token once, and all of a micro-batch's in its part or in trunks that are alive
    assert sum(part.num_tokens for part in steps) == forest.num_tokens
    found = np.sort(np.concatenate(trunks.sequences))
    assert found.tolist() == list(range(forest.num_sequences))
    for at, sequences in enumerate(trunks.sequences):
        available = [
            part
            for part, span in enumerate(trunks.spans)
            if span.first == at or (span.is_trunk and span.first <= at <= span.last)
        ]
        own = np.isin(steps.owner, available)
        for sequence in sequences.tolist():
            for node in forest.path(sequence).tolist():
                start = int(forest.node_start[node])
                assert own[start : start + int(forest.node_length[node])].all()
    for part, span in zip(steps, trunks.spans, strict=True):
        for exporter in np.unique(steps.owner[part.imported_tokens]).tolist():
            exports = trunks.spans[exporter]
            assert exports.is_trunk and exports.first <= span.first and span.last <= exports.last
    again, on_host = trunks.stats.again, trunks.stats.on_host
    states = states_held(forest, trunks, steps.owner)
    assert trunks.stats.states == (states if state_weight else 0)
    cost = replace(cost, graph_bytes=0 if again else COST.graph_bytes, on_host=on_host)
    peak = held(trunks, steps.owner, cost)
    if state_weight:
        peak = max(peak, cost.state_weight * states)
    assert peak <= trunks.stats.peak + 1e-6 and trunks.stats.peak <= max_tokens + 1e-6
    assert trunks.costs(CostModel()).sum() == pytest.approx(
        CostModel().cost(forest.node_position.astype(np.int64), forest.node_length).sum()
    )


def test_a_trunk_and_its_responses() -> None:
    trunks = plan_trunks(forest_of(single(8192, 16, 2048)), 16384, COST)
    assert not trunks.stats.again
    assert trunks.stats.trunks == 1 and trunks.stats.kept_tokens == 8192
    assert [len(sequences) for sequences in trunks.sequences] in ([6, 6, 4], [6, 5, 5], [7, 7, 2])


def test_pieces_of_trunks_leave_room_for_the_state_behind_them() -> None:
    """A piece may end within a node: pieces without that room fit nowhere, or without graphs."""
    cost = replace(COST, state_layers=1, state_bytes=200)
    two = PrefixForest.from_parents([-1, 0, 0], [18, 16, 17])
    four = PrefixForest.from_parents([-1, 0, 0, 0, 0], [56, 6, 2, 10, 16])
    for forest, max_tokens in ((two, 18), (four, 43)):
        stats = plan_trunks(forest, max_tokens, cost).stats
        assert stats.peak <= max_tokens and not stats.again and not stats.on_host


def test_small_trunks_are_computed_with_those_above() -> None:
    """Fewer launches; where they then do not fit, they are not."""
    forest = forest_of(caterpillar(24, 120, 120, 1300, 16))
    trunks = plan_trunks(forest, 16384)
    spans = [span for span in trunks.spans if span.is_trunk]
    sizes = np.bincount(trunks.on(torch.device("cpu")).owner)
    small = [s for span, s in zip(trunks.spans, sizes, strict=True) if span.is_trunk and s < 1024]
    assert len(spans) < len(trunks.sequences) and len(small) <= 1


def test_trunks_that_do_not_fit_with_their_graphs_keep_none() -> None:
    """Then what they export waits on the host, and then a path does not fit."""
    forest = PrefixForest.from_parents([-1, 0, 0], [100, 10, 10])
    # of 26 tokens, in pieces
    whole, again, host = (plan_trunks(forest, n, LAYERS) for n in (150, 70, 30))
    assert not whole.stats.again and not whole.stats.on_host
    assert again.stats.again and not again.stats.on_host and again.stats.peak <= 70
    assert host.stats.again and host.stats.on_host and host.stats.peak <= 30
    assert "on the host; their forward runs twice" in str(host.stats)


def test_a_path_that_does_not_fit() -> None:
    forest = PrefixForest.from_parents([-1, 0, 0], [100, 10, 10])
    # what a token exports takes as much as the token, wherever it waits
    cost = replace(COST, token_bytes=60)
    with pytest.raises(ForestError, match="max_tokens 20 is too little for the trunks") as error:
        plan_trunks(forest, 20, cost)
    least = int(re.findall(r"is about (\d+)", str(error.value))[0])
    assert plan_trunks(forest, least, cost).stats.peak <= least
    with pytest.raises(ForestError):
        plan_trunks(forest, least - 2, cost)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_plans_of_ranks(num_ranks: int) -> None:
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, 999, 60)
    sequences = [
        np.concatenate([trunk[: 10 * (i % 6) + 10], rng.integers(0, 999, 20)]) for i in range(30)
    ]
    groups = [i % 5 for i in range(30)]
    plan = plan_micro_batches(sequences, 90, num_ranks, groups, trunks=True, import_cost=COST)
    cut = plan_micro_batches(sequences, 90, num_ranks, groups)
    assert len({len(rank) for rank in plan}) == 1 and plan.max_tokens == 90
    everything = [batch.sequence_indices for rank in plan for batch in rank]
    assert np.sort(np.concatenate(everything)).tolist() == list(range(30))
    of_rank = 0
    for rank in plan:
        mine = np.sort(np.concatenate([batch.sequence_indices for batch in rank]))
        forest = PrefixForest.from_sequences([sequences[i] for i in mine])
        assert rank.trunks.forest.num_tokens == forest.num_tokens
        of_rank += forest.num_tokens
        # groups stay on one rank
        assert len(mine) == sum(groups[i] in {groups[j] for j in mine} for i in range(30))
        for batch in rank:
            assert batch.is_empty or batch.num_tokens == batch.packed.num_tokens
    assert plan.stats.packed_tokens == of_rank < cut.stats.packed_tokens
    assert sum(plan.stats.rank_costs) < sum(cut.stats.rank_costs)
    assert "trunks of" in str(plan.stats) and plan.stats.trunks.peak <= 90
