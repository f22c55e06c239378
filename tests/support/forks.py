"""Rollouts that fork, their losses of every drawn token alone, and one rank of
tests/planning/test_token_weights.py."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import prefixtree as pt
from tests.support.models import build

CONSTANT = 8.0
P = [1, 2, 3, 4]
# A sampled 5 6 and forked; B drew 5 by chance too; C became two sequences, as after a compaction
SEQUENCES = [[*P, 5, 6, 20, 21], [*P, 5, 6, 30], [*P, 5, 9], [*P, 40, 41, 42], [1, 2, 50, 51]]
ROLLOUTS = ["A", "A", "B", "C", "C"]
MASKS = [[0] * 4 + [1] * 4, [0] * 4 + [1] * 3, [0] * 4 + [1] * 2, [0] * 4 + [1] * 3, [0, 0, 1, 1]]
# [n - 1], by segment: A's first turn has an advantage in each branch
ADVANTAGES = [
    torch.tensor([0, 0, 0, 2.0, 2.0, 1.0, -1.0]),
    torch.tensor([0, 0, 0, 1.0, 1.0, 0.5]),
    torch.full((5,), 0.7),
    torch.full((6,), 0.3),
    torch.full((3,), -0.3),
]


def options_of(name: str) -> dict[str, Any]:
    """A normalization's arguments."""
    return {"normalization": name} | ({"constant": CONSTANT} if name == "constant" else {})


def loss_by_hand(model: Any, name: str) -> torch.Tensor:
    """Every drawn token once, with the mean advantage of its copies; without prefixtree."""
    # per draw: (sequence, advantage, log p) of each copy
    draws: dict[tuple[str, tuple[int, ...]], list[tuple[int, Any, Any]]] = defaultdict(list)
    for i, (tokens, mask, rollout) in enumerate(zip(SEQUENCES, MASKS, ROLLOUTS, strict=True)):
        log_p = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)
        for t in np.flatnonzero(mask).tolist():
            copy = i, ADVANTAGES[i][t - 1], log_p[t - 1, tokens[t]]
            draws[rollout, tuple(tokens[: t + 1])].append(copy)
    if name in ("token-mean", "rollout-mean"):
        losses: dict[str, list[torch.Tensor]] = defaultdict(list)
        for (rollout, _), copies in draws.items():
            advantage = sum(a for _, a, _ in copies) / len(copies)
            losses[rollout if name == "rollout-mean" else ""].append(-advantage * copies[0][2])
        return torch.stack([torch.stack(part).mean() for part in losses.values()]).mean()
    shares: dict[int, list[float]] = defaultdict(list)
    parts: dict[int, list[torch.Tensor]] = defaultdict(list)
    for copies in draws.values():
        for i, a, value in copies:
            shares[i].append(1 / len(copies))
            parts[i].append(-a * value / len(copies))
    sums = torch.stack([torch.stack(parts[i]).sum() for i in range(len(SEQUENCES))])
    if name == "constant":
        return (sums / CONSTANT).mean()
    means = sums / torch.tensor([sum(shares[i]) for i in range(len(SEQUENCES))])
    if name == "sequence-mean":
        return means.mean()
    return torch.stack([means[:2].mean(), means[2], means[3:].mean()]).mean()


def loss_of(model: Any, batch: Any, weights: list[torch.Tensor], **how: Any) -> Any:
    """A micro-batch's part of the loss."""
    scores = pt.sequence_logprobs(model, batch, loss_mask=MASKS, **how)
    own = batch.take(weights), batch.take(ADVANTAGES), scores.logprobs
    return sum(-(w[1:] * a * p).sum() for w, a, p in zip(*own, strict=True))


def on_rank(rank: int, folder: Path) -> dict[str, torch.Tensor]:
    """The parameters after two updates by AdamW, under DDP."""
    model = DistributedDataParallel(build("qwen3"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    plan = pt.plan_micro_batches(SEQUENCES, 9, dist.get_world_size())
    weights = plan.token_weights("rollout-mean", MASKS, rollouts=ROLLOUTS)
    for _ in range(2):
        for batch in plan[rank]:
            loss_of(model, batch, weights).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.module.named_parameters()}
