"""Updates with verl's distillation losses, with verl's own engine or with prefixtree's.

`run_distillation` is called in the tests' process for one rank and by `rank.py` for several.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from verl.trainer.distillation import distillation_ppo_loss
from verl.utils import tensordict_utils as tu
from verl.workers.config import DistillationLossConfig

from tests.integrations.verl.cases import CASES, Settings
from tests.integrations.verl.compare import difference
from tests.integrations.verl.image_runs import VISION, patches_taken_back, shown
from tests.integrations.verl.runs import (
    VOCABULARY,
    actor_loss,
    batch_of,
    jagged,
    make_worker,
    of_collecting_rank,
    parameters,
    rollouts,
)
from tests.support.hooks import inner, place

K = 5
ONE_MICRO_BATCH = CASES["grpo, one micro-batch"]
_TWO_RANKS = {"ulysses_sequence_parallel_size": 2}
_NO_REWARDS = {"use_task_rewards": False, "use_policy_gradient": False}


@dataclass(frozen=True)
class Distillation:
    """One comparison.

    Attributes:
        options: of verl's DistillationLossConfig.
        own: whether every third sequence has teacher's rows of its own.
        red: whether ranks run it too with gradients of one rank's edges left out.
    """

    settings: Settings = ONE_MICRO_BATCH
    options: dict[str, Any] = field(default_factory=dict)
    own: bool = True
    red: bool = False

    @property
    def beside(self) -> str:
        """The engine to compare with."""
        return self.settings.beside


TOP_K = {"loss_mode": "forward_kl_topk", **_NO_REWARDS}
BESIDE_REWARDS = {
    "loss_mode": "forward_kl_topk",
    "use_policy_gradient": False,
    "use_chunked_topk": True,
    "distillation_loss_coef": 0.5,
}
K3 = {"loss_mode": "k3", "use_policy_gradient": False}
# on two ranks: each with rollouts of its own, or both with the same
RANK_CASES: dict[str, Distillation] = {
    "top k": Distillation(options=TOP_K),
    "top k beside rewards, ranks unlike": Distillation(
        replace(CASES["grpo"], even=False, tokens=50), BESIDE_REWARDS
    ),
    "top k, two ranks a forest": Distillation(
        replace(ONE_MICRO_BATCH, engine=_TWO_RANKS), TOP_K, red=True
    ),
    "top k as a reward, two ranks a forest": Distillation(
        Settings(engine=_TWO_RANKS, tokens=30), {"loss_mode": "forward_kl_topk"}
    ),
    "k3, two ranks a forest": Distillation(replace(ONE_MICRO_BATCH, engine=_TWO_RANKS), K3),
}


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


def run_distillation(
    vendor: str, models: Path, case: Distillation, rank: int = 0, world: int = 1
) -> dict[str, Any]:
    """Two updates an epoch: {"metrics": {name: [one an update]}, "parameters": {name: tensor},
    "start": the same before them}. Vendor "lost" is "prefixtree" without a rank's gradients."""
    if vendor == "lost":
        with share_left_out():
            return _run("prefixtree", models, case, rank, world)
    if vendor == "stock" and case.settings.model in VISION:
        with patches_taken_back():
            return _run(vendor, models, case, rank, world)
    return _run(vendor, models, case, rank, world)


def _run(vendor: str, models: Path, case: Distillation, rank: int, world: int) -> dict[str, Any]:
    settings = case.settings
    together = settings.engine.get("ulysses_sequence_parallel_size", 1)
    # as verl's dispatch has it
    rank, world = rank // together, world // together
    shared = settings.even or rank < world - 1
    rows = rollouts(10 + rank, groups=4, size=4, shared=shared)
    if settings.model in VISION:
        rows = shown(rows, models / settings.model, settings.images == "all")
    actor = make_worker(vendor, models / settings.model, settings)
    config = actor_loss(settings).keywords["config"]
    loss = DistillationLossConfig(**{"log_prob_min_clamp": -6.0, **case.options})
    actor.set_loss_fn(
        partial(
            distillation_ppo_loss,
            config=config,
            distillation_config=SimpleNamespace(distillation_loss=replace(loss, topk=K)),
        )
    )
    generator = torch.manual_seed(3 + rank)
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
    count = len(lengths) * world
    data = batch_of(
        rows,
        **drawn,
        **teacher_rows(rows, K if use_topk else 1, case.own),
        temperature=0.7,
        global_token_num=None,
        distillation_use_topk=use_topk,
        distillation_only=use_topk and not (loss.use_task_rewards or loss.use_policy_gradient),
        calculate_entropy=True,
        global_batch_size=count // 2,
        mini_batch_size=count // 2,
        epochs=settings.epochs,
        seed=3,
        dataloader_kwargs={"shuffle": False},
    )
    start = parameters(actor)
    metrics = tu.get(of_collecting_rank(actor, actor.train_mini_batch(data)), "metrics")
    return {"metrics": metrics, "parameters": parameters(actor), "start": start}


@contextmanager
def share_left_out() -> Iterator[None]:
    """The second rank's edges get no gradient from what is measured; the values are exact."""
    gather_rows = inner("backward of gathered rows")

    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        own, *others = gather_rows(ctx, gradient)
        # behind log p and the entropy
        if dist.get_rank() == 1:
            own[:, 2:] = 0
        return own, *others

    with patch.object(*place("backward of gathered rows"), staticmethod(backward)):
        yield


def differences(expected: Any, found: Any, settings: Settings) -> tuple[float, float]:
    """The greatest difference of metrics, relative to their size, and of parameters."""
    assert isinstance(expected, dict), expected
    assert isinstance(found, dict), found
    worst = {}
    for name, values in expected["metrics"].items():
        if "perf/" in name or name == "mfu":
            continue
        if not settings.same_steps and name not in ("loss", "grad_norm"):
            continue  # means over micro-batches of other sizes
        scale = max(1.0, *(abs(float(v)) for v in values))
        worst[name] = difference(values, found["metrics"][name]) / scale
    assert {"loss", "grad_norm"} <= worst.keys()
    before, after = expected["start"], expected["parameters"]
    moved = [float((after[n] - before[n]).abs().max()) for n in after if "visual." not in n]
    assert sum(m > 1e-3 for m in moved) >= len(moved) // 2
    apart = difference([*after.values()], [found["parameters"][n] for n in after])
    return max(worst.values()), apart
