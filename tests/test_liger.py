"""Liger Kernel's patched models: their forward and layers in place of the family's."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
from models import build, ragged_sequences

import prefixtree as pt
from prefixtree.integrations.transformers import sequence_logprobs

liger = pytest.importorskip("liger_kernel.transformers", reason="needs liger-kernel")

# what it replaces for every model of the process
REPLACED = {
    "qwen3": ["apply_rotary_pos_emb", "Qwen3RMSNorm", "Qwen3MLP"],
    "llama": ["apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP"],
}


def patch(model: Any, model_type: str, monkeypatch: pytest.MonkeyPatch, **layers: bool) -> None:
    """`apply_liger_kernel_to_...(model=model)`, undone after the test."""
    modeling = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    for name in REPLACED[model_type]:
        monkeypatch.setattr(modeling, name, getattr(modeling, name))
    apply = getattr(liger, f"apply_liger_kernel_to_{model_type}")
    apply(model=model, cross_entropy=False, fused_linear_cross_entropy=True, **layers)


def run(model: Any, packed: pt.PackedForest) -> list[torch.Tensor]:
    """Log-probabilities and entropies in one, then every gradient."""
    scores = sequence_logprobs(model, packed, return_entropy=True)
    out = torch.cat([*scores.logprobs, *scores.entropy])
    return [out.detach(), *torch.autograd.grad(out.sum(), list(model.parameters()))]


@pytest.mark.filterwarnings("ignore::UserWarning:liger_kernel.*")
@pytest.mark.parametrize("model_type", list(REPLACED))
def test_its_forward(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its fused loss, which scoring does not ask for; again and again."""
    model = build(model_type)
    packed = pt.pack(pt.PrefixForest.from_sequences(ragged_sequences(1)))
    want = run(copy.deepcopy(model), packed)
    patch(model, model_type, monkeypatch, rope=False, rms_norm=False, swiglu=False)
    theirs = model.forward
    assert theirs.__module__.startswith("liger_kernel")
    for _ in range(2):
        assert all(map(torch.equal, run(model, packed), want))
        assert model.forward == theirs


@pytest.mark.gpu
@pytest.mark.parametrize("model_type", list(REPLACED))
def test_its_layers(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(model_type).to("cuda")
    packed = pt.pack(pt.PrefixForest.from_sequences(ragged_sequences(1))).to("cuda")
    want = run(copy.deepcopy(model), packed)
    patch(model, model_type, monkeypatch, rope=True, rms_norm=True, swiglu=True)
    assert "Liger" in repr(model)
    for got, exact in zip(run(model, packed), want, strict=True):
        gap = float((got - exact).abs().max() / exact.abs().max())
        assert gap < 1e-4
