"""Images that are refused: of other sequences, of other models, or without what they need."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers.modeling_outputs import BaseModelOutputWithPooling

import prefixtree as pt
from prefixtree.images import vision as adapter
from prefixtree.images.placements import place
from prefixtree.models.families import forward_inputs
from tests.support.image_cases import (
    TREE,
    VOCABULARY,
    batch,
    build,
    images_for,
    images_of,
    run_packed,
    videos,
)
from tests.support.models import counted, enable_checkpointing, pack_sequences


@pytest.mark.parametrize("model_type", TREE)
def test_placeholders_and_ids_without_images(model_type):
    model, images = build(model_type), images_for(model_type)
    raw = pt.pack(pt.PrefixForest.from_sequences(batch(model_type).sequences))
    with pytest.raises(ValueError, match=r"id 66 is beyond .* of 64: .*logprobs\(images=\)"):
        pt.sequence_logprobs(model, pack_sequences(images.sequences))
    with pytest.raises(
        pt.UnsupportedError, match=r"hold image_token_id 60 beside .* images.sequences"
    ):
        pt.sequence_logprobs(model, raw, images=images)


def _padded(rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
    ids = [torch.as_tensor(row) for row in rows]
    ones = [torch.ones_like(row) for row in ids]
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(ids, batch_first=True), pad(ones, batch_first=True)


def test_images_of_the_rows_of_a_batch():
    """Rows that are others now are refused, whatever their lengths."""
    model, images, made = build("qwen3_vl"), images_for("qwen3_vl"), batch("qwen3_vl")
    with torch.no_grad():
        expected = pt.sequence_logprobs(
            model, pack_sequences(images.sequences), images=images
        ).logprobs
        # the processor's ids, and those of images
        for rows in (made.sequences, images.sequences):
            found = pt.batch_logprobs(model, *_padded(rows), images=images).logprobs
            for row, alone in zip(found, expected, strict=True):
                assert torch.equal(row[1 : 1 + len(alone)], alone)
    for kind in (made.sequences, images.sequences):
        wrong = [row.copy() for row in kind]
        wrong[7][-1] += 1
        with pytest.raises(pt.ForestError, match=r"in its order: make them .* after .*; token \d+"):
            pt.batch_logprobs(model, *_padded(wrong), images=images)
    with pytest.raises(pt.ForestError, match=r"in its order: .* expected sequences of"):
        pt.batch_logprobs(model, *_padded(made.sequences[1:]), images=images)


def test_images_of_another_batch():
    """The same numbers of images and sizes, behind other tokens; what begins as a sequence of
    theirs is served."""
    model, images = build("qwen3_vl"), images_for("qwen3_vl")
    cut = [row[:-2] for row in images.sequences]
    pt.sequence_logprobs(model, pt.pack(pt.PrefixForest.from_sequences(cut)), images=images)
    moved = [np.where(row < 60, row ^ 1, row) for row in images.sequences]
    with pytest.raises(pt.ForestError, match=r"token \d+ \(id \d+\) of sequence \d+ shows image 0"):
        pt.sequence_logprobs(model, pt.pack(pt.PrefixForest.from_sequences(moved)), images=images)


def test_a_forward_with_images_is_refused():
    """A bare call shares placeholders whatever they show."""
    for model_type in TREE:
        model, images = build(model_type), images_for(model_type)
        packed = pack_sequences(images.sequences)
        numbers = place(packed, images)[0].number.tolist()
        pixels = adapter.alone_inputs(images, packed.input_ids.numpy(), numbers)
        del pixels["mm_token_type_ids"]
        with pytest.raises(pt.UnsupportedError, match=r"scored with sequence_logprobs\(model, pac"):
            model(**forward_inputs(packed, model) | pixels)


def test_images_of_others_are_refused():
    model, images = build("qwen3_vl"), images_for("qwen3_vl")
    with pytest.raises(TypeError, match="images must be a Images, got dict"):
        pt.sequence_logprobs(model, pack_sequences(images.sequences), images={})
    with pytest.raises(ValueError, match="were made for qwen2_5_vl with placeholders"):
        others = images_for("qwen2_5_vl")
        pt.sequence_logprobs(model, pack_sequences(others.sequences), images=others)
    larger = build("qwen3_vl")
    larger.resize_token_embeddings(80)
    with pytest.raises(ValueError, match=r"ids from 64 on, the model .* vocabulary of 80"):
        pt.sequence_logprobs(larger, pack_sequences(images.sequences), images=images)
    few = pt.Images.from_batch([[1, 2]], None, None, model.config)
    with pytest.raises(pt.ForestError, match=r"hold image 2 .* and there are 0"):
        pt.sequence_logprobs(model, pack_sequences(images.sequences), images=few)
    for cut in (8, 10):
        forest = pt.PrefixForest.from_sequences([images.sequences[0][:cut]])
        with pytest.raises(pt.ForestError, match="cut inside an image"):
            pt.sequence_logprobs(model, pt.pack(forest), images=images)
    with pytest.raises(pt.UnsupportedError, match="see the later tokens"):
        both = build("gemma4")
        both.config.text_config.use_bidirectional_attention = "vision"
        gemma = images_for("gemma4")
        pt.sequence_logprobs(both, pack_sequences(gemma.sequences), images=gemma)


def test_what_is_not_verified_is_refused():
    model, images = build("qwen3_vl"), images_for("qwen3_vl")
    packed = pack_sequences(images.sequences)

    def refused(match: str, model: Any = model, **options: Any) -> None:
        with pytest.raises(pt.UnsupportedError, match=match):
            pt.sequence_logprobs(model, packed, images=images, **options)

    for outside in ("visual.blocks.0", "language_model", "language_model.norm"):
        compiled = build("qwen3_vl")
        compiled.model.get_submodule(outside).compile()
        refused(r"compile of Qwen3VL\w+, which is no decoder layer, is not", compiled)
    noisy = build("qwen3_vl")
    noisy.config.vision_config.attention_dropout = 0.1
    refused("vision_config.attention_dropout is 0.1", noisy)
    patched = build("qwen3_vl")
    patched.model.visual.forward = lambda pixels, **kwargs: torch.zeros(20, 64)
    refused("and got Tensor", patched)
    idle = build("qwen3_vl")
    none = BaseModelOutputWithPooling(pooler_output=[torch.zeros(44, 64)])
    none.deepstack_features = []
    idle.model.get_image_features = lambda *args, **kwargs: none
    refused("this one called it 1 times less", idle)


def test_a_frame_that_is_missing():
    model = build("qwen3_vl")
    made = videos("qwen3_vl")
    images = images_of(model, made)
    row = images.sequences[0]
    ends = np.flatnonzero((row[1:] < VOCABULARY) & (row[:-1] >= VOCABULARY)) + 1
    forest = pt.PrefixForest.from_sequences([row[: ends[1]]])
    with pytest.raises(pt.ForestError, match="holds 2 of the 3 frames of video 0"):
        pt.sequence_logprobs(model, pt.pack(forest), images=images)


def test_counted_calls_of_the_encoder():
    """Checkpointed blocks of the vision encoder run again, the vision encoder itself does not."""
    model = build("qwen3_vl")
    enable_checkpointing(model, use_reentrant=False)
    encoder = model.model.visual
    with counted([encoder]) as encoders, counted([encoder.blocks[0].attn]) as attentions:
        run_packed(model, batch("qwen3_vl"))
        assert encoders() == 1 and attentions() == 2
