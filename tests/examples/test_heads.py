"""The examples of other outputs: distillation against every sequence alone, and that both run."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import prefixtree as pt
from tests.support.full import in_turn
from tests.support.hooks import limit
from tests.support.models import (
    VOCABULARY,
    Run,
    assert_same,
    build,
    counted,
    gradients,
    make_objective,
    ragged_sequences,
)

_TYPES = ["qwen3", "gemma2", "gpt_oss", "deepseek_v3"]


def _example(name: str) -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


value_head, distillation = _example("value_head"), _example("distillation")


@pytest.fixture(scope="module")
def sequences() -> list[np.ndarray]:
    return ragged_sequences()


@pytest.fixture(scope="module")
def packed(sequences) -> pt.PackedForest:
    return pt.pack(pt.PrefixForest.from_sequences(sequences))


def _run(values: list[torch.Tensor], loss: torch.Tensor, model: Any) -> Run:
    """Values in the place of log-probabilities, to be compared as a run is."""
    loss.backward()
    flat = [v.detach().reshape(-1) for v in values]
    return Run(flat, flat, gradients(model))


# ---- distillation --------------------------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    """The most rows of logits that an operation gave."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        is_weight = func is torch.ops.aten.t.default
        if isinstance(out, torch.Tensor) and out.shape[-1:] == (VOCABULARY,) and not is_weight:
            self.rows = max(self.rows, out.numel() // VOCABULARY)
        return out


@pytest.mark.parametrize(("model_type", "masked"), in_turn(_TYPES, [False, True]))
def test_distillation(model_type, masked, packed, sequences, monkeypatch):
    """KL of every scored token and the student's gradients; both models run once."""
    masks = make_objective(sequences).loss_masks if masked else None
    teacher = build("llama", seed=5).eval()
    student = build(model_type)
    with counted([teacher.model, student.model]) as calls, LargestTensor() as largest:
        kl = distillation.token_kl(student, teacher, packed, masks, temperature=0.7)
        assert calls() == 2
    limit(monkeypatch, "logits", 8 * VOCABULARY)
    with LargestTensor() as chunked:
        kl = distillation.token_kl(student, teacher, packed, masks, temperature=0.7)
    # no logits of all edges in the forward, where chunks are smaller than the forest
    count = len(packed.edges(masks).token)
    assert largest.rows >= count > 8 >= chunked.rows
    weights = [torch.linspace(0.5, 2, len(s) - 1) * (-1) ** i for i, s in enumerate(sequences)]
    run = _run(kl, sum((k * w).sum() for k, w in zip(kl, weights, strict=True)), student)
    assert not any(p.grad is not None for p in teacher.parameters())

    student = build(model_type, "eager")
    teacher.set_attn_implementation("eager")
    alone = []
    for i, s in enumerate(sequences):
        ids = torch.from_numpy(s)[None]
        p, q = (
            (model(ids, use_cache=False).logits[0, :-1].double() / 0.7).log_softmax(-1)
            for model in (teacher, student)
        )
        each = (p.detach().exp() * (p.detach() - q)).sum(-1)
        if masks is not None:
            each = each * torch.from_numpy(masks[i][1:])
        alone.append(each.float())
    loss = sum((k * w).sum() for k, w in zip(alone, weights, strict=True))
    teacher.zero_grad(set_to_none=True)
    assert_same(run, _run(alone, loss, student))


@pytest.mark.parametrize("example", [value_head, distillation])
def test_the_examples_run(example, capsys):
    """As printed; the loss goes down, that of distillation in every step."""
    torch.manual_seed(0)
    example.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    losses = [float(line.split()[3]) for line in lines]
    assert len(losses) == 5 and losses[-1] < 0.7 * losses[0]
    assert example is value_head or losses == sorted(losses, reverse=True)
