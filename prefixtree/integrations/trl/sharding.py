"""Sharded models under TRL: the one setting of FSDP2 that is changed."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch


class KeepsOutputs:
    """A trainer of TRL whose models keep their outputs: see `keep_outputs`. Stands first of bases.

    The accelerator is made within TRL's constructor, before it shards the models.
    """

    def create_accelerator_and_postprocess(self) -> None:
        trainer: Any = super()
        trainer.create_accelerator_and_postprocess()
        this: Any = self
        if this.is_fsdp_enabled:
            keep_outputs(this.accelerator.state.fsdp_plugin)


def keep_outputs(plugin: Any) -> None:
    """Lets models under mixed precision return what they computed: log-probabilities in float32.

    By default accelerate casts the output of every sharded module to the parameters' dtype.
    bfloat16 keeps 8 bits of a log-probability. Without the cast, layers still return bfloat16, as
    they compute in it. Call this before a model is sharded.

    Args:
        plugin: accelerate's FullyShardedDataParallelPlugin.
    """
    policy = plugin.mixed_precision_policy
    if plugin.fsdp_version != 2 or policy is None:
        return
    if policy.output_dtype not in (None, torch.float32):
        plugin.mixed_precision_policy = dataclasses.replace(policy, output_dtype=None)
