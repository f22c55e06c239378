"""Images where a forest is computed in steps: as each sequence alone, also where a border cuts an
image, and red where a step leaves out its gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from packaging import version
from torch import nn

import prefixtree as pt
from prefixtree.images import vision
from prefixtree.images.placements import place
from prefixtree.models.layers import layers_of
from prefixtree.planning.steps import plan_steps
from prefixtree.scoring.part_runs import dummy_of
from tests.support.full import each_once, mostly
from tests.support.hybrid_configs import HYBRIDS
from tests.support.image_cases import (
    ADAPTED,
    IN_PARTS,
    NO_VIDEOS,
    batch,
    build,
    clone,
    distance,
    errors,
    images_of,
    reference,
    run_packed,
    tolerance,
    videos,
)
from tests.support.models import TRANSFORMERS, adapted, counted
from tests.support.step_ranks import LIGHT

OPTIONS: dict[str, Any] = {"max_step_tokens": 30, "import_cost": LIGHT}


def _encoder(model: Any) -> nn.Module:
    return vision.encoder_of(model)


def _borders(model: Any, made: Any) -> tuple[int, int]:
    """Steps, and images that a border cuts."""
    images = images_of(model, made)
    packed = pt.pack(pt.PrefixForest.from_sequences(images.sequences))
    steps = plan_steps(packed, 30, import_cost=LIGHT)
    of_token = np.empty(packed.num_tokens, int)
    for number, part in enumerate(steps):
        of_token[part.own_tokens] = number
    placements, _ = place(packed, images)
    runs = [
        of_token[start : start + images.distinct[n].run_tokens]
        for start, n in zip(placements.start, placements.number, strict=True)
    ]
    return len(steps), sum(len(set(run.tolist())) > 1 for run in runs)


@pytest.mark.parametrize("model_type, kind", IN_PARTS)
def test_equals_each_sequence_alone(model_type, kind):
    if kind == "videos" and model_type in NO_VIDEOS:
        pytest.skip("videos are refused")
    model, made = build(model_type), (batch if kind == "images" else videos)(model_type)
    if version.parse("5.17") > TRANSFORMERS and (model_type, kind) == ("qwen2_5_vl", "videos"):
        pytest.skip("this transformers takes seconds of images too")
    # hybrids are cut where their states are, which another plan says
    steps, cut = (4, 1) if model_type in HYBRIDS else _borders(model, made)
    with counted([_encoder(model)]) as calls:
        run = run_packed(model, made, **OPTIONS)
        # in both passes
        assert calls() >= 6
    found = errors(run, reference(model_type, kind))
    print(f"{model_type}, {kind}: {found}, {steps} steps, {cut} cut")
    assert steps > 3 and cut > 0 and found.largest < tolerance(model_type)


@pytest.mark.parametrize("model_type", mostly(["qwen3_vl", "qwen2_5_vl"], ["qwen3_vl"]))
def test_the_encoder_in_runs(model_type, monkeypatch):
    monkeypatch.setattr(vision, "RUN", 1)
    model = build(model_type)
    # each step keeps its last image
    layers = len(model.get_decoder().layers)
    recompute = pt.RecomputePlan(("all",) * layers, 0, patches=1, kept=40)
    run = run_packed(model, batch(model_type), recompute=recompute, **OPTIONS)
    assert errors(run, reference(model_type)).largest < tolerance(model_type)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("targets", [ADAPTED[0], pytest.param(ADAPTED[1], marks=pytest.mark.full)])
def test_adapters_over_frozen_text(targets):
    """What a step without images returns to one with some goes on to the vision encoder."""
    model, made = adapted(build("qwen3_vl"), *targets), batch("qwen3_vl")
    expected = run_packed(model, made)
    model.zero_grad(set_to_none=True)
    found = run_packed(model, made, **OPTIONS)
    assert distance(found.gradients, expected.gradients) < 5e-5


@pytest.mark.parametrize(
    ("of", "recompute"),
    each_once([("gemma4", "embed_vision"), ("qwen3_vl", "deepstack_merger_list.1")], [None, "all"]),
)
def test_what_turns_features_into_embeddings_trains_alone(of, recompute):
    """Below a last layer that trains too, so that steps without images have a graph at all."""
    model_type, part = of
    model, made = build(model_type), batch(model_type)
    last = layers_of(model)[-1]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part in name)
    last.requires_grad_(True)
    expected = run_packed(model, made)
    assert any(part in name for name in expected.gradients)
    model.zero_grad(set_to_none=True)
    found = run_packed(model, made, recompute=recompute, **OPTIONS)
    assert distance(found.gradients, expected.gradients) < 5e-5


@pytest.mark.parametrize("model_type", mostly(["qwen3_vl", "qwen2_5_vl", "gemma4"], ["qwen3_vl"]))
def test_a_step_without_gradients_of_its_images_is_seen(model_type, monkeypatch):
    """The first step's are those that the backward computes last."""
    of = vision.PlacedImages.forward

    def without(self: Any, own: Any = None) -> Any:
        found = of(self, own)
        if own is not None and 0 in own:
            for encoding in found.encodings:
                repeated = encoding._repeated
                object.__setattr__(
                    encoding, "_repeated", lambda x, repeated=repeated: repeated(x).detach()
                )
        return found

    monkeypatch.setattr(vision.PlacedImages, "forward", without)
    wrong = errors(
        run_packed(build(model_type), batch(model_type), **OPTIONS), reference(model_type)
    )
    assert wrong.logprob < tolerance(model_type) and wrong.encoder > 0.2


def test_a_dummy_is_a_token_that_the_model_knows():
    """Also where the forest begins with an image."""
    packed = pt.pack(pt.PrefixForest.from_sequences([[64, 64, 9, 5], [64, 64, 7]]))
    assert dummy_of(packed).input_ids.tolist() == [5]


def test_pixels_that_change_before_the_backward():
    model, made = build("qwen3_vl"), batch("qwen3_vl")
    made = clone(made, pixel_values=made.arguments["pixel_values"].clone())
    images = images_of(model, made)
    packed = pt.pack(pt.PrefixForest.from_sequences(images.sequences))
    scores = pt.sequence_logprobs(model, packed, images=images, **OPTIONS)
    made.arguments["pixel_values"].zero_()
    with pytest.raises(RuntimeError, match=r"the pixels of image 0 .*between a call with"):
        torch.cat(scores.logprobs).sum().backward()
