"""Refuses images that a model would not run as it runs each sequence alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from prefixtree.errors import ForestError, Refusal, refuse
from prefixtree.images.images import Images
from prefixtree.images.inputs import check_served
from prefixtree.models.checks import runs_deepspeed
from prefixtree.models.families import check_noise, seed_of
from prefixtree.models.layers import groups_of, layers_of
from prefixtree.models.rope import fixed_lengths
from prefixtree.packing.layout import PackedForest


class Shows(NamedTuple):
    """A called model, transformers' model in it, a forest, and the images to show."""

    model: nn.Module
    causal_lm: Any
    packed: PackedForest
    images: Images


def runs_in_lockstep(model: nn.Module) -> bool:
    """Whether other ranks wait for this one in every layer, or in the backward."""
    return any(group.size() > 1 for group in groups_of(model))


def _compiles_others(shows: Shows) -> Any:
    """Finds the first compiled module that is no decoder layer, nor in one."""
    in_layers = {module for layer in layers_of(shows.causal_lm) for module in layer.modules()}
    for module in shows.model.modules():
        is_compiled = vars(module).get("_compiled_call_impl") or hasattr(module, "_orig_mod")
        if is_compiled and module not in in_layers:
            return {"kind": type(module).__name__}
    return None


def _waits_for_videos(shows: Shows) -> bool:
    has_videos = any(image.modality == "video" for image in shows.images.distinct)
    is_sharded = any(isinstance(module, FSDPModule) for module in shows.model.modules())
    return has_videos and is_sharded and runs_in_lockstep(shows.model)


def _rope_by_length(shows: Shows) -> Any:
    """Finds RoPE that counts tokens: positions of images are others."""
    fixed = fixed_lengths(shows.causal_lm.config.get_text_config())
    return fixed and {"kind": fixed[0][0]}


def _placeholder(shows: Shows) -> Any:
    """Finds a placeholder of a modality that is shown: equal ids may stand for other pixels."""
    tokens = shows.packed.forest.tokens
    for modality in {image.modality: None for image in shows.images.distinct}:
        token = shows.images.placeholders[modality]
        if tokens is not None and (tokens == token).any():
            return {"modality": modality, "token": token}
    return None


#: Refusals of options that do not go with images.
WITH_IMAGES = (
    Refusal(
        "routes",
        lambda shows: shows.packed.forest.routes is not None,
        "recorded routes of experts are not verified with images; make the forest without routes",
    ),
    Refusal(
        "shared dropout",
        lambda shows: seed_of(shows.causal_lm) is not None,
        "shared dropout is not verified with images, whose ids are others in other batches; set "
        "lora_dropout=0",
    ),
    Refusal(
        "DeepSpeed",
        lambda shows: runs_deepspeed(shows.model),
        "DeepSpeed is not verified with images; use DDP or FSDP2",
    ),
    Refusal(
        "FSDP1",
        lambda shows: any(isinstance(m, FullyShardedDataParallel) for m in shows.model.modules()),
        "FSDP1 is not verified with images; use FSDP2 (fully_shard) or DDP",
    ),
    Refusal(
        "compiled modules",
        _compiles_others,
        "torch.compile of {kind}, which is no decoder layer, is not verified with images; leave "
        "it out, and compile with compile_layers(model)",
    ),
    Refusal(
        "tensor or expert parallel",
        lambda shows: any(vars(m).get("_is_hooked") for m in shows.model.modules()),
        "tensor or expert parallelism is not verified with images; load the model without "
        "tp_plan and ep_size",
    ),
    Refusal(
        "videos under FSDP2",
        _waits_for_videos,
        "videos are not verified under FSDP2, where ranks with images alone would run the vision "
        "encoder less often; train on images alone, or use DDP",
    ),
    Refusal(
        "RoPE by length",
        _rope_by_length,
        "{kind} RoPE is not verified with images, whose positions are not numbers of tokens: train "
        'this model with attn_implementation="sdpa"',
    ),
    Refusal(
        "placeholders",
        _placeholder,
        "the sequences hold {modality}_token_id {token} beside images, and it would be shared "
        "whatever it shows: make the forest of images.sequences, where each image has an id",
    ),
)


def check_images(
    model: nn.Module, causal_lm: Any, packed: PackedForest, images: Any
) -> np.ndarray | None:
    """Refuses images that the model would not run as it runs each sequence alone.

    Returns int64 [T], the token ids that the model gets; None of a forest without ids.
    """
    if not isinstance(images, Images):
        raise TypeError(
            f"images must be a Images, got {type(images).__name__}; "
            "Images.from_batch(sequences, pixel_values, image_grid_thw, model.config) makes one"
        )
    config, text = causal_lm.config, causal_lm.config.get_text_config()
    check_served(config.model_type, text)
    made_for = images.model_type, images.placeholders
    is_for = config.model_type, {m: getattr(config, f"{m}_token_id") for m in made_for[1]}
    if made_for != is_for or images.first_id < text.vocab_size:
        raise ValueError(
            f"the images were made for {made_for[0]} with placeholders {made_for[1]} and ids "
            f"from {images.first_id} on, the model is {is_for[0]} with {is_for[1]} and a "
            f"vocabulary of {text.vocab_size}: give Images.from_batch this model's config"
        )
    if causal_lm.training:
        check_noise(config.vision_config, "vision_config")
    refuse(WITH_IMAGES, Shows(model, causal_lm, packed, images))
    tokens = packed.forest.tokens
    return None if tokens is None else images.with_placeholders(tokens)


def check_sequences(sequences: list[np.ndarray], images: Images) -> None:
    """Refuses images of other sequences than those of the batch, or in another order."""
    mend = (
        "images must be made of the sequences of this batch, in its order: make them "
        "(Images.from_batch) after whatever cuts, drops or shuffles rows"
    )
    lengths, expected = ([len(s) for s in rows] for rows in (images.sequences, sequences))
    if lengths != expected:
        raise ForestError(f"{mend}; expected sequences of {expected} tokens, got {lengths}")
    for i, (given, theirs) in enumerate(zip(sequences, images.sequences, strict=True)):
        # the batch has the processor's placeholders, or the ids of the images
        for at in np.flatnonzero((given != images.with_placeholders(theirs)) & (given != theirs)):
            raise ForestError(
                f"{mend}; token {at} of sequence {i} is {given[at]} in input_ids and {theirs[at]} "
                "in images.sequences"
            )
