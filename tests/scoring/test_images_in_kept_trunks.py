"""Images where micro-batches keep their trunks: as each sequence alone, and red where a trunk or
a micro-batch leaves out the gradients of its images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from packaging import version
from torch import nn

import prefixtree as pt
from prefixtree.images import vision
from prefixtree.images.placements import place
from prefixtree.planning.micro_batches import batches_with_trunks
from prefixtree.planning.trunks import plan_trunks
from prefixtree.recompute.counted import LiveBytes
from prefixtree.scoring import kept_trunks as module
from tests.scoring.kept_cases import Forward64
from tests.scoring.test_trunk_modes import Memory
from tests.support.float64 import Float64
from tests.support.full import each_once, mostly
from tests.support.hybrid_configs import HYBRIDS
from tests.support.image_cases import (
    ADAPTED,
    IN_PARTS,
    NO_VIDEOS,
    Batch,
    Run,
    batch,
    build,
    clone,
    distance,
    errors,
    images_of,
    reference,
    run_alone,
    run_packed,
    screenshots,
    tolerance,
    videos,
)
from tests.support.models import TRANSFORMERS, adapted, counted
from tests.support.step_ranks import LIGHT

# two trunks with images, two micro-batches with others, and an image that a border cuts
MAX_TOKENS = 40


def _plan(images: pt.Images, max_tokens: int = MAX_TOKENS) -> pt.MicroBatchPlan:
    return pt.plan_micro_batches(images.sequences, max_tokens, trunks=True, import_cost=LIGHT)


def _parts_with_images(images: pt.Images) -> set[tuple[int, bool, str]]:
    """The parts of a plan with images of a modality, whether they are trunks, and this."""
    trunks = _plan(images)[0].trunks
    steps = trunks.on(torch.device("cpu"))
    placements, _ = place(steps.packed, images)
    return {
        (number, trunks.spans[number].is_trunk, images.distinct[n].modality)
        for number, part in enumerate(steps)
        for start, n in zip(placements.start, placements.number, strict=True)
        if np.isin(np.arange(images.distinct[n].run_tokens) + start, part.own_tokens).any()
    }


def _loss(logprobs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> Any:
    return sum((p * w.to(p.dtype)).sum() for p, w in zip(logprobs, weights, strict=True))


def _run(model: nn.Module, made: Batch, max_tokens: int = MAX_TOKENS, **options: Any) -> Run:
    """Scores and gradients of the sum over micro-batches."""
    model.zero_grad(set_to_none=True)
    images = images_of(model, made)
    plan = _plan(images, max_tokens)
    found: dict[int, torch.Tensor] = {}
    with pt.kept_trunks(model, plan[0], images=images, **options) as scored:
        for each, scores in scored:
            found |= dict(zip(each.sequence_indices.tolist(), scores.logprobs, strict=True))
            _loss(scores.logprobs, each.take(made.weights)).backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return Run([found[i].detach() for i in sorted(found)], gradients)


@pytest.mark.parametrize("model_type, kind", IN_PARTS)
def test_equals_each_sequence_alone(model_type, kind):
    if kind == "videos" and model_type in NO_VIDEOS:
        pytest.skip("videos are refused")
    if version.parse("5.17") > TRANSFORMERS and (model_type, kind) == ("qwen2_5_vl", "videos"):
        pytest.skip("this transformers takes seconds of images too")
    model, made = build(model_type), (batch if kind == "images" else videos)(model_type)
    with counted([vision.encoder_of(model)]) as calls:
        found = errors(_run(model, made), reference(model_type, kind))
        # once per part with images, images and videos apart; hybrids are cut elsewhere
        expected = _parts_with_images(images_of(model, made))
        assert model_type in HYBRIDS or calls() == len(expected)
        assert {is_trunk for _, is_trunk, _ in expected} == {True, False}
    print(f"{model_type}, {kind}: {found}")
    assert found.largest < tolerance(model_type)


@pytest.mark.parametrize(
    ("model_type", "kind", "max_tokens", "again"),
    mostly(
        [
            ("qwen3_vl", "images", MAX_TOKENS, False),
            ("qwen3_vl", "videos", 30, True),
            ("qwen2_5_vl", "images", 20, True),
            ("glm4v", "images", MAX_TOKENS, False),
            ("gemma4", "images", MAX_TOKENS, False),
        ],
        [("qwen3_vl", "videos", 30, True), ("gemma4", "images", MAX_TOKENS, False)],
    ),
)
def test_float64_is_exact(model_type, kind, max_tokens, again, monkeypatch):
    made = (batch if kind == "images" else videos)(model_type)
    with Float64():
        expected = run_alone(build(model_type, "eager", torch.float64), made)
        model = pt.prepare(build(model_type, dtype=torch.float64))
    monkeypatch.setattr(module, "ModelForward", Forward64)
    mode = "again" if again else None
    found = errors(_run(model, made, max_tokens, recompute_trunks=mode), expected)
    print(f"{model_type}, {kind}: {found}")
    assert found.logprob < 1e-13 and found.largest < 1e-12


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("targets", "again"), mostly(zip(ADAPTED, (False, True), strict=True), [(ADAPTED[0], False)])
)
def test_adapters_over_frozen_text(targets, again):
    """What a micro-batch without images returns to a trunk's goes on to the vision encoder."""
    model, made = adapted(build("qwen3_vl"), *targets), batch("qwen3_vl")
    expected = run_packed(model, made)
    found = _run(model, made, recompute_trunks="again" if again else None)
    assert distance(found.gradients, expected.gradients) < 5e-5


@pytest.mark.full
@pytest.mark.parametrize("share", [0, 0.2, 1])
def test_auto_plans_the_encoder_too(share, monkeypatch):
    """The most bytes alive are those that were predicted, of a trunk with an image of 256 patches
    and three micro-batches of two others each; gradients are those of each sequence alone."""
    model, memory = build("qwen3_vl"), Memory(monkeypatch)
    made = _shared_screen(6)
    expected = run_alone(build("qwen3_vl", "eager"), made)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    images = images_of(model, made)
    forest = pt.PrefixForest.from_sequences(images.sequences)
    cost, members = pt.import_cost(model, "auto"), [np.arange(at, at + 2) for at in (0, 2, 4)]
    batches = batches_with_trunks(plan_trunks(forest, 10**6, cost, members))
    assert batches.trunks.stats.trunks == 1

    def counted_bytes() -> int:
        known = [x for p in model.parameters() for x in (p, p.grad)]
        live = LiveBytes([*(p.pixels for p in images.distinct), *known])
        most = 0
        options = {"recompute": "auto", "chunk_size": 64}
        with (
            live,
            counted(vision.encoder_of(model).blocks[:1]) as blocks,
            pt.kept_trunks(model, batches, images=images, **options) as scored,
        ):
            for each, scores in scored:
                _loss(scores.logprobs, each.take(made.weights)).backward()
                most = max(most, live.most)
                del scores
            ran.append(blocks())
        return max(most, live.most)

    ran: list[int] = []
    counted_bytes()
    memory.left = memory.share(share)
    model.zero_grad(set_to_none=False)
    measured, plan = counted_bytes(), memory.plans[-1]
    print(f"{share}: {plan}, predicted / counted: {plan.peak_bytes / measured:.3f}")
    # images that are kept are a run, those of a part; others are computed again one by one
    of_trunk, *others = plan.of_part
    if share == 1:
        assert not plan.runs_again and ran[-1] == len(plan.of_part)
        assert of_trunk.kept == 256 and {part.kept for part in others} == {512}
    elif share == 0:
        # the trunk runs again, right before its backward
        assert plan.runs_again and {part.kept for part in others} == {0}
        assert ran[-1] == 2 + 2 * 2 * len(others)
    # a run is planned to the last patch that fits, and images are whole
    assert 0.8 * plan.peak_bytes < measured < 1.03 * plan.peak_bytes <= 1.03 * memory.left
    assert share or any(set(part.modes) != {"nothing"} for part in plan.of_part)
    got = {n: p.grad for n, p in model.named_parameters() if n in expected.gradients}
    assert distance(got, expected.gradients) < 5e-5


def _shared_screen(count: int) -> Batch:
    """As many sequences with two screens of 256 patches each, of which the first is the same."""
    one = screenshots(count + 1)
    screen, pixels = one.sequences[0][:-2], one.arguments["pixel_values"].split(256)
    rows = [np.concatenate([screen, row]) for row in one.sequences[1:]]
    shown = torch.cat([x for own in pixels[1:] for x in (pixels[0], own)])
    grids = one.arguments["image_grid_thw"][:1].expand(2 * count, -1)
    weights = [torch.ones(len(row) - 1, dtype=torch.float64) for row in rows]
    return Batch(rows, {"pixel_values": shown, "image_grid_thw": grids}, weights)


# ---- red -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "of_trunk"), each_once(["qwen3_vl", "gemma4"], [True, False])
)
def test_features_without_gradients_are_seen(model_type, of_trunk, monkeypatch):
    """Those of the first trunk, whose graph waits, or of the last micro-batch."""
    model, made = build(model_type), batch(model_type)
    trunks = _plan(images_of(model, made))[0].trunks
    steps = trunks.on(torch.device("cpu"))
    part = 0 if of_trunk else len(steps) - 1
    assert trunks.spans[part].is_trunk == of_trunk
    lost = steps[part].own_tokens[0]
    of = vision.PlacedImages.forward

    def without(self: Any, own: Any = None) -> Any:
        found = of(self, own)
        if lost in own:
            assert found.encodings
            for encoding in found.encodings:
                repeated = encoding._repeated
                object.__setattr__(
                    encoding, "_repeated", lambda x, repeated=repeated: repeated(x).detach()
                )
        return found

    monkeypatch.setattr(vision.PlacedImages, "forward", without)
    options = {"recompute": "auto"} if model_type == "qwen3_vl" else {}
    wrong = errors(_run(model, made, **options), reference(model_type))
    print(wrong)
    assert wrong.logprob < tolerance(model_type) and wrong.encoder > (0.5 if of_trunk else 0.05)


# ---- refused -------------------------------------------------------------------------------------


def test_images_of_another_model():
    model, made = build("qwen3_vl"), batch("qwen3_vl")
    plan, other = _plan(images_of(model, made)), images_of(build("qwen2_5_vl"), made)
    for given, message in ((other, "were made for qwen2_5_vl"), (None, "beyond the model's voc")):
        with (
            pytest.raises(ValueError, match=message),
            pt.kept_trunks(model, plan[0], images=given),
        ):
            pass


def test_pixels_that_change_within_the_block():
    model, made = build("qwen3_vl"), batch("qwen3_vl")
    made = clone(made, pixel_values=made.arguments["pixel_values"].clone())
    images = images_of(model, made)
    with (
        pytest.raises(RuntimeError, match=r"the pixels of image 0 .*within the block"),
        pt.kept_trunks(model, _plan(images)[0], images=images) as scored,
    ):
        for _, scores in scored:
            torch.cat(scores.logprobs).sum().backward()
            made.arguments["pixel_values"].zero_()
