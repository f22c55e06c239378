"""The memory of vision encoders, as a probe tells it and as it is counted, and plans with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import prefixtree as pt
from prefixtree.images import vision
from prefixtree.images.encoder import EncoderShape, in_few_calls
from prefixtree.images.vision import PlacedImages, encoder_of
from prefixtree.planning.trunks import Span
from prefixtree.recompute import choose, image_work
from prefixtree.recompute.counted import LiveBytes
from prefixtree.recompute.image_work import RUN, ImageWork
from prefixtree.recompute.layers import checkpoint_of_encoder
from prefixtree.recompute.memory import EncoderMemory
from prefixtree.recompute.plan import (
    PartWork,
    Work,
    peaks_of,
    place_of,
    plan_for,
    recomputed_by,
    spare_bytes,
)
from prefixtree.recompute.trunk_modes import plan_kept
from tests.recompute.test_recompute import memory_of
from tests.support.full import each_once, mostly
from tests.support.hooks import inner, limit
from tests.support.image_cases import (
    batch,
    build,
    errors,
    images_of,
    reference,
    run_packed,
    screenshots,
    tolerance,
    videos,
)
from tests.support.models import adapted, counted

_CPU = torch.device("cpu")


def _packed(images: pt.Images) -> pt.PackedForest:
    return pt.pack(pt.PrefixForest.from_sequences(images.sequences))


def _with_gradients(model: Any) -> Any:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def _known(model: Any) -> Any:
    return (x for p in model.parameters() for x in (p, p.grad) if x is not None)


@pytest.mark.parametrize(
    ("model_type", "trains"), each_once(["qwen3_vl", "qwen2_5_vl"], [True, False])
)
def test_a_run_takes_what_was_probed(model_type, trains):
    """The most bytes alive in a run of images and in its backward, beside features."""
    model = _with_gradients(build(model_type))
    encoder = encoder_of(model)
    if not trains:
        encoder.requires_grad_(False)
    images = images_of(model, screenshots(6))
    placed = PlacedImages(model, model, _packed(images), images).forward()
    shown, grids = placed.inputs["pixel_values"], placed.inputs["image_grid_thw"]
    live = LiveBytes([shown, *_known(model)])
    run = checkpoint_of_encoder(encoder, "all")
    assert run is not None
    encode = in_few_calls(encoder)
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
    memory = choose.encoder_memory_of(model, model, _CPU)
    assert memory.feature == size // len(features[0]) and memory.dtype == torch.float32
    print(f"{model_type}: measured {most}, probed {memory.run(len(shown)):.0f}")
    assert memory.run(len(shown)) == pytest.approx(most, rel=0.1)


@pytest.mark.parametrize("model_type", mostly(["qwen2_5_vl", "gemma4", "glm4v"], {"qwen2_5_vl"}))
def test_auto_is_exact(model_type):
    run = run_packed(build(model_type), batch(model_type), recompute="auto")
    assert errors(run, reference(model_type)).largest < tolerance(model_type)


@pytest.mark.full
def test_what_was_planned_without_gradients_says_what_training_takes():
    """What was probed is kept, and without gradients a vision encoder keeps nothing."""
    model = build("qwen3_vl")
    images = images_of(model, screenshots(6))
    packed = _packed(images)
    plans = []
    # of inference tensors a probe would fail
    for context in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
        model = build("qwen3_vl")
        with context:
            plans.append(pt.plan_recomputation(model, packed, 1 << 40, images=images))
    assert plans[0].kept == 6 * 256 and len(set(plans)) == 1


def test_the_encoder_keeps_what_fits(monkeypatch):
    """In memory from the least on: the most bytes that are alive in an update are those of the
    plan, images run as often as it says, and gradients stay."""
    # runs of two images
    for module in (vision, image_work):
        monkeypatch.setattr(module, "RUN", 512)
    limit(monkeypatch, "runs of images", 512)
    # chunks of logits are as small as the model
    limit(monkeypatch, "logits of plans", 1 << 16)
    model = build("qwen3_vl")
    images = images_of(model, screenshots(8))
    packed = _packed(images)

    def planned(memory: float) -> Any:
        return pt.plan_recomputation(model, packed, int(memory), images=images)

    least, most = 0, planned(1 << 40).peak_bytes
    while most - least > 4096:
        middle = (least + most) // 2
        try:
            planned(middle)
            most = middle
        except torch.OutOfMemoryError:
            least = middle
    least, most = most, planned(1 << 40).peak_bytes
    seen, expected = [], None
    for share in (0, 0.2, 0.4, 0.6, 0.8, 1):
        memory = least + share * (most - least) + 1
        plan = planned(memory)
        assert plan.peak_bytes <= memory
        _with_gradients(model)
        live = LiveBytes([*(p.pixels for p in images.distinct), *_known(model)])
        with live, counted(encoder_of(model).blocks[:1]) as blocks:
            scores = pt.sequence_logprobs(model, packed, images=images, recompute=plan)
            torch.cat(scores.logprobs).sum().backward()
            peak = live.restart()
        again, kept = EncoderShape([256] * 8, 0).runs(plan.patches, plan.kept)
        assert blocks() == 2 * len(again) + len(kept)
        print(f"{plan}: planned {plan.peak_bytes:,}, counted {peak:,}")
        # of few tokens layers take less than was planned
        assert 0.85 * plan.peak_bytes < peak < 1.01 * plan.peak_bytes
        found = torch.cat([p.grad.flatten() for p in model.parameters()])
        expected = found if expected is None else expected
        assert (found - expected).norm() < 1e-5 * expected.norm()
        seen.append(plan.kept)
    assert seen[0] == 0 and seen[-1] == 2048 and seen == sorted(seen) and len(set(seen)) > 3
    assert "; the vision encoder keeps 2,048 patches; " in str(plan)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.floats(0, 1),
    st.sampled_from([1, 1 << 10, 1 << 14]),
    st.booleans(),
)
def test_the_plan_computes_least_again(sizes, share, unit, with_spare):
    """Of all plans of layers and all numbers of last images that fit."""
    memory = memory_of([[(1, 8), (3, 6), (9, 2)], [(1, 5), (2, 4), (4, 9)]], 3, unit)
    encoder = EncoderMemory(
        5.0 * unit, 7.0, 2, torch.float32, 11 * unit, (4.0 * unit, 5.0), 40.0, 2.0
    )
    images = ImageWork(dict(enumerate(sizes)), 9, 100)
    work = Work(pt.PrefixForest.from_parents([-1], [30]), 1, False, images)
    peaks, costs = peaks_of(memory, work), recomputed_by(memory, work)
    plans = []
    for first in range(len(sizes) + 1):
        again, kept = sizes[:first], sum(sizes[first:])
        # those that are kept are a run, whose backward is the first
        waiting = encoder.gradients if again and kept else 0
        last = encoder.run(kept) + waiting if kept else 0.0
        if again:
            run = encoder.run(sum(again)) + waiting
            if not kept and len(again) > 1:
                run = min(run, encoder.run(max(again)) + encoder.gradients)
            last = max(last, run)
        spare = spare_bytes(memory, work, with_spare)
        free = np.max(spare) if kept else spare
        last += memory.before * 30 + (free if kept else 0)
        of_layers = peaks + (encoder.kept(kept) if kept else 0) + free
        needs = np.maximum(of_layers, last) + images.held(encoder)
        cost = costs + sum(map(encoder.again, again))
        plans += zip(needs.flat, cost.flat, strict=True)
    least, most = (f(need for need, _ in plans if np.isfinite(need)) for f in (min, max))
    available = least + share * (most - least) + 1
    plan = plan_for(memory, work, available, encoder, with_spare=with_spare)
    of_encoder, _ = EncoderShape(sizes, 0).runs(RUN, plan.kept)
    found = costs[place_of(plan)] + sum(
        encoder.again(x) for x in sizes[: (of_encoder or [(0, 0)])[-1][1]]
    )
    assert found == pytest.approx(min(cost for need, cost in plans if need <= available))
    assert plan.peak_bytes <= available + 1


@pytest.mark.parametrize("kept_trunks", [False, True])
def test_an_encoder_that_keeps_images_leaves_what_is_to_spare(monkeypatch, kept_trunks):
    """Runs of the images that it computes again do not fill it."""
    limit(monkeypatch, "logits of plans", 0)
    gib = 1 << 30
    memory = memory_of([[(1, 8), (3, 6), (9, 2)]] * 4, 3, 1 << 22)
    held = (0.9e6, 0.0)
    encoder = EncoderMemory(1e6, 0.0, 2, torch.bfloat16, gib, held, 4e8, 1e5)
    images = ImageWork(dict.fromkeys(range(16), 4096), 9, 100)
    work = Work(pt.PrefixForest.from_parents([-1], [30]), 1, False, images)
    part = PartWork(work.runs, 0, 1, False, images=images)
    spare, several = float(np.max(spare_bytes(memory, work, True))), 0
    for available in range(12 * gib, 64 * gib, 4 * gib):
        if kept_trunks:
            parts = [part], [Span(0, 0, False)]
            (plan,) = plan_kept(memory, *parts, available, encoder=encoder, with_spare=True).of_part
        else:
            plan = plan_for(memory, work, available, encoder, with_spare=True)
        assert plan.peak_bytes <= available - (spare if plan.kept else 0.0)
        again, kept = EncoderShape([4096] * 16, 0).runs(plan.patches, plan.kept)
        several += len(again) > 1 and len(kept) > 0
    assert several > 3


@pytest.mark.parametrize("model_type", mostly(["qwen3_vl", "qwen2_5_vl"], ["qwen3_vl"]))
def test_what_an_encoder_keeps_is_what_was_probed(model_type):
    model = _with_gradients(build(model_type))
    images = images_of(model, screenshots(6))
    packed, held = _packed(images), []
    plan = pt.plan_recomputation(model, packed, 1 << 40, images=images)
    for kept in (0, 512, 6 * 256):
        live = LiveBytes([*(p.pixels for p in images.distinct), *_known(model)])
        with live:
            of_plan = replace(plan, kept=kept)
            scores = pt.sequence_logprobs(model, packed, images=images, recompute=of_plan)
            held.append(live.bytes)
        del scores
    encoder = choose.encoder_memory_of(model, model, _CPU)
    for bytes_, kept in zip(held[1:], (512, 6 * 256), strict=True):
        assert bytes_ - held[0] == pytest.approx(encoder.kept(kept), rel=0.05)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_encoder_that_does_not_train_has_nothing_to_keep():
    """As adapters leave it: its runs fit, and the memory is the text's."""
    model = adapted(build("qwen3_vl"), "q_proj")
    model.base_model.model.model.visual.requires_grad_(False)
    images = images_of(model, screenshots(6))
    packed = _packed(images)
    much = pt.plan_recomputation(model, packed, 1 << 40, images=images)
    less = pt.plan_recomputation(model, packed, much.peak_bytes - 100_000, images=images)
    assert much.kept == less.kept == 0 and "the vision encoder keeps 0 patches" in str(much)
    base = model.get_base_model()
    frozen = choose.encoder_memory_of(model, base, _CPU)
    encoder_of(base).requires_grad_(True)
    trained = choose.encoder_memory_of(model, base, _CPU)
    # a trunk that runs again pays for it
    assert frozen.again(64) == trained.again(64) > 0 and not frozen.may_keep
    assert set(much.modes) == {"nothing"} != set(less.modes)


def test_frames_of_a_video_attend_alone():
    """Its products as they are counted in a forward, against those that plans expect."""
    model = build("qwen3_vl")
    made = videos("qwen3_vl")
    images = images_of(model, made)
    placed = PlacedImages(model, model, _packed(images), images)
    work = ImageWork.of(placed.placements, images, torch.float32, moved=False)
    encoder = choose.encoder_memory_of(model, model, _CPU)
    assert work is not None and any(count > 1 for count in work.frames.values())
    encode = in_few_calls(encoder_of(model))
    for number, patches in work.patches.items():
        shown, frames = images.distinct[number], work.frames.get(number, 1)
        products = inner("work of a vision encoder")(patches // frames)
        with torch.no_grad(), products:
            encode(shown.pixels, shown.grid[None], tree_encodes=True)
        expected = products.products + products.pairs
        assert encoder.again(patches, frames) == pytest.approx(expected, rel=1e-6)
    none_kept = work.choices(encoder, 4)[0]
    of_each = [encoder.again(n, work.frames.get(at, 1)) for at, n in work.patches.items()]
    assert none_kept.again == sum(of_each)


def test_an_image_that_does_not_fit_is_named(monkeypatch):
    model = build("qwen3_vl")
    images = images_of(model, batch("qwen3_vl"))
    packed = _packed(images)
    with pytest.raises(torch.OutOfMemoryError, match=r"for image 0 alone, .* with 32 patches"):
        pt.plan_recomputation(model, packed, 150_000, images=images)
    monkeypatch.setattr(choose, "available_bytes", lambda device: 0)
    with pytest.raises(torch.OutOfMemoryError, match="enough for 0 patches at once: give smaller"):
        pt.sequence_logprobs(model, packed, images=images, recompute="auto")
    eager = build("qwen3_vl", "eager")
    eager.set_attn_implementation({"": "prefixtree", "text_config": "prefixtree"})
    eager.config.vision_config._attn_implementation = "eager"
    with pytest.raises(pt.UnsupportedError, match="the square of an image: give it sdpa"):
        pt.plan_recomputation(eager, packed, images=images)


def test_text_beside_images_needs_no_encoder():
    model = build("qwen3_vl")
    images = images_of(model, batch("qwen3_vl"))
    text = pt.pack(pt.PrefixForest.from_sequences([images.sequences[8]]))
    both = (pt.plan_recomputation(model, text, 1 << 40, images=p) for p in (None, images))
    assert len(set(both)) == 1
    assert np.unique(images.sequences[8]).max() < 60


def test_layers_are_measured_beside_images():
    """The first micro-batch and the next one: the same numbers, and what was planned is taken."""
    model = _with_gradients(build("qwen3_vl"))
    images = images_of(model, screenshots(4))
    packed, masks = _packed(images), [np.arange(n) >= n - 4 for n in map(len, images.sequences)]
    known, found = [*(p.pixels for p in images.distinct), *_known(model)], []
    for _ in range(2):
        live = LiveBytes(known)
        with live:
            options = {"images": images, "loss_mask": masks, "recompute": "auto"}
            scores = pt.sequence_logprobs(model, packed, **options)
            torch.cat(scores.logprobs).sum().backward()
        found.append(torch.cat(scores.logprobs).detach())
        del scores
    assert torch.equal(*found)
    learnt = choose.learnt_so_far(model, _CPU)
    assert learnt.knows(("all",)) and learnt.margin == 0
