"""Old log-probabilities, reference, values and updates: the same as with verl's own engines.

Four updates of one rank in this process, two of ranks in processes of their own (FSDP and gloo).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from verl.utils import tensordict_utils as tu

from prefixtree.integrations.verl.batches import MINI_BATCH, TRAINED_TOKENS
from tests.integrations.verl.cases import CASES, MASK_CASES, SEQUENCE_PARALLEL_CASES
from tests.integrations.verl.compare import check_same
from tests.integrations.verl.runs import (
    actor_loss,
    batch_of,
    infer_with,
    jagged,
    make_worker,
    parameters,
    rollouts,
    run,
    run_ranks,
)
from tests.support.full import asked_for, mostly

# each algorithm, model, strategy and setting of both, on one rank or on several
ONE = ("grpo, a temperature a sample", "grpo, one micro-batch", "grpo, AdamW", "ppo", "ppo, fsdp1")
# every time; the others with --full
TWO = (
    *("grpo, masks, ranks unlike", "grpo, masks, long sequences"),
    "grpo, masks, two ranks a forest",
    *("grpo, ranks unlike", "grpo, fixed size", "grpo, padded to buckets", "grpo, lora"),
    *("grpo, offloaded", "ppo, tied", "ppo, experts", "ppo, fsdp1, original parameters"),
)
# what neither one rank nor those have
TWO_WITH_FULL = ("grpo, gradients reduced every time", "grpo, offload policy")
FOUR = ("grpo, two ranks a forest", "ppo, two ranks a forest, fsdp1")


@pytest.fixture(scope="module")
def two_ranks(models: Path) -> list[dict[tuple[str, str], Any]]:
    """The results of two ranks, all cases with both engines."""
    return run_ranks(models, asked_for((*TWO, *TWO_WITH_FULL), TWO))


@pytest.fixture(scope="module")
def four_ranks(models: Path) -> list[dict[tuple[str, str], Any]]:
    """The results of four ranks, verl's engine by Ulysses and ours by parts of forests."""
    return run_ranks(models, asked_for(SEQUENCE_PARALLEL_CASES, FOUR), 4)


@pytest.mark.parametrize("name", ONE)
def test_one_rank(name: str, models: Path, record_property: Callable[..., None]) -> None:
    stock = run("stock", models, CASES[name])
    packed = run("prefixtree", models, CASES[name])
    differences = check_same(stock, packed, CASES[name])
    print("DIFF", name, {k: f"{v:.1e}" for k, v in differences.items()})
    record_property("differences", differences)


@pytest.mark.parametrize("name", mostly((*TWO, *TWO_WITH_FULL), TWO))
def test_two_ranks(
    name: str, two_ranks: list[dict[tuple[str, str], Any]], record_property: Callable[..., None]
) -> None:
    settings = (CASES | MASK_CASES)[name]
    for rank, results in enumerate(two_ranks):
        beside, packed = results[name, settings.beside], results[name, "prefixtree"]
        differences = check_same(beside, packed, settings)
        record_property(f"differences of rank {rank}", differences)


@pytest.mark.parametrize("name", mostly(SEQUENCE_PARALLEL_CASES, FOUR))
def test_two_ranks_with_the_same_data(
    name: str, four_ranks: list[dict[tuple[str, str], Any]], record_property: Callable[..., None]
) -> None:
    settings = SEQUENCE_PARALLEL_CASES[name]
    for rank, results in enumerate(four_ranks):
        assert results[name, "stock"]["exchanges"].keys() == {"heads"}
        assert results[name, "prefixtree"]["exchanges"].keys() == {"keys"}
        differences = check_same(results[name, "stock"], results[name, "prefixtree"], settings)
        record_property(f"differences of rank {rank}", differences)
        print("DIFF", name, rank, {k: f"{v:.1e}" for k, v in differences.items()})


def test_ranks_agree_on_their_micro_batches(two_ranks: list[dict[Any, Any]]) -> None:
    first, second = (results["steps"] for results in two_ranks)
    assert first["alone"] != second["alone"]
    assert first["together"] == second["together"] == max(first["alone"], second["alone"])
    assert first["samples"] == second["samples"] == list(range(16))
    # what one rank cannot do, all refuse: none waits for the others
    assert "more than max_token_len_per_gpu=10" in first["too long"]
    assert "one rank needs 6 micro-batches, another has only 3 sequences" in first["too few"]
    for reason in ("too long", "too few"):
        assert first[reason] == second[reason]


@pytest.mark.parametrize(
    "options",
    [
        {"tokens": 40},
        {"tokens": 40, "checkpointing": False},
        {"tokens": None, "size": 2},
        {"tokens": 40, "model_options": {"lora_rank": 4, "lora_alpha": 8}},
        {"tokens": 40, "recompute": "auto"},
    ],
    ids=str,
)
def test_a_policy_that_is_its_reference_does_not_move(
    models: Path, options: dict[str, Any]
) -> None:
    """By a bit: AdamW makes steps of the learning rate of rounding. Old log-probabilities and the
    reference's are of the forwards by which the policy is trained, two mini-batches an epoch."""
    settings = replace(CASES["grpo, AdamW"], epochs=2, **options)
    path, rows = models / settings.model, rollouts(3, groups=4, size=4)
    count = len(rows["uid"])
    actor = make_worker("prefixtree", path, settings)
    actor.set_loss_fn(actor_loss(settings, entropy_coeff=0.0))
    # what `prefixtree_sync` tells
    told = {MINI_BATCH: count // 2, TRAINED_TOKENS: settings.tokens}
    common = {"temperature": 0.7, "global_token_num": None, **told}
    if "model_options" in options:
        reference = infer_with(actor, rows, no_lora_adapter=True, **common)
        old = infer_with(actor, rows, calculate_entropy=True, **common)
    else:
        old = infer_with(actor, rows, calculate_entropy=True, **common)
        other = make_worker("prefixtree", path, settings, forward_only=True)
        other.engine_config.max_token_len_per_gpu = None
        reference = infer_with(other, rows, **common)
    nothing = jagged([torch.zeros_like(r, dtype=torch.float32) for r in rows["responses"]])
    data = batch_of(
        rows,
        old_log_probs=jagged(old["log_probs"]),
        ref_log_prob=jagged(reference["log_probs"]),
        advantages=nothing,
        returns=nothing,
        **common,
        calculate_entropy=True,
        global_batch_size=count // 2,
        mini_batch_size=count // 2,
        epochs=settings.epochs,
        seed=3,
        dataloader_kwargs={"shuffle": False},
    )
    before = parameters(actor)
    metrics = tu.get(actor.train_mini_batch(data), "metrics")
    assert set(map(float, metrics["grad_norm"])) == {0.0}
    after = parameters(actor)
    assert all(torch.equal(p, after[name]) for name, p in before.items())
