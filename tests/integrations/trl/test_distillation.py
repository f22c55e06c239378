"""Distillation: the adapter's trainers against TRL's, through `train()` and `evaluate()`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from prefixtree.errors import UnsupportedError
from prefixtree.integrations.trl.distillation import (
    PrefixTreeDistillationTrainer,
    PrefixTreeGKDTrainer,
)
from tests.integrations.trl.distillation_runs import (
    DISTILLATION,
    GKD,
    GOLD,
    SameOrder,
    chats,
    conversations,
    make_distillation,
    make_gkd,
    teacher,
)
from tests.integrations.trl.runs import (
    VOCABULARY,
    assert_equal_runs,
    moved,
    parameters,
)
from tests.integrations.trl.sample_runs import Maker, ratios, rows_of_calls, turns
from tests.support.family_configs import TINY


def with_softcap() -> Any:
    """A teacher of another family, which caps its logits; on the same vocabulary."""
    torch.manual_seed(7)
    config = AutoConfig.for_model(
        "gemma2", **{**TINY, "vocab_size": VOCABULARY, "num_hidden_layers": 2}
    )
    config.final_logit_softcapping, config.initializer_range = 2.0, 0.3
    return AutoModelForCausalLM.from_config(config)


def test_a_run_on_policy_is_trls_own(folder: Path) -> None:
    """Reverse KL at a temperature; both models run once per micro-batch, and in evaluations."""
    ours, theirs = DISTILLATION.trained(
        folder,
        temperature=0.7,
        eval_strategy="steps",
        eval_steps=2,
        options={"eval_dataset": chats(2)},
    )
    assert moved(theirs, folder) > 1e-2
    assert "eval_entropy" in [key for log in ours.state.log_history for key in log]
    assert_equal_runs(ours, theirs)
    assert min(ratios(ours)) > 2


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_a_student_that_is_its_teacher_does_not_move(folder: Path, beta: float) -> None:
    """By a bit: of rounding AdamW would make steps. (GKD's loss in TRL has rounding there.)"""
    options = {"teacher_model": AutoModelForCausalLM.from_pretrained(folder)}
    given = {"optim": "adamw_torch", "learning_rate": 1e-3, "max_steps": 1, "beta": beta}
    trainer = make_distillation(PrefixTreeDistillationTrainer, folder, options=options, **given)
    before = parameters(trainer.model)
    trainer.train()
    after = parameters(trainer.model)
    assert before and all(torch.equal(p, after[name]) for name, p in before.items())


@pytest.mark.parametrize("maker", [DISTILLATION, GKD, GOLD], ids=["on policy", "gkd", "gold"])
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_divergences(folder: Path, maker: Maker, beta: float) -> None:
    """By a teacher that caps its logits, with moments."""
    runs = maker.trained(
        folder,
        beta=beta,
        optim="adamw_torch",
        learning_rate=3e-4,
        options={"teacher_model": with_softcap()},
    )
    assert moved(runs[1], folder) > 3e-4
    assert_equal_runs(*runs)
    assert min(ratios(runs[0])) > 1.3


@pytest.mark.parametrize(
    "arguments",
    [
        # given answers alone; the last batch of an epoch is smaller
        {"lmbda": 0.0, "per_device_train_batch_size": 5, "gradient_accumulation_steps": 1},
        # the teacher's answers
        {"lmbda": 0.0, "seq_kd": True, "beta": 1.0},
        # rows that lose their prompts' beginnings
        {"lmbda": 0.0, "max_length": 120},
    ],
    ids=lambda arguments: "-".join(map(str, [*arguments, *arguments.values()])),
)
def test_gkd(folder: Path, arguments: dict[str, Any]) -> None:
    ours, theirs = GKD.trained(
        folder,
        eval_strategy="steps",
        eval_steps=2,
        options={"eval_dataset": conversations(turns(2))},
        **arguments,
    )
    assert moved(theirs, folder) > 1e-3
    assert_equal_runs(ours, theirs)
    assert arguments.get("seq_kd") or min(ratios(ours)) > 1.3


def test_gold_on_given_answers(folder: Path) -> None:
    """At another temperature, with evaluations and a smaller last batch."""
    ours, theirs = GOLD.trained(
        folder,
        lmbda=0.0,
        num_generations=1,
        temperature=0.6,
        eval_strategy="steps",
        eval_steps=2,
        options={"eval_dataset": conversations(turns(2))},
    )
    assert moved(theirs, folder) > 1e-3
    assert_equal_runs(ours, theirs)


def test_gold_with_a_teacher_that_is_padded_otherwise(folder: Path) -> None:
    """TRL resizes the teacher; its other trainers refuse one (below)."""
    options = {"teacher_model": teacher(vocab_size=300)}
    ours, theirs = GOLD.trained(folder, lmbda=0.0, num_generations=1, max_steps=1, options=options)
    assert moved(theirs, folder) > 1e-3
    assert_equal_runs(ours, theirs)


@pytest.mark.parametrize("maker", [DISTILLATION, GKD], ids=["on policy", "gkd"])
def test_an_adapter(folder: Path, maker: Maker) -> None:
    peft = pytest.importorskip("peft")
    runs = []
    for kind in (maker.ours, maker.stock):
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"])
        random.seed(0)
        runs.append(maker.make(kind, folder, options={"peft_config": config}, learning_rate=1.0))
        runs[-1].train()
    b = max(float(p.abs().max()) for n, p in parameters(runs[1].model).items() if "lora_B" in n)
    assert b > 1e-3
    assert_equal_runs(*runs)


@pytest.mark.usefixtures("unprobed")
def test_masked_tools_and_copies(folder: Path) -> None:
    """TRL's loss of one batch, whose tool tokens are masked, with copies of a row, and its
    gradients; the mean over scored tokens where no divisor is given."""
    torch.manual_seed(1)
    prompts, answers = torch.randint(256, (4, 5)), torch.randint(256, (4, 6))
    prompts[1:], answers[1], answers[2, :3] = prompts[0], answers[0], answers[0, :3]
    batch = {
        "prompt_ids": prompts,
        "prompt_mask": torch.tensor([[1] * 5] * 3 + [[0, 0, 1, 1, 1]]),
        "completion_ids": answers,
        "completion_mask": torch.tensor([[1] * 6] * 2 + [[1] * 4 + [0] * 2] * 2),
        "tool_mask": torch.tensor([[1, 1, 0, 0, 1, 1]] * 3 + [[0, 0, 1, 1, 1, 1]]),
    }
    found = []
    for kind in (PrefixTreeDistillationTrainer, SameOrder):
        trainer = make_distillation(kind, folder, beta=0.5)
        trainer.model.train()
        rows = rows_of_calls(trainer.model)
        trainer.compute_loss(trainer.model, batch, num_items_in_batch=None).backward()
        gradients = {name: p.grad for name, p in trainer.model.named_parameters()}
        found.append((rows, gradients, trainer._metrics["train"]["entropy"]))
    (rows, ours, entropy), (_, theirs, expected) = found
    assert rows == [1] and entropy == pytest.approx(expected, abs=1e-5)
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-6)


# ---- refused -------------------------------------------------------------------------------------


def test_what_the_trainers_refuse(folder: Path) -> None:
    for make, kind in (
        (make_distillation, PrefixTreeDistillationTrainer),
        (make_gkd, PrefixTreeGKDTrainer),
    ):
        other = {"teacher_model": teacher(vocab_size=300)}
        with pytest.raises(ValueError, match="vocab_size 300"):  # TRL's own
            make(kind, folder, options=other)
        with pytest.raises(UnsupportedError, match="fp16=True is not verified"):
            make(kind, folder, fp16=True)


def test_rows_that_are_refused(folder: Path) -> None:
    trainer = make_gkd(PrefixTreeGKDTrainer, folder)
    ids = torch.randint(256, (2, 6))
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    labels = torch.where(mask == 1, ids, -100)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    with pytest.raises(UnsupportedError, match="row 1 has an empty prompt"):
        trainer.compute_loss(trainer.model, batch)
    labels[1, 2], labels[1, 0] = -100, 5
    with pytest.raises(UnsupportedError, match=r"labels\[1, 0\] is scored, and padding"):
        trainer.compute_loss(trainer.model, batch)
    trainer.teacher_model.set_attn_implementation("sdpa")
    with pytest.raises(UnsupportedError, match="attn_implementation='sdpa'"):
        trainer.compute_loss(trainer.model, batch)
