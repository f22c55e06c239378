"""RLOO and GMPO: the adapter's trainers against TRL's, through `train()` and `evaluate()`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trl import RLOOConfig
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

from prefixtree.integrations.trl import PrefixTreeGRPOTrainer
from prefixtree.integrations.trl.micro_batches import cut_losses
from tests.integrations.trl.rloo_runs import RATIO, Ours, SameOrder, Theirs
from tests.integrations.trl.runs import (
    assert_equal_runs,
    moved,
    prompts,
    rollouts,
    save_model,
    tiny_mixture,
    train,
    worst_parameter,
)
from tests.support.full import mostly

SGD = {"optim": "sgd", "learning_rate": 0.3, "config": RLOOConfig}
# micro-batches cut the groups of 4
CUT = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}


@pytest.mark.parametrize("optimizer", mostly(["sgd", "adamw_torch"], ["sgd"]))
def test_a_run_is_trls_own(folder: Path, optimizer: str) -> None:
    """Beside TRL's forward in our order, as some metrics are means over micro-batches, and beside
    TRL's trainer, whose steps have the same rows."""
    arguments = {
        **SGD,
        "optim": optimizer,
        "learning_rate": 0.3 if optimizer == "sgd" else 1e-3,
        # the third is of another generation
        "max_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "per_device_eval_batch_size": 4,
        "options": {"eval_dataset": prompts()},
    }
    ours, theirs, stock = (train(kind, folder, **arguments) for kind in (Ours, SameOrder, Theirs))
    assert moved(stock, folder) > 1e-3
    logs = [log for log in ours.state.log_history if "loss" in log]
    # a policy that is its reference, and then not
    kl = [log["kl"] for log in logs if "kl" in log]
    assert kl[0] == 0 and max(map(abs, kl)) > 1e-3
    assert min(log["prefixtree/replication_ratio"] for log in logs) > 1.6
    assert_equal_runs(ours, theirs, RATIO)
    assert worst_parameter(ours, stock)[0] < 1e-5


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("trunks", {**CUT, "beta": 0.0}),
        ("max_tokens", CUT),
        ("recompute", {**CUT, "normalize_advantages": True}),
        ("masks", {"mask_truncated_completions": True, "epsilon": 0.05}),
        ("generations", {"steps_per_generation": 4, "reward_clip_range": (0.2, 0.4)}),
        ("reference", {"sync_ref_model": True, "ref_model_sync_steps": 2}),
    ],
)
@pytest.mark.filterwarnings("ignore:micro-batches cut the groups")
def test_settings(folder: Path, name: str, arguments: dict[str, Any]) -> None:
    ours = {
        "max_tokens": {"max_tokens": 40},
        "recompute": {"keep_trunks": False, "recompute": "auto"},
    }.get(name, {})
    runs = [
        train(kind, folder, options=options, **{**SGD, "max_steps": 2, **arguments})
        for kind, options in ((Ours, ours), (SameOrder, {}))
    ]
    assert moved(runs[1], folder) > 1e-3
    assert_equal_runs(*runs, RATIO)


@pytest.mark.full
def test_an_adapter_and_its_reference(folder: Path) -> None:
    peft = pytest.importorskip("peft")
    runs = [
        train(
            kind,
            folder,
            options={"peft_config": peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"])},
            **{**SGD, "learning_rate": 1.0},
        )
        for kind in (Ours, SameOrder)
    ]
    assert runs[0].ref_model is None
    assert max(abs(log.get("kl", 0)) for log in runs[0].state.log_history) > 1e-5
    assert_equal_runs(*runs, RATIO)


@pytest.mark.full
def test_experts_and_their_loss(tmp_path: Path) -> None:
    """In micro-batches of their own: the loss depends on the cut."""
    folder = save_model(tmp_path, tiny_mixture())
    arguments = {**SGD, "router_aux_loss_coef": 3.0, "steps_per_generation": 1, "max_steps": 2}
    arguments["gradient_accumulation_steps"] = 1
    ours, theirs = (train(kind, folder, **arguments) for kind in (Ours, SameOrder))
    assert moved(theirs, folder) > 1e-3
    assert theirs.state.log_history[0]["aux_loss"] > 0
    assert_equal_runs(ours, theirs, RATIO)


def test_what_depends_on_the_cut() -> None:
    """Of RLOO's settings, which lack those of GRPO, the load-balancing loss alone."""
    arguments = RLOOConfig("out", use_cpu=True, bf16=False, gradient_accumulation_steps=4)
    assert cut_losses(arguments) == ""
    assert cut_losses(arguments, aux_loss=True).startswith("with the load-balancing loss of exp")


class OurGMPO(GMPOTrainer, PrefixTreeGRPOTrainer): ...


def test_gmpo(folder: Path) -> None:
    """The class in docs/trl.md."""
    arguments = {**SGD, "config": GMPOConfig, "max_steps": 2}
    arguments["options"] = {"rollout_func": rollouts}
    ours, theirs = (train(kind, folder, **arguments) for kind in (OurGMPO, GMPOTrainer))
    assert moved(theirs, folder) > 1e-3
    assert ours.state.log_history[0]["prefixtree/replication_ratio"] > 1.6
    assert worst_parameter(ours, theirs)[0] < 1e-5
