"""Common to the trainers of samples."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from prefixtree.errors import UnsupportedError
from tests.integrations.trl.runs import (
    assert_equal_runs,
    check_half_precision,
    count_once,
    moved,
    parameters,
    save_model,
    squared_distance,
    tiny_mixture,
    worst_parameter,
)
from tests.integrations.trl.sample_runs import DPO, KTO, REWARD, SFT, Maker
from tests.support.full import mostly
from tests.support.operator_calls import count_attentions

MAKERS = {"dpo": DPO, "sft": SFT, "kto": KTO, "reward": REWARD}


@pytest.fixture(params=mostly(MAKERS, ["dpo", "sft"]))
def maker(request: pytest.FixtureRequest) -> Maker:
    return MAKERS[request.param]


def test_the_trainer_asks(folder: Path, maker: Maker) -> None:
    """The checks are those of the trainer for GRPO, in test_refusals.py."""
    make, ours = maker.make, maker.ours
    with pytest.raises(UnsupportedError, match=r"neftune_noise_alpha=5\.0: a shared token"):
        make(ours, folder, neftune_noise_alpha=5.0)


def test_samples_that_are_alone_in_their_batches(folder: Path, maker: Maker) -> None:
    """Turns share nothing then; the two answers of a pair share their prompt."""
    make, ours = maker.make, maker.ours
    if maker is KTO:
        pytest.skip("TRL wants several, of which the KL is estimated")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        make(ours, folder, per_device_train_batch_size=1).train()
    messages = [text for each in found if "shared nothing" in (text := str(each.message))]
    assert len(messages) == (maker is SFT)
    assert all("set train_sampling_strategy='sequential'" in text for text in messages)


@pytest.mark.usefixtures("unprobed")
def test_layers_recompute_what_is_asked_for(
    folder: Path, maker: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever TRL's checkpointing says: another number of attentions, the same parameters."""
    make, ours = maker.make, maker.ours
    ran = count_attentions(monkeypatch)
    counts, ends = [], []
    for options in ({}, {"recompute": "nothing"}):
        ran.clear()
        trainer = make(ours, folder, options=options, max_steps=1)
        trainer.train()
        counts.append(len(ran))
        ends.append(list(trainer.model.parameters()))
    # two layers, two batches; a reference recomputes nothing, nor do mismatched answers
    others = {DPO: 4, KTO: 12}.get(maker, 0)
    assert counts == [8 + others, 4 + others]
    assert all(map(torch.equal, *ends))


@pytest.mark.parametrize("coefficient", [0.0, 3.0])
def test_experts_and_their_loss(
    maker: Maker, coefficient: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if maker is REWARD:
        pytest.skip("TRL's trainer of rewards knows no load-balancing loss")
    folder = save_model(tmp_path, tiny_mixture())
    arguments = {
        "router_aux_loss_coef": coefficient,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "options": {"eval_dataset": maker.data(3)},
    }
    ours, theirs = maker.trained(folder, **arguments)
    assert moved(theirs, folder) > 1e-3
    assert_equal_runs(ours, theirs)
    losses = [log["aux_loss"] for log in theirs.state.log_history if "aux_loss" in log]
    assert bool(losses) == (coefficient > 0)
    if coefficient > 0:
        # a loss that counts every packed token once would be seen
        count_once(monkeypatch)
        wrong = maker.make(maker.ours, folder, **arguments, max_steps=1)
        wrong.train()
        assert abs(wrong.state.log_history[0]["aux_loss"] - losses[0]) > 1e-4


def test_metrics_of_logits(folder: Path, maker: Maker) -> None:
    """For `compute_metrics` TRL runs the model again, on the rows as they are."""

    def compute_metrics(predictions: Any) -> dict[str, float]:
        return {"spread": float(predictions.predictions.std())}

    options = {"eval_dataset": maker.data(2), "compute_metrics": compute_metrics}
    mine, other = (run.evaluate() for run in maker.both(folder, options=options))
    assert other["eval_spread"] > 0
    assert mine["eval_spread"] == pytest.approx(other["eval_spread"], rel=1e-5)
    assert mine["eval_loss"] == pytest.approx(other["eval_loss"], rel=1e-5)


def test_mixed_precision(folder: Path, maker: Maker) -> None:
    """`bf16=True`, TRL's default: as near to a float32 run as TRL's own."""
    exact = maker.make(maker.stock, folder)
    runs = [exact, *maker.both(folder, bf16=True)]
    for run in runs:
        run.train()
    wanted = parameters(exact.model)
    errors = [squared_distance(parameters(run.model), wanted) for run in runs[1:]]
    print(f"squared distance from float32: ours {errors[0]:.2e}, TRL's {errors[1]:.2e}")
    assert 0.5 * errors[1] < errors[0] < 1.5 * errors[1]
    assert moved(exact, folder) > 10 * worst_parameter(runs[1], exact)[0]


@pytest.mark.full
def test_half_precision(folder: Path, maker: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(kind: type, folder: Path, **arguments: Any) -> Any:
        run = maker.make(kind, folder, **arguments)
        run.train()
        return run

    # of 12 seeds with rewards the ratios were between 0.74 and 1.67, and 1.00 of the sums
    most = 2.0 if maker is REWARD else 1.5
    check_half_precision(trained, (maker.ours, maker.stock), folder, monkeypatch, most)
