"""Refuses TRL settings under which a packed run is not known to equal a run of TRL's trainer."""

from __future__ import annotations

from typing import Any

from torch import nn

from prefixtree.errors import UnsupportedError
from prefixtree.integrations.adapters import check_adapters
from prefixtree.integrations.families import check_config, check_modules
from prefixtree.integrations.model_checks import transformer_of
from prefixtree.integrations.trl.fsdp import check_fsdp

AUX_LOSS = (
    "the load-balancing loss of experts would count a shared token once where the replicated batch "
    "counts every copy: set router_aux_loss_coef=0.0 in the trainer's arguments"
)

# (argument, values that are fine, what is wrong with the others)
_ARGUMENTS: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("use_liger_kernel", (False, None), "its layers replace those of the model: set it to False"),
    ("neftune_noise_alpha", (None,), "a shared token would draw one noise: leave it None"),
    ("torch_compile", (False, None), "not verified under TRL: set it to False"),
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
        "logits are computed in the dtype of the hidden states, and everything after them in "
        "float32: set it to False",
    ),
    (
        "activation_offloading",
        (False, None),
        "not verified on packed batches: set it to False",
    ),
    ("fp16", (False, None), "not verified under TRL: use bf16, or float32"),
)


def prepare_trainer(trainer: Any) -> None:
    """Refuses a trainer that is not verified, and sets the attention of its models.

    Args:
        trainer: a trainer of TRL with a model and perhaps a ref_model.

    Raises:
        UnsupportedError: arguments, a distribution, images, the loss of experts or a model.
    """
    check_arguments(trainer.args)
    check_distribution(trainer)
    if trainer._is_vlm:
        raise UnsupportedError(
            f"processing_class is a {type(trainer.processing_class).__name__}: images are not "
            "packed yet; for a text-only run pass its tokenizer"
        )
    if trainer.aux_loss_enabled:
        raise UnsupportedError(AUX_LOSS)
    for model in filter(None, (trainer.model, getattr(trainer, "ref_model", None))):
        check_model(model)
        transformer_of(model).set_attn_implementation("prefixtree")


def check_arguments(args: Any) -> None:
    """Refuses arguments (a `GRPOConfig`, `DPOConfig`, ...) that are not verified."""
    for name, fine, why in _ARGUMENTS:
        if (value := getattr(args, name, None)) not in fine:
            raise UnsupportedError(f"{name}={value!r}: {why}")


def check_distribution(trainer: Any) -> None:
    """Refuses ways to spread a model over processes other than DDP, FSDP2 and HSDP."""
    if trainer.is_deepspeed_enabled:
        raise UnsupportedError("DeepSpeed is not verified under TRL: use DDP (accelerate launch)")
    if trainer.is_fsdp_enabled:
        check_fsdp(trainer.accelerator.state.fsdp_plugin)
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    if parallelism is not None and parallelism.non_data_parallel_size != 1:
        raise UnsupportedError(
            "a parallelism_config with tensor, context or sequence parallelism splits the packed "
            "tokens or the heads, which is not verified: set tp_size, cp_size and sp_size to 1 "
            "(dp_replicate_size and dp_shard_size may be any)"
        )


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
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise UnsupportedError(
                f"{name} is a dropout (p = {module.p}): a shared token would draw one mask where "
                "the replicated batch draws several; set it to 0 (lora_dropout=0 for an adapter, "
                "or disable_dropout=True in the trainer's arguments)"
            )
    check_modules(model)
    check_adapters(model)
