"""`kept_trunks` of models with recurrent layers: states and tails that trunks export."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from prefixtree import import_cost, kept_trunks
from prefixtree.parallel import ledger
from prefixtree.parallel.ledger import Rows
from prefixtree.planning.part_states import KEYS, STATES
from prefixtree.planning.trunks import Trunks
from tests.scoring import steps_cases
from tests.scoring.kept_cases import compare, linear, one_by_one, plan_of, run, worst_in_float64
from tests.support.full import mostly
from tests.support.hooks import forget_all_but
from tests.support.hybrid_cases import needs_states
from tests.support.models import (
    assert_same,
    build,
    errors,
    ragged_objective,
    run_eager,
    same_bits,
    tolerance,
)
from tests.support.step_ranks import LIGHT

pytestmark = needs_states


@pytest.mark.parametrize("family", mostly(["qwen3_5", "falcon_h1"], ["qwen3_5"]))
def test_each_sequence_alone_and_each_micro_batch(family: str) -> None:
    """The other families are in test_states_in_steps.py: steps import as micro-batches do."""
    model = build(family)
    # rounding of float32; float64 is below
    compare(model, tolerance=tolerance(family))
    assert_same(run(model, loss=linear), run_eager(model), tolerance(family))


@pytest.mark.parametrize(
    "family, checkpointed, again",
    mostly(
        [
            ("qwen3_5", False, False),
            ("qwen3_5", True, True),
            ("nemotron_h", True, False),
            ("kimi_linear", False, True),
            ("lfm2", True, False),
            ("falcon_h1", False, False),
        ],
        [("falcon_h1", False, False)],
    ),
)
def test_float64_is_exact(
    family: str, checkpointed: bool, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against each sequence alone through eager."""
    largest, gradient = worst_in_float64(family, checkpointed, again, monkeypatch)
    assert largest < 1e-13 and gradient < 1e-12


def test_states_on_the_host_and_several_trunks_at_once() -> None:
    plan = plan_of(ragged_objective(), 17, import_cost=replace(LIGHT, on_host=True))
    assert plan.stats.trunks.on_host
    compare(build("nemotron_h"), plan=plan, recompute="all", recompute_trunks="again")


def test_half_precision_rounds_as_one_forward_does() -> None:
    """Returned gradients of a bfloat16 model are summed in float32."""
    plan, model = plan_of(ragged_objective()), build("qwen3_5")
    exact = one_by_one(model, ragged_objective(), plan)
    model = build("qwen3_5").bfloat16()
    alone, kept = one_by_one(model, ragged_objective(), plan), run(model)
    alone, kept = errors(alone, exact), errors(kept, exact)
    assert alone.gradient > 1e-3 and kept.gradient < 1.5 * alone.gradient


def test_the_same_bits_every_time() -> None:
    model = build("nemotron_h")
    assert same_bits(run(model), run(model))


def most_states(trunks: Trunks) -> int:
    """The most states that wait within a turn, token by token."""
    steps, spans = trunks.on(torch.device("cpu")), trunks.spans
    until: dict[int, int] = {}
    for token, above in enumerate(steps.packed.mask.host.predictor.tolist()):
        reader = spans[steps.owner[token]]
        if above >= 0 and steps.owner[above] != steps.owner[token]:
            until[above] = max(until.get(above, -1), reader.last)
    turns = [range(spans[steps.owner[above]].first, last + 1) for above, last in until.items()]
    return max(sum(at in turn for turn in turns) for at in range(len(trunks.sequences)))


def test_what_waits_is_what_the_plan_says() -> None:
    """Bytes of exported states turn after turn, those of which all readers are done left out, and
    that all is freed."""
    model = build("qwen3_5")
    cost = import_cost(model, "all", "again")
    plan = plan_of(ragged_objective(), 17, import_cost=replace(cost, token_bytes=1e9))
    stats = plan.stats.trunks
    assert stats.states > 0 and f"with {stats.states} states" in str(plan.stats)
    most = 0
    with kept_trunks(model, plan[0]) as scored:
        for _, scores in scored:
            torch.cat(scores.logprobs).sum().backward()
            exports = scored._run.ledger.exports(STATES)
            values = [x for export in exports for rows in export.values.values() for x in rows]
            most = max(most, sum(x.nbytes for x in values))
    assert most == most_states(plan[0].trunks) * cost.state_layers * cost.state_bytes
    assert 0 < most <= stats.states * cost.state_layers * cost.state_bytes
    assert scored._run.ledger.held_bytes() == (0, 0)


@pytest.mark.parametrize("family", mostly(["qwen3", "nemotron_h"], ["qwen3"]))
def test_rows_of_trunks_stay_where_they_are(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between readers too; those of steps wait on the host for their backward."""
    copies: list[Rows] = []
    monkeypatch.setattr(ledger, "to_host", lambda rows: copies.append(rows) or rows)
    model, plan = build(family), plan_of(ragged_objective(), 17)
    assert plan.stats.trunks.trunks > 2 and not plan.stats.trunks.on_host
    for mode in (None, "again"):
        run(model, plan=plan, recompute_trunks=mode)
    assert not copies
    steps_cases.run(model)
    assert copies


# ---- what is refused -----------------------------------------------------------------------------


def test_gradients_that_a_layer_does_not_take_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_all_but(monkeypatch, KEYS)
    with pytest.raises(RuntimeError, match="calls of recurrent layers"):
        run(build("nemotron_h"))


def test_a_backward_that_is_late() -> None:
    model, plan = build("nemotron_h"), plan_of(ragged_objective())
    kept: list[torch.Tensor] = []
    with (
        pytest.raises(RuntimeError, match="ran after the next one was asked for"),
        kept_trunks(model, plan[0]) as scored,
    ):
        for _, scores in scored:
            loss = torch.cat(scores.logprobs).sum()
            loss.backward(retain_graph=True)
            kept.append(loss)
            kept[0].backward(retain_graph=True)
