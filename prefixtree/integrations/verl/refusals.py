"""What the verl engines refuse, before anything is computed: settings that are not verified to give
verl's own results on packed forests.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.utils.model import extract_multi_modal_inputs

from prefixtree.errors import UnsupportedError
from prefixtree.integrations.families import LIGER_LAYERS, check_config


def check_settings(model_config: Any, engine_config: Any) -> None:
    """Refuses configurations, as an engine is made.

    Args:
        model_config: verl's HFModelConfig. engine_config: its FSDPEngineConfig.

    Raises:
        UnsupportedError: with the setting to change.
    """
    hf_config = model_config.hf_config
    sequence_parallel = engine_config.ulysses_sequence_parallel_size
    for refused, why in (
        (
            sequence_parallel > 1,
            f"ulysses_sequence_parallel_size={sequence_parallel}: packed forests are not split "
            "over ranks yet; set it to 1 (packing lets more context into one GPU)",
        ),
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
            getattr(hf_config, "vision_config", None) is not None,
            f"{hf_config.model_type} takes images: verl gives such models attention functions of "
            "its own, which ignore the tree; use a text-only model",
        ),
    ):
        if refused:
            raise UnsupportedError(f'attn_implementation="prefixtree": {why}')
    check_config(hf_config, training=not engine_config.forward_only)


def check_batch(data: TensorDict) -> None:
    """Refuses batches, before they are split.

    Args:
        data: verl's batch; input_ids and position_ids jagged [B, n].

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
            flag("distillation_use_topk") or flag("distillation_only"),
            "distillation from the teacher's top-k needs whole logits, which are never made here",
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
            bool(extract_multi_modal_inputs(data.get("multi_modal_inputs", []))),
            "the batch holds images, whose placeholders would be shared whatever they show",
        ),
    ):
        if refused:
            raise UnsupportedError(f'attn_implementation="prefixtree": {why}')
    _check_positions(data["input_ids"], data["position_ids"])


def _check_positions(input_ids: Any, position_ids: Any) -> None:
    """In a forest a token's position is its depth, so it must be its index in its sequence.

    Both jagged [B, n]."""
    offsets = input_ids.offsets()
    starts = torch.repeat_interleave(offsets[:-1], offsets.diff())
    indices = torch.arange(len(starts), device=offsets.device) - starts
    positions = position_ids.values()
    if positions.shape != indices.shape or not torch.equal(positions, indices.to(positions)):
        raise UnsupportedError(
            'attn_implementation="prefixtree": position_ids must count 0, 1, 2, ... along every '
            "sequence (multi-dimensional and shifted positions are not supported)"
        )
