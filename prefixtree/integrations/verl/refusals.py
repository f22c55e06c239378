"""Refuses verl settings that are not verified to give verl's results on packed forests.

The engines call these checks before anything is computed.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode

from prefixtree._picture_inputs import GRIDS
from prefixtree.errors import UnsupportedError
from prefixtree.integrations.verl.batches import shown_of
from prefixtree.models.families import LIGER_LAYERS, check_config
from prefixtree.recompute.layers import MODES

# of override_config: as in `sequence_logprobs`, and whether `compile_layers` compiles the layers
RECOMPUTE, COMPILE = "prefixtree_recompute", "prefixtree_compile"

# whose pictures verl's batches have shown here
_SEEING = [name for name in GRIDS if name.startswith("qwen")]
_PREFIX = 'attn_implementation="prefixtree": '

# policy losses that look at the other samples of a micro-batch, and what they do
_CUT_MODES = {
    "clip_cov": "chooses the tokens that are left out within a micro-batch",
    "kl_cov": "chooses the tokens that are penalised within a micro-batch",
    "geo_mean": "is a mean over a micro-batch, summed over however many there are",
}
_CUT = "depends on how verl cuts a mini-batch into micro-batches, which packing changes"


def check_settings(model_config: Any, engine_config: Any, model_output: str) -> None:
    """Refuses configurations, as an engine is made.

    Args:
        model_config: verl's HFModelConfig. engine_config: its FSDPEngineConfig.
        model_output: what the model gives per token, "log_probs" or "values".

    Raises:
        UnsupportedError: with the setting to change.
    """
    hf_config = model_config.hf_config
    sees = getattr(hf_config, "vision_config", None) is not None
    for refused, why in (
        (
            model_config.use_fused_kernels,
            "use_fused_kernels=True replaces the model's forward by one that drops the tree mask; "
            "set it to False (log-probabilities are computed in chunks here anyway)",
        ),
        (
            model_config.use_liger and hf_config.model_type not in LIGER_LAYERS,
            f"use_liger=True is not verified on packed forests of {hf_config.model_type}, only of "
            f"{', '.join(LIGER_LAYERS)}; set it to False",
        ),
        (
            model_config.enable_activation_offload,
            "enable_activation_offload=True is not verified on packed forests; set it to False and "
            "keep enable_gradient_checkpointing",
        ),
        (
            model_config.mtp.enable,
            "model.mtp.enable=True: extra prediction heads are not scored on packed forests; set "
            "it to False",
        ),
        (
            getattr(getattr(engine_config, "qat", None), "enable", False),
            "qat.enable=True is not verified on packed forests; set it to False",
        ),
        (
            sees and hf_config.model_type not in _SEEING,
            f"{hf_config.model_type} takes images, and of such models only "
            f"{', '.join(_SEEING)} are verified with verl; use one of them, or a text-only model",
        ),
        (
            sees and model_output == "values",
            f"a critic is a token classifier, and transformers has none of {hf_config.model_type}, "
            "which takes images; give the critic a text-only model, or use an advantage estimator "
            "without a critic",
        ),
    ):
        if refused:
            raise UnsupportedError(f"{_PREFIX}{why}")
    training = not engine_config.forward_only
    check_config(hf_config, training)
    if sees:
        check_config(hf_config.get_text_config(), training)


def check_megatron_settings(model_config: Any, engine_config: Any) -> None:
    """`check_settings` for the Megatron backend; the model itself is checked as it runs.

    Args:
        model_config: verl's HFModelConfig. engine_config: its McoreEngineConfig.

    Raises:
        UnsupportedError: with the setting to change.
    """
    size, replay = engine_config.context_parallel_size, engine_config.router_replay.mode
    for refused, why in (
        (
            engine_config.vanilla_mbridge,
            "vanilla_mbridge=True has no layer spec to change; set it to False, which uses "
            "Megatron-Bridge",
        ),
        (
            size > 1 or engine_config.dynamic_context_parallel,
            f"context_parallel_size={size} (dynamic_context_parallel="
            f"{engine_config.dynamic_context_parallel}): not verified in verl; set them to 1 and "
            "False",
        ),
        (
            engine_config.use_fused_kernels or model_config.use_fused_kernels,
            "use_fused_kernels=True replaces the model's forward; set it to False "
            "(log-probabilities are computed in chunks here anyway)",
        ),
        (
            engine_config.use_megatron_fsdp,
            "use_megatron_fsdp=True is not verified on packed forests; set it to False",
        ),
        (
            replay != "disabled" and model_config.model_type != "language_model",
            f"router_replay.mode={replay} of a critic, for which verl records no routes; set it to "
            "disabled",
        ),
        (
            replay == "R2" and (engine_config.virtual_pipeline_model_parallel_size or 1) > 1,
            "router_replay.mode=R2 with virtual_pipeline_model_parallel_size="
            f"{engine_config.virtual_pipeline_model_parallel_size}: what virtual stages record was "
            "not compared; set it to null, or router_replay.mode to R3",
        ),
        (
            model_config.mtp.enable,
            "model.mtp.enable=True: extra prediction heads are not scored on packed forests; set "
            "it to False",
        ),
        (
            getattr(getattr(engine_config, "qat", None), "enable", False),
            "qat.enable=True is not verified on packed forests; set it to False",
        ),
        (
            (model_config.lora or {}).get("rank", 0) > 0,
            "lora.rank above 0 is not verified on packed forests with Megatron; set it to 0",
        ),
        (
            getattr(model_config.hf_config, "vision_config", None) is not None,
            f"{model_config.hf_config.model_type} takes images; use a text-only model",
        ),
    ):
        if refused:
            raise UnsupportedError(f"{_PREFIX}{why}")


def check_recompute(
    recompute: Any,
    is_served: bool,
    instead: str = "enable_gradient_checkpointing",
) -> None:
    """Refuses a setting of override_config that nothing would follow.

    Args:
        recompute: its value, None where it is not set.
        is_served: whether the engine packs.
        instead: the setting that is followed where this one is not.

    Raises:
        UnsupportedError: without attn_implementation="prefixtree".
        ValueError: an unknown value.
    """
    if recompute is None:
        return
    setting = f"override_config.{RECOMPUTE}={recompute!r}"
    if not is_served:
        raise _not_served(setting, "FSDP engines", f"; {instead} says what is recomputed")
    if recompute not in (values := ("auto", *MODES)):
        raise ValueError(f"{setting}: expected one of {', '.join(map(repr, values))}")


def check_compile(compiles: Any, is_served: bool, strategy: str) -> bool:
    """Whether the layers are to be compiled, or an error where they would not be.

    Args:
        compiles: the value of the setting, None where it is not set.
        is_served: whether the engine is a packed actor's or reference's.
        strategy: of the engine, "fsdp" or "fsdp2".

    Raises:
        UnsupportedError: for a critic, without attn_implementation="prefixtree", or under FSDP1.
        ValueError: neither True nor False.
    """
    if compiles not in (None, True, False):
        raise ValueError(f"override_config.{COMPILE}={compiles!r}: expected True or False")
    if not compiles:
        return False
    setting = f"override_config.{COMPILE}=True"
    if not is_served:
        raise _not_served(setting, "FSDP2 actors and references")
    if strategy != "fsdp2":
        raise UnsupportedError(f"{setting} is verified with strategy=fsdp2: set it, not {strategy}")
    return True


def _not_served(setting: str, engines: str, more: str = "") -> UnsupportedError:
    return UnsupportedError(
        f"{setting} is for {engines} with attn_implementation=prefixtree: take it out here{more}"
    )


def check_pictures(engine_config: Any) -> None:
    """Refuses settings of an engine whose batches have pictures.

    Args:
        engine_config: verl's FSDPEngineConfig.

    Raises:
        UnsupportedError: with the setting to change.
    """
    if (strategy := engine_config.strategy) != "fsdp2":
        raise UnsupportedError(
            f"{_PREFIX}the batch has pictures (multi_modal_inputs). strategy={strategy} is not "
            "verified; set strategy=fsdp2"
        )


def check_batch(
    data: TensorDict, sees: bool = False, serves_topk: bool = False, replays: bool = False
) -> None:
    """Refuses batches, before they are split.

    Args:
        data: verl's batch; input_ids and position_ids jagged [B, n], or position_ids [B, 4, n].
        sees: whether the model takes pictures. Then the engine checks the other rows of positions.
        serves_topk: whether the engine computes losses of the teacher's top k.
        replays: whether the engine runs recorded experts.

    Raises:
        UnsupportedError: with the setting to change.
    """

    def flag(key: str, default: Any = False) -> Any:
        return tu.get_non_tensor_data(data=data, key=key, default=default)

    for refused, why in (
        (
            flag("use_fused_kernels"),
            "use_fused_kernels=True drops the tree mask; set it to False",
        ),
        (
            (flag("distillation_use_topk") or flag("distillation_only")) and not serves_topk,
            "distillation from the teacher's top-k needs a rank's whole logits of a language "
            "model, which the actors of the FSDP engines have: take one, or an estimator "
            "(loss_mode=k3)",
        ),
        (
            flag("calculate_sum_pi_squared"),
            "calculate_sum_pi_squared=True needs whole logits, which are never made here",
        ),
        (
            flag("force_group_size", 1) != 1,
            "force_group_size (pairs of a reward model) is not supported",
        ),
        (
            flag("pad_mode", DatasetPadMode.NO_PADDING) != DatasetPadMode.NO_PADDING
            or not data["input_ids"].is_nested,
            "batches must be without padding (pad_mode=no_padding, jagged input_ids)",
        ),
        (
            data.get("routed_experts", None) is not None and not replays,
            "the batch has routed_experts, which verl's FSDP engine ignores (its Megatron and "
            "VeOmni engines replay them): set actor_rollout_ref.rollout."
            "enable_rollout_routing_replay=False; to replay routes on packed forests, call "
            "PrefixForest.from_sequences(..., routes=) and sequence_logprobs in a loop of your own",
        ),
        (
            not sees and any(shown_of(data)),
            "the batch has pictures (multi_modal_inputs), and the engine's model takes none: "
            "train on text alone, or with a vision checkpoint and the FSDP engines",
        ),
    ):
        if refused:
            raise UnsupportedError(f"{_PREFIX}{why}")
    _check_positions_are_indices(data["input_ids"], data["position_ids"], sees)


def check_step(
    data: TensorDict,
    loss_function: Any,
    forward_only: bool,
    sees: bool = False,
    serves_topk: bool = False,
    replays: bool = False,
) -> None:
    """`check_batch`, and for a step with a backward `check_loss`."""
    check_batch(data, sees, serves_topk, replays)
    if not forward_only:
        dynamic = tu.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=True)
        check_loss(loss_function, dynamic)


def check_loss(loss_function: Any, dynamic: bool) -> None:
    """Refuses losses of verl whose gradients depend on the cut into micro-batches.

    Args:
        loss_function: as an engine is given it, a partial of verl's with config=. Of others nothing
            is known.
        dynamic: micro-batches differ in size (use_dynamic_bsz=True).

    Raises:
        UnsupportedError: with the setting to change.
    """
    config: Any = getattr(loss_function, "keywords", {}).get("config")
    aggregation = getattr(config, "loss_agg_mode", None)
    if aggregation == "seq-mean-token-sum-norm" and config.loss_scale_factor is None:
        raise UnsupportedError(
            f"{_PREFIX}loss_agg_mode={aggregation} {_CUT}: it divides by the longest response of a "
            "micro-batch; set loss_scale_factor (data.max_response_length, for example)"
        )
    policy = getattr(config, "policy_loss", None)
    if policy is None:
        return
    mode = policy.get("loss_mode", "vanilla")
    # a mean over micro-batches of one size is the same mean however they are filled
    if mode in _CUT_MODES and (dynamic or mode != "geo_mean"):
        instead = "set use_dynamic_bsz=False, or " if mode == "geo_mean" else "take "
        raise UnsupportedError(
            f"{_PREFIX}policy_loss.loss_mode={mode} {_CUT}: it {_CUT_MODES[mode]}; {instead}"
            "another loss_mode"
        )
    correction = policy.get("rollout_correction", None) if mode == "bypass_mode" else None
    if correction is not None and all(
        (
            correction.get("loss_type", "ppo_clip") == "reinforce",
            correction.get("rollout_is", None) is not None,
            correction.get("rollout_is_batch_normalize", False),
        )
    ):
        raise UnsupportedError(
            f"{_PREFIX}rollout_correction.rollout_is_batch_normalize=True with bypass_mode {_CUT}: "
            "weights are divided by their mean over a micro-batch; set it to False"
        )


def _check_positions_are_indices(input_ids: Any, position_ids: Any, sees: bool) -> None:
    """In a forest a token's position is its index in its sequence, so it must be so here.

    Both jagged [B, n]; where the model takes pictures, the first of four rows may say it."""
    offsets = input_ids.offsets()
    starts = torch.repeat_interleave(offsets[:-1], offsets.diff())
    indices = torch.arange(len(starts), device=offsets.device) - starts
    positions = position_ids.values()
    if sees and len(positions) == 4 and positions.ndim == 2:
        positions = positions[0]
    if positions.shape != indices.shape or not torch.equal(positions, indices.to(positions)):
        raise UnsupportedError(
            f"{_PREFIX}position_ids must count 0, 1, 2, ... along every "
            "sequence (multi-dimensional and shifted positions are not supported)"
        )
