"""The models that `verify` runs: found by transformers, built with an attention implementation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from prefixtree.errors import InputError, UnsupportedError
from prefixtree.hub import explain, load_config
from prefixtree.models.family_table import COMPRESSED_TYPES, INDEXED_BLOCKS, layer_types_of
from prefixtree.rollouts import Rollouts
from prefixtree.rollouts.image_messages import FIRST_IMAGE
from prefixtree.testing.reference import EAGER_BY_ROWS

_HALF = ("bfloat16", "float16")
_OF_VISION = {"prefixtree": "sdpa", EAGER_BY_ROWS: "eager"}
# layers that hand their choice only to eager's function
EAGER_ALONE = COMPRESSED_TYPES | {INDEXED_BLOCKS}


@dataclass(frozen=True)
class Setting:
    """The model to build and how to run it.

    Attributes:
        model: a folder of weights or a name on the Hugging Face hub, or a config.json for random
            weights.
        device: a torch device, or "auto": cuda if there is one.
        seed: of random weights and of the loss's weights.
        images: whether the rollouts hold images, for which the model has a vision encoder.
    """

    model: str
    dtype: str = "float32"
    device: str = "auto"
    seed: int = 0
    gradient_checkpointing: bool = False
    images: bool = False

    def resolved(self) -> Setting:
        """Replaces "auto" by the chosen device."""
        return replace(self, device=choose_device(self.device))


def choose_device(device: str) -> str:
    """Finds a torch device that can be used; "auto" is cuda if there is one, otherwise cpu."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "meta":
        raise InputError("--device meta: it holds no numbers; take cpu or cuda")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as problem:
        raise InputError(explain("--device", device, problem)) from None
    return device


def build(setting: Setting, attention: str) -> Any:
    """Builds the model with an attention implementation; equal weights every time."""
    try:
        return _build(setting, attention)
    except (UnsupportedError, InputError, torch.OutOfMemoryError):
        raise
    except Exception as problem:
        raise InputError(explain("--model", setting.model, problem)) from None


def build_as_trained(setting: Setting) -> Any:
    """Builds the model with the attention that trainers use without prefixtree.

    It is the first that transformers accepts (flash_attention_2 on a GPU in half precision, sdpa,
    eager), and stands in `model.config._attn_implementation`.
    """
    implementations = ["sdpa"]
    if setting.device.startswith("cuda") and setting.dtype in _HALF:
        implementations.insert(0, "flash_attention_2")
    for attention in implementations:
        try:
            return _build(setting, attention)
        except (ValueError, ImportError):
            # transformers refuses an implementation so, before it reads any weight
            continue
    return build(setting, "eager")


def _build(setting: Setting, attention: str) -> Any:
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )
    from transformers.utils import logging

    import prefixtree.integrations.transformers  # noqa: F401  registers "prefixtree"

    options: dict[str, Any] = {"dtype": getattr(torch, setting.dtype)}
    options["attn_implementation"] = attention
    config = load_config(setting.model)
    auto_class = AutoModelForCausalLM
    if setting.images or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        auto_class = AutoModelForImageTextToText
        # our own implementations are for the text model
        of_vision = _OF_VISION.get(attention, attention)
        of_parts = {"": attention, "text_config": attention, "vision_config": of_vision}
        options["attn_implementation"] = of_parts
    # also when weights are loaded, as missing ones are made up
    torch.manual_seed(setting.seed)
    logging.disable_progress_bar()
    if Path(setting.model).is_file():
        # the usual 0.02 leaves a small random model's attention uniform and its gradients
        # next to nothing, where a wrong mask or a wrong image would hardly show
        parts = [config.get_text_config()]
        if setting.images:
            parts.append(config.vision_config)
        for part in parts:
            for name in ("initializer_range", "init_std"):
                if (spread := getattr(part, name, None)) is not None:
                    setattr(part, name, max(spread, part.hidden_size**-0.5))
        model = auto_class.from_config(config, **options)
    else:
        try:
            model = auto_class.from_pretrained(setting.model, **options)
        except OSError as problem:
            file = Path(setting.model) / "config.json"
            if not file.is_file():
                raise
            raise OSError(f"{problem} {file} in the folder's place gives random weights") from None
    kinds = layer_types_of(model.config.get_text_config())
    if attention == EAGER_BY_ROWS and not EAGER_ALONE.isdisjoint(kinds):
        model.set_attn_implementation("eager")
    model.to(setting.device).eval()
    if setting.gradient_checkpointing:
        # transformers checkpoints only in training mode
        model.train()
        # renamed in transformers 5.23, where the old name warns
        if hasattr(model, "activation_checkpointing_enable"):
            model.activation_checkpointing_enable()
        else:
            model.gradient_checkpointing_enable()
    return model


def check_vocabulary(rollouts: Rollouts, config: Any, model: str) -> None:
    """Refuses token ids that the model's embedding lacks, by line, and other images' ids."""
    size = config.get_text_config().vocab_size
    if any(sequence.max() >= FIRST_IMAGE for sequence in rollouts.sequences):
        known = getattr(config, "image_token_id", None)
        if known != rollouts.placeholder:
            raise InputError(
                f"{rollouts.source}: holds images, for which the tokenizer writes the "
                f"placeholder {rollouts.placeholder}; {model} "
                + ("knows no images" if known is None else f"knows the placeholder {known}")
                + "; is it the model of this tokenizer?"
            )
        rollouts = replace(rollouts, sequences=[s[s < FIRST_IMAGE] for s in rollouts.sequences])
    for sequence, line in zip(rollouts.sequences, rollouts.lines, strict=True):
        if sequence.max(initial=0) >= size:
            raise InputError(
                f"{rollouts.source}:{line}: has the token id {sequence.max()}, but the vocabulary "
                f"of {model} ends at {size - 1}; is it the model these rollouts were tokenized for?"
            )
