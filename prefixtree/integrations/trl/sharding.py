"""The beginning of every trainer of TRL on packed forests: checks, and one setting of FSDP2."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch

from prefixtree.errors import Refusal, refuse
from prefixtree.integrations.trl.refusals import check_recompute, prepare_trainer
from prefixtree.recompute.choose import Recompute

#: The trainer of TRL that a base stands before, to a checker of types.
BeforeTRL: Any = object


class PackedTrainer:
    """A base before every trainer of TRL on packed forests."""

    def _start(self, recompute: Recompute, rows: Iterable[Refusal] = (), **options: Any) -> None:
        """Refuses, after TRL's constructor, what is not verified, and prepares the models."""
        refuse(rows, self)
        prepare_trainer(self, **options)
        self._recompute = check_recompute(self, recompute)

    def create_accelerator_and_postprocess(self) -> None:
        # within TRL's constructor, before it shards the models
        trainer: Any = super()
        trainer.create_accelerator_and_postprocess()
        this: Any = self
        if this.is_fsdp_enabled:
            keep_outputs(this.accelerator.state.fsdp_plugin)


def keep_outputs(plugin: Any) -> None:
    """Lets models under mixed precision return log-probabilities in float32, as they computed them.

    By default accelerate casts the output of every sharded module to the parameters' dtype.
    bfloat16 keeps 8 bits of a log-probability. Without the cast, layers still return bfloat16, as
    they compute in it. Call this before a model is sharded.
    """
    policy = plugin.mixed_precision_policy
    if plugin.fsdp_version != 2 or policy is None:
        return
    if policy.output_dtype not in (None, torch.float32):
        plugin.mixed_precision_policy = dataclasses.replace(policy, output_dtype=None)
