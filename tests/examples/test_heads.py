"""Other outputs than log-probabilities: value heads, reward heads, a teacher's distribution.

The examples show how, and are what is tested here against every sequence alone.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

import prefixtree as pt
from prefixtree.kernels.lm_head import logprobs
from prefixtree.scoring.logprobs import sequence_logprobs
from tests.support.models import (
    VOCABULARY,
    Run,
    assert_same,
    build,
    counted,
    enable_checkpointing,
    gradients,
    make_objective,
    ragged_sequences,
    randomise,
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


# ---- values and rewards --------------------------------------------------------------------------


def _classifier(
    auto: Any, model_type: str, implementation: str = "prefixtree", **changes: Any
) -> Any:
    config = build(model_type, num_labels=1, classifier_dropout=0.0, **changes).config
    model = auto.from_config(config, attn_implementation=implementation)
    randomise(model)
    return model.train()


def _squares(values: list[torch.Tensor]) -> torch.Tensor:
    """A loss that is another one a sequence: returns differ where tokens are shared."""
    return sum(((v - 0.3 * i) ** 2).sum() for i, v in enumerate(values))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("model_type", _TYPES)
def test_a_value_a_token(model_type, checkpointing, packed, sequences):
    model = _classifier(AutoModelForTokenClassification, model_type)
    if checkpointing:
        enable_checkpointing(model, use_reentrant=False)
    with counted([model.model]) as calls:
        values = value_head.token_values(model, packed)
        assert calls() == 1
    run = _run(values, _squares(values), model)
    assert all(g.any() for name, g in run.gradients.items() if "expert" not in name)

    reference = _classifier(AutoModelForTokenClassification, model_type, "eager")
    alone = [
        reference(torch.from_numpy(s)[None], use_cache=False).logits[0, :, 0] for s in sequences
    ]
    assert_same(run, _run(alone, _squares(alone), reference))


@pytest.mark.parametrize("model_type", _TYPES)
def test_a_reward_a_sequence(model_type, packed, sequences, tmp_path):
    """A reward model's checkpoint, whose own class pools a row, as a token classifier."""
    reference = _classifier(AutoModelForSequenceClassification, model_type, "eager")
    reference.save_pretrained(tmp_path)
    model, report = AutoModelForTokenClassification.from_pretrained(
        tmp_path, attn_implementation="prefixtree", output_loading_info=True
    )
    assert report["missing_keys"] == {"score.bias"} and not report["unexpected_keys"]
    got = value_head.rewards(model.train(), packed)
    assert got.shape == (len(sequences),)
    weights = torch.linspace(-1, 1, len(sequences))
    run = _run([got], (got * weights).sum(), model)

    alone = [reference(torch.from_numpy(s)[None], use_cache=False).logits[0, 0] for s in sequences]
    expected = _run(alone, (torch.stack(alone) * weights).sum(), reference)
    run.gradients.pop("score.bias")
    together = [torch.cat(expected.logprobs)]
    assert_same(run, Run(together, together, expected.gradients))


def test_a_sequence_classifier_is_refused(packed):
    """One pooled row for a whole forest is nothing that could be given back to the sequences."""
    model = _classifier(AutoModelForSequenceClassification, "qwen3")
    with pytest.raises(pt.UnsupportedError, match="needs a transformers model with a language"):
        sequence_logprobs(model, packed)
    output = model(**packed.model_inputs()).logits
    with pytest.raises(pt.ForestError, match=r"values must be \[T, \.\.\.\]"):
        packed.unpack(output)


def test_the_heads_own_dropout_is_refused(packed):
    config = build("qwen3", num_labels=1).config  # transformers' default is 0.1
    model = AutoModelForTokenClassification.from_config(config, attn_implementation="prefixtree")
    with pytest.raises(pt.UnsupportedError, match=r"dropout is an active dropout \(p = 0\.1\)"):
        value_head.token_values(model.train(), packed)
    assert len(value_head.token_values(model.eval(), packed)) == packed.forest.num_sequences


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


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("model_type", _TYPES)
def test_distillation(model_type, masked, packed, sequences, monkeypatch):
    """KL of every scored token and the student's gradients; both models run once."""
    masks = make_objective(sequences).loss_masks if masked else None
    teacher = build("llama", seed=5).eval()
    student = build(model_type)
    with counted([teacher.model, student.model]) as calls, LargestTensor() as largest:
        kl = distillation.token_kl(student, teacher, packed, masks, temperature=0.7)
        assert calls() == 2
    monkeypatch.setattr(logprobs, "_CPU_CHUNK", 8 * VOCABULARY)
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
