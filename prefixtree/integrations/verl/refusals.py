"""Refuses verl settings that are not verified to give verl's results on packed forests.

The engines call these checks before anything is computed.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode

from prefixtree.errors import Refusal, is_set, refuse
from prefixtree.images.inputs import GRIDS
from prefixtree.integrations.verl.batches import shown_of
from prefixtree.models.families import LIGER_LAYERS, check_config
from prefixtree.recompute.layers import MODES

# keys of override_config: recompute of `sequence_logprobs`, and whether to run `compile_layers`
RECOMPUTE, COMPILE = "prefixtree_recompute", "prefixtree_compile"
SETTINGS: dict[str, tuple[Any, ...]] = {RECOMPUTE: ("auto", *MODES), COMPILE: (True, False)}

# model types whose images were tested in verl's batches
_SEEING = [name for name in GRIDS if name.startswith("qwen")]
_CUT = "depends on the cut into micro-batches, which packing changes"
_PREFIX = 'attn_implementation="prefixtree": '


class Asked(NamedTuple):
    """The parts of an engine: HFModelConfig, its configuration, "log_probs" or "values"."""

    model: Any
    engine: Any
    output: str = "log_probs"

    @property
    def model_type(self) -> str:
        return self.model.hf_config.model_type

    @property
    def sees(self) -> bool:
        return getattr(self.model.hf_config, "vision_config", None) is not None


class Batch(NamedTuple):
    """verl's batch, and whether the engine takes images and top-k losses."""

    data: TensorDict
    sees: bool = False
    serves_topk: bool = False

    def flag(self, key: str, default: Any = False) -> Any:
        return tu.get_non_tensor_data(data=self.data, key=key, default=default)


def _without_liger(asked: Asked) -> Any:
    words = {"model_type": asked.model_type, "types": ", ".join(LIGER_LAYERS)}
    return asked.model.use_liger and asked.model_type not in LIGER_LAYERS and words


def _sees_otherwise(asked: Asked) -> Any:
    words = {"model_type": asked.model_type, "types": ", ".join(_SEEING)}
    return asked.sees and asked.model_type not in _SEEING and words


def _quantises(asked: Asked) -> Any:
    return getattr(getattr(asked.engine, "qat", None), "enable", False)


#: Settings of every engine.
EVERY_ENGINE = (
    Refusal(
        "model.mtp.enable",
        lambda asked: asked.model.mtp.enable,
        "model.mtp.enable=True: extra prediction heads are not scored on packed forests; set it to "
        "False",
    ),
    Refusal(
        "qat.enable",
        _quantises,
        "qat.enable=True is not verified on packed forests; set it to False",
    ),
)
#: Settings of FSDP engines.
FSDP = (
    Refusal(
        "use_liger",
        _without_liger,
        "use_liger=True is not verified on packed forests of {model_type}, only of {types}; set"
        " it to False",
    ),
    Refusal(
        "enable_activation_offload",
        lambda asked: asked.model.enable_activation_offload,
        "enable_activation_offload=True is not verified on packed forests; set it to False and "
        "keep enable_gradient_checkpointing",
    ),
    Refusal(
        "model with images",
        _sees_otherwise,
        "{model_type} takes images, and of such models only {types} are verified with verl; use "
        "one of them, or a text-only model",
    ),
    Refusal(
        "critic with images",
        lambda asked: asked.sees and asked.output == "values" and {"model_type": asked.model_type},
        "a critic is a token classifier, and transformers has none of {model_type}, which takes "
        "images; give the critic a text-only model, or use an advantage estimator without a critic",
    ),
)


def _divides_context(asked: Asked) -> Any:
    size, dynamic = asked.engine.context_parallel_size, asked.engine.dynamic_context_parallel
    return (size > 1 or dynamic) and {"size": size, "dynamic": dynamic}


def _replays_a_critic(asked: Asked) -> Any:
    mode = asked.engine.router_replay.mode
    return mode != "disabled" and asked.model.model_type != "language_model" and {"mode": mode}


def _replays_virtual_stages(asked: Asked) -> Any:
    stages = asked.engine.virtual_pipeline_model_parallel_size or 1
    return asked.engine.router_replay.mode == "R2" and stages > 1 and {"stages": stages}


#: Settings of Megatron engines.
MEGATRON = (
    Refusal(
        "vanilla_mbridge",
        lambda asked: asked.engine.vanilla_mbridge,
        "vanilla_mbridge=True has no layer spec to change; set it to False, which uses "
        "Megatron-Bridge",
    ),
    Refusal(
        "context_parallel_size",
        _divides_context,
        "context_parallel_size={size} (dynamic_context_parallel={dynamic}) is not verified in "
        "verl; set them to 1 and False",
    ),
    Refusal(
        "use_megatron_fsdp",
        lambda asked: asked.engine.use_megatron_fsdp,
        "use_megatron_fsdp=True is not verified on packed forests; set it to False",
    ),
    Refusal(
        "router_replay of a critic",
        _replays_a_critic,
        "router_replay.mode={mode} of a critic, for which verl records no routes; set it to "
        "disabled",
    ),
    Refusal(
        "router_replay of virtual stages",
        _replays_virtual_stages,
        "router_replay.mode=R2 with virtual_pipeline_model_parallel_size={stages}: what virtual "
        "stages record was not compared; set it to null, or router_replay.mode to R3",
    ),
    Refusal(
        "lora.rank",
        lambda asked: (asked.model.lora or {}).get("rank", 0) > 0,
        "lora.rank above 0 is not verified on packed forests with Megatron; set it to 0",
    ),
    Refusal(
        "model with images",
        lambda asked: asked.sees and {"model_type": asked.model_type},
        "{model_type} takes images; use a text-only model",
    ),
)
#: Refusals of the provider that Megatron-Bridge makes.
PROVIDER = (
    Refusal(
        "calculate_per_token_loss",
        is_set("calculate_per_token_loss"),
        "{name}=True is not verified on packed forests under verl; take it out of "
        "override_transformer_config",
    ),
)


class Override(NamedTuple):
    """A setting of override_config, whether it is followed, and which one is in its place."""

    name: str
    asked: Any
    is_served: bool
    instead: str = ""
    strategy: str = ""


#: Settings that nothing would follow.
OVERRIDES = (
    Refusal(
        "prefixtree_recompute",
        lambda given: given.name == RECOMPUTE and not given.is_served and given._asdict(),
        "override_config.{name}={asked!r} is for FSDP engines with attn_implementation=prefixtree: "
        "take it out here; {instead} says what is recomputed",
    ),
    Refusal(
        "prefixtree_compile",
        lambda given: given.name == COMPILE and not given.is_served,
        "override_config.{name}=True is for FSDP2 actors and references with "
        "attn_implementation=prefixtree: take it out here",
    ),
    Refusal(
        "prefixtree_compile under FSDP1",
        lambda given: given.name == COMPILE and given.strategy != "fsdp2" and given._asdict(),
        "override_config.prefixtree_compile=True is verified with strategy=fsdp2: set it, not "
        "{strategy}",
    ),
)
#: Refusals of an FSDP engine whose batches have images.
IMAGES = (
    Refusal(
        "strategy",
        is_set("strategy", "fsdp2"),
        "{name}={value} is not verified with images (the batch has multi_modal_inputs); set "
        "strategy=fsdp2",
    ),
)


def _is_padded(batch: Batch) -> bool:
    mode = batch.flag("pad_mode", DatasetPadMode.NO_PADDING)
    return mode != DatasetPadMode.NO_PADDING or not batch.data["input_ids"].is_nested


def _restarts(batch: Batch) -> bool:
    """Whether jagged positions [B, n] or [B, 4, n] are not indices in their sequences."""
    offsets = batch.data["input_ids"].offsets()
    starts = torch.repeat_interleave(offsets[:-1], offsets.diff())
    indices = torch.arange(len(starts), device=offsets.device) - starts
    positions = batch.data["position_ids"].values()
    if batch.sees and len(positions) == 4 and positions.ndim == 2:
        positions = positions[0]
    return positions.shape != indices.shape or not torch.equal(positions, indices.to(positions))


#: Refusals of a batch, before it is split.
BATCHES = (
    Refusal(
        "distillation_use_topk",
        lambda batch: (
            (batch.flag("distillation_use_topk") or batch.flag("distillation_only"))
            and not batch.serves_topk
        ),
        "distillation from the teacher's top-k needs whole rows of logits, which only actors of "
        "the FSDP engines have: take such an actor, or an estimator (loss_mode=k3)",
    ),
    Refusal(
        "calculate_sum_pi_squared",
        lambda batch: batch.flag("calculate_sum_pi_squared"),
        "calculate_sum_pi_squared=True needs whole logits, which are never made here; set it to "
        "False",
    ),
    Refusal(
        "force_group_size",
        lambda batch: batch.flag("force_group_size", 1) != 1,
        "force_group_size (pairs of a reward model) is not supported",
    ),
    Refusal(
        "pad_mode",
        _is_padded,
        "batches must be without padding (pad_mode=no_padding, jagged input_ids)",
    ),
    Refusal(
        "multi_modal_inputs",
        lambda batch: not batch.sees and any(shown_of(batch.data)),
        "the batch has images (multi_modal_inputs), and the engine's model takes none: train on "
        "text alone, or with a vision checkpoint and the FSDP engines",
    ),
    Refusal(
        "position_ids",
        _restarts,
        "position_ids must count 0, 1, 2, ... along every sequence (multi-dimensional and shifted "
        "positions are not supported)",
    ),
)


class Loss(NamedTuple):
    """A loss's configuration, and whether micro-batches differ in size or responses are padded."""

    config: Any
    dynamic: bool
    padded: bool = False

    @property
    def policy(self) -> Any:
        return getattr(self.config, "policy_loss", None) or {}

    @property
    def mode(self) -> str:
        return self.policy.get("loss_mode", "vanilla")


def _divides_by_longest(loss: Loss) -> bool:
    mode = getattr(loss.config, "loss_agg_mode", None)
    asked = mode == "seq-mean-token-sum-norm" and loss.config.loss_scale_factor is None
    return asked and not loss.padded


def _normalises_weights(loss: Loss) -> bool:
    correction = loss.policy.get("rollout_correction", None)
    return (
        loss.mode == "bypass_mode"
        and correction is not None
        and correction.get("loss_type", "ppo_clip") == "reinforce"
        and correction.get("rollout_is", None) is not None
        and correction.get("rollout_is_batch_normalize", False)
    )


#: Modes of policy losses that choose among a micro-batch's tokens, and by how much the gradients of
#: two shuffles of verl's differ.
CUT_MODES = {"clip_cov": "by 6 to 7 %", "kl_cov": "by 0.3 to 0.4 %"}
#: Losses of verl whose gradients depend on the cut into micro-batches.
LOSSES = (
    Refusal(
        "loss_agg_mode",
        _divides_by_longest,
        f"loss_agg_mode=seq-mean-token-sum-norm {_CUT}: it divides by the longest response of a "
        "micro-batch; set loss_scale_factor (data.max_response_length, for example)",
    ),
    Refusal(
        "geo_mean",
        # a mean over micro-batches of one size is the same mean however they are filled
        lambda loss: loss.mode == "geo_mean" and loss.dynamic,
        f"policy_loss.loss_mode=geo_mean {_CUT}: verl adds up a mean over each micro-batch however "
        "many there are, so that its own gradients of 4 and of 8 micro-batches differ by half; set "
        "use_dynamic_bsz=False, or another loss_mode",
    ),
    Refusal(
        "rollout_is_batch_normalize",
        _normalises_weights,
        f"rollout_correction.rollout_is_batch_normalize=True with bypass_mode {_CUT}: weights are "
        "divided by their mean over a micro-batch; set it to False",
    ),
)


def turn_off_fused_kernels(model_config: Any, engine_config: Any) -> None:
    """Turns off use_fused_kernels, with a warning, before an engine patches its model."""
    configs = [c for c in (model_config, engine_config) if c.use_fused_kernels]
    for config in configs:
        # verl freezes the field
        object.__setattr__(config, "use_fused_kernels", False)
    if configs:
        warnings.warn(
            "use_fused_kernels=True is turned off: it replaces the model's forward by one that "
            "drops the tree mask, and log-probabilities are computed in chunks here anyway",
            stacklevel=3,
        )


def check_settings(model_config: Any, engine_config: Any, model_output: str) -> None:
    """Refuses configurations, as an engine is made."""
    settings = Asked(model_config, engine_config, model_output)
    refuse((*EVERY_ENGINE, *FSDP), settings, _PREFIX)
    hf_config, training = model_config.hf_config, not engine_config.forward_only
    check_config(hf_config, training)
    if settings.sees:
        check_config(hf_config.get_text_config(), training)


def check_megatron_settings(model_config: Any, engine_config: Any) -> None:
    """Refuses configurations of the Megatron backend; the model itself is checked as it runs."""
    refuse((*EVERY_ENGINE, *MEGATRON), Asked(model_config, engine_config), _PREFIX)


def check_override(
    name: str, value: Any, is_served: bool, instead: str = "", strategy: str = ""
) -> Any:
    """The value of a setting of override_config, None if not set; refuses one not followed."""
    if value is None:
        return None
    if value not in SETTINGS[name]:
        values = ", ".join(map(repr, SETTINGS[name]))
        raise ValueError(f"override_config.{name}={value!r}: expected one of {values}")
    if value:
        refuse(OVERRIDES, Override(name, value, is_served, instead, strategy))
    return value


def check_images(engine_config: Any) -> None:
    """Refuses settings of an engine whose batches have images."""
    refuse(IMAGES, engine_config, _PREFIX)


def check_batch(data: TensorDict, **takes: bool) -> None:
    """Refuses batches, before they are split; `takes` as `Batch` has it."""
    refuse(BATCHES, Batch(data, **takes), _PREFIX)


def check_step(data: TensorDict, loss_function: Any, forward_only: bool, **takes: bool) -> None:
    """Runs `check_batch`, and for a step with a backward `check_loss`."""
    check_batch(data, **takes)
    if not forward_only:
        dynamic = tu.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=True)
        mask = data.get("response_mask", None)
        check_loss(loss_function, dynamic, mask is not None and not mask.is_nested)


def check_loss(loss_function: Any, dynamic: bool, padded: bool = False) -> None:
    """Refuses losses whose gradients depend on micro-batches; warns if verl's shuffle does."""
    config = getattr(loss_function, "keywords", {}).get("config")
    loss = Loss(config, dynamic, padded)
    refuse(LOSSES, loss, _PREFIX)
    if loss.mode in CUT_MODES:
        warnings.warn(
            f"policy_loss.loss_mode={loss.mode} chooses tokens within a micro-batch, and packing "
            "fills micro-batches otherwise than verl: gradients differ as those of two shuffles of "
            f"verl's do, {CUT_MODES[loss.mode]} with 64 responses in 8 micro-batches",
            stacklevel=4,
        )
