"""The code of docs/losses.md: each recipe beside each sequence alone, all gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import prefixtree as pt
from tests.support import forks
from tests.support.full import in_turn
from tests.support.models import (
    VOCABULARY,
    Objective,
    Run,
    assert_same,
    build,
    gradients,
)
from tests.support.recipes import (
    ALONE,
    OF_FORKS,
    alone,
    code_of,
    eager_copy,
    log_p_alone,
    loss_of,
    names_of_page,
    objective_of,
    values_of,
)


@pytest.fixture(scope="module")
def objective() -> Objective:
    return objective_of()


@pytest.fixture(params=["one temperature", "temperatures"])
def page(request: pytest.FixtureRequest, objective: Objective) -> dict[str, Any]:
    """The names of the page once its code has run."""
    temperature: Any = 0.7 if request.param == "one temperature" else objective.temperatures
    return names_of_page(build("gemma2"), build("llama", seed=5).eval(), objective, temperature)


def _alone(page: dict[str, Any], objective: Objective, name: str) -> Run:
    """The recipe of each sequence alone, in eager."""
    student = eager_copy(page["model"])
    log_p = log_p_alone(student, eager_copy(page["teacher"]), objective, page["temperature"])
    return _run(alone(name, log_p, objective), student, objective)


def _run(values: list[torch.Tensor], model: Any, objective: Objective) -> Run:
    """Values [n - 1, C] as a run."""
    model.zero_grad(set_to_none=True)
    loss_of(values, objective).backward()
    flat = [v.detach().float().reshape(-1) for v in values]
    return Run(flat, flat, gradients(model))


@pytest.mark.parametrize(
    ("name", "page"), in_turn(ALONE, ["one temperature", "temperatures"]), indirect=["page"]
)
def test_each_sequence_alone(name, page, objective):
    run = _run(values_of(page, name), page["model"], objective)
    assert not any(p.grad is not None for p in page["teacher"].parameters())
    print(name, assert_same(run, _alone(page, objective, name), 2e-5))


def test_the_first_block_is_the_loss_of_log_p(page, objective):
    plain = pt.sequence_logprobs(
        page["model"], page["packed"], page["temperature"], page["loss_mask"]
    )
    loss = sum((w * p).sum() for w, p in zip(page["weights"], plain.logprobs, strict=True))
    torch.testing.assert_close(page["loss"], loss, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("page", ["one temperature"], indirect=True)
def test_a_teacher_of_another_vocabulary(page):
    width = page["teacher"].lm_head.in_features
    page["teacher"].lm_head = torch.nn.Linear(width, VOCABULARY + 3)
    page["of_teacher"] = pt.Teacher(page["teacher"], page["packed"], page["loss_mask"])
    page["forward_kl"] = page["of_teacher"].divergence()
    with pytest.raises(ValueError, match="they must have one vocabulary"):
        values_of(page, "forward_kl")


@pytest.mark.parametrize("page", ["one temperature"], indirect=True)
def test_a_teacher_whose_vocabulary_is_padded_otherwise(page):
    """Rows that no token has change nothing."""
    expected = values_of(page, "forward_kl")
    head = page["teacher"].lm_head
    padded = torch.nn.Linear(head.in_features, VOCABULARY + 3, bias=False)
    padded.weight.data[:VOCABULARY] = head.weight.detach()
    page["teacher"].lm_head = padded
    of_teacher = pt.Teacher(page["teacher"], page["packed"], page["loss_mask"])
    page["padded"] = of_teacher.divergence(vocabulary=VOCABULARY)
    for found, want in zip(values_of(page, "padded"), expected, strict=True):
        torch.testing.assert_close(found, want)
    with pytest.raises(ValueError, match="vocabulary must be an integer >= 1, got 0"):
        of_teacher.divergence(vocabulary=0)


@pytest.mark.parametrize("page", ["one temperature"], indirect=True)
def test_the_top_k_of_a_server(page, objective):
    """Its ids and log p of each token [n, k], in the place of a teacher's rows; all gradients."""
    packed, masks = page["packed"], page["loss_mask"]
    # row i stands for token i, and the first token has none
    rows = [torch.cat([m.new_zeros(1, m.shape[1]), m]) for m in page["best"].measured]
    log_p, ids = zip(*(row.chunk(2, -1) for row in rows), strict=True)
    t_log_p, t_ids = packed.pack_values(log_p, masks), packed.pack_values(ids, masks).long()

    def measure(logits, edges):
        token = edges.tokens_in(packed)
        s = logits.log_softmax(-1).gather(1, t_ids[token])
        t, s = page["with_rest"](t_log_p[token]), page["with_rest"](s)
        return (t.exp() * (t - s)).sum(-1, keepdim=True)

    page["of_server"] = measure
    run = _run(values_of(page, "of_server"), page["model"], objective)
    print(assert_same(run, _alone(page, objective, "top_k_kl"), 2e-5))


@pytest.mark.parametrize("page", ["one temperature"], indirect=True)
def test_red_where_the_teacher_is_another_edges(page, objective, monkeypatch):
    of_teacher = page["of_teacher"]
    monkeypatch.setattr(of_teacher, "_hidden", of_teacher._hidden.roll(1, 0))
    run = _run(values_of(page, "forward_kl"), page["model"], objective)
    with pytest.raises(AssertionError):
        assert_same(run, _alone(page, objective, "forward_kl"), 1e-2)


def test_rollouts_that_fork():
    """The page's loop, and a trainer's clipped mean over padded rows, beside every draw alone."""
    length = max(map(len, forks.SEQUENCES))
    rows = {name: torch.zeros(5, length) for name in ("ids", "attention", "mask", "advantages")}
    of_rows = forks.SEQUENCES, forks.MASKS, forks.ADVANTAGES
    for i, (tokens, mask, advantage) in enumerate(zip(*of_rows, strict=True)):
        n = len(tokens)
        rows["ids"][i, -n:], rows["attention"][i, -n:] = torch.tensor(tokens).float(), 1
        rows["mask"][i, -n:], rows["advantages"][i, 1 - n :] = torch.tensor(mask), advantage
    model, reference = build("qwen3"), build("qwen3", "eager")
    names: dict[str, Any] = {
        "pt": pt,
        "torch": torch,
        "model": model,
        "plan": pt.plan_micro_batches(forks.SEQUENCES, 9),
        "rank": 0,
        "masks": forks.MASKS,
        "rollouts": forks.ROLLOUTS,
        "advantages": forks.ADVANTAGES,
        "attention_mask": rows["attention"],
        "loss_mask": rows["mask"],
        "advantages_of_rows": rows["advantages"],
    }
    loop, through_advantages = code_of(OF_FORKS)
    forks.loss_by_hand(reference, "rollout-mean").backward()
    exec(loop, names)
    found = [gradients(model)]
    exec(through_advantages, names)
    model.zero_grad()
    scores = pt.batch_logprobs(model, rows["ids"].long(), rows["attention"])
    ratio = (scores.logprobs - scores.logprobs.detach()).exp()
    surrogate = torch.minimum(
        ratio * names["advantages"], ratio.clamp(0.8, 1.2) * names["advantages"]
    )
    (-(surrogate * rows["mask"]).sum() / rows["mask"].sum()).backward()
    found.append(gradients(model))
    for got in found:
        for name, expected in gradients(reference).items():
            assert float((got[name] - expected).norm() / expected.norm()) < 5e-6, name
