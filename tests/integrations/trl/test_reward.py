"""Reward models: the adapter's trainer against TRL's, through `train()` and `evaluate()`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from prefixtree.errors import UnsupportedError
from prefixtree.integrations.trl import PrefixTreeRewardTrainer
from tests.integrations.trl.runs import assert_equal_runs, parameters
from tests.integrations.trl.sample_runs import REWARD, classifier, make_reward, pairs, ratios
from tests.support.full import mostly


def assert_same_training(folder: Path, **arguments: Any) -> list[Any]:
    runs = REWARD.both(folder, **arguments)
    start = parameters(runs[1].model)
    for run in runs:
        run.train()
    trained = parameters(runs[1].model)
    assert max(float((trained[name] - start[name]).abs().max()) for name in start) > 1e-3
    assert_equal_runs(*runs)
    return runs


@pytest.mark.parametrize("optimizer", mostly(["sgd", "adamw_torch"], ["sgd"]))
def test_a_run_is_trls_own(folder: Path, optimizer: str) -> None:
    ours, theirs = assert_same_training(
        folder,
        optim=optimizer,
        learning_rate=0.3 if optimizer == "sgd" else 1e-3,
        eval_strategy="steps",
        eval_steps=2,
        options={"eval_dataset": pairs(3)},
    )
    assert max(abs(log.get("eval_margin", 0)) for log in theirs.state.log_history) > 1e-3
    # two pairs of one prompt or of two
    assert min(ratios(ours)) > 1.8


@pytest.mark.full
@pytest.mark.parametrize("arguments", [{"center_rewards_coefficient": 0.1}, {"max_length": 90}])
def test_settings(folder: Path, arguments: dict[str, Any]) -> None:
    data = pairs().add_column("margin", [0.5 * i for i in range(8)])
    assert_same_training(folder, options={"train_dataset": data}, **arguments)


@pytest.mark.parametrize("task", mostly(["SEQ_CLS", None], ["SEQ_CLS"]))
def test_an_adapter(folder: Path, task: str | None) -> None:
    """With its task PEFT trains the head for rewards too."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type=task)
    ours, _ = assert_same_training(folder, options={"peft_config": config}, learning_rate=3.0)
    assert any("score" in name for name in parameters(ours.model)) == (task is not None)


@pytest.mark.parametrize("pad", ["<|im_end|>", "<|im_start|>"])
def test_rewards_are_read_where_transformers_reads_them(folder: Path, pad: str) -> None:
    """Before an end of text that is padding too, which TRL takes where a tokenizer has none."""
    losses, gradients = [], []
    for run in REWARD.both(folder, pad_token=pad, gradient_checkpointing=False):
        batch = next(iter(run.get_train_dataloader()))
        ends = batch["attention_mask"].sum(1) - 1
        batch["input_ids"][torch.arange(len(ends)), ends] = run.processing_class.eos_token_id
        loss = run.compute_loss(run.model, batch)
        loss.backward()
        losses.append(loss.item())
        gradients.append([p.grad for p in run.model.parameters()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_batches_that_are_refused(folder: Path) -> None:
    trainer = make_reward(PrefixTreeRewardTrainer, folder, model=classifier(folder))
    pad = trainer.model.config.pad_token_id
    ids = torch.tensor([[5, 6, 7, pad], [5, 6, 8, 9]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    for bad, message in (
        ({"input_ids": ids.flip(1), "attention_mask": mask.flip(1)}, "row 0 begins with padding: "),
        ({"input_ids": ids.where(ids != pad, pad - 1)}, f"other tokens than .*pad_token_id={pad}"),
        ({"token_type_ids": mask}, "the batch has token_type_ids, which is not packed: train on"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            trainer.compute_loss(trainer.model, {"input_ids": ids, "attention_mask": mask, **bad})
