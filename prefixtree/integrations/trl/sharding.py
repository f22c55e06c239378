"""Sharded models under TRL: which parts of DeepSpeed's configuration are verified, the one setting
of FSDP2 that is changed, and what of it is refused.

ZeRO partitions the optimiser's states, the gradients and, at stage 3, the parameters. Its hooks
gather a module's parameters before the module's forward and its backward. The packed forward calls
every module as an ordinary forward does, the lm_head included, so nothing is to be done for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from prefixtree.errors import UnsupportedError

# ---- DeepSpeed -----------------------------------------------------------------------------------

# sections that leave alone what a forward computes. Others may replace layers, drop tokens, cast or
# split the model
_FINE = {
    "zero_optimization",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "prescale_gradients",
    "gradient_predivide_factor",
    "communication_data_type",
    "optimizer",
    "scheduler",
    "bf16",
    "activation_checkpointing",
    "checkpoint",
    "aio",
    "steps_per_print",
    "wall_clock_breakdown",
    "memory_breakdown",
    "dump_state",
    "comms_logger",
    "tensorboard",
    "wandb",
    "comet",
    "csv_monitor",
}
# of "zero_optimization": what is more than partitioning
_CHANGES_WEIGHTS = (
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
    "zenflow",
)


def check_deepspeed(config: Mapping[str, Any]) -> None:
    """Refuses a configuration of DeepSpeed with more than verified parts.

    Args:
        config: what DeepSpeed's JSON file holds; values may be "auto".

    Raises:
        UnsupportedError: a section, or an entry of "zero_optimization", that is not verified.
    """
    for name, value in config.items():
        if name not in _FINE and not _is_off(value):
            raise UnsupportedError(
                f"{name!r} of the DeepSpeed config is not verified under TRL: it may change what "
                "a forward computes. Take it out, or set it to false"
            )
    zero = config.get("zero_optimization", {})
    for name in _CHANGES_WEIGHTS:
        if not _is_off(zero.get(name)):
            raise UnsupportedError(
                f"{name}={zero[name]!r} of the DeepSpeed config is not verified under TRL: weights "
                "or gradients would be more than partitioned. Take it out"
            )
    for name in ("offload_param", "offload_optimizer"):
        if (device := (zero.get(name) or {}).get("device")) not in (None, "none", "cpu"):
            raise UnsupportedError(
                f"{name} to {device!r} is not verified under TRL, expected 'cpu' or 'none' in the "
                "DeepSpeed config"
            )


def _is_off(value: Any) -> bool:
    """Whether a section or an entry of the configuration does nothing."""
    if isinstance(value, Mapping):
        # "auto" becomes what the trainer's arguments say, which are checked by themselves
        return value.get("enabled", bool(value)) in (False, "auto")
    return value in (None, False, "auto")


# ---- FSDP2 ---------------------------------------------------------------------------------------


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


def check_fsdp(plugin: Any) -> None:
    """Refuses what is not verified of accelerate's FullyShardedDataParallelPlugin.

    Raises:
        UnsupportedError: FSDP1, or parameters or activations that are offloaded to the CPU.
    """
    if plugin.fsdp_version != 2:
        raise UnsupportedError(
            f"FSDP1 (fsdp_version: {plugin.fsdp_version}) is not verified under TRL: set "
            'fsdp_version: 2 in accelerate\'s configuration, or "version": 2 in fsdp_config'
        )
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        raise UnsupportedError(
            "CPU offload (fsdp_offload_params: true) is not verified under TRL: set "
            'fsdp_offload_params: false in accelerate\'s configuration, or "cpu_offload": False in '
            "fsdp_config, and shard over more GPUs"
        )
    if getattr(plugin, "activation_checkpointing_offload", False):
        raise UnsupportedError(
            "fsdp_activation_checkpointing_offload: true is not verified under TRL: set it to "
            "false in accelerate's configuration"
        )
