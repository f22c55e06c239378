"""Liger Kernel's patched models: their forward and layers in place of the family's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from prefixtree.models.families import LIGER_LAYERS
from tests.support.liger import keep_transformers
from tests.support.models import (
    build,
    cases,
    errors,
    pack_sequences,
    ragged_objective,
    ragged_packed,
    run_packed,
    run_replicated,
)

liger = pytest.importorskip("liger_kernel.transformers", reason="needs liger-kernel")


@pytest.fixture(autouse=True)
def unpatched(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_transformers(monkeypatch)


@pytest.mark.filterwarnings("ignore::UserWarning:liger_kernel.*")
@pytest.mark.filterwarnings(
    "ignore:`past_key_values` is deprecated:FutureWarning"
)  # Liger passes it
@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
def test_its_forward(model_type: str) -> None:
    """With its fused loss, which scoring does not ask for; again and again."""

    def run(model: Any) -> list[torch.Tensor]:
        found = run_packed(model, ragged_packed(), ragged_objective())
        return [*found.logprobs, *found.entropy, *found.gradients.values()]

    model = build(model_type)
    want = run(copy.deepcopy(model))
    apply = getattr(liger, f"apply_liger_kernel_to_{model_type}")
    losses = {"cross_entropy": False, "fused_linear_cross_entropy": True}
    apply(model=model, rope=False, rms_norm=False, swiglu=False, **losses)
    theirs = model.forward
    assert theirs.__module__.startswith("liger_kernel")
    for _ in range(2):
        assert all(map(torch.equal, run(model), want))
        assert model.forward == theirs


@pytest.mark.gpu
@pytest.mark.parametrize("model_type", cases(LIGER_LAYERS))
def test_its_layers(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As verl applies them with `use_liger=True`: packed, and every sequence alone."""
    # its experts multiply float32 in TF32 otherwise, tl.dot's default: 2e-4 to 4e-4 apart
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    model, alone = (build(model_type, kind).to("cuda") for kind in ("prefixtree", "eager"))
    for each in (model, alone):
        _apply_liger_kernel_to_instance(model=each, fused_linear_cross_entropy=False, swiglu=True)
        assert "Liger" in repr(each)
    objective = ragged_objective()
    packed = pack_sequences(objective.sequences).to("cuda")
    found = errors(run_packed(model, packed, objective), run_replicated(alone, objective))
    assert found.largest < 1e-4, found
