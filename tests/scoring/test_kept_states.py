"""`kept_trunks` of models with recurrent layers: states and tails that trunks lend."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from prefixtree import borrow_cost, kept_trunks, prepare
from prefixtree.models.compiled import compile_layers
from prefixtree.parallel import states
from prefixtree.scoring import kept_trunks as module
from tests.scoring.kept_cases import compare, linear, one_by_one, plan_of, run
from tests.support.hybrid_cases import FEW, Float64, in_float64, logprobs_of, needs_states
from tests.support.hybrid_configs import HYBRIDS
from tests.support.lost_gradients import lose_states, lose_tails
from tests.support.models import (
    Objective,
    adapted,
    assert_same,
    build,
    counted,
    enable_checkpointing,
    errors,
    make_objective,
    mostly_full,
    ragged_objective,
    run_eager,
    same_bits,
    tolerance,
)
from tests.support.step_ranks import LIGHT

pytestmark = needs_states


@pytest.mark.parametrize("family", mostly_full(HYBRIDS, {"qwen3_5", "falcon_h1"}))
def test_every_family_with_states(family: str) -> None:
    model = build(family)
    # rounding of float32; float64 is below
    compare(model, tolerance=tolerance(family))
    assert_same(run(model, loss=linear), run_eager(model), tolerance(family))


class Forward64:
    """In the place of `ModelForward`, which rounds scores to float32: [u, 1] in float64."""

    def __init__(self, model: nn.Module, *_: Any) -> None:
        self._model = model

    def __call__(
        self, mask: Any, inputs: dict[str, Any], edges: Any, own: Any = None
    ) -> torch.Tensor:
        with Float64():
            logits = self._model(**inputs).logits[0]
        rows = logits[edges.predictors][edges.to_predictors.rows.long()]
        return logprobs_of(rows, edges.target)[:, None]


@pytest.mark.parametrize(
    "family, checkpointed, again",
    [
        ("qwen3_5", False, False),
        ("qwen3_5", True, True),
        ("nemotron_h", True, False),
        ("kimi_linear", False, True),
        ("lfm2", True, False),
        ("falcon_h1", False, False),
    ],
)
def test_float64_is_exact(
    family: str, checkpointed: bool, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against each sequence alone through eager."""
    objective = make_objective(ragged_objective().sequences, plain=True)
    plan = plan_of(objective, 17)
    assert plan.stats.trunks.trunks > 3
    eager = in_float64(family, "eager")
    expected: list[torch.Tensor] = []
    with Float64():
        for tokens, weight in zip(objective.sequences, objective.weights, strict=True):
            ids = torch.as_tensor(tokens)
            logits = eager(input_ids=ids[None], use_cache=False).logits[0]
            expected.append(logprobs_of(logits[:-1], ids[1:]))
            _loss(expected[-1], weight).backward()
    model = prepare(in_float64(family))
    if checkpointed:
        # torch leaves Float64 in a backward
        layer_again = functools.partial(
            checkpoint, use_reentrant=False, context_fn=lambda: (nullcontext(), Float64())
        )
        for layer in model.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                layer.gradient_checkpointing = True
                layer._gradient_checkpointing_func = layer_again
    monkeypatch.setattr(module, "ModelForward", Forward64)
    found: dict[int, torch.Tensor] = {}
    with kept_trunks(model, plan[0], recompute_trunks="again" if again else None) as scored:
        for batch, scores in scored:
            weights = batch.take(objective.weights)
            found |= dict(zip(batch.sequence_indices.tolist(), scores.logprobs, strict=True))
            sum(map(_loss, scores.logprobs, weights)).backward()
    largest = max(float((found[i] - e).detach().abs().max()) for i, e in enumerate(expected))
    worst = 0.0
    for (name, p), (_, q) in zip(eager.named_parameters(), model.named_parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None and float(p.grad.norm()) > 1e-10:
            worst = max(worst, float((p.grad - q.grad).norm() / p.grad.norm()))
    print(f"{family}: float64 log p {largest:.1e}, gradient {worst:.1e}")
    assert largest < 1e-13 and worst < 1e-12


def _loss(logprobs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (logprobs * weight[:, 0].double()).sum() + logprobs.square().sum() / 10


@pytest.mark.parametrize(
    "family, recompute, trunks",
    [
        ("qwen3_5", "all_but_attention", None),
        ("nemotron_h", "all", "again"),
        ("falcon_h1", "nothing", "all"),
        ("lfm2", "all", "nothing"),
    ],
)
def test_recomputation(family: str, recompute: Any, trunks: Any) -> None:
    compare(build(family), recompute=recompute, recompute_trunks=trunks)


@pytest.mark.parametrize("family, use_reentrant", [("qwen3_5", False), ("kimi_linear", True)])
def test_checkpointing(family: str, use_reentrant: bool) -> None:
    model = build(family)
    enable_checkpointing(model, use_reentrant)
    compare(model)


def test_states_on_the_host_and_several_trunks_at_once() -> None:
    plan = plan_of(ragged_objective(), 17, borrow_cost=replace(LIGHT, on_host=True))
    assert plan.stats.trunks.on_host
    compare(build("nemotron_h"), plan=plan, recompute="all", recompute_trunks="again")


# PEFT asks transformers under the old name of the property
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters() -> None:
    got = compare(adapted(build("qwen3_5"), "q_proj", "in_proj_qkv", "out_proj"))
    assert got.gradients and all("lora" in name for name in got.gradients)


def test_frozen_layers() -> None:
    """Where states need no gradients, none come back; and where they do, all."""
    model = build("qwen3_5")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1" in name or "layers.0.linear_attn.dt_bias" in name)
    got = compare(model)
    assert any("layers.0" in name for name in got.gradients)


# dynamo's own look at .grad of its inputs
@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_layers() -> None:
    model = build("qwen3_5")
    expected = run(model)
    torch._dynamo.reset()
    compile_layers(model, backend="eager")
    assert_same(run(model), expected)
    torch._dynamo.reset()


def test_half_precision_rounds_as_one_forward_does() -> None:
    """Returned gradients of a bfloat16 model are summed in float32."""
    plan, model = plan_of(ragged_objective()), build("qwen3_5")
    exact = one_by_one(model, ragged_objective(), plan)
    model = build("qwen3_5").bfloat16()
    alone, kept = one_by_one(model, ragged_objective(), plan), run(model)
    alone, kept = errors(alone, exact), errors(kept, exact)
    assert alone.gradient > 1e-3 and kept.gradient < 1.5 * alone.gradient


def test_without_gradients_and_the_same_bits() -> None:
    model, plan = build("nemotron_h").eval(), plan_of(ragged_objective())
    expected = one_by_one(model, ragged_objective(), plan)
    with counted([model]) as forwards, torch.inference_mode():
        with kept_trunks(model, plan[0], *_given(ragged_objective())) as scored:
            for batch, scores in scored:
                for i, got in zip(batch.sequence_indices.tolist(), scores.logprobs, strict=True):
                    torch.testing.assert_close(got, expected.logprobs[i], atol=1e-5, rtol=1e-5)
        assert forwards() == len(plan[0].trunks.spans)
    assert same_bits(run(model), run(model))


def test_what_waits_is_what_the_plan_says() -> None:
    """Bytes of lent states turn after turn, and that all is freed."""
    model = build("qwen3_5")
    cost = borrow_cost(model, "all", "again")
    plan = plan_of(ragged_objective(), 17, borrow_cost=replace(cost, token_bytes=1e9))
    stats = plan.stats.trunks
    assert stats.states > 0 and f"with {stats.states} states" in str(plan.stats)
    most = 0
    with kept_trunks(model, plan[0]) as scored:
        for _, scores in scored:
            torch.cat(scores.logprobs).sum().backward()
            loans = scored._store.states.loans(0).of_lender
            values = [x for of in loans for loan in of for x in loan.values.values()]
            most = max(most, sum(x.nbytes for x in values))
    assert most == stats.states * cost.state_layers * cost.state_bytes
    assert scored._store.held_bytes() == (0, 0)


# ---- the comparison turns red --------------------------------------------------------------------


@pytest.mark.parametrize("family", FEW)
@pytest.mark.parametrize("lose", [lose_states, lose_tails])
def test_the_comparison_turns_red_where_states_lose_their_gradient(
    family: str, lose: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(family)
    expected = run(model)
    lose(monkeypatch)
    found = errors(run(model), expected)
    print(f"{family}: {found}")
    assert found.logprob < 1e-6 and found.gradient > 0.05


def test_gradients_that_a_layer_does_not_take_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states._Exchange, "take", lambda self: None)
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


def _given(objective: Objective) -> tuple[Any, Any]:
    return objective.temperatures, objective.loss_masks
