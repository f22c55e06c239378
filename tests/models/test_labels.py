"""`labels=` with a packed forest is an error, however the model is wrapped."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging import version
from torch import nn

import prefixtree as pt
from prefixtree.models.families import forward_inputs
from tests.support.family_configs import FAMILIES
from tests.support.full import mostly
from tests.support.models import (
    TRANSFORMERS,
    build,
    enable_checkpointing,
    mostly_full,
    ragged_packed,
)
from tests.support.variant_configs import LABELS_UNSEEN_BELOW, VARIANTS

_MESSAGE = (
    r"labels= \(or num_items_in_batch=\) asks .* prefixtree\.sequence_logprobs\(model, packed\)"
)


def _inputs(model_type: str = "qwen3") -> dict[str, Any]:
    config = SimpleNamespace(model_type=model_type.partition("/")[0])
    return forward_inputs(ragged_packed(), SimpleNamespace(config=config, training=True))


@pytest.mark.parametrize("model_type", mostly_full([*FAMILIES, *VARIANTS]))
def test_every_family(model_type):
    """Also where a trainer counts the labels and hands the count over (transformers' Trainer)."""
    needs = LABELS_UNSEEN_BELOW.get(model_type)
    if needs is not None and version.parse(needs) > TRANSFORMERS:
        pytest.skip(f"{model_type} shows labels from transformers {needs} on: {TRANSFORMERS}")
    model, inputs = pt.prepare(build(model_type)), _inputs(model_type)
    assert "loss" not in model(**inputs)
    with pytest.raises(pt.UnsupportedError, match=_MESSAGE):
        model(**inputs, labels=inputs["input_ids"])
    inputs["num_items_in_batch"] = torch.tensor(5)
    with pytest.raises(pt.UnsupportedError, match=_MESSAGE):
        model(**inputs, labels=inputs["input_ids"])


def _compiled_layers(model: Any) -> nn.Module:
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend="eager")
    return model


def _checkpointed(model: Any, use_reentrant: bool) -> nn.Module:
    enable_checkpointing(model, use_reentrant)
    return model


def _adapted(model: Any) -> nn.Module:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=2))


def _accelerated(model: Any) -> nn.Module:
    accelerate = pytest.importorskip("accelerate")
    return accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare(model)


WRAPPERS: dict[str, Callable[[Any], nn.Module]] = {
    "compiled layers": _compiled_layers,
    "compiled model": lambda model: torch.compile(model, backend="eager"),
    "checkpointing": lambda model: _checkpointed(model, False),
    "reentrant checkpointing": lambda model: _checkpointed(model, True),
    "peft": _adapted,
    "accelerate": _accelerated,
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("wrapper", mostly(WRAPPERS, WRAPPERS.keys() - {"compiled model"}))
def test_wrappers(wrapper):
    torch._dynamo.reset()
    model, inputs = WRAPPERS[wrapper](build("qwen3", num_hidden_layers=1)), _inputs()
    logits = model(**inputs).logits
    logits.float().square().mean().backward()
    assert any(p.grad is not None and bool(p.grad.abs().max() > 0) for p in model.parameters())
    with pytest.raises(pt.UnsupportedError, match=_MESSAGE):
        model(**inputs, labels=inputs["input_ids"])
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::UserWarning:liger_kernel.*")
@pytest.mark.filterwarnings(
    "ignore:`past_key_values` is deprecated:FutureWarning"
)  # Liger passes it
def test_ligers_forward():
    """It computes a loss where there are labels of either name, shift_labels included."""
    liger = pytest.importorskip("liger_kernel.transformers", reason="needs liger-kernel")
    model, inputs = build("qwen3"), _inputs()
    expected = model(**inputs).logits
    losses = {"cross_entropy": False, "fused_linear_cross_entropy": True}
    liger.apply_liger_kernel_to_qwen3(
        model=model, rope=False, rms_norm=False, swiglu=False, **losses
    )
    assert model.forward.__module__.startswith("liger_kernel")
    assert torch.equal(model(**inputs).logits, expected)
    with pytest.raises(pt.UnsupportedError, match=_MESSAGE):
        # its fused loss, in training, is for a GPU
        model.eval()(**inputs, labels=inputs["input_ids"])
