"""The backward of `sequence_logprobs(max_step_tokens=)`: one node, and what may not change before
it."""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.scoring.steps_cases import number_of_steps, run, score
from tests.support.hooks import inner
from tests.support.models import (
    Run,
    assert_same,
    build,
    enable_checkpointing,
    gradients,
    make_objective,
    pack_sequences,
    ragged_objective,
    randomise,
)
from tests.support.step_ranks import loss_of


def test_calls_interleaved() -> None:
    model = build("qwen3")
    objectives = make_objective(ragged_objective().sequences[:7], 1), ragged_objective()
    expected: dict[str, torch.Tensor] = {}
    for objective in objectives:
        for name, gradient in run(model, objective, max_step_tokens=None).gradients.items():
            expected[name] = expected.get(name, 0) + gradient
    model.zero_grad(set_to_none=True)
    losses = [loss_of(objective, score(model, objective)) for objective in objectives]
    for loss in losses:
        loss.backward()
    got = gradients(model)
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, atol=2e-4, rtol=1e-4)
    # one loss over both
    model.zero_grad(set_to_none=True)
    sum(loss_of(objective, score(model, objective)) for objective in objectives).backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, got[name], atol=2e-4, rtol=1e-4)


def test_two_threads() -> None:
    objective = ragged_objective()
    models = [build("qwen3", seed=seed) for seed in (0, 1)]
    expected = [run(model, objective, max_step_tokens=None) for model in models]
    found: dict[int, Run] = {}

    def work(number: int) -> None:
        found[number] = run(models[number], objective)

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in (0, 1):
        assert_same(found[number], expected[number])


def test_a_second_backward_says_what_to_do() -> None:
    scores = score(build("qwen3"), ragged_objective())
    loss = torch.cat(scores.logprobs).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(
        RuntimeError, match="ran already, and what its steps exported one another is"
    ):
        loss.backward()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_second_derivatives_are_refused() -> None:
    scores = score(build("qwen3"), ragged_objective())
    with pytest.raises(RuntimeError, match="are differentiable once"):
        torch.cat(scores.logprobs).sum().backward(create_graph=True)


@pytest.mark.usefixtures("unprobed")
def test_an_error_in_the_backward_leaves_the_next_call_alone() -> None:
    model = build("qwen3")
    expected = run(model, max_step_tokens=None)
    scores, calls = score(model, ragged_objective()), []

    def fails(*_: Any) -> None:
        calls.append(None)
        if len(calls) == 3:
            raise MemoryError

    with model.model.layers[1].mlp.register_forward_pre_hook(fails), pytest.raises(MemoryError):
        loss_of(ragged_objective(), scores).backward()
    assert_same(run(model), expected)


def _changes(model: Any, packed: Any) -> dict[str, Callable[[], Any]]:
    """Changes that the second forward of a backward reads, by the words of the refusal. `model`
    has two adapters, the first of them active, with dropout, in eval mode."""
    layer = model.base_model.model.model.layers[0]
    attention, norm = layer.self_attn, layer.input_layernorm
    rotary = model.base_model.model.model.rotary_emb
    return {
        "training of the model became True (it was False)": model.train,
        "layers.0.self_attn.q_proj became {'default': ": lambda: attention.q_proj.scale_layer(2.0),
        "merged_adapters of ": model.merge_adapter,
        "active_adapter of the model became 'other' (it was 'default')": lambda: model.set_adapter(
            "other"
        ),
        "_disable_adapters of ": model.base_model.disable_adapter_layers,
        "lora_dropout.default became 0.5 (it was 0.1)": lambda: setattr(
            attention.q_proj.lora_dropout["default"], "p", 0.5
        ),
        "packed.input_ids, or what shares its memory, changed": lambda: packed.input_ids.clamp_(
            max=50
        ),
        "rotary_emb.inv_freq changed": lambda: rotary.inv_freq.mul_(2),
        "rotary_emb.inv_freq was replaced": lambda: setattr(
            rotary, "inv_freq", rotary.inv_freq * 2
        ),
        "input_layernorm.weight changed": lambda: norm.weight.detach().mul_(1.5),
        "layers.0.input_layernorm.weight was replaced": lambda: setattr(
            norm.weight, "data", norm.weight.data * 1.5
        ),
        "input_layernorm.weight was replaced": lambda: setattr(
            norm, "weight", nn.Parameter(norm.weight * 1.5)
        ),
        "variance_epsilon of ": lambda: setattr(norm, "variance_epsilon", 0.1),
        "modules of base_model.model.model.layers.0 were replaced": lambda: setattr(
            layer, "mlp", copy.deepcopy(layer.mlp)
        ),
        "rms_norm_eps of Qwen3Config became 0.1": lambda: setattr(
            model.config, "rms_norm_eps", 0.1
        ),
        "requires_grad of base_model.model.model.layers.0": lambda: attention.q_proj.lora_A[
            "default"
        ].requires_grad_(False),
    }


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_what_changed_before_the_backward_is_refused_by_name() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1)

    def made() -> tuple[Any, Any]:
        model = peft.get_peft_model(build("qwen3", num_hidden_layers=1), config)
        model.add_adapter("other", config)
        randomise(model)
        return model.eval(), pack_sequences(ragged_objective().sequences)

    for words in _changes(*made()):
        model, packed = made()
        scores = score(model, ragged_objective(), packed, max_step_tokens=60)
        _changes(model, packed)[words]()
        with pytest.raises(RuntimeError, match=re.escape(words)) as refused:
            torch.cat(scores.logprobs).sum().backward()
        assert "and its backward, which runs the steps again: call backward() before such" in str(
            refused.value
        )


def test_what_changes_no_number_is_not_refused() -> None:
    """Changes that forwards make themselves, and attributes that a model does not read."""
    model = build("qwen3")
    expected = run(model, max_step_tokens=None)
    mlp = model.model.layers[1].mlp
    mlp.calls, mlp.last = 0, torch.zeros(1)

    def counts(module: Any, args: Any, output: torch.Tensor) -> None:
        module.calls, module.last = module.calls + 1, output.detach()

    mlp.register_forward_hook(counts)
    scores = score(model, ragged_objective())
    model.zero_grad(set_to_none=True)
    run(build("qwen3", seed=1))
    score(model, ragged_objective())
    model.config.use_cache = not model.config.use_cache
    enable_checkpointing(model, False)
    loss_of(ragged_objective(), scores).backward()
    assert mlp.calls > 2 * number_of_steps()
    assert_same(replace(expected, gradients=gradients(model)), expected)


@pytest.mark.parametrize("fused", [False, True])
def test_an_update_before_the_backward_is_refused(fused: bool) -> None:
    """A fused one leaves the parameters' versions as they are."""
    model, other = build("qwen3"), build("qwen3")
    options = {"lr": 0.1, "fused": fused}
    optimizer, of_other = (torch.optim.AdamW(m.parameters(), **options) for m in (model, other))
    expected = run(model)
    run(other)
    scores = score(model, ragged_objective())
    of_other.step()
    model.zero_grad(set_to_none=True)
    loss_of(ragged_objective(), scores).backward()
    assert gradients(model).keys() == expected.gradients.keys()
    scores = score(model, ragged_objective())
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"embed_tokens.weight changed between"):
        loss_of(ragged_objective(), scores).backward()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_model_made_in_inference_mode(context: Any) -> None:
    with torch.inference_mode():
        model = build("qwen3").eval()
    with context():
        whole, stepped = (score(model, ragged_objective(), max_step_tokens=n) for n in (None, 20))
    torch.testing.assert_close(stepped.logprobs, whole.logprobs, atol=1e-5, rtol=1e-5)


def test_gradients_are_found_in_the_parameters() -> None:
    """What asks for them by name reaches none: torch raises, or the end of the scores warns."""
    model = build("qwen3")
    scores = score(model, ragged_objective())
    with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
        torch.autograd.grad(torch.cat(scores.logprobs).sum(), list(model.parameters()))
    torch.cat(scores.logprobs).sum().backward()
    inner("warning of no backward").cache_clear()
    model.zero_grad(set_to_none=True)
    for is_first in (True, False):
        scores = score(model, ragged_objective())
        torch.cat(scores.logprobs).sum().backward(inputs=list(model.parameters()))
        assert all(p.grad is None for p in model.parameters())
        told = pytest.warns(UserWarning, match="let go, and no backward came")
        with told if is_first else nullcontext():
            del scores
    with torch.no_grad():
        score(model, ragged_objective())
