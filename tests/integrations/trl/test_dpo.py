"""DPO: the adapter's trainer against TRL's, through `train()` and `evaluate()`."""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from trl import DPOTrainer
from trl.experimental.bema_for_ref_model import BEMACallback
from trl.experimental.bema_for_ref_model import DPOTrainer as BEMA

from prefixtree.integrations.trl import PrefixTreeDPOTrainer
from tests.integrations.trl.runs import (
    assert_equal_runs,
    moved,
    save_model,
    tiny_hybrid,
)
from tests.integrations.trl.sample_runs import (
    DPO,
    callers,
    compare_with_adapter,
    make_dpo,
    pairs,
    ratios,
    rows_of_calls,
)

# TRL's: the losses for which it allows divergences other than the reverse KL
_DIVERGING = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft")

# refused by TRL 1.16 with `use_weighting`, or broken there: it multiplies a result of relu, or an
# expanded tensor, in place
_UNWEIGHTED = ("aot", "aot_unpaired", "hinge", "sft")


def other_model(folder: Path) -> Any:
    """The model with other weights: a reference that is not where the policy begins."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.02 * torch.randn_like(p)
    return model


@pytest.mark.parametrize("optimizer", ["sgd", "adamw_torch"])
def test_a_run_is_trls_own(folder: Path, optimizer: str) -> None:
    ours, theirs = DPO.trained(
        folder,
        optim=optimizer,
        learning_rate=0.3 if optimizer == "sgd" else 1e-3,
        eval_strategy="steps",
        eval_steps=2,
        options={"eval_dataset": pairs(3)},
    )
    assert moved(theirs, folder) > 1e-3
    logs = theirs.state.log_history
    # the reference took part, and some statistics are not 0
    assert max(abs(log.get("rewards/margins", 0)) for log in logs) > 1e-2
    assert max(abs(log.get("logits/chosen", 0)) for log in logs) > 1e-3
    assert_equal_runs(ours, theirs)
    # the policy is where its reference is, in the same packed rows
    assert ours.state.log_history[0]["rewards/margins"] == 0
    # two pairs of one prompt or of two
    assert min(ratios(ours)) > 1.8


@pytest.mark.parametrize(
    "arguments",
    [
        {"use_weighting": True, "ld_alpha": 0.5, "learning_rate": 3.0},
        {"loss_type": ["sigmoid", "sft", "ipo"], "loss_weights": [1.0, 0.1, 0.5]},
        {"loss_type": ["robust"], "label_smoothing": 0.1, "f_divergence_type": "js_divergence"},
        # answers that lose their end, and rows that lose their beginning
        {"max_length": 60, "pad_to_multiple_of": 8},
        {"max_length": 50, "truncation_mode": "keep_end"},
        {"sync_ref_model": True, "ref_model_sync_steps": 1},
        {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
        # TRL says that it is switched off
        {"padding_free": True},
        {"train_sampling_strategy": "sequential", "per_device_train_batch_size": 4},
    ],
    ids=lambda arguments: "-".join(arguments),
)
# ends of rows, which share nothing
@pytest.mark.filterwarnings("ignore:the first optimiser step shared nothing")
def test_settings(folder: Path, arguments: dict[str, Any]) -> None:
    ours, theirs = DPO.trained(folder, **arguments)
    assert moved(theirs, folder) > 1e-3
    assert_equal_runs(ours, theirs)


@pytest.mark.usefixtures("unprobed")
def test_a_reference_with_other_weights(folder: Path) -> None:
    runs = [
        make_dpo(trainer, folder, options={"ref_model": other_model(folder)})
        for trainer in (PrefixTreeDPOTrainer, DPOTrainer)
    ]
    rows = rows_of_calls(runs[0].model), rows_of_calls(runs[0].ref_model)
    for run in runs:
        run.train()
    assert runs[1].state.log_history[0]["rewards/margins"] != 0
    assert_equal_runs(*runs)
    # 2 steps of 2 batches, each packed to one row
    assert rows == ([1] * 4, [1] * 4)


class OurBEMA(BEMA, PrefixTreeDPOTrainer): ...


@pytest.mark.full
def test_a_reference_that_follows_by_bema(folder: Path) -> None:
    """TRL's experimental subclass, before ours as docs/trl.md says."""
    often = {"update_freq": 1, "update_ref_model": True, "ref_model_update_freq": 1}
    runs = []
    for trainer in (OurBEMA, BEMA):
        options = {"callbacks": [BEMACallback(**often)]}
        runs.append(make_dpo(trainer, folder, options=options, max_steps=3))
        runs[-1].train()
    start = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    reference = runs[0].ref_model.state_dict()
    assert max(float((p - start[name]).abs().max()) for name, p in reference.items()) > 1e-4
    assert_equal_runs(*runs)
    assert min(ratios(runs[0])) > 1.8


@pytest.mark.usefixtures("unprobed")
@pytest.mark.parametrize("pretrained", [False, True], ids=["new adapter", "pretrained adapter"])
def test_an_adapter_and_its_reference(folder: Path, pretrained: bool) -> None:
    """The reference is the policy with its adapter switched off, or the adapter's first weights;
    it is packed as the policy is."""
    rows = compare_with_adapter(DPO, folder, pretrained, learning_rate=1.0)
    # policy and reference of 4 batches
    assert rows == [1] * 8


@pytest.mark.parametrize("with_adapter", [False, True], ids=["full", "adapter"])
def test_precomputed_references(
    folder: Path, with_adapter: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL computes them in its constructor, and keeps them on disk by data and weights."""
    calls = callers(monkeypatch, DPOTrainer, "compute_ref_log_probs")
    runs = []
    for trainer in (PrefixTreeDPOTrainer, DPOTrainer):
        options: dict[str, Any] = {}
        # another column, or the second trainer finds what the first has kept
        for name in ("train_dataset", "eval_dataset"):
            data = pairs(4 if name == "train_dataset" else 2)
            options[name] = data.add_column("of", [f"{trainer}{with_adapter}"] * len(data))
        if with_adapter:
            peft = pytest.importorskip("peft")
            options["peft_config"] = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"])
        runs.append(
            make_dpo(
                trainer,
                folder,
                options=options,
                precompute_ref_log_probs=True,
                eval_strategy="steps",
                eval_steps=2,
            )
        )
    # 8 pairs in batches of 2, and 4 in one of 8
    assert calls.count(PrefixTreeDPOTrainer) == calls.count(DPOTrainer) == 5
    for run in runs:
        run.train()
    assert len(calls) == 10
    # as long as the policy is where its reference is, rounding decides which answer is ahead
    assert_equal_runs(*runs, wanted=lambda name: name != "rewards/accuracies")
    for ours, theirs in zip(runs[0].train_dataset, runs[1].train_dataset, strict=True):
        assert ours["ref_chosen_logps"] == pytest.approx(theirs["ref_chosen_logps"], rel=1e-6)
    if not with_adapter:
        return  # TRL has no reference left
    losses = []
    for run in runs:
        data = pairs(3).add_column("of", [f"evaluated {type(run)}"] * 6)
        losses.append(run.evaluate(data)["eval_loss"])
    assert len(calls) == 12
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_recurrent_layers(tmp_path: Path) -> None:
    """A hybrid model; the reference, which TRL loads, is prepared by its first forward."""
    folder = save_model(tmp_path, tiny_hybrid("qwen3_5_text"))
    ours, theirs = DPO.trained(folder)
    assert moved(theirs, folder) > 1e-3
    assert_equal_runs(ours, theirs)
    assert min(ratios(ours)) > 1.8


# ---- losses, without training --------------------------------------------------------------------


def loss_types() -> list[str]:
    """Every name that TRL's code compares a loss type with."""
    source = ast.parse(textwrap.dedent(inspect.getsource(DPOTrainer._compute_loss)))
    return [
        node.comparators[0].value
        for node in ast.walk(source)
        if isinstance(node, ast.Compare)
        and ast.unparse(node.left) == "loss_type"
        and isinstance(node.comparators[0], ast.Constant)
    ]


@pytest.fixture(scope="module")
def both(folder: Path) -> tuple[DPOTrainer, DPOTrainer]:
    """Trainers whose settings of the loss are set by the tests, and whose references differ from
    their policies. WPO's weights are on as they are made, so that TRL's head gives its entry."""
    trainers = [
        make_dpo(
            trainer,
            folder,
            model=other_model(folder),
            use_weighting=True,
            gradient_checkpointing=False,
            options={"ref_model": AutoModelForCausalLM.from_pretrained(folder)},
        )
        for trainer in (PrefixTreeDPOTrainer, DPOTrainer)
    ]
    return trainers[0], trainers[1]


def losses_of(trainers: Any, batch: Any = None, **settings: Any) -> list[float]:
    """The loss of both trainers, whose gradients are compared."""
    found = []
    for trainer in trainers:
        for name, value in {"use_weighting": False, "ld_alpha": None, **settings}.items():
            assert hasattr(trainer, name)
            setattr(trainer, name, value)
        inputs = batch or next(iter(trainer.get_train_dataloader()))
        trainer.model.zero_grad()
        loss = trainer.compute_loss(trainer.model, copy.copy(inputs))
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in trainer.model.named_parameters()}
        assert trainer.precompute_ref_logps is False
        found.append((loss.item(), gradients))
    (ours, gradients), (theirs, wanted) = found
    assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    largest = max(float(g.abs().max()) for g in wanted.values())
    for name, gradient in wanted.items():
        # some losses (discopop) read sums of log-probabilities through a sigmoid: 1.5e-5
        assert float((gradients[name] - gradient).abs().max()) < 3e-5 * max(largest, 1e-3), name
    return [theirs, largest]


def test_the_loss_types() -> None:
    """A new one would have to be looked at."""
    others = "nca_pair bco_pair sppo_hard aot aot_unpaired apo_zero apo_down"
    assert set(loss_types()) == {*_DIVERGING, *others.split()}


@pytest.mark.parametrize("loss_type", loss_types())
def test_every_loss_and_divergence(both: Any, loss_type: str) -> None:
    common = {"loss_types": [loss_type], "label_smoothing": 0.1}
    plain = losses_of(both, **common, f_divergence_type="reverse_kl")
    assert plain[1] > 1e-3
    if loss_type not in _UNWEIGHTED:
        weighted = losses_of(both, **common, f_divergence_type="reverse_kl", use_weighting=True)
        assert weighted != plain
    losses_of(both, **common, f_divergence_type="reverse_kl", ld_alpha=0.3)
    if loss_type in _DIVERGING:
        for divergence in ("forward_kl", "js_divergence", "alpha_divergence"):
            losses_of(both, **common, f_divergence_type=divergence)


def test_rows_without_an_answer(both: Any) -> None:
    """An answer of which nothing is left, and a prompt of which nothing is left."""
    batch = next(iter(both[0].get_train_dataloader()))
    batch["completion_mask"][0] = 0
    batch["completion_mask"][1] = batch["attention_mask"][1]
    settings = {"loss_types": ["sigmoid"], "f_divergence_type": "reverse_kl"}
    assert losses_of(both, batch, **settings)[1] > 1e-3
    batch["completion_mask"][:] = 0
    assert losses_of(both, batch, **settings)[1] == 0
