"""Refuses TRL settings under which a packed run is not known to equal a run of TRL's trainer."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import Any

import numpy as np
import trl
from packaging.version import Version
from torch import nn

from prefixtree.errors import Refusal, UnsupportedError, is_set, refuse
from prefixtree.experts.routers import loss_function
from prefixtree.images.inputs import check_served
from prefixtree.integrations.trl.contract import TESTED
from prefixtree.integrations.trl.distribution_refusals import (
    DEEPSPEED_CONFIG,
    DISTRIBUTIONS,
    FSDP,
)
from prefixtree.models.adapters import check_adapters
from prefixtree.models.checks import set_attention, transformer_of
from prefixtree.models.dropout import SharedDropout
from prefixtree.models.families import (
    DROPOUT_LAYERS,
    LIGER_LAYERS,
    check_config,
    check_modules,
)
from prefixtree.models.prepared import prepare_layers
from prefixtree.recompute.choose import Recompute

#: Arguments (of a `GRPOConfig`, `DPOConfig`, ...) that are refused with every trainer.
ARGUMENTS = (
    Refusal(
        "neftune_noise_alpha",
        is_set("neftune_noise_alpha", None),
        "{name}={value!r}: a shared token would draw one noise: leave it None",
    ),
    Refusal(
        "use_transformers_continuous_batching",
        is_set("use_transformers_continuous_batching", False, None),
        '{name}={value!r}: it needs a paged attention, which "prefixtree" is not: set it to False',
    ),
    Refusal(
        "cache_implementation",
        is_set("cache_implementation", None, "dynamic"),
        '{name}={value!r}: only the dynamic cache is verified with attn_implementation="prefixtree"'
        ": leave it None",
    ),
)
#: Arguments that are verified with some trainers, alone: not where another library splits the model
#: or wraps its layers, and not with images.
ALONE = (
    Refusal(
        "use_liger_kernel",
        is_set("use_liger_kernel", False, None),
        "{name}={value!r} is not verified {place}; set it to False",
    ),
    Refusal(
        "torch_compile",
        is_set("torch_compile", False, None),
        "{name}={value!r} is not verified {place}; set it to False",
    ),
    Refusal(
        "fp16",
        is_set("fp16", False, None),
        "{name}={value!r} is not verified {place}; use bf16, or float32",
    ),
    Refusal(
        "cast_lm_head_to_fp32",
        is_set("cast_lm_head_to_fp32", False, None),
        "{name}={value!r} is not verified {place}; set it to False",
    ),
    Refusal(
        "activation_offloading",
        is_set("activation_offloading", False, None),
        "{name}={value!r} is not verified {place}; set it to False",
    ),
)


def _sees_otherwise(trainer: Any) -> Any:
    model_type = transformer_of(trainer.model).config.model_type
    return not model_type.startswith("qwen") and {"model_type": model_type}


#: Refusals with a processor of images.
IMAGES = (
    Refusal(
        "images of other families",
        _sees_otherwise,
        "a run with images of {model_type} is not verified under TRL, only with those of Qwen's"
        " families; for a text-only run pass its tokenizer as processing_class",
    ),
    Refusal(
        "images under DeepSpeed or FSDP",
        lambda trainer: trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled,
        "DeepSpeed or FSDP is not verified with images in TRL; use DDP; for a text-only run "
        "pass the tokenizer as processing_class",
    ),
)


def _without_liger(trainer: Any) -> Any:
    model_type = transformer_of(trainer.model).config.get_text_config().model_type
    words = {"model_type": model_type, "types": ", ".join(LIGER_LAYERS)}
    # TRL turns off its fused loss, and a packed forward asks for no loss. So only layers change
    return trainer.args.use_liger_kernel and model_type not in LIGER_LAYERS and words


def _without_aux_loss(trainer: Any) -> Any:
    if not getattr(trainer, "aux_loss_enabled", False):
        return None
    causal_lm = transformer_of(trainer.model)
    return loss_function(causal_lm) is None and {"kind": type(causal_lm).__name__}


#: Settings that are verified with some families alone.
FAMILIES = (
    Refusal(
        "use_liger_kernel",
        _without_liger,
        "use_liger_kernel=True is not verified in {model_type}: Liger's layers were compared in"
        " {types}; set it to False",
    ),
    Refusal(
        "router_aux_loss_coef",
        _without_aux_loss,
        "{kind} of transformers computes no load-balancing loss of experts: set "
        "router_aux_loss_coef=0.0 in the trainer's arguments",
    ),
)


def _other_attention(model: nn.Module) -> Any:
    name = transformer_of(model).config.get_text_config()._attn_implementation
    return name != "prefixtree" and {"given": name}


def _dropout(model: nn.Module) -> Any:
    for name, module in model.named_modules():
        if isinstance(module, DROPOUT_LAYERS) and module.p > 0:
            return {"layer": name, "p": module.p}
    return None


#: Refusals of a model, whenever it runs.
ATTENTION = Refusal(
    "attn_implementation",
    _other_attention,
    "the model runs attn_implementation={given!r}, which ignores the tree: the trainer set "
    '"prefixtree" when it was made, and something else has been set since (by a callback, a patch '
    "or a library for faster generation); take that out, or call "
    'model.set_attn_implementation("prefixtree") after it',
)
#: Refusals of a model, active or about to be.
DROPOUT = Refusal(
    "dropout",
    _dropout,
    "{layer} is a dropout (p = {p}): a shared token would draw one mask where the replicated batch "
    "draws several; set it to 0 (lora_dropout=0 for an adapter, or disable_dropout=True in the "
    "trainer's arguments), or share LoRA's: callbacks=[prefixtree.integrations.trl.ShareDropout()]",
)
_INSTEAD = "leave it None, and set gradient_checkpointing"
#: Refusals of trainers that get recompute=.
RECOMPUTED = (
    Refusal(
        "recompute under DeepSpeed",
        is_set("is_deepspeed_enabled"),
        "recompute={recompute!r} is not verified under DeepSpeed, which keeps parameters and "
        f"their gathering to itself; {_INSTEAD}",
    ),
    Refusal(
        "recompute with torch_compile",
        lambda trainer: getattr(trainer.args, "torch_compile", False),
        "recompute={recompute!r} with torch_compile would compile the whole model anew for every "
        f"plan: {_INSTEAD}; or leave torch_compile out and call prefixtree.compile_layers(model)",
    ),
)
#: Refusals of trainers that get recompute="auto".
MEASURED = (
    Refusal(
        "recompute='auto' with activation_offloading",
        lambda trainer: getattr(trainer.args, "activation_offloading", False),
        "{name}: plans are made from bytes that stay on the device, and offloading moves them: "
        "leave recompute None, and set gradient_checkpointing",
    ),
)
#: Refusals of rows that join several samples.
JOINED = Refusal(
    "packing",
    lambda trainer: trainer.args.packing or trainer.args.eval_packing or trainer.padding_free,
    "packing, eval_packing and padding_free join samples to rows, which share no prefix: set them "
    "to False; what samples share is packed without them",
)
_LOGITS = (
    "with {name} TRL computes the loss from the logits of all rows, which a packed batch does not "
    "have: leave it out, or use TRL's SFTTrainer"
)
#: Refusals of `PrefixTreeSFTTrainer`.
SFT = (
    Refusal(
        "padding_free with images",
        lambda trainer: trainer.padding_free and trainer._is_vlm,
        "{name} (packing_strategy 'bfd' sets it too) is not verified under TRL; set it to False, "
        "or for a text-only run pass the tokenizer as processing_class",
    ),
    Refusal(
        "padding_free with compute_metrics",
        lambda trainer: trainer.padding_free and trainer.compute_metrics is not None,
        "{name} (packing_strategy 'bfd' sets it too): TRL computes the logits from joined rows, "
        "outside of the packed forward: set padding_free=False and packing=False",
    ),
    Refusal("compute_loss_func", lambda trainer: trainer.compute_loss_func is not None, _LOGITS),
    Refusal(
        "label_smoothing_factor",
        lambda trainer: trainer.args.label_smoothing_factor > 0 and trainer.args.loss_type == "nll",
        _LOGITS,
    ),
)
#: Refusals of `PrefixTreeRewardTrainer`.
REWARDS = (
    Refusal(
        "fused_linear_cross_entropy",
        lambda trainer: (
            trainer.args.use_liger_kernel
            and (trainer.args.liger_kernel_config or {}).get("fused_linear_cross_entropy", True)
        ),
        "use_liger_kernel=True: reward models lack the lm_head that Liger's {name} needs: set "
        "liger_kernel_config={{'{name}': False}}",
    ),
)
#: Refusals of `PrefixTreeGKDTrainer` and `PrefixTreeGOLDTrainer`.
ANSWERS = (
    Refusal(
        "use_uld_loss",
        is_set("use_uld_loss"),
        "{name}=True compares the teacher's tokens of another tokenizer, by spans of them: set it "
        "to False, or use TRL's trainer",
    ),
    JOINED,
    Refusal(
        "compute_metrics",
        lambda trainer: trainer.compute_metrics is not None,
        "{name} reads the logits of all rows: leave it out, or use TRL's trainer",
    ),
)
#: Refusal of trainers that are verified on text alone.
TEXT = Refusal(
    "images",
    is_set("_is_vlm"),
    "a processor of images is not verified with distillation and KTO, whose teachers and "
    "references see none; pass the tokenizer as processing_class",
)
#: Refusals of every trainer with a teacher.
DISTILLATION = (
    TEXT,
    Refusal(
        "teacher_model",
        lambda trainer: trainer.teacher_model is None,
        "there is no teacher_model: pass one",
    ),
)


def _sees(trainer: Any) -> bool:
    return getattr(transformer_of(trainer.model).config, "vision_config", None) is not None


#: Refusals of a trainer with `tree_rollouts`.
ROLLOUTS = (
    Refusal(
        "vision model",
        lambda trainer: trainer.is_fsdp_enabled and _sees(trainer),
        "tree_rollouts with a vision model is not verified under FSDP2; load its text model",
    ),
    Refusal(
        "repetition_penalty",
        lambda trainer: (
            trainer.args.repetition_penalty != 1.0 and {"given": trainer.args.repetition_penalty}
        ),
        "tree_rollouts has no {name} ({given}): set it to 1.0, or leave rollout_func out",
    ),
    Refusal(
        "generation_kwargs",
        lambda trainer: (
            trainer.args.generation_kwargs not in (None, {})
            and {"given": trainer.args.generation_kwargs}
        ),
        "tree_rollouts has no {name} ({given}): set it to None, or leave rollout_func out",
    ),
    Refusal(
        "tools",
        # it would join our log-probabilities with those of `generate`, which gives none
        is_set("tools"),
        "with tools TRL samples what follows a tool's answer by generate, not by tree_rollouts: "
        "call the tools in reply=, or leave rollout_func out",
    ),
)


def _samples_from_fewer(trainer: Any) -> Any:
    args = trainer.args
    fine = {"top_k": (0, -1, None), "top_p": (1.0, None), "min_p": (0.0, None)}
    used = [name for name, values in fine.items() if getattr(args, name, None) not in values]
    newer = Version(trl.__version__) > Version(TESTED[1])
    # what the notes of 1.17 say, whose source was not there to read
    return args.use_vllm and newer and used and {"given": f"{used[0]}={getattr(args, used[0])}"}


#: Refusals of `PrefixTreeGRPOTrainer`.
GRPO = (
    Refusal(
        "top_k, top_p, min_p",
        _samples_from_fewer,
        "{given} with use_vllm ({name}): TRL compares log-probabilities over the tokens that the "
        "sampler kept from 1.17 on, which is not verified; set top_k=0, top_p=1.0 and min_p=None, "
        "or install TRL 1.16",
    ),
)
_DIVIDED = "{name} is not verified with AsyncGRPO; use DDP, or PrefixTreeGRPOTrainer"
#: Refusals of AsyncGRPO.
ASYNC_GRPO = (
    Refusal("DeepSpeed", is_set("is_deepspeed_enabled"), _DIVIDED),
    Refusal("FSDP", is_set("is_fsdp_enabled"), _DIVIDED),
    Refusal(
        "router_aux_loss_coef",
        is_set("aux_loss_enabled"),
        "the load-balancing loss of experts would count a shared token once in AsyncGRPO (it does "
        "in TRL too): set router_aux_loss_coef=0.0 in the trainer's arguments, or use "
        "PrefixTreeGRPOTrainer",
    ),
)


def prepare_trainer(trainer: Any, verified: Collection[str]) -> None:
    """Refuses a trainer that is not verified; sets its models' attention and prepares layers."""
    check_arguments(trainer.args, verified)
    check_distribution(trainer)
    refuse(FAMILIES, trainer)
    # a trainer of rewards, and RLOO's of TRL 1.15, has none
    if getattr(trainer, "_is_vlm", False):
        check_images(trainer)
    # not by truth value: a compiled model has none
    others = (getattr(trainer, name, None) for name in ("ref_model", "teacher_model"))
    models = (trainer.model, *others)
    if trainer.accelerator.is_main_process:
        _warn_of_attention(trainer.args)
    for model in (m for m in models if m is not None):
        if getattr(trainer.args, "disable_dropout", False):
            # TRL's switch knows torch's dropouts
            for module in model.modules():
                if isinstance(module, SharedDropout):
                    module.p = 0.0
        check_model(model)
        transformer = transformer_of(model)
        set_attention(transformer)
        # generation runs it too, before anything is scored
        prepare_layers(transformer)


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
                stacklevel=5,
            )


def check_arguments(args: Any, verified: Collection[str] = ()) -> None:
    """Refuses arguments (a `GRPOConfig`, `DPOConfig`, ...) that are not verified."""
    rows = (row for row in (*ARGUMENTS, *ALONE) if row.name not in verified)
    refuse(rows, args, place="with this trainer")


def check_distribution(trainer: Any) -> None:
    """Refuses ways to spread a model over processes that are not verified."""
    if trainer.is_deepspeed_enabled:
        refuse(DEEPSPEED_CONFIG, trainer.accelerator.state.deepspeed_plugin.deepspeed_config)
        refuse(ALONE, trainer.args, place="under DeepSpeed, which gathers and casts weights itself")
    if trainer.is_fsdp_enabled:
        refuse(FSDP, trainer.accelerator.state.fsdp_plugin)
        refuse(ALONE, trainer.args, place="under FSDP2, which gathers and casts weights itself")
    refuse(DISTRIBUTIONS, trainer)


def check_images(trainer: Any) -> None:
    """Refuses a trainer with a processor of images that is not verified."""
    config = transformer_of(trainer.model).config
    check_served(config.model_type, config.get_text_config())
    refuse(IMAGES, trainer)
    refuse(ALONE, trainer.args, place="with images")


def check_recompute(trainer: Any, recompute: Recompute) -> Recompute:
    """Returns `recompute` if it is verified with the trainer's settings."""
    if recompute is not None:
        refuse(RECOMPUTED, trainer, recompute=recompute)
    if recompute == "auto":
        refuse(MEASURED, trainer)
    return recompute


def check_prompts(empty: np.ndarray) -> None:
    """Refuses the first row of a batch, bool [B], whose completion begins without a predictor."""
    for bad in np.flatnonzero(empty)[:1]:
        raise UnsupportedError(
            f"row {bad} has an empty prompt: nothing predicts the first token of its completion; "
            "give every prompt a token (a BOS token)"
        )


def check_attention(model: nn.Module) -> None:
    """Refuses a model whose attention was switched after the trainer was made."""
    refuse([ATTENTION], model)


def check_model(model: nn.Module) -> None:
    """Refuses a model that would not train exactly on packed forests, before it generates."""
    causal_lm = transformer_of(model)
    for config in (causal_lm.config, causal_lm.config.get_text_config()):
        check_config(config, training=True)
    refuse([DROPOUT], model)
    check_modules(model)
    check_adapters(model)
