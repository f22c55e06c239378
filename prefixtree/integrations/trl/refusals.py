"""Refuses TRL settings under which a packed run is not known to equal a run of TRL's trainer."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import Any

from torch import nn

from prefixtree.errors import UnsupportedError
from prefixtree.integrations.trl.images import check_images
from prefixtree.integrations.trl.sharding import check_deepspeed, check_fsdp
from prefixtree.models.adapters import check_adapters
from prefixtree.models.checks import set_attention, transformer_of
from prefixtree.models.families import (
    DROPOUT_LAYERS,
    LIGER_LAYERS,
    check_config,
    check_modules,
)
from prefixtree.models.hybrids import prepare_states
from prefixtree.models.routers import loss_function
from prefixtree.recompute.forward import Recompute

# (argument, values that are fine, what is wrong with the others)
_ARGUMENTS: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("neftune_noise_alpha", (None,), "a shared token would draw one noise: leave it None"),
    (
        "use_transformers_continuous_batching",
        (False, None),
        'it needs a paged attention, which "prefixtree" is not: set it to False',
    ),
    (
        "cache_implementation",
        (None, "dynamic"),
        'only the dynamic cache is verified with attn_implementation="prefixtree": leave it None',
    ),
    (
        "cast_lm_head_to_fp32",
        (False, None),
        "under autocast the lm_head would still compute in its dtype; everything after the logits "
        "is computed in float32 anyway: set it to False",
    ),
    (
        "activation_offloading",
        (False, None),
        "not verified on packed batches: set it to False",
    ),
    ("use_liger_kernel", (False, None), "not verified with this trainer: set it to False"),
    ("torch_compile", (False, None), "not verified with this trainer: set it to False"),
    ("fp16", (False, None), "not verified with this trainer: use bf16, or float32"),
)
# what is verified alone, and not where another library splits the model or wraps its layers
_ALONE = ("use_liger_kernel", "torch_compile", "fp16")


def prepare_trainer(trainer: Any, verified: Collection[str] = (), deepspeed: bool = False) -> None:
    """Refuses a trainer that is not verified, sets the attention of its models and prepares their
    recurrent layers.

    Args:
        trainer: a trainer of TRL with a model and perhaps a ref_model or a teacher_model.
        verified: as for `check_arguments`. deepspeed: as for `check_distribution`.

    Raises:
        UnsupportedError: arguments, a distribution, images or a model.
    """
    check_arguments(trainer.args, verified)
    check_distribution(trainer, deepspeed)
    check_liger(trainer.args, trainer.model)
    if trainer._is_vlm:
        check_images(trainer)
    if getattr(trainer, "aux_loss_enabled", False):
        _check_aux_loss(trainer.model)
    # not by truth value: a compiled model has none
    others = (getattr(trainer, name, None) for name in ("ref_model", "teacher_model"))
    models = (trainer.model, *others)
    if trainer.accelerator.is_main_process:
        _warn_of_attention(trainer.args)
    for model in (m for m in models if m is not None):
        check_model(model)
        transformer = transformer_of(model)
        set_attention(transformer)
        # generation runs it too, before anything is scored
        prepare_states(transformer)


def _warn_of_attention(args: Any) -> None:
    """Warns of an attention that was asked for and is not used."""
    for setting in ("model_init_kwargs", "teacher_model_init_kwargs"):
        given = getattr(args, setting, None)
        name = given.get("attn_implementation") if isinstance(given, dict) else None
        if isinstance(name, str) and name != "prefixtree":
            warnings.warn(
                f"{setting}={{'attn_implementation': {name!r}}} is not used: packed rows need "
                "'prefixtree', which the trainer sets. Leave it out (`prefixtree doctor` names the "
                f"kernels that 'prefixtree' runs here), or use TRL's trainer for {name!r}",
                stacklevel=4,
            )


def _check_aux_loss(model: nn.Module) -> None:
    causal_lm = transformer_of(model)
    if loss_function(causal_lm) is None:
        raise UnsupportedError(
            f"{type(causal_lm).__name__} of transformers computes no load-balancing loss of "
            "experts: set router_aux_loss_coef=0.0 in the trainer's arguments"
        )


def check_arguments(args: Any, verified: Collection[str] = ()) -> None:
    """Refuses arguments (a `GRPOConfig`, `DPOConfig`, ...) that are not verified.

    Args:
        args: the trainer's arguments.
        verified: names of arguments that are verified with this trainer, and not with all.

    Raises:
        UnsupportedError: with the argument and what to set.
    """
    for name, fine, why in _ARGUMENTS:
        if (value := getattr(args, name, None)) not in fine and name not in verified:
            raise UnsupportedError(f"{name}={value!r}: {why}")


def check_distribution(trainer: Any, deepspeed: bool = False) -> None:
    """Refuses ways to spread a model over processes that are not verified.

    Args:
        trainer: the trainer, made.
        deepspeed: whether DeepSpeed is verified with this trainer. Default: False.

    Raises:
        UnsupportedError: with the way and what to use.
    """
    if trainer.is_deepspeed_enabled:
        if not deepspeed:
            raise UnsupportedError(
                "DeepSpeed is not verified with this trainer: use DDP (accelerate launch)"
            )
        check_deepspeed(trainer.accelerator.state.deepspeed_plugin.deepspeed_config)
        _check_alone(trainer.args, "DeepSpeed")
    if trainer.is_fsdp_enabled:
        check_fsdp(trainer.accelerator.state.fsdp_plugin)
        _check_alone(trainer.args, "FSDP2")
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    if parallelism is not None and parallelism.non_data_parallel_size != 1:
        raise UnsupportedError(
            "a parallelism_config with tensor, context or sequence parallelism splits the packed "
            "tokens or the heads, which is not verified: set tp_size, cp_size and sp_size to 1 "
            "(dp_replicate_size and dp_shard_size may be any)"
        )


def check_recompute(trainer: Any, recompute: Recompute) -> Recompute:
    """Returns `recompute` if it is verified with the trainer's settings.

    Raises:
        UnsupportedError: with DeepSpeed or torch_compile.
    """
    if recompute is None:
        return None
    instead = "leave it None, and set gradient_checkpointing"
    if trainer.is_deepspeed_enabled:
        raise UnsupportedError(
            f"recompute={recompute!r} is not verified under DeepSpeed, which keeps parameters and "
            f"their gathering to itself: {instead}"
        )
    if getattr(trainer.args, "torch_compile", False):
        raise UnsupportedError(
            f"recompute={recompute!r} with torch_compile would compile the whole model anew for "
            f"every plan: {instead}; or leave torch_compile out and call "
            "prefixtree.compile_layers(model)"
        )
    return recompute


def check_attention(model: nn.Module) -> None:
    """Refuses a model whose attention was switched after the trainer was made."""
    name = transformer_of(model).config.get_text_config()._attn_implementation
    if name != "prefixtree":
        raise UnsupportedError(
            f"the model runs attn_implementation={name!r}, which ignores the tree: the trainer set "
            '"prefixtree" when it was made, and something else has been set since (by a callback, '
            "a patch or a library for faster generation); take that out, or call "
            'model.set_attn_implementation("prefixtree") after it'
        )


def _check_alone(args: Any, library: str) -> None:
    for name in _ALONE:
        if value := getattr(args, name, None):
            instead = "use bf16, or float32" if name == "fp16" else "set it to False"
            raise UnsupportedError(f"{name}={value!r} is not verified under {library}: {instead}")


def check_liger(args: Any, model: nn.Module) -> None:
    """Refuses Liger Kernel's layers in a family in which they were not compared.

    TRL turns off its fused loss, and a packed forward asks for no loss. So only layers change.
    """
    model_type = transformer_of(model).config.get_text_config().model_type
    if args.use_liger_kernel and model_type not in LIGER_LAYERS:
        raise UnsupportedError(
            f"use_liger_kernel=True: Liger's layers were not compared in {model_type}, only in "
            f"{', '.join(LIGER_LAYERS)}; set it to False"
        )


def check_model(model: nn.Module) -> None:
    """Refuses a model that would not train exactly on packed forests, before it generates.

    Raises:
        UnsupportedError: a model type outside the allow-list, layers, RoPE, dropout (active or
            about to be), and what `check_modules` and `check_adapters` refuse.
    """
    causal_lm = transformer_of(model)
    for config in (causal_lm.config, causal_lm.config.get_text_config()):
        check_config(config, training=True)
    for name, module in model.named_modules():
        if isinstance(module, DROPOUT_LAYERS) and module.p > 0:
            raise UnsupportedError(
                f"{name} is a dropout (p = {module.p}): a shared token would draw one mask where "
                "the replicated batch draws several; set it to 0 (lora_dropout=0 for an adapter, "
                "or disable_dropout=True in the trainer's arguments)"
            )
    check_modules(model)
    check_adapters(model)
