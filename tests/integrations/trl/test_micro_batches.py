"""Effects of the cut into micro-batches, and its warnings: groups that are cut, and losses
that depend on it. Every loss of TRL's source is run on two cuts of the same rows."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import warnings
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer

from prefixtree.integrations.trl import PrefixTreeGRPOTrainer
from prefixtree.integrations.trl.micro_batches import cut_groups, cut_losses
from tests.integrations.trl.runs import make, rollouts, tiny_mixture, train

ROWS, COLUMNS = 8, 6
CUTS = ([[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 6, 2, 5], [7, 3, 4, 1]])


def loss_types() -> list[str]:
    """Those that TRL's `_compute_loss` compares with."""
    types = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(GRPOTrainer._compute_loss)))):
        if isinstance(node, ast.Compare) and ast.unparse(node.left) == "self.loss_type":
            types |= {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)}
    return sorted(types)


class Given(GRPOTrainer):
    """TRL's losses on log-probabilities and entropies that are given, by row."""

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, *_: Any, **__: Any
    ) -> Any:
        rows = input_ids[:, 0]
        return self.leaves[0][rows], self.leaves[1][rows], None


def gradient(trainer: Any, cut: list[list[int]]) -> torch.Tensor:
    """Of the loss of all rows, cut so, by every log-probability and entropy."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    logps, entropies = -drawn(ROWS, COLUMNS).abs(), drawn(ROWS, COLUMNS).abs()
    lengths = torch.tensor([6, 2, 5, 3, 1, 6, 4, 2])
    mask = (torch.arange(COLUMNS) < lengths[:, None]).int()
    batch = {
        "prompt_ids": torch.arange(ROWS)[:, None],
        "prompt_mask": torch.ones(ROWS, 1, dtype=torch.int),
        "completion_ids": torch.ones(ROWS, COLUMNS, dtype=torch.long),
        "completion_mask": mask,
        "advantages": drawn(ROWS),
        "old_per_token_logps": logps + 0.2 * drawn(ROWS, COLUMNS),
        "ref_per_token_logps": logps + 0.2 * drawn(ROWS, COLUMNS),
    }
    trainer.leaves = [x.requires_grad_() for x in (logps, entropies)]
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = len(cut)
    for rows in cut:
        part = {name: value[rows] for name, value in batch.items()}
        trainer._compute_loss(trainer.model, {**part, "num_items_in_batch": mask.sum()}).backward()
    return torch.cat([torch.zeros_like(x) if x.grad is None else x.grad for x in trainer.leaves])


TERMS: list[dict[str, Any]] = [
    {},
    {"entropy_coef": 0.05},
    {"use_adaptive_entropy": True, "entropy_coef": 0.05, "entropy_target": 10.0},
    {"top_entropy_quantile": 0.5},
    {"importance_sampling_level": "sequence"},
    {"beta": 0.0},
    {"use_bias_correction_kl": False},
    {"delta": 1.1},
    {"off_policy_mask_threshold": 0.01},
]


@pytest.mark.parametrize(
    ("loss_type", "terms"),
    [
        *((loss_type, {}) for loss_type in loss_types()),
        *product(["dapo", "grpo"], TERMS[1:]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
def test_losses(folder: Path, loss_type: str, terms: dict[str, Any]) -> None:
    trainer = make(Given, folder, loss_type=loss_type, **{"epsilon_high": 0.2, **terms})
    # set by the steps that came before
    trainer._last_world_entropy = 0.0
    one, other = (gradient(trainer, cut) for cut in CUTS)
    difference = float((one - other).norm() / one.norm())
    print(f"{loss_type} {terms}: {difference:.1e}")
    assert difference < 1e-5 or difference > 1e-3
    message = cut_losses(trainer.args)
    assert bool(message) == (difference > 1e-3), message
    # with one micro-batch there is nothing to cut
    trainer.args.steps_per_generation = 1
    assert not cut_losses(trainer.args)


def test_the_loss_types_are_found() -> None:
    assert {"grpo", "bnpo", "dr_grpo", "dapo"} <= set(loss_types())


def test_the_settings_are_named(folder: Path) -> None:
    settings = {"loss_type": "bnpo", "entropy_coef": 0.05, "top_entropy_quantile": 0.5}
    with pytest.warns(UserWarning) as caught:
        make(PrefixTreeGRPOTrainer, folder, beta=0.0, **settings)
    (found,) = (w for w in caught if "make up a micro-batch" in str(w.message))
    assert str(found.message).startswith(
        "with loss_type='bnpo', entropy_coef=0.05, top_entropy_quantile=0.5 TRL's loss depends"
    )
    # where the trainer was made
    assert Path(found.filename).name == "runs.py"
    with pytest.warns(UserWarning, match="with use_adaptive_entropy=True TRL's loss depends"):
        make(PrefixTreeGRPOTrainer, folder, beta=0.0, use_adaptive_entropy=True)
    # the model has experts, and TRL takes their loss unless told otherwise
    model = AutoModelForCausalLM.from_config(tiny_mixture())
    with pytest.warns(UserWarning, match="with the load-balancing loss of experts .* TRL's loss"):
        make(PrefixTreeGRPOTrainer, folder, beta=0.0, model=model)


# ---- groups --------------------------------------------------------------------------------------


def test_whole_groups_say_nothing(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        make(PrefixTreeGRPOTrainer, folder, beta=0.0)


def counted(rows: int, group: int, micro_batches: int) -> tuple[int, int]:
    """Groups, and the micro-batches that they are in, by counting."""
    total = rows * micro_batches
    pieces = {(row // rows, row // group) for row in range(total)}
    return total // group, len(pieces)


@pytest.mark.parametrize("group", [2, 3, 4, 8, 12])
@pytest.mark.parametrize("rows", range(1, 26))
@pytest.mark.parametrize("steps", [1, 2, 6])
def test_how_often_a_prompt_is_computed(rows: int, group: int, steps: int) -> None:
    # processes count like further micro-batches; as many as make groups of all rows
    processes = next(p for p in range(1, 30) if rows * steps * p % group == 0)
    args = SimpleNamespace(
        per_device_train_batch_size=rows,
        num_generations=group,
        gradient_accumulation_steps=steps,
        steps_per_generation=steps,
    )
    message = cut_groups(args)
    groups, pieces = counted(rows, group, 24 * steps * processes)
    assert bool(message) == (groups != pieces) == (rows % group != 0)
    if message:
        (times,) = re.findall(r"is computed (\S+) times", message)
        assert float(times) == pytest.approx(pieces / groups, rel=0.01)
        args.__dict__.update(_advised(message))
        assert args.per_device_train_batch_size >= rows
        assert not cut_groups(args)
        done = args.per_device_train_batch_size * args.gradient_accumulation_steps
        assert (done == rows * steps) != (f"({done} completions per step" in message)


def _advised(message: str) -> dict[str, int]:
    advice = message.partition("To compute it once, set ")[2]
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", advice)}


@pytest.mark.parametrize(
    ("rows", "together", "times"), [(1, 4, None), (2, 4, None), (1, 2, 2), (3, 2, 4 / 3)]
)
def test_micro_batches_that_keep_trunks_cut_where_they_end(
    rows: int, together: int, times: float | None
) -> None:
    """As those of one process do, whose rows of a step are half of a group of 4."""
    settings = {"per_device_train_batch_size": rows, "num_generations": 4}
    steps = {"gradient_accumulation_steps": together, "steps_per_generation": together}
    message = cut_groups(SimpleNamespace(**settings, **steps), together)
    assert bool(message) == (times is not None)
    assert times is None or f"every prompt is computed {times:.3g} times" in message


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (
            {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
            {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        ),
        (
            {
                "per_device_train_batch_size": 2,
                "gradient_accumulation_steps": 2,
                "steps_per_generation": 4,
                "num_iterations": 1,
            },
            {
                "per_device_train_batch_size": 4,
                "gradient_accumulation_steps": 1,
                "steps_per_generation": 2,
            },
        ),
    ],
    ids=["accumulation", "generation"],
)
def test_the_advice_keeps_groups_whole(
    folder: Path, arguments: dict[str, Any], advice: dict[str, int]
) -> None:
    """And a step as large as it was; the trainer's own metric says what it is worth."""
    given = {"rollout_func": rollouts, "keep_trunks": False}
    common = {"options": given, "max_completion_length": 40, "max_steps": 2}

    def ratio(**arguments: Any) -> float:
        made = train(PrefixTreeGRPOTrainer, folder, beta=0.0, **{**common, **arguments})
        logs = [log for log in made.state.log_history if "loss" in log]
        assert len(logs) == 2
        return min(log["prefixtree/replication_ratio"] for log in logs)

    with pytest.warns(UserWarning, match="cut the groups|shared nothing") as caught:
        cut = ratio(**arguments)
    (message,) = (str(w.message) for w in caught if "cut the groups" in str(w.message))
    assert _advised(message) == advice
    assert "completions per step" not in message
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="micro-batches cut")
        whole = ratio(**{**arguments, **advice})
    print(f"{cut:.2f} -> {whole:.2f}")
    assert whole > 1.15 * cut
