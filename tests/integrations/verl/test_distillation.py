"""verl's distillation losses on packed forests beside verl's own engine: metrics and parameters."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from verl.trainer.distillation import distillation_ppo_loss
from verl.utils import tensordict_utils as tu
from verl.workers.config import DistillationLossConfig

from prefixtree.errors import UnsupportedError
from prefixtree.integrations.verl import distillation
from prefixtree.integrations.verl.refusals import check_batch
from tests.integrations.verl.cases import CASES
from tests.integrations.verl.compare import difference
from tests.integrations.verl.runs import (
    VOCABULARY,
    actor_loss,
    batch_of,
    jagged,
    make_worker,
    parameters,
    rollouts,
)

SETTINGS = CASES["grpo, one micro-batch"]
K = 5


def teacher_rows(rows: dict[str, list[Any]], k: int, own: bool) -> dict[str, torch.Tensor]:
    """The teacher's k tokens and their log p at every token. Copies of an edge have equal ones, as
    the distribution follows from the tokens before; with `own` every third sequence has others."""
    ids, logprobs = [], []
    for number, (prompt, response) in enumerate(
        zip(rows["prompts"], rows["responses"], strict=True)
    ):
        tokens = torch.cat([prompt, response])
        seeds = (tokens * torch.arange(1, len(tokens) + 1) ** 2).cumsum(0)
        draws = []
        for seed in seeds.tolist():
            generator = torch.Generator().manual_seed(seed)
            draws.append(torch.randn(VOCABULARY, generator=generator))
        logits = 2 * torch.stack(draws)
        if own and number % 3 == 1:
            logits = logits + 0.3 * torch.randn(VOCABULARY, generator=torch.manual_seed(number))
        best = logits.log_softmax(-1).topk(k)
        ids.append(best.indices)
        logprobs.append(best.values)
    as_rows = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    return {"teacher_ids": as_rows(ids), "teacher_logprobs": as_rows(logprobs)}


def train(
    vendor: str, models: Path, settings: Any, own: bool = False, k: int = K, **options: Any
) -> tuple[dict[str, list[float]], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Four updates: metrics, parameters, and those before."""
    rows = rollouts(10, groups=4, size=4)
    actor = make_worker(vendor, models / settings.model, settings)
    config = actor_loss(settings).keywords["config"]
    loss = DistillationLossConfig(**{"log_prob_min_clamp": -6.0, **options})
    actor.set_loss_fn(
        partial(
            distillation_ppo_loss,
            config=config,
            distillation_config=SimpleNamespace(distillation_loss=replace(loss, topk=k)),
        )
    )
    generator = torch.manual_seed(3)
    lengths = [len(r) for r in rows["responses"]]
    drawn = {
        name: jagged([scale * torch.randn(n, generator=generator) + shift for n in lengths])
        for name, scale, shift in (
            ("old_log_probs", 0.3, -4.0),
            ("ref_log_prob", 0.3, -4.0),
            ("advantages", 1.0, 0.0),
        )
    }
    use_topk = loss.loss_settings.use_topk
    count = len(lengths)
    data = batch_of(
        rows,
        **drawn,
        **teacher_rows(rows, k if use_topk else 1, own),
        temperature=0.7,
        global_token_num=None,
        distillation_use_topk=use_topk,
        distillation_only=use_topk and not (loss.use_task_rewards or loss.use_policy_gradient),
        calculate_entropy=True,
        global_batch_size=count // 2,
        mini_batch_size=count // 2,
        epochs=2,
        seed=3,
        dataloader_kwargs={"shuffle": False},
    )
    before = parameters(actor)
    out = tu.get(actor.train_mini_batch(data), "metrics")
    return (
        {k: v for k, v in out.items() if "perf/" not in k and k != "mfu"},
        parameters(actor),
        before,
    )


def check(models: Path, settings: Any, **options: Any) -> None:
    expected, after, before = train("stock", models, settings, **options)
    found, parameters_of_ours, _ = train("prefixtree", models, settings, **options)
    worst = {}
    for name, values in expected.items():
        if not settings.same_steps and name not in ("loss", "grad_norm"):
            continue  # means over micro-batches of other sizes
        worst[name] = difference(values, found[name]) / max(1.0, *(abs(float(v)) for v in values))
        assert worst[name] < 1e-5, (name, values, found[name])
    assert {"loss", "grad_norm"} <= worst.keys()
    moved = [float((after[n] - before[n]).abs().max()) for n in after]
    assert sum(m > 1e-3 for m in moved) >= len(moved) // 2
    parameters_apart = difference([*after.values()], [parameters_of_ours[n] for n in after])
    print(f"metrics {max(worst.values())}, parameters {parameters_apart}")
    assert parameters_apart < 1e-5


@pytest.mark.parametrize("own", [False, True], ids=["one teacher's row", "rows of copies"])
def test_top_k(models: Path, own: bool) -> None:
    check(
        models,
        SETTINGS,
        own=own,
        loss_mode="forward_kl_topk",
        use_task_rewards=False,
        use_policy_gradient=False,
    )


def test_top_k_beside_rewards_in_several_micro_batches(models: Path) -> None:
    check(
        models,
        replace(CASES["grpo, lora"], lr=0.5),
        own=True,
        loss_mode="forward_kl_topk",
        use_policy_gradient=False,
        use_chunked_topk=True,
        distillation_loss_coef=0.5,
    )


@pytest.mark.parametrize(
    "options",
    [
        {"loss_mode": "k3", "use_policy_gradient": False},
        {"loss_mode": "k1", "use_task_rewards": False},
    ],
    ids=["k3", "k1 as a reward"],
)
def test_estimators(models: Path, options: dict[str, Any]) -> None:
    check(models, SETTINGS, **options)


def test_distinct_rows() -> None:
    """Edges 0 .. 2 with two, one and three copies' rows; equal hashes do not make rows equal."""
    edge = torch.tensor([2, 0, 1, 2, 0, 2, 0])
    row = torch.tensor([9, 1, 3, 0, 5, 7, 6])
    ids = torch.arange(10)[:, None].expand(10, 2).clone()
    ids[5], ids[7] = ids[1], ids[9]
    of_copies, rows = distillation._distinct(edge, row, ids, torch.zeros(10, 2))
    assert rows.shape == (3, 2) and (rows >= 0).sum(1).tolist() == [2, 1, 2]
    same = ids[rows[edge, of_copies]] == ids[row]
    assert bool(same.all())


def test_engines_without_whole_logits_refuse() -> None:
    data = batch_of(rollouts(0, groups=1, size=2), distillation_use_topk=True)
    check_batch(data, serves_topk=True)
    with pytest.raises(UnsupportedError, match="or an estimator"):
        check_batch(data)
