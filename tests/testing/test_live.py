"""`verify` on a model in memory: green where packing is right, red where it is not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import prefixtree as pt
from prefixtree.testing import judge
from tests.support.full import in_turn, mostly
from tests.support.models import build, cases, ragged_objective

_SEQUENCES = ragged_objective().sequences
# what the probe does not see, and other code that is not known
pytestmark = pytest.mark.filterwarnings("ignore:.* holds code that prefixtree does not know")


def _behind_70(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
    out = out.clone()
    out[:, 70:] += 0.1
    return out


@pytest.mark.parametrize(
    ("family", "dtype"),
    mostly(
        in_turn(
            cases(["qwen3", "qwen3_moe", "qwen3_5", "gpt_oss"]), [torch.float32, torch.bfloat16]
        ),
        ["qwen3", "qwen3_moe"],
    ),
)
def test_it_is_green(family, dtype):
    verdict = pt.verify(build(family).to(dtype), _SEQUENCES)
    assert verdict and verdict.passed
    assert [check.name for check in verdict.checks] == [
        "logprobs",
        "entropy",
        "gradients",
        "whole gradient",
    ]
    assert verdict.reference == ("replicated" if dtype == torch.float32 else "float32")
    lines = str(verdict).splitlines()
    assert lines[0].startswith("12 sequences, 263 tokens, 91 distinct") and lines[-1] == "PASS"


@pytest.mark.parametrize("dtype", mostly([torch.float32, torch.bfloat16], [torch.bfloat16]))
def test_a_hook_that_the_probe_does_not_see_turns_it_red(dtype):
    model = build("qwen3").to(dtype)
    model.model.layers[1].register_forward_hook(_behind_70)
    verdict = pt.verify(model, _SEQUENCES)
    assert not verdict and str(verdict).endswith("FAIL") and "DIFFERS" in str(verdict)


def test_a_gradient_that_is_left_out_turns_it_red(monkeypatch):
    from prefixtree.scoring import logprobs as adapter

    original = adapter.sequence_logprobs

    def damaged(*args: Any, **options: Any) -> Any:
        scores = original(*args, **options)
        scores.logprobs[2] = scores.logprobs[2].detach()
        return scores

    monkeypatch.setattr(adapter, "sequence_logprobs", damaged)
    verdict = pt.verify(build("qwen3"), _SEQUENCES)
    assert [check.name for check in verdict.checks if not check.passed] == [
        "gradients",
        "whole gradient",
    ]


def test_rounding_beyond_the_limit_is_no_mistake(monkeypatch):
    """Both are then as far from float64; a mistake is farther."""
    monkeypatch.setattr(judge, "FLOAT32", judge.Limits.alike(4e-7))
    model = build("qwen3")
    verdict = pt.verify(model, _SEQUENCES)
    assert verdict.passed and verdict.reference == "float64"
    assert all(check.replicated for check in verdict.checks)
    monkeypatch.undo()
    model.model.layers[1].register_forward_hook(_behind_70)
    verdict = pt.verify(model, _SEQUENCES)
    assert not verdict.passed and verdict.reference == "float64"


@pytest.mark.parametrize("trains", mostly(["all", "some", "none"], ["some"]))
def test_the_model_is_as_it_was(trains):
    model = build("qwen3", "sdpa").eval()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trains == "all" or (trains == "some" and "layers.1" in name))
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    before = [(p.grad, p.requires_grad) for p in model.parameters()]
    numbers, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with torch.no_grad():
        assert pt.verify(model, _SEQUENCES, [[1] * len(s) for s in _SEQUENCES])
    assert torch.equal(rng, torch.get_rng_state()) and not model.training
    assert model.config._attn_implementation == "prefixtree"
    for parameter, (gradient, does_train) in zip(model.parameters(), before, strict=True):
        assert parameter.grad is gradient and parameter.requires_grad is does_train
        assert gradient is None or bool((gradient == 1).all())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, numbers[name])


def test_what_it_cannot_verify():
    model = build("qwen3")
    with pytest.raises(pt.ForestError, match="no token is scored"):
        pt.verify(model, [[3], [4]])
    weight = model.lm_head.weight
    weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(pt.UnsupportedError, match=r"lm_head.* has a hook that runs when its grad"):
        pt.verify(model, _SEQUENCES)


@pytest.mark.parametrize("family", cases(["deepseek_v32"]))
def test_indexers_are_for_the_command(family):
    with pytest.raises(pt.UnsupportedError, match="use the command prefixtree verify"):
        pt.verify(build(family), _SEQUENCES)
