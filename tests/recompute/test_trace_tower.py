"""The memory of vision towers, as traced and as measured, and plans that count it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import prefixtree as pt
from prefixtree.models.tower import in_few_calls
from prefixtree.models.vision import PlacedPictures, tower_of
from prefixtree.recompute import forward
from prefixtree.recompute.layers import checkpoint_of_tower
from prefixtree.recompute.plan import RUN
from prefixtree.recompute.trace import LiveBytes
from tests.support.models import counted
from tests.support.picture_cases import (
    batch,
    build,
    errors,
    pictures_of,
    reference,
    run_packed,
    screenshots,
    tolerance,
)

_CPU = torch.device("cpu")


def _packed(pictures: pt.Pictures) -> pt.PackedForest:
    return pt.pack(pt.PrefixForest.from_sequences(pictures.sequences))


def _with_gradients(model: Any) -> Any:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def _known(model: Any) -> Any:
    return (x for p in model.parameters() for x in (p, p.grad) if x is not None)


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen2_5_vl"])
def test_a_run_takes_what_was_traced(model_type, trains):
    """The most bytes alive in a run of pictures and in its backward, beside features."""
    model = _with_gradients(build(model_type))
    tower = tower_of(model)
    if not trains:
        tower.requires_grad_(False)
    pictures = pictures_of(model, screenshots(6))
    placed = PlacedPictures(model, model, _packed(pictures), pictures).of()
    shown, grids = placed.inputs["pixel_values"], placed.inputs["image_grid_thw"]
    live = LiveBytes([shown, *_known(model)])
    run = checkpoint_of_tower(tower, "all")
    assert run is not None
    encode = in_few_calls(tower)
    with live:
        output = run(lambda x: encode(x, grids, tree_encodes=True), shown)
        features = [output.pooler_output, *(getattr(output, "deepstack_features", ()) or ())]
        del output
        size = sum(f.nbytes for f in features)
        most = live.restart() - size
        if trains:
            gradients = [torch.ones_like(f) for f in features]
            live.restart()
            torch.autograd.backward(features, gradients)
            most = live.restart() - 2 * size
    memory = forward.tower_memory_of(model, model, _CPU)
    assert memory.feature == size // len(features[0]) and memory.dtype == torch.float32
    print(f"{model_type}: measured {most}, traced {memory.run(len(shown)):.0f}")
    assert memory.run(len(shown)) == pytest.approx(most, rel=0.1)


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl", "gemma4", "glm4v"])
def test_auto_is_exact(model_type):
    run = run_packed(build(model_type), batch(model_type), recompute="auto")
    assert errors(run, reference(model_type)).largest < tolerance(model_type)


def test_as_many_pictures_at_once_as_fit(monkeypatch):
    """The most bytes that are alive in an update are those that the plan goes by."""
    peaks = []
    for pictures_at_once in (4, 8):
        model = _with_gradients(build("qwen3_vl"))
        pictures = pictures_of(model, screenshots(8))
        packed = _packed(pictures)
        largest = pt.plan_recomputation(model, packed, 1 << 40, pictures=pictures)
        assert largest.patches == RUN
        tower = forward.tower_memory_of(model, model, _CPU)
        held = 2 * 8 * 64 * tower.feature
        memory = forward.memory_of(model, model, _CPU)
        # gradients of the tower wait where it runs twice
        held += tower.gradients * (pictures_at_once < 8)
        wanted = int(held + memory.before * packed.num_tokens + tower.run(256 * pictures_at_once))
        # the lm_head's logits, of which half a GiB is planned with
        monkeypatch.setattr("prefixtree.recompute.plan._LOGITS", 1 << 19)
        monkeypatch.setattr(forward, "available_bytes", lambda device, n=wanted + 4096: n)
        # pixels are on the device as a forward plans
        shown = sum(p.pixels.nbytes for p in pictures.distinct)
        plan = pt.plan_recomputation(model, packed, wanted + 4096 + shown, pictures=pictures)
        assert plan.patches // 256 == pictures_at_once
        live = LiveBytes([*(p.pixels for p in pictures.distinct), *_known(model)])
        with live, counted(tower_of(model).blocks[:1]) as blocks:
            scores = pt.sequence_logprobs(model, packed, pictures=pictures, recompute="auto")
            torch.cat(scores.logprobs).sum().backward()
            assert blocks() == 2 * 8 // pictures_at_once
        peaks.append((live.restart() - shown, wanted))
    print(peaks)
    assert all(0.9 * wanted < peak < 1.01 * wanted for peak, wanted in peaks)


def test_a_picture_that_does_not_fit_is_named(monkeypatch):
    model = build("qwen3_vl")
    pictures = pictures_of(model, batch("qwen3_vl"))
    packed = _packed(pictures)
    with pytest.raises(torch.OutOfMemoryError, match=r"for picture 0 alone, .* with 32 patches"):
        pt.plan_recomputation(model, packed, 150_000, pictures=pictures)
    monkeypatch.setattr(forward, "available_bytes", lambda device: 0)
    with pytest.raises(torch.OutOfMemoryError, match="enough for 0 patches at once: give smaller"):
        pt.sequence_logprobs(model, packed, pictures=pictures, recompute="auto")
    eager = build("qwen3_vl", "eager")
    eager.set_attn_implementation({"": "prefixtree", "text_config": "prefixtree"})
    eager.config.vision_config._attn_implementation = "eager"
    with pytest.raises(pt.UnsupportedError, match="the square of a picture: give it sdpa"):
        pt.plan_recomputation(eager, packed, pictures=pictures)


def test_text_beside_pictures_needs_no_tower():
    model = build("qwen3_vl")
    pictures = pictures_of(model, batch("qwen3_vl"))
    text = pt.pack(pt.PrefixForest.from_sequences([pictures.sequences[8]]))
    both = (pt.plan_recomputation(model, text, 1 << 40, pictures=p) for p in (None, pictures))
    assert len(set(both)) == 1
    assert np.unique(pictures.sequences[8]).max() < 60
