"""`sequence_logprobs(max_step_tokens=)` of models with recurrent layers: states and tails from step
to step, against one forward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import prefixtree as pt
from prefixtree import UnsupportedError, plan_micro_batches
from prefixtree.parallel.ledger import Ledger
from prefixtree.parallel.states import LayerStates
from prefixtree.planning import schedule
from prefixtree.planning.costs import ImportCost
from prefixtree.planning.division import Division
from prefixtree.planning.part_states import KEYS, STATES
from prefixtree.planning.steps import plan_steps
from prefixtree.recompute.layers import MODES
from prefixtree.recompute.plan import RecomputePlan
from prefixtree.scoring.in_steps import step_cost_of
from prefixtree.scoring.logprobs import sequence_logprobs
from tests.scoring.steps_cases import (
    MAX_STEP_TOKENS,
    compare,
    logprobs_in_steps,
    number_of_steps,
    run,
)
from tests.support.float64 import Float64
from tests.support.full import mostly
from tests.support.hooks import forget_all_but, round_exported
from tests.support.hybrid_cases import (
    SERVED,
    checkpointed_in_float64,
    in_float64,
    logprobs_alone,
    long_packed,
    long_sequences,
    worst,
)
from tests.support.hybrid_configs import HYBRIDS
from tests.support.models import (
    build,
    cases,
    counted,
    errors,
    gradients,
    make_objective,
    mostly_full,
    pack_sequences,
    ragged_objective,
    same_bits,
)
from tests.support.step_ranks import LIGHT

pytestmark = pytest.mark.skipif(not SERVED, reason="recurrent layers of newer transformers")

# ---- what is computed ----------------------------------------------------------------------------


@pytest.mark.parametrize("family", mostly_full(HYBRIDS, {"qwen3_5"}))
def test_every_family_with_states(family: str) -> None:
    model = build(family)
    with counted([model]) as forwards:
        run(model)
        assert forwards() == 2 * number_of_steps() - 1 >= 9
    compare(model)


@pytest.mark.parametrize(
    "family, checkpointed",
    [
        ("qwen3_5", False),
        ("nemotron_h", True),
        pytest.param("kimi_linear", False, marks=pytest.mark.full),
        pytest.param("lfm2", True, marks=pytest.mark.full),
    ],
)
def test_float64_is_exact(family: str, checkpointed: bool) -> None:
    """Steps through a prepared model, against each sequence alone through eager."""
    sequences, packed = long_sequences(), long_packed()
    draw = torch.Generator().manual_seed(0)
    weights = [torch.randn(len(s) - 1, dtype=torch.float64, generator=draw) for s in sequences]
    with Float64():
        eager = in_float64(family, "eager")
        expected = logprobs_alone(eager, sequences)
        _loss(expected, weights).backward()
        model = pt.prepare(in_float64(family))
        if checkpointed:
            checkpointed_in_float64(model)
        # an imported token counts a tenth of an own one
        got = logprobs_in_steps(model, packed, 64 if checkpointed else 90)
        _loss(got, weights).backward()
    largest, gradient = worst(got, model, expected, eager)
    assert largest < 1e-11 and gradient < 1e-10


def _loss(logprobs: list[torch.Tensor], weights: list[torch.Tensor]) -> torch.Tensor:
    pairs = zip(logprobs, weights, strict=True)
    return sum((p * w).sum() + p.square().sum() / 10 for p, w in pairs)


@pytest.mark.full
def test_a_plan_of_several_modes() -> None:
    model = build("qwen3_5")
    layers = len(model.get_decoder().layers)
    compare(model, recompute=RecomputePlan((*MODES, *("all",) * layers)[:layers], 0))


@pytest.mark.parametrize(
    "family, max_step_tokens", mostly([("lfm2", 8), ("nemotron_h", 60)], [("lfm2", 8)])
)
def test_budgets(family: str, max_step_tokens: int) -> None:
    compare(build(family), max_step_tokens=max_step_tokens, import_cost=ImportCost(token_bytes=1e9))


def test_a_sequence_longer_than_a_step_waits_on_the_host() -> None:
    rng = np.random.default_rng(0)
    trunk = rng.integers(3, 90, 120)
    branches = [np.concatenate([trunk[:at], rng.integers(3, 90, 9)]) for at in (110, 60, 40)]
    objective = make_objective([trunk, *branches])
    cost = ImportCost(token_bytes=36 * 8 * 256 * 6 / 0.3, on_host=True)
    compare(build("qwen3_5"), objective, max_step_tokens=40, import_cost=cost)


def test_the_same_bits_every_time() -> None:
    model = build("nemotron_h")
    assert same_bits(run(model), run(model))


@pytest.mark.parametrize("family", mostly(cases(["qwen3_5", "deepseek_v32"]), ["deepseek_v32"]))
def test_a_plan_that_reuses_trunks(family: str) -> None:
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, 90, 24)
    sequences = [np.concatenate([prompt, [i % 97], rng.integers(3, 90, 7)]) for i in range(12)]
    forest = pt.PrefixForest.from_sequences(sequences)
    model = build(family)
    found = []
    for options in ({}, {"max_step_tokens": 32, "import_cost": LIGHT}):
        (batch,) = plan_micro_batches(forest, 32, reuse=True, import_cost=LIGHT)[0]
        model.zero_grad(set_to_none=True)
        logprobs = torch.cat(sequence_logprobs(model, batch.packed, **options).logprobs)
        (logprobs.square().sum() + logprobs.sum()).backward()
        found.append(torch.cat([grad.flatten() for grad in gradients(model).values()]))
    assert float((found[1] - found[0]).norm() / found[0].norm()) < 1e-5


# ---- the checks can fail -------------------------------------------------------------------------


def test_states_summed_in_bfloat16_turn_it_red(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("qwen3_5")
    expected = run(model, max_step_tokens=None)
    exact = errors(run(model), expected)
    round_exported(monkeypatch, STATES)
    assert errors(run(model), expected).gradient > 100 * exact.gradient


def test_half_precision_rounds_as_one_forward_does() -> None:
    """Returned gradients of a bfloat16 model are summed in float32."""
    exact = run(build("qwen3_5"), max_step_tokens=None)
    model = build("qwen3_5").bfloat16()
    whole, stepped = (errors(run(model, max_step_tokens=n), exact) for n in (None, MAX_STEP_TOKENS))
    print(whole, stepped)
    assert whole.gradient > 1e-3 and stepped.gradient < 1.5 * whole.gradient


def test_gradients_that_a_layer_does_not_take_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_all_but(monkeypatch, KEYS)
    with pytest.raises(RuntimeError, match="calls of recurrent layers"):
        run(build("nemotron_h"))


def test_what_was_exported_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    ledgers = []
    real = Ledger.__init__

    def kept(self: Ledger, *arguments: Any, **options: Any) -> None:
        real(self, *arguments, **options)
        ledgers.append(self)

    monkeypatch.setattr(Ledger, "__init__", kept)
    run(build("qwen3_5"))
    ledger = ledgers[-1]
    assert ledger.kinds >= {KEYS, STATES} and ledger.held_bytes() == (0, 0)
    run(build("qwen3"))
    assert ledgers[-1].kinds == {KEYS}


# ---- memory and what is refused ------------------------------------------------------------------


@pytest.mark.full
def test_states_that_wait_take_room_from_the_steps() -> None:
    model = build("qwen3_5")
    device = torch.device("cpu")
    cost = step_cost_of(model, model, device, "all")
    linear = model.config.get_text_config()
    recurrent = linear.layer_types.count("linear_attention")
    numbers = linear.linear_num_value_heads * (
        linear.linear_key_head_dim * linear.linear_value_head_dim
    )
    assert (cost.state_layers, cost.state_bytes) == (recurrent, 4 * numbers)
    assert cost.state_weight == 2 * recurrent * 4 * numbers / cost.token_bytes
    assert step_cost_of(build("qwen3"), build("qwen3"), device, "all").state_weight == 0
    packed = pack_sequences(ragged_objective().sequences)
    light = replace(LIGHT, state_layers=1, state_bytes=int(LIGHT.token_bytes))
    steps = plan_steps(packed, 40, import_cost=light)
    assert steps.stats.state_weight == 2 and steps.stats.peak <= 40
    owner, predictor = steps.owner, packed.mask.host.predictor
    alive = [
        len(
            {
                int(above)
                for token, above in enumerate(predictor)
                if above >= 0
                and owner[above] <= step <= owner[token]
                and owner[above] < owner[token]
            }
        )
        for step in range(len(steps))
    ]
    assert steps.stats.states == max(alive) > 0
    compare(model, max_step_tokens=40, import_cost=light)
    with pytest.raises(pt.ForestError, match="leaves no room beside the states behind"):
        plan_steps(packed, 4, import_cost=light)


def test_a_layer_that_runs_twice_is_refused() -> None:
    layer, packed = nn.Linear(2, 2), pack_sequences(ragged_objective().sequences)
    steps = plan_steps(packed, MAX_STEP_TOKENS, import_cost=LIGHT)
    events = schedule.steps(len(steps), trains=True)
    ledger = Ledger(Division(steps), events, parks=True)
    with ledger.running(0) as exporting:
        LayerStates(exporting, layer)
        with pytest.raises(UnsupportedError, match="Linear runs twice in one forward: the states"):
            LayerStates(exporting, layer)
    # checkpointing runs it again
    with ledger.running(events.index((schedule.KEEP, 0))) as again:
        assert LayerStates(again, layer).num_tokens == LayerStates(again, layer).num_tokens > 0
