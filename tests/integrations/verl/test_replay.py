"""Router replay on verl's FSDP engines: updates with recorded experts beside each sequence alone,
whose routers are made to choose them; one rank and two.

verl 0.9.1 asks for a transformers below 5.11, and a replay needs 5.17. Most of these tests need the
newer one of the main environment in its place (`make test-verl-hybrids`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging import version

from prefixtree.errors import UnsupportedError
from tests.integrations.verl.cases import CASES, REPLAY_CASES
from tests.integrations.verl.compare import check_same, difference
from tests.integrations.verl.replay_runs import with_routes
from tests.integrations.verl.runs import (
    batch_of,
    infer_with,
    jagged,
    make_worker,
    rollouts,
    run,
    run_ranks,
)
from tests.support.full import asked_for, mostly
from tests.support.hybrid_configs import OLDEST_WITH_STATES

SETTINGS = CASES["grpo, experts"]
COMMON = {"temperature": 0.7, "global_token_num": None}
# every time
ONE = ("grpo, routes", "grpo, routes, AdamW", "grpo, routes, lora", "ppo, routes, fsdp1")
TWO = ("grpo, routes, long sequences", "grpo, routes, two ranks a forest")
# on two ranks alone
TOGETHER = TWO[1:]

SERVED = version.parse(transformers.__version__) >= version.parse(OLDEST_WITH_STATES)
needs_replay = pytest.mark.skipif(not SERVED, reason=f"needs transformers {OLDEST_WITH_STATES}")


@pytest.fixture(scope="module")
def two_ranks(models: Path) -> list[dict[Any, Any]]:
    return run_ranks(models, [*asked_for(REPLAY_CASES, TWO)])


@needs_replay
@pytest.mark.parametrize("name", mostly([n for n in REPLAY_CASES if n not in TOGETHER], ONE))
def test_one_rank(name: str, models: Path) -> None:
    settings = REPLAY_CASES[name]
    stock = run(settings.beside, models, settings)
    differences = check_same(stock, run("prefixtree", models, settings), settings)
    print("DIFF", name, {k: f"{v:.1e}" for k, v in differences.items()})


@needs_replay
@pytest.mark.parametrize("name", mostly(REPLAY_CASES, TWO))
def test_two_ranks(name: str, two_ranks: list[dict[Any, Any]]) -> None:
    for results in two_ranks:
        settings = REPLAY_CASES[name]
        differences = check_same(
            results[name, settings.beside], results[name, "prefixtree"], settings
        )
        print("DIFF", name, {k: f"{v:.1e}" for k, v in differences.items()})


def _infer(worker: Any, rows: dict[str, list[Any]], **extra: Any) -> list[torch.Tensor]:
    """Log-probabilities of what is scored."""
    found = infer_with(worker, rows, **COMMON, **extra)["log_probs"]
    return [v * mask for v, mask in zip(found, rows["response_mask"], strict=True)]


@needs_replay
def test_a_reference_chooses_by_itself(models: Path) -> None:
    """With LoRA verl asks the actor's engine for it, without the adapter."""
    lora = REPLAY_CASES["grpo, routes, lora"]
    rows = rollouts(10, groups=2, size=4)
    routed = with_routes(rows)
    plain = rows | {"response_mask": routed["response_mask"]}
    actor = make_worker("prefixtree", models / "qwen3_moe", lora)
    chosen = _infer(actor, plain)
    assert difference(chosen, _infer(actor, routed)) > 0.1
    assert difference(chosen, _infer(actor, routed, no_lora_adapter=True)) == 0
    # and then replays again
    assert difference(chosen, _infer(actor, routed)) > 0.1
    reference = make_worker("prefixtree", models / "qwen3_moe", SETTINGS, forward_only=True)
    assert difference(_infer(reference, plain), _infer(reference, routed)) == 0


@needs_replay
def test_routes_of_another_model(models: Path) -> None:
    rows = with_routes(rollouts(1, groups=1, size=2))
    routes = rows["routed_experts"]
    worker = make_worker("prefixtree", models / "qwen3_moe", SETTINGS)
    for wrong, message in (
        ([r.repeat(1, 2, 1)[:, :3] for r in routes], "3 layers of experts, the model 2"),
        ([torch.where(r == 3, 9, r) for r in routes], "name expert 9, the model has 4"),
        ([r[:-5] for r in routes], r"routes\[1\] has 20 rows for 25 tokens; .* at least the 24"),
    ):
        data = batch_of(rows, compute_loss=False, **COMMON)
        data["routed_experts"] = jagged(wrong)
        with pytest.raises(ValueError, match=message):
            worker.infer_batch(data)
    dense = make_worker("prefixtree", models / "qwen3", SETTINGS)
    with pytest.raises(
        UnsupportedError, match=r"'qwen3', only in .*enable_rollout_routing_replay=F"
    ):
        dense.infer_batch(batch_of(rows, compute_loss=False, **COMMON))


@pytest.mark.skipif(SERVED, reason="this transformers replays routes")
def test_the_transformers_that_verl_asks_for_is_refused(models: Path) -> None:
    rows = with_routes(rollouts(1, groups=1, size=2))
    worker = make_worker("prefixtree", models / "qwen3_moe", SETTINGS)
    with pytest.raises(UnsupportedError, match=r'pip install "transformers>=5.17"'):
        worker.infer_batch(batch_of(rows, compute_loss=False, **COMMON))
