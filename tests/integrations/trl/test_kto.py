"""KTO: the adapter's trainer against TRL's, through `train()` and `evaluate()`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trl import KTOTrainer

from prefixtree.integrations.trl import PrefixTreeKTOTrainer
from tests.integrations.trl.runs import assert_equal_runs, moved
from tests.integrations.trl.sample_runs import (
    KTO,
    answers,
    callers,
    compare_with_adapter,
    make_kto,
    ratios,
)
from tests.support.full import mostly


@pytest.mark.parametrize("optimizer", mostly(["sgd", "adamw_torch"], ["sgd"]))
def test_a_run_is_trls_own(folder: Path, optimizer: str) -> None:
    ours, theirs = KTO.trained(
        folder,
        optim=optimizer,
        learning_rate=0.3 if optimizer == "sgd" else 1e-3,
        # all answers become likelier, or TRL cuts the KL to 0
        desirable_weight=3.0,
        eval_strategy="steps",
        eval_steps=2,
        options={"eval_dataset": answers(3)},
    )
    assert moved(theirs, folder) > 1e-3
    logs = theirs.state.log_history
    # the reference took part, and so did the mismatched answers
    assert max(abs(log.get("rewards/margins", 0)) for log in logs) > 1e-2
    assert max(log.get("eval_kl", 0) for log in logs) > 1e-3
    assert_equal_runs(ours, theirs)
    # the policy is where its reference is, in the same packed rows
    assert ours.state.log_history[0]["rewards/margins"] == ours.state.log_history[0]["kl"] == 0
    # four answers of one prompt
    assert min(ratios(ours)) > 2.5


@pytest.mark.full
@pytest.mark.parametrize(
    "arguments",
    [
        {"loss_type": "apo_zero_unpaired", "train_sampling_strategy": "random"},
        {"desirable_weight": 0.7, "undesirable_weight": 1.3, "beta": 0.5},
        # answers that lose their end
        {"max_length": 70, "pad_to_multiple_of": 8},
        {"sync_ref_model": True, "ref_model_sync_steps": 1},
        {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
    ],
    ids=lambda arguments: "-".join(arguments),
)
# mismatched answers run without gradients, in TRL too
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_settings(folder: Path, arguments: dict[str, Any]) -> None:
    ours, theirs = KTO.trained(folder, **arguments)
    assert moved(theirs, folder) > 1e-3
    assert_equal_runs(ours, theirs)


@pytest.mark.usefixtures("unprobed")
@pytest.mark.parametrize("pretrained", mostly([False, True], [False]))
def test_an_adapter_and_its_reference(folder: Path, pretrained: bool) -> None:
    """The reference is the policy with its adapter switched off, or the adapter's first weights."""
    rows = compare_with_adapter(KTO, folder, pretrained, learning_rate=3.0)
    # policy and reference of 4 batches, each with its mismatched answers
    assert rows == [1] * 16


@pytest.mark.full
@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_precomputed_references(
    folder: Path, loss_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL computes them in its constructor, and keeps them on disk by data and weights."""
    calls = callers(monkeypatch, KTOTrainer, "compute_ref_log_probs")
    runs = []
    for trainer in (PrefixTreeKTOTrainer, KTOTrainer):
        # another column, or the second trainer finds what the first has kept
        data = answers().add_column("of", [f"{trainer}"] * 16)
        arguments = {"precompute_ref_log_probs": True, "loss_type": loss_type}
        runs.append(make_kto(trainer, folder, options={"train_dataset": data}, **arguments))
    # 16 answers in batches of 4
    assert calls.count(PrefixTreeKTOTrainer) == calls.count(KTOTrainer) == 4
    for run in runs:
        run.train()
    assert len(calls) == 8
    assert moved(runs[1], folder) > 1e-3
    assert_equal_runs(*runs)
    for name in {"ref_logps", "ref_KL_logps"} & {*runs[1].train_dataset.column_names}:
        ours, theirs = (run.train_dataset[name][:] for run in runs)
        assert ours == pytest.approx(theirs, rel=1e-6)
