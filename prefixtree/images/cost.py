"""The cost of a token in the vision encoder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForImageTextToText

from prefixtree.errors import UnsupportedError
from prefixtree.images.inputs import ImageRule
from prefixtree.planning.costs import CostModel


def with_images(of_text: CostModel, config: Any, passes: int) -> CostModel:
    """Adds FLOPs of image tokens to a text model's cost, for updates worth so many forwards."""
    try:
        first = ImageRule(config).first_id
    except UnsupportedError:
        return of_text
    return replace(of_text, image=passes * 2 * encoder_weights(config), first_image=first)


def encoder_weights(config: Any) -> int:
    """The linear weights that the patches of one placeholder meet in a vision encoder."""
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config).model
    encoder = getattr(model, "visual", None) or model.vision_tower
    vision = config.vision_config
    side = getattr(vision, "spatial_merge_size", None) or vision.pooling_kernel_size
    skipped = {id(m.weight) for m in encoder.modules() if isinstance(m, nn.Embedding)}
    met = 0
    for name, weight in encoder.named_parameters():
        *_, owner, last = name.split(".")
        is_linear = weight.ndim > 1 and "norm" not in owner and "position" not in last
        if is_linear and id(weight) not in skipped:
            # these modules see the patches of a placeholder as one row
            sees_all = "merger" in name or "downsample" in name
            met += weight.numel() * (1 if sees_all else side**2)
    return met
