"""verl's v1 trainers, with a balancing that keeps groups on one rank.

verl deals samples out by length, so that the responses of a prompt land on several ranks and each
computes the prompt again. These trainers deal out groups, by the cost of what is computed. The
samples of a batch and their number on every rank are unchanged.

    VERL_USE_EXTERNAL_MODULES=prefixtree.integrations.verl.trainer
    trainer.v1.trainer_mode=prefixtree_sync

The environment variable is needed because verl looks the trainer up before it imports external_lib.
`+trainer.prefixtree_rollouts=FOLDER` also writes the sampled rollouts, one file per step, for
`prefixtree report` and `prefixtree verify`.
"""

from __future__ import annotations

import json
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.seqlen_balancing import calculate_workload, log_seqlen_unbalance

from prefixtree.integrations.verl.balance import balance
from prefixtree.integrations.verl.batches import MINI_BATCH, TRAINED_TOKENS


class KeepsGroups:
    """A mixin for verl's v1 trainers, `base_mode` by name, that replaces the balancing alone."""

    base_mode: str
    config: Any
    global_steps: int
    actor_rollout_wg: Any

    @property
    def trainer_mode(self) -> str:
        """The name by which verl's trainers look up their settings and some behaviour."""
        return self.base_mode

    @trainer_mode.setter
    def trainer_mode(self, value: str) -> None:
        # verl assigns the registered name, under which there are no settings
        pass

    def _balance_batch(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Runs verl's balancing, which pads the batch and finds the ranks; orders it by groups."""
        prefix = kwargs.get("logging_prefix", "global_seqlen")
        batch = super()._balance_batch(batch, metrics, *args, **kwargs)  # type: ignore[misc]
        num_ranks = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        tokens = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=["input_ids"]
        )["input_ids"]
        sequences = [row.numpy() for row in tokens.unbind()]
        groups = [_group_of(key, tag) for key, tag in zip(batch.keys, batch.tags, strict=True)]
        if folder := self.config.trainer.get("prefixtree_rollouts", None):
            real = [not tag.get("is_padding", False) for tag in batch.tags]
            rows = [*compress(zip(batch.keys, groups, sequences, strict=True), real)]
            _write_rollouts(Path(folder) / f"step{self.global_steps}.jsonl", rows)
        balanced = balance(
            sequences,
            groups,
            num_ranks,
            max(1, len(batch) // self._mini_batch_size()),
            lambda n: calculate_workload(torch.from_numpy(n)).numpy(),
        )
        size = len(batch) // num_ranks
        partitions = [balanced.order[i : i + size] for i in range(0, len(batch), size)]
        lengths = [len(s) for s in sequences]
        metrics.update(log_seqlen_unbalance(lengths, partitions, prefix))
        costs = np.array(balanced.rank_costs)
        metrics["prefixtree/rank_cost/max_over_mean"] = float(costs.max() / costs.mean())
        metrics["prefixtree/divided_groups"] = balanced.divided_groups
        batch.reorder(balanced.order)
        actor = self.config.actor_rollout_ref.actor
        if not actor.get("shuffle", False):
            # old log-probabilities and the reference's are then scored as the policy is trained
            batch.extra_info[MINI_BATCH] = self._mini_batch_size()
            if (tokens := actor.get("ppo_max_token_len_per_gpu", None)) is not None:
                batch.extra_info[TRAINED_TOKENS] = tokens
        return batch

    def _mini_batch_size(self) -> int:
        """The samples of a mini-batch over all ranks: the actor's, or a warming critic's own."""
        trains_actor = self.config.trainer.critic_warmup <= self.global_steps
        role = self.config.actor_rollout_ref.actor if trains_actor else self.config.critic
        return role.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n


def _group_of(key: str, tag: dict[str, Any]) -> str:
    """The prompt's uid of a key `{uid}_{session}_{index}`; verl's padding is alone."""
    return key if tag.get("is_padding", False) else key.rsplit("_", 2)[0]


def _write_rollouts(path: Path, rows: list[tuple[str, str, np.ndarray]]) -> None:
    """Writes (key, group, token ids) as lines that `prefixtree report` reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for key, group, tokens in rows:
            line = {"id": key, "group": group, "token_ids": tokens.tolist()}
            file.write(json.dumps(line) + "\n")


@register_trainer("prefixtree_sync")
class GroupedTrainerSync(KeepsGroups, PPOTrainerSync):
    """verl's "sync" trainer with groups kept on one rank."""

    base_mode = "sync"


@register_trainer("prefixtree_colocate_async")
class GroupedTrainerColocateAsync(KeepsGroups, PPOTrainerColocateAsync):
    """verl's "colocate_async" trainer with groups kept on one rank."""

    base_mode = "colocate_async"
