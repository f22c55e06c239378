"""Micro-batches of an optimiser step that share what their rows have in common, in real runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from prefixtree.errors import UnsupportedError
from prefixtree.integrations.core import trunks
from prefixtree.integrations.trl import PrefixTreeGRPOTrainer, kept_windows
from prefixtree.planning.costs import ImportCost
from prefixtree.scoring import in_steps as scoring
from tests.integrations.trl.runs import (
    SameOrder,
    assert_equal_runs,
    count_once,
    make,
    moved,
    parameters,
    rollouts,
    save_model,
    tiny_hybrid,
    tiny_mixture,
    train,
    worst_parameter,
)
from tests.support.hooks import lose_keys, lose_states
from tests.support.tight_memory import tighten

# of micro-batches that cut groups
pytestmark = pytest.mark.filterwarnings("ignore:.*micro-batch:UserWarning")

# groups of 4 in micro-batches of 2, a step of 4 of them
CUT: dict[str, Any] = {
    "optim": "sgd",
    "learning_rate": 0.3,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "max_steps": 2,
    "max_completion_length": 40,
    "options": {"rollout_func": rollouts},
}


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """Of each window that was opened: whether it trains, and its micro-batches."""
    opened: list[tuple[bool, int]] = []
    real = kept_windows.KeptWindow.__init__

    def init(self: Any, accelerator: Any, model: Any, plan: Any, options: Any) -> None:
        real(self, accelerator, model, plan, options)
        opened.append((torch.is_grad_enabled(), len(plan.batches)))

    monkeypatch.setattr(kept_windows.KeptWindow, "__init__", init)
    return opened


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # old and reference log-probabilities of a generation, then two iterations
        ({}, [(False, 4), (False, 4), (True, 4), (True, 4)]),
        # generation every half step, and every other step, in two parts of it
        (
            {"steps_per_generation": 2, "num_iterations": 1, "beta": 0.0},
            [(True, 2), (True, 2)],
        ),
        (
            {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_iterations": 1},
            # of the reference as of the policy
            [(False, 2)] * 4 + [(True, 2), (True, 2)],
        ),
        ({"gradient_checkpointing": False, "num_iterations": 1}, [(False, 4), (True, 4)]),
        ({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, None),
        ({"beta": 0.0, "num_iterations": 1, "epochs": 6}, [(False, 2), (False, 2), (True, 2)]),
        # windows end with a generation and with a step: there are none
        ({"num_iterations": 1, "epochs": 3}, []),
    ],
    ids=[
        *("iterations", "generations within", "generations over", "plain", "reentrant"),
        *("remainder", "no divisor"),
    ],
)
def test_runs_are_trls_own_on_the_same_micro_batches(
    folder: Path, windows: Any, arguments: dict[str, Any], expected: Any
) -> None:
    given = {**CUT, **arguments}
    if accumulated := given.pop("epochs", None):
        # the last step of the epoch has fewer micro-batches than the others
        given |= {"max_steps": -1, "num_train_epochs": 1, "generation_batch_size": 8}
        given |= {"gradient_accumulation_steps": accumulated}
    ours = train(PrefixTreeGRPOTrainer, folder, **given)
    assert bool(windows) == (expected != []) and all(count > 1 for _, count in windows)
    if expected is not None:
        assert windows[: len(expected)] == expected
    theirs = train(SameOrder, folder, **given)
    assert moved(theirs, folder) > 1e-3
    assert_equal_runs(ours, theirs)
    assert ours._trunks.window is None and ours._trunks._done == 0


@pytest.mark.usefixtures("unprobed")
def test_every_distinct_token_of_a_step_is_computed_once(folder: Path, windows: Any) -> None:
    """And what is logged says so."""
    options = {**CUT, "num_iterations": 1, "beta": 0.0, "gradient_checkpointing": False}
    runs, counts = {}, {}
    for keep in (True, False):
        # with room for the graph of trunks, whose forward then runs once
        given = {**options["options"], "keep_trunks": keep, "max_tokens": 200}
        trainer = make(PrefixTreeGRPOTrainer, folder, **{**options, "options": given})
        seen: list[int] = []
        trainer.model.get_input_embeddings().register_forward_hook(
            lambda m, args, out, seen=seen: seen.append(out.shape[1])
        )
        trainer.train()
        runs[keep], counts[keep] = trainer, sum(seen)
    assert windows == [(True, 4)] * 2
    assert counts[True] < 0.85 * counts[False]
    assert_equal_runs(runs[True], runs[False])
    for keep, run in runs.items():
        logs = [log for log in run.state.log_history if "loss" in log]
        logged = sum(4 * log["prefixtree/tokens_computed"] for log in logs)
        # shares are rounded
        assert abs(logged - counts[keep]) <= 8
    ratio = [
        [x["prefixtree/replication_ratio"] for x in runs[k].state.log_history if "loss" in x]
        for k in (True, False)
    ]
    assert min(ratio[0]) > 1.15 * max(ratio[1])


def test_a_budget_computes_micro_batches_in_steps(
    folder: Path, windows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one micro-batch a step there is nothing to share; with more, trunks take part."""
    stepped: list[int] = []
    real = scoring.rows_in_steps

    def counted(*args: Any, **options: Any) -> Any:
        stepped.append(1)
        return real(*args, **options)

    monkeypatch.setattr(scoring, "rows_in_steps", counted)
    one = {**CUT, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    for arguments in (one, CUT):
        given = {**CUT["options"], "max_tokens": 60}
        ours = train(PrefixTreeGRPOTrainer, folder, **{**arguments, "options": given})
        theirs = train(SameOrder, folder, **arguments)
        assert_equal_runs(ours, theirs)
    assert stepped and windows


@pytest.mark.parametrize("family", ["granitemoehybrid", "glm_moe_dsa"])
def test_recurrent_layers_and_indexers(family: str, tmp_path: Path, windows: Any) -> None:
    folder = save_model(tmp_path, tiny_hybrid(family))
    arguments = {**CUT, "router_aux_loss_coef": 0.0}
    ours = train(PrefixTreeGRPOTrainer, folder, **arguments)
    theirs = train(SameOrder, folder, **arguments)
    assert windows and moved(theirs, folder) > 1e-3
    assert_equal_runs(ours, theirs)


# both sides have the same micro-batches
@pytest.mark.filterwarnings("ignore:.*micro-batch:UserWarning")
def test_a_load_balancing_loss(
    tmp_path: Path, windows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each micro-batch, over its tokens and those of trunks."""
    folder = save_model(tmp_path, tiny_mixture())
    arguments = {**CUT, "max_steps": 2, "router_aux_loss_coef": 3.0}
    ours = train(PrefixTreeGRPOTrainer, folder, **arguments)
    theirs = train(SameOrder, folder, **arguments)
    assert windows and any("aux_loss" in log for log in ours.state.log_history)
    assert_equal_runs(ours, theirs)
    count_once(monkeypatch)
    wrong = train(PrefixTreeGRPOTrainer, folder, **arguments)
    assert worst_parameter(ours, wrong)[0] > 1e-4


def test_adapters_with_their_reference(folder: Path, windows: Any) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"])
    arguments = {**CUT, "learning_rate": 1.0}
    arguments["options"] = {**CUT["options"], "peft_config": config, "recompute": "nothing"}
    ours = train(PrefixTreeGRPOTrainer, folder, **arguments)
    assert windows
    del arguments["options"]["recompute"]
    theirs = train(SameOrder, folder, **arguments)
    assert_equal_runs(ours, theirs)


def test_auto_recomputes_what_does_not_fit(
    folder: Path, windows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trunks and micro-batches of a step are planned together. Without the gradients that trunks
    get from micro-batches the comparison turns red."""
    plans = tighten(monkeypatch)
    arguments = {**CUT, "num_iterations": 1}
    theirs = train(SameOrder, folder, **arguments)
    arguments["options"] = {**CUT["options"], "recompute": "auto"}
    ours = train(PrefixTreeGRPOTrainer, folder, **arguments)
    # before the reference is scored, the policy's memory is planned
    assert windows[:3] == [(True, 4), (False, 4), (True, 4)] and len(plans) == 4
    assert any(set(part.modes) != {"nothing"} for plan in plans for part in plan.of_part)
    assert_equal_runs(ours, theirs)
    lose_keys(monkeypatch)
    wrong = train(PrefixTreeGRPOTrainer, folder, **arguments)
    assert worst_parameter(ours, wrong)[0] > 1e-4


ALIKE: list[dict[str, Any]] = [
    # a generation of one step, of several with and without trunks, and of a part of one
    {},
    {"gradient_accumulation_steps": 2, "steps_per_generation": 4},
    {"gradient_accumulation_steps": 1, "steps_per_generation": 4},
    {"gradient_accumulation_steps": 3, "steps_per_generation": 4, "num_iterations": 1},
    {"steps_per_generation": 2, "gradient_checkpointing": False},
    # steps of a budget are as large for the reference, which recomputes nothing
    {"options": {"max_tokens": 30}, "per_device_train_batch_size": 4},
    {"options": {"max_tokens": 30, "keep_trunks": False}, "gradient_accumulation_steps": 2},
    {"options": {"recompute": "auto"}},
    {"options": {"peft": True}, "steps_per_generation": 8},
    {"options": {"peft": True, "recompute": "auto", "max_tokens": 40}, "bf16": True},
    {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 1.0},
    {"bf16": True, "steps_per_generation": 8},
]


@pytest.mark.parametrize("arguments", ALIKE, ids=str)
def test_a_policy_that_is_its_reference_does_not_move(
    folder: Path, arguments: dict[str, Any]
) -> None:
    """By a bit, as in TRL: of a gradient of rounding AdamW makes steps of the learning rate."""
    more = {"reward_funcs": lambda completions, **_: [1.0] * len(completions)}
    more |= {"rollout_func": rollouts, **arguments.get("options", {})}
    if more.pop("peft", False):
        peft = pytest.importorskip("peft")
        more["peft_config"] = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"])
    given = {**CUT, **arguments, "optim": "adamw_torch", "learning_rate": 1e-3, "beta": 0.1}
    trainer = make(PrefixTreeGRPOTrainer, folder, **{**given, "options": more})
    before = parameters(trainer.model)
    trainer.train()
    after = parameters(trainer.model)
    assert before and all(torch.equal(p, after[name]) for name, p in before.items())
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert [(log["kl"], log["grad_norm"]) for log in logs] == [(0.0, 0.0)] * 2


@pytest.mark.parametrize("lose", [lose_keys, lose_states])
def test_the_comparison_turns_red_where_trunks_lose_their_gradient(
    lose: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_hybrid("granitemoehybrid") if lose is lose_states else None
    folder = save_model(tmp_path, config)
    arguments = {**CUT, "max_steps": 1, "router_aux_loss_coef": 0.0}
    right = train(PrefixTreeGRPOTrainer, folder, **arguments)
    lose(monkeypatch)
    wrong = train(PrefixTreeGRPOTrainer, folder, **arguments)
    assert worst_parameter(right, wrong)[0] > 1e-4


# ---- where trunks are not kept -------------------------------------------------------------------


def test_switched_off(folder: Path, windows: Any) -> None:
    given = {**CUT, "max_steps": 1, "options": {**CUT["options"], "keep_trunks": False}}
    assert train(PrefixTreeGRPOTrainer, folder, **given)._trunks.keeps is False
    assert not windows


def test_no_window_where_it_would_hold_more_or_compute_more(
    folder: Path, windows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each then runs by itself, with the same result."""
    # nothing of a trunk fits beside a micro-batch
    monkeypatch.setattr(trunks, "import_cost", lambda *_: ImportCost(token_bytes=1.0, on_host=True))
    ours = train(PrefixTreeGRPOTrainer, folder, **{**CUT, "max_steps": 1})
    assert not windows and ours._trunks.keeps
    assert_equal_runs(ours, train(SameOrder, folder, **{**CUT, "max_steps": 1}))


def test_whole_groups_of_one_step_say_nothing_where_trunks_are_kept(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="micro-batches cut")
        make(PrefixTreeGRPOTrainer, folder, **CUT)
    with pytest.warns(UserWarning, match="cut the groups"):
        given = {**CUT, "options": {"keep_trunks": False}}
        make(PrefixTreeGRPOTrainer, folder, **given)


class ChangesRows(PrefixTreeGRPOTrainer):
    """A subclass whose loss looks at other rows than those that were buffered."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        if self._step % 4 == 2:
            inputs = {**inputs, "completion_ids": inputs["completion_ids"].flip(0)}
        return super()._compute_loss(model, inputs)


def test_rows_that_change_within_a_step_are_refused(folder: Path) -> None:
    trainer = make(ChangesRows, folder, **CUT)
    with pytest.raises(UnsupportedError, match="asks for other rows than the trainer buffered"):
        trainer.train()
    assert trainer._trunks.window is None
    given = {**CUT["options"], "keep_trunks": False}
    train(ChangesRows, folder, **{**CUT, "max_steps": 1, "options": given})
