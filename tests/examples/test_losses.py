"""The code of docs/losses.md: each recipe beside each sequence alone, all gradients."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import prefixtree as pt
from tests.support.models import (
    VOCABULARY,
    Objective,
    Run,
    assert_same,
    build,
    gradients,
    make_objective,
    pack_sequences,
    ragged_sequences,
)
from tests.support.spawn import ROOT

PAGE = ROOT / "docs" / "losses.md"
K = 64
Alone = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture(scope="module")
def objective() -> Objective:
    return make_objective(ragged_sequences())


def _candidates(objective: Objective) -> list[torch.Tensor]:
    """Three per token, the same in all copies: they follow from the tokens up to it."""
    return [
        torch.stack([(torch.from_numpy(s).cumsum(0) * k) % VOCABULARY for k in (1, 5, 7)], -1)
        for s in objective.sequences
    ]


@pytest.fixture(params=["one temperature", "temperatures"])
def page(request: pytest.FixtureRequest, objective: Objective) -> dict[str, Any]:
    """The names of the page once its code has run."""
    temperature: Any = 0.7 if request.param == "one temperature" else objective.temperatures
    names: dict[str, Any] = {
        "pt": pt,
        "torch": torch,
        "math": math,
        "model": build("gemma2"),
        "teacher": build("llama", seed=5).eval(),
        "packed": pack_sequences(objective.sequences),
        "temperature": temperature,
        "loss_mask": objective.loss_masks,
        "weights": [w[:, 0] for w in objective.weights],
        "candidates": _candidates(objective),
    }
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(code, PAGE.name, "exec"), names)
    return names


def _kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.exp() * (a - b)).sum(-1, keepdim=True)


def _jensen_shannon(t: torch.Tensor, s: torch.Tensor, _: Any) -> torch.Tensor:
    m = (0.3 * t.exp() + 0.7 * s.exp()).log()
    return 0.3 * _kl(t, m) + 0.7 * _kl(s, m)


def _top_k(t: torch.Tensor, s: torch.Tensor, _: Any) -> torch.Tensor:
    p, ids = t.exp().topk(K)
    q = s.exp().gather(1, ids)
    p, q = (torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1) for x in (p, q))
    return (p * (p / q).log()).sum(-1, keepdim=True)


# of the log p of the teacher and of the student [n - 1, V], and the candidates
ALONE: dict[str, Alone] = {
    "forward_kl": lambda t, s, _: _kl(t, s),
    "reverse_kl": lambda t, s, _: _kl(s, t),
    "jensen_shannon": _jensen_shannon,
    "top_k_kl": _top_k,
    "log_p_of_candidates": lambda t, s, ids: s.gather(1, ids),
}


def _alone(page: dict[str, Any], objective: Objective, of: Alone) -> tuple[Any, list[torch.Tensor]]:
    """The student in eager, and the values of each sequence [n - 1, C]."""
    student, teacher = build("gemma2", "eager"), build("llama", "eager", seed=5).eval()
    temperatures = page["temperature"]
    if isinstance(temperatures, float):
        temperatures = [temperatures] * len(objective.sequences)
    found = []
    for i, tokens in enumerate(objective.sequences):
        ids = torch.from_numpy(tokens)[None]
        t, s = (
            (m(ids, use_cache=False).logits[0, :-1].double() / temperatures[i]).log_softmax(-1)
            for m in (teacher, student)
        )
        values = of(t.detach(), s, page["candidates"][i][1:])
        found.append(values * torch.from_numpy(objective.loss_masks[i][1:])[:, None])
    return student, found


def _run(values: list[torch.Tensor], model: Any, weights: list[torch.Tensor]) -> Run:
    """Values [n - 1, C] as a run."""
    model.zero_grad(set_to_none=True)
    sum((v * w[:, None]).sum() for v, w in zip(values, weights, strict=True)).backward()
    flat = [v.detach().float().reshape(-1) for v in values]
    return Run(flat, flat, gradients(model))


@pytest.mark.parametrize("name", ALONE)
def test_each_sequence_alone(name, page, objective):
    options = page["temperature"], page["loss_mask"]
    scores = pt.sequence_logprobs(
        page["model"], page["packed"], *options, measure=page[name], chunk_size=9
    )
    run = _run(scores.measured, page["model"], page["weights"])
    assert not any(p.grad is not None for p in page["teacher"].parameters())
    student, alone = _alone(page, objective, ALONE[name])
    print(name, assert_same(run, _run(alone, student, page["weights"]), 2e-5))


def test_without_a_measure(page, objective):
    """The estimators, and the first block's loss, which is that of log p."""
    student, alone = _alone(page, objective, lambda t, s, _: torch.stack([t, s], 1).flatten(1))
    weights = page["weights"]
    expected = []
    for values, tokens in zip(alone, objective.sequences, strict=True):
        t, s = values.view(len(values), 2, -1).unbind(1)
        taken = torch.from_numpy(tokens[1:])[:, None]
        t, s = t.gather(1, taken), s.gather(1, taken)
        x = t - s
        expected.append(torch.cat([-x, x**2 / 2, x.exp() - x - 1], -1))
    got = [torch.stack(k, -1) for k in zip(page["k1"], page["k2"], page["k3"], strict=True)]
    assert_same(_run(got, page["model"], weights), _run(expected, student, weights), 2e-5)
    plain = pt.sequence_logprobs(
        page["model"], page["packed"], page["temperature"], page["loss_mask"]
    )
    loss = sum((w * p).sum() for w, p in zip(weights, plain.logprobs, strict=True))
    torch.testing.assert_close(page["loss"], loss, atol=1e-4, rtol=1e-5)
    assert all(b.requires_grad for b in page["bonus"])


@pytest.mark.parametrize("page", ["one temperature"], indirect=True)
def test_a_teacher_of_another_vocabulary(page):
    width = page["teacher"].lm_head.in_features
    page["teacher"].lm_head = torch.nn.Linear(width, VOCABULARY + 3)
    page["of_teacher"] = pt.Teacher(page["teacher"], page["packed"], page["loss_mask"])
    options = page["temperature"], page["loss_mask"]
    with pytest.raises(RuntimeError, match="must match the size"):
        pt.sequence_logprobs(page["model"], page["packed"], *options, measure=page["forward_kl"])


@pytest.mark.parametrize("page", ["one temperature"], indirect=True)
def test_red_where_the_teacher_is_another_edges(page, objective, monkeypatch):
    of_teacher = page["of_teacher"]
    monkeypatch.setattr(of_teacher, "_hidden", of_teacher._hidden.roll(1, 0))
    options = page["temperature"], page["loss_mask"]
    scores = pt.sequence_logprobs(
        page["model"], page["packed"], *options, measure=page["forward_kl"]
    )
    student, alone = _alone(page, objective, ALONE["forward_kl"])
    run = _run(scores.measured, page["model"], page["weights"])
    with pytest.raises(AssertionError):
        assert_same(run, _run(alone, student, page["weights"]), 1e-2)
