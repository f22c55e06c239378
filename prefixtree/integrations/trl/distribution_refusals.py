"""Refuses ways to spread a model over processes that are not verified under TRL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.fsdp import CPUOffloadPolicy

from prefixtree.errors import Refusal, is_set


def _splits_tokens(trainer: Any) -> bool:
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    return parallelism is not None and parallelism.non_data_parallel_size != 1


#: Ways to spread a model over processes.
DISTRIBUTIONS = (
    Refusal(
        "parallelism_config",
        _splits_tokens,
        "a parallelism_config with tensor, context or sequence parallelism, which splits the "
        "packed tokens or the heads, is not verified under TRL; set tp_size, cp_size and "
        "sp_size to 1 (dp_replicate_size and dp_shard_size may be any)",
    ),
)

# sections of DeepSpeed's configuration that leave alone what a forward computes. ZeRO's hooks
# gather parameters before a module's forward, and the packed forward calls every module as an
# ordinary one does. Other sections may replace layers, drop tokens, cast or split the model
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


def _is_off(value: Any) -> bool:
    """Whether a section or an entry of the configuration does nothing."""
    if isinstance(value, Mapping):
        # "auto" becomes what the trainer's arguments say, which are checked by themselves
        return value.get("enabled", bool(value)) in (False, "auto")
    return value in (None, False, "auto")


def _other_section(config: Mapping[str, Any]) -> Any:
    names = (n for n, value in config.items() if n not in _FINE and not _is_off(value))
    return next(({"section": name} for name in names), None)


def _changes_weights(config: Mapping[str, Any]) -> Any:
    zero = config.get("zero_optimization", {})
    names = ("weights", "nontrainable_weights", "gradients")
    for entry in (*(f"zero_quantized_{name}" for name in names), "zenflow"):
        if not _is_off(zero.get(entry)):
            return {"entry": entry, "given": zero[entry]}
    return None


def _offloads(config: Mapping[str, Any]) -> Any:
    zero = config.get("zero_optimization", {})
    for entry in ("offload_param", "offload_optimizer"):
        if (device := (zero.get(entry) or {}).get("device")) not in (None, "none", "cpu"):
            return {"entry": entry, "device": device}
    return None


#: Parts of DeepSpeed's configuration, as its JSON file holds them; values may be "auto".
DEEPSPEED_CONFIG = (
    Refusal(
        "another section",
        _other_section,
        "{section!r} of the DeepSpeed config, which may change what a forward computes, is not "
        "verified under TRL; take it out, or set it to false",
    ),
    Refusal(
        "zero_quantized, zenflow",
        _changes_weights,
        "{entry}={given!r} of the DeepSpeed config (zero_quantized_* and zenflow do more than "
        "partition weights and gradients) is not verified under TRL; take it out",
    ),
    Refusal(
        "offload_param, offload_optimizer",
        _offloads,
        "{entry} to {device!r} of the DeepSpeed config (offload_param, offload_optimizer) is "
        "not verified under TRL; set it to 'cpu' or 'none'",
    ),
)
#: Refusals of accelerate's FullyShardedDataParallelPlugin.
FSDP = (
    Refusal(
        "fsdp_version",
        is_set("fsdp_version", 2),
        "FSDP1 (fsdp_version: {value}) is not verified under TRL; set fsdp_version: 2 in "
        'accelerate\'s configuration, or "version": 2 in fsdp_config',
    ),
    Refusal(
        "fsdp_offload_params",
        lambda plugin: isinstance(plugin.cpu_offload, CPUOffloadPolicy),
        "CPU offload ({name}: true) is not verified under TRL; set fsdp_offload_params: false "
        'in accelerate\'s configuration, or "cpu_offload": False in fsdp_config, and shard over '
        "more GPUs",
    ),
    Refusal(
        "fsdp_activation_checkpointing_offload",
        is_set("activation_checkpointing_offload"),
        "{name}: true is not verified under TRL; set it to false in accelerate's configuration",
    ),
)
