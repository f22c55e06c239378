"""The load-balancing loss of experts equals that of the replicated batch: what transformers' eager
model computes for one padded batch of all sequences, with the gradient of every parameter."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from packaging import version

import prefixtree as pt
from prefixtree.recompute import choose
from prefixtree.scoring.logprobs import sequence_logprobs
from tests.support.family_configs import FAMILIES
from tests.support.full import in_turn, mostly
from tests.support.models import (
    TRANSFORMERS,
    Run,
    assert_same,
    build,
    cases,
    enable_checkpointing,
    errors,
    gradients,
    padded_balancing_loss,
    ragged_objective,
    ragged_packed,
    ragged_sequences,
    run_packed,
    run_replicated,
    tolerance,
)
from tests.support.variant_configs import CANNOT_CHECKPOINT, WITH_ROUTER_LOSS

# whose router logits older transformers does not record
RECORDED_SINCE = {
    name: "5.23" for name in WITH_ROUTER_LOSS if name.startswith(("granite", "qwen3_vl"))
}
_UNRECORDED = [n for n, v in RECORDED_SINCE.items() if version.parse(v) > TRANSFORMERS]
# softmax over all experts, over those chosen, square roots of softplus, and layers without experts
_QUICK = {"qwen3_moe", "gpt_oss", "deepseek_v4", "granitemoehybrid"}
_MIXTURES = mostly(cases(name for name in WITH_ROUTER_LOSS if name not in _UNRECORDED), _QUICK)


@cache
def _reference(model_type: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Value and gradients of the loss alone, with those parameters that it reaches."""
    model = build(model_type, "eager")
    loss = padded_balancing_loss(model, ragged_sequences())
    loss.backward()
    return float(loss.detach()), gradients(model)


def _packed_loss(model: Any, packed: pt.PackedForest, **options: Any) -> tuple[float, Any]:
    scores = sequence_logprobs(model, packed, output_router_logits=True, **options)
    assert scores.aux_loss is not None and scores.aux_loss.dtype == torch.float32
    model.zero_grad(set_to_none=True)
    scores.aux_loss.backward()
    return float(scores.aux_loss.detach()), gradients(model)


def _worst(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest of `errors` over the parameters' gradients."""
    nothing = [torch.ones(1)]
    return errors(Run(nothing, nothing, got), Run(nothing, nothing, expected)).gradient


@pytest.mark.parametrize("model_type", _MIXTURES)
def test_equals_the_padded_batch(model_type):
    value, expected = _reference(model_type)
    # routers, and what lies before them; not what only the last layer's experts do
    assert any("gate" in name or "router" in name for name in expected)
    found, got = _packed_loss(build(model_type), ragged_packed())
    assert found == pytest.approx(value, rel=1e-6)
    assert got.keys() == expected.keys()
    worst = _worst(got, expected)
    print(f"{model_type}: value {abs(found - value):.1e}, gradients {worst:.1e}")
    assert worst <= tolerance(model_type)


@pytest.mark.parametrize("model_type", cases(sorted(_QUICK - {*_UNRECORDED})))
def test_every_path_of_the_loss_counts(model_type, monkeypatch):
    """Without the multiplicity, and without the gradient through a layer's router, it is wrong."""
    value, expected = _reference(model_type)
    packed = ragged_packed()
    ones = torch.ones_like(packed.multiplicity)
    with monkeypatch.context() as patched:
        patched.setattr(packed, "multiplicity", ones)
        found, got = _packed_loss(build(model_type), packed)
    assert abs(found - value) > 1e-4 and _worst(got, expected) > 0.05
    model = build(model_type)
    routers = [m for m in model.modules() if type(m).__name__.endswith(("TopKRouter", "Gating"))]
    handle = routers[-1].register_forward_pre_hook(lambda _, args: (args[0].detach(), *args[1:]))
    found, got = _packed_loss(model, packed)
    handle.remove()
    assert found == pytest.approx(value, rel=1e-6)
    got = {name: got.get(name, torch.zeros_like(g)) for name, g in expected.items()}
    assert _worst(got, expected) > 0.01


@pytest.mark.parametrize(
    ("model_type", "mode"),
    mostly(
        in_turn(
            (case for case in _MIXTURES if case.values[0] not in CANNOT_CHECKPOINT),
            ["non-reentrant", "all_but_attention"],
        ),
        _QUICK - {"deepseek_v4"},
    ),
)
def test_with_log_probabilities_and_recomputed(model_type, mode):
    """One backward of both losses; the configuration asks."""
    # as much gradient as the log-probabilities have
    objective = replace(ragged_objective(), balance=300.0)
    model = build(model_type, output_router_logits=True)
    if mode == "non-reentrant":
        enable_checkpointing(model, use_reentrant=False)
    recompute = None if mode == "non-reentrant" else mode
    run = run_packed(model, ragged_packed(), objective, recompute=recompute)
    expected = _both(model_type)
    assert_same(run, expected, tolerance(model_type))


@pytest.mark.full
def test_a_plan_leaves_room_for_router_logits(monkeypatch):
    """Their bytes are no longer there for activations."""
    asked = []

    def planned(memory: Any, work: Any, available: int, **options: Any) -> Any:
        asked.append(available)
        return original(memory, work, available, **options)

    original = choose.plan_for
    monkeypatch.setattr(choose, "plan_for", planned)
    monkeypatch.setattr(choose, "available_bytes", lambda device: 2**30)
    model, packed = build("qwen3_moe"), ragged_packed()
    for wanted in (False, True):
        sequence_logprobs(model, packed, recompute="auto", output_router_logits=wanted)
    # logits and probabilities of 3 layers of 4 experts, in float32
    assert asked[0] - asked[1] == packed.num_tokens * 3 * 4 * 2 * 4


@cache
def _both(model_type: str) -> Run:
    model = build(model_type, "eager")
    both = run_replicated(model, replace(ragged_objective(), balance=300.0))
    assert errors(run_replicated(model, ragged_objective()), both).gradient > 0.05
    return both


@pytest.mark.full
def test_the_families_with_a_loss():
    """All whose forward computes it, and no others."""
    found = {
        case.values[0]
        for case in cases(FAMILIES)
        if not case.marks and _computes_loss(build(*case.values))
    }
    assert found == {case.values[0] for case in cases(WITH_ROUTER_LOSS) if not case.marks}


@pytest.mark.parametrize("model_type", cases(_UNRECORDED))
def test_families_whose_router_logits_are_not_recorded(model_type):
    """transformers' own loss of them is the number 0."""
    assert padded_balancing_loss(build(model_type, "eager"), ragged_sequences()) == 0
    with pytest.raises(pt.UnsupportedError, match=r"recorded no router logits.*need 5\.23"):
        sequence_logprobs(build(model_type), ragged_packed(), output_router_logits=True)


def _computes_loss(model: Any) -> bool:
    forward = inspect.getsource(inspect.unwrap(type(model).forward))
    return "aux_loss = load_balancing_loss_func(" in forward


# ---- which batch it is of ------------------------------------------------------------------------


def test_padding_counts_nothing():
    model = build("qwen3_moe")
    forest = ragged_packed().forest
    padded = pt.pack(forest, pad_to_multiple_of=64)
    assert padded.num_padding > 0
    expected, _ = _packed_loss(model, ragged_packed())
    assert _packed_loss(model, padded)[0] == pytest.approx(expected, rel=1e-6)


def test_micro_batches_have_the_loss_of_their_sequences():
    sequences = ragged_sequences()
    forest = pt.PrefixForest.from_sequences(sequences)
    plan = pt.plan_micro_batches(forest, max_tokens=60)
    parts = [part for rank in plan for part in rank]
    assert len(parts) > 1
    model, eager = build("mixtral"), build("mixtral", "eager")
    values = []
    for part in parts:
        value, got = _packed_loss(model, part.packed)
        eager.zero_grad(set_to_none=True)
        loss = padded_balancing_loss(eager, part.take(sequences))
        loss.backward()
        assert value == pytest.approx(float(loss.detach()), rel=1e-6)
        assert _worst(got, gradients(eager)) <= tolerance("mixtral")
        values.append(value)
    # nor is their mean that of the whole batch
    whole, _ = _packed_loss(model, ragged_packed())
    assert abs(sum(values) / len(values) - whole) > 1e-3


def test_a_loss_of_your_own():
    """A z loss of the routers, from their logits and the multiplicity."""
    packed, sequences = ragged_packed(), ragged_sequences()
    model = build("qwen3_moe")
    scores = sequence_logprobs(model, packed, output_router_logits=True)
    assert len(scores.router_logits) == model.config.num_hidden_layers
    weight = packed.multiplicity / packed.multiplicity.sum()
    z_loss = sum((x.logsumexp(-1) ** 2 * weight).sum() for x in scores.router_logits)
    z_loss.backward()
    eager = build("qwen3_moe", "eager")
    total = 0.0
    for sequence in sequences:
        ids = torch.from_numpy(sequence)[None]
        output = eager(input_ids=ids, use_cache=False, output_router_logits=True)
        total = total + sum((x.logsumexp(-1) ** 2).sum() for x in output.router_logits)
    expected = total / sum(map(len, sequences))
    expected.backward()
    torch.testing.assert_close(z_loss, expected)
    assert _worst(gradients(model), gradients(eager)) <= tolerance("qwen3_moe")


# ---- who asks ------------------------------------------------------------------------------------


def test_the_configuration_asks_unless_the_caller_does():
    packed = ragged_packed()
    model = build("mixtral", output_router_logits=True)
    assert sequence_logprobs(model, packed).aux_loss is not None
    silent = sequence_logprobs(model, packed, output_router_logits=False)
    assert silent.aux_loss is None and silent.router_logits == ()
    assert sequence_logprobs(build("mixtral"), packed).aux_loss is None
    with torch.no_grad():
        loss = sequence_logprobs(model, packed).aux_loss
    assert loss is not None and not loss.requires_grad


@pytest.mark.parametrize("model_type", cases(["deepseek_v3", "hy_v3", "llama"]))
def test_families_without_a_loss(model_type):
    """A configuration that asks is theirs in eager runs as well, where nothing comes of it."""
    changes = {} if model_type == "llama" else {"output_router_logits": True}
    model = build(model_type, **changes)
    assert sequence_logprobs(model, ragged_packed()).aux_loss is None
    with pytest.raises(pt.UnsupportedError, match=r"ForCausalLM of transformers computes no load"):
        sequence_logprobs(model, ragged_packed(), output_router_logits=True)


def test_reentrant_checkpointing_is_refused():
    """Its router logits have no gradient, in transformers' own batches neither."""
    model = build("qwen3_moe")
    enable_checkpointing(model, use_reentrant=True)
    match = "no gradient under reentrant checkpointing"
    with pytest.raises(pt.UnsupportedError, match=match):
        sequence_logprobs(model, ragged_packed(), output_router_logits=True)
    # another plan of recomputation takes its place
    _, got = _packed_loss(model, ragged_packed(), recompute="all")
    assert _worst(got, _reference("qwen3_moe")[1]) <= tolerance("qwen3_moe")
    with torch.no_grad():
        sequence_logprobs(model.eval(), ragged_packed(), output_router_logits=True)


def test_routers_that_were_replaced_are_refused():
    class Twice(torch.nn.Module):
        def __init__(self, router: Any) -> None:
            super().__init__()
            self.router = router

        def forward(self, x: torch.Tensor) -> Any:
            return self.router(torch.cat([x, x]))[:1] + tuple(
                part[: len(x)] for part in self.router(x)[1:]
            )

    model = build("qwen3_moe")
    model.model.layers[1].mlp.gate = Twice(model.model.layers[1].mlp.gate)
    with pytest.raises(pt.UnsupportedError, match=r"recorded router logits of shapes \[\["):
        sequence_logprobs(model, ragged_packed(), output_router_logits=True)


def test_routes_that_nobody_recorded_are_refused():
    """What ran any experts would count."""
    model = build("qwen3_moe")
    experts = range(model.config.num_experts_per_tok)
    route = np.tile(np.array(experts), (4, model.config.num_hidden_layers, 1))
    route[3] = 0
    made = {"routes": [route], "loss_mask": [[1, 1, 1, 0]]}
    packed = pt.pack(pt.PrefixForest.from_sequences([[1, 2, 3, 4]], **made))
    scores = sequence_logprobs(model, packed, loss_mask=made["loss_mask"])
    assert scores.logprobs[0].isfinite().all()
    with pytest.raises(pt.UnsupportedError, match="no recorded experts: leave output_router"):
        sequence_logprobs(model, packed, loss_mask=made["loss_mask"], output_router_logits=True)
