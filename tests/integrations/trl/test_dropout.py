"""LoRA's dropout through `train()`, beside TRL's trainer whose copies draw the same masks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from prefixtree import PrefixForest, pack
from prefixtree.integrations.trl import PrefixTreeGRPOTrainer, ShareDropout
from prefixtree.models.checks import transformer_of
from prefixtree.models.families import KEYS, SEED, forward_inputs
from tests.integrations.trl.runs import assert_equal_runs, make, parameters
from tests.integrations.trl.sample_runs import DPO, SFT, Maker

peft = pytest.importorskip("peft")


def _adapter() -> Any:
    # random ones, as B starts at 0, where no dropout shows
    options = {"lora_dropout": 0.2, "init_lora_weights": False}
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], **options)


def _with_own_keys(model: torch.nn.Module) -> None:
    """Each row of a padded batch draws the masks of its own paths."""

    def give(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        rows = (pack(PrefixForest.from_sequences([row])) for row in kwargs["input_ids"].numpy())
        keys = [forward_inputs(row, transformer_of(model))[KEYS] for row in rows]
        return args, {**kwargs, KEYS: torch.cat(keys)}

    model.register_forward_pre_hook(give, with_kwargs=True)


@pytest.mark.usefixtures("unprobed")
@pytest.mark.parametrize(
    ("maker", "optimizer"),
    [
        pytest.param(SFT, "sgd", id="SFT"),
        pytest.param(SFT, "adamw_torch", id="SFT, AdamW", marks=pytest.mark.full),
        pytest.param(DPO, "sgd", id="DPO", marks=pytest.mark.full),
    ],
)
def test_equals_copies_that_draw_the_same_masks(folder: Path, maker: Maker, optimizer: str) -> None:
    runs, moved = [], []
    for kind in (maker.ours, maker.stock):
        options = {"peft_config": _adapter(), "callbacks": [ShareDropout(seed=3)]}
        rate = {"sgd": 1.0, "adamw_torch": 1e-3}[optimizer]
        arguments = {"disable_dropout": False} if maker is DPO else {}
        run = maker.make(
            kind, folder, options=options, optim=optimizer, learning_rate=rate, **arguments
        )
        if kind is maker.stock:
            _with_own_keys(run.model)
        before = parameters(run.model)
        run.train()
        after = parameters(run.model)
        moved.append(max(float((after[n] - before[n]).abs().max()) for n in after))
        assert getattr(transformer_of(run.model), SEED) == 3 + run.state.global_step - 1
        runs.append(run)
    assert min(moved) > 1e-4
    assert_equal_runs(*runs)


@pytest.mark.usefixtures("unprobed")
def test_dropout_that_is_disabled_drops_nothing(folder: Path) -> None:
    """DPO disables it by default, after the callback shared it."""
    runs = []
    for kind in (DPO.ours, DPO.stock):
        options = {"peft_config": _adapter()}
        if kind is DPO.ours:
            options["callbacks"] = [ShareDropout()]
        runs.append(DPO.make(kind, folder, options=options, max_steps=1))
        runs[-1].train()
    assert_equal_runs(*runs)


@pytest.mark.parametrize("steps", [2, 1])
def test_an_unmoved_policy_has_the_ratio_1(folder: Path, steps: int) -> None:
    """GRPO, where both steps of a generation have the masks of its old log-probabilities."""
    options = {"peft_config": _adapter(), "callbacks": [ShareDropout(steps=steps)]}
    run = make(PrefixTreeGRPOTrainer, folder, options=options, beta=0.0, learning_rate=0.0)
    run.train()
    clipped = [log["clip_ratio/region_mean"] for log in run.state.log_history[:2]]
    assert clipped[0] == 0
    assert (clipped[1] == 0) == (steps == 2)
