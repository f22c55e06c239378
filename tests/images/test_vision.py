"""Images on packed forests: as each sequence alone, the vision encoder's gradients too, and red
where an image, its place, its positions or its gradient are another's.

The replicated side: `tests.support.image_cases`.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from packaging import version
from peft import LoraConfig, get_peft_model

import prefixtree as pt
from prefixtree.images import vision as adapter
from prefixtree.images.placements import place
from prefixtree.testing import compare
from prefixtree.testing.reference import EAGER_BY_ROWS
from prefixtree.testing.verify import random_objective
from tests.support.float64 import Float64
from tests.support.full import in_turn, mostly
from tests.support.hooks import put, wrap
from tests.support.image_cases import (
    FAMILIES,
    IMAGE,
    NO_VIDEOS,
    START,
    TREE,
    VIDEO,
    Batch,
    Run,
    batch,
    build,
    clone,
    distance,
    errors,
    finished,
    images_for,
    images_of,
    random_weights,
    reference,
    run_alone,
    run_forward,
    run_packed,
    tolerance,
    videos,
)
from tests.support.models import (
    ENCODERS,
    TRANSFORMERS,
    counted,
    enable_checkpointing,
    pack_sequences,
)

# as many as ways to run them in turn
FIRST = [case.values[0] for case in FAMILIES[:4]]
WITH_VIDEOS = [case for case in FAMILIES if case.values[0] not in NO_VIDEOS]


# ---- exact ---------------------------------------------------------------------------------------


def _all_with(families, kind):
    return [pytest.param(*case.values, kind, marks=case.marks) for case in families]


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [
        *mostly(_all_with(FAMILIES, "images"), (*TREE, "qwen3_5")),
        *mostly(_all_with(WITH_VIDEOS, "videos"), ["qwen3_vl"]),
    ],
)
def test_float64_is_exact(model_type, kind, record_property):
    """Log-probabilities, and all gradients of text and vision encoder, none of them zero."""
    made = made_of(model_type, kind)
    with Float64():
        expected = run_alone(build(model_type, "eager", torch.float64), made)
        run = run_forward(build(model_type, dtype=torch.float64), made)
    assert all(float(g.norm()) > 0 for g in expected.gradients.values())
    assert any(n.startswith(ENCODERS) for n in expected.gradients)
    assert len(expected.gradients) == len(list(build(model_type).named_parameters()))
    found = errors(run, expected)
    print(f"{model_type}, {kind}, float64: {found}")
    record_property("float64", f"{found.logprob:.1e} {found.text:.1e} {found.encoder:.1e}")
    assert found.largest < 1e-12


def made_of(model_type: str, kind: str) -> Batch:
    if kind == "images":
        return batch(model_type)
    if version.parse("5.17") > TRANSFORMERS and model_type == "qwen2_5_vl":
        pytest.skip("this transformers takes seconds of images too")
    return videos(model_type)


# reentrant checkpoints of layers that use keys of earlier ones are refused
_RECOMPUTED = ["all", "reentrant", "non-reentrant", "all_but_attention"]


@pytest.mark.parametrize(
    ("model_type", "mode"),
    [
        ("qwen2_5_vl", "videos"),
        pytest.param("qwen3_vl", "videos", marks=pytest.mark.full),
        *mostly(in_turn(FAMILIES, _RECOMPUTED), FIRST),
    ],
)
def test_equals_each_sequence_alone(model_type, mode):
    """In float32, by `sequence_logprobs`."""
    made = made_of(model_type, "videos" if mode == "videos" else "images")
    model = build(model_type)
    if mode.endswith("reentrant"):
        enable_checkpointing(model, use_reentrant=mode == "reentrant")
    recompute = mode if mode.startswith("all") else None
    pad = 1 if mode == "videos" else 32
    kind = "videos" if mode == "videos" else "images"
    run = run_packed(model, made, pad=pad, recompute=recompute)
    found = errors(run, reference(model_type, kind))
    print(f"{model_type}, {mode}: {found}")
    assert found.largest < tolerance(model_type)


@pytest.mark.parametrize(("model_type", "implementation"), in_turn(TREE, ["sdpa", "eager"]))
def test_the_encoder_may_keep_its_own_attention(model_type, implementation):
    kinds = {"": "prefixtree", "text_config": "prefixtree", "vision_config": implementation}
    changed = build(model_type, "eager")
    changed.set_attn_implementation(kinds)
    for model in (build(model_type, kinds), changed):
        assert model.config.vision_config._attn_implementation == implementation
        assert model.config.text_config._attn_implementation == "prefixtree"
        found = errors(run_packed(model, batch(model_type)), reference(model_type))
        assert found.largest < tolerance(model_type)


@pytest.mark.parametrize("model_type", TREE)
def test_a_model_with_such_an_encoder_generates(model_type):
    kinds = {"": "prefixtree", "text_config": "prefixtree", "vision_config": "sdpa"}
    model, images = build(model_type, kinds).eval(), images_for(model_type)
    inputs = adapter.alone_inputs(images, images.sequences[3], images.of_sequences[3])
    inputs["pixel_values"] = inputs["pixel_values"].float()
    switches = {"max_new_tokens": 5, "do_sample": False}
    found = model.generate(**inputs, **switches)
    model.set_attn_implementation("eager")
    assert torch.equal(found, model.generate(**inputs, **switches))


@pytest.mark.parametrize("model_type", mostly(FAMILIES, TREE))
def test_each_distinct_image_is_encoded_once(model_type):
    model, images = build(model_type), images_for(model_type)
    placements, _ = place(pack_sequences(images.sequences), images)
    assert placements.number.tolist() != sorted(placements.number.tolist())
    assert np.bincount(placements.number).tolist() == [3, 2, 1]
    assert images.num_given == 11 and len(images) == 3
    seen = []
    encoder = getattr(model.model, "visual", None) or model.model.vision_tower
    encoder.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(args[0] if args else kwargs["pixel_values"]),
        with_kwargs=True,
    )
    run_packed(model, batch(model_type), images)
    (found,) = seen
    shown = [image.pixels for image in images.distinct]
    wanted = torch.stack(shown) if model_type == "gemma4" else torch.cat(shown)
    torch.testing.assert_close(found, wanted.to(found))
    # nothing stays behind on the model
    assert not any(adapter.__name__ in f.__module__ for f in encoder._forward_hooks.values())


@pytest.mark.parametrize("model_type", mostly(TREE, ["qwen3_vl"]))
def test_micro_batches_and_copies(model_type):
    """The same Images serve every part of the sequences, one without images, and an empty
    step; so do pickles of them."""
    made, expected = batch(model_type), reference(model_type)
    images = pickle.loads(pickle.dumps(images_for(model_type)))
    model = copy.deepcopy(build(model_type))
    plan = pt.plan_micro_batches(images.sequences, max_tokens=64, min_micro_batches=8)
    held = [
        sorted({n for i in step.sequence_indices for n in images.of_sequences[i]})
        for step in plan[0]
    ]
    assert plan[0][-1].is_empty and [] in held[:-1] and held[0] != held[1]
    logprobs: list[Any] = [None] * len(made.sequences)
    for step in plan[0]:
        scores = pt.sequence_logprobs(model, step.packed, images=images)
        terms = zip(step.take(made.weights), scores.logprobs, strict=True)
        sum((w[: len(p)].to(p.dtype) * p).sum() for w, p in terms).backward()
        for i, p in zip(step.sequence_indices.tolist(), scores.logprobs, strict=False):
            logprobs[i] = p.detach()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert errors(Run(logprobs, gradients), expected).largest < tolerance(model_type)


def test_masks_temperatures_and_entropies():
    """The options of the scores of text, beside images."""
    made, model = batch("qwen3_vl"), build("qwen3_vl").eval()
    images = images_for("qwen3_vl")
    rng = np.random.default_rng(0)
    masks = [(rng.random(len(row)) < 0.7) & (row != IMAGE) for row in made.sequences]
    temperatures = [(1.0, 0.7)[i % 2] for i in range(len(masks))]
    with torch.no_grad():
        scores = pt.sequence_logprobs(
            model,
            pack_sequences(images.sequences),
            temperatures,
            masks,
            return_entropy=True,
            images=images,
        )
        eager = build("qwen3_vl", "eager").eval()
        for i, numbers in enumerate(images.of_sequences):
            inputs = adapter.alone_inputs(images, images.sequences[i], numbers)
            logits = eager(**inputs, use_cache=False).logits[0, :-1] / temperatures[i]
            log_p, scored = logits.log_softmax(-1), torch.from_numpy(masks[i][1:])
            wanted = log_p.gather(-1, inputs["input_ids"][0, 1:, None])[:, 0] * scored
            torch.testing.assert_close(scores.logprobs[i], wanted, atol=2e-5, rtol=0)
            entropy = -(log_p.exp() * log_p).sum(-1) * scored
            torch.testing.assert_close(scores.entropy[i], entropy, atol=2e-5, rtol=0)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("where", mostly(["text", "encoder", "patches"], ["text", "patches"]))
def test_lora(where):
    """Adapters of the text part, over a frozen vision encoder or beside one that trains."""
    targets = {
        "text": r".*language_model.*\.(q_proj|down_proj)",
        "encoder": r".*\.qkv|.*\.q_proj",
        "patches": r".*\.patch_embed\.proj|.*\.q_proj",
    }[where]

    def adapted(implementation: str) -> Any:
        model = build("qwen3_vl", implementation)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=targets, lora_dropout=0.0))
        generator = torch.Generator().manual_seed(1)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
        return model

    made = batch("qwen3_vl")
    expected = run_alone(adapted("eager"), made)
    run = run_packed(adapted("prefixtree"), made)
    assert expected.gradients.keys() == run.gradients.keys()
    assert all("lora_" in name for name in run.gradients)
    assert any("visual" in name for name in run.gradients) == (where != "text")
    norm = sum(float(g.norm()) ** 2 for g in expected.gradients.values()) ** 0.5
    runs = [run]
    if where == "encoder":
        # planned by what adapters keep
        runs.append(run_packed(adapted("prefixtree"), made, recompute="auto"))
    for found in runs:
        assert found.gradients.keys() == run.gradients.keys()
        gap = {n: float((g - expected.gradients[n]).norm()) for n, g in found.gradients.items()}
        assert max(gap.values()) < 5e-5 * norm


@pytest.mark.skipif(
    version.parse("5.23") > TRANSFORMERS,
    reason="qwen3_vl_moe records no router logits before transformers 5.23",
)
@pytest.mark.parametrize("model_type", mostly(["qwen3_vl_moe", "qwen3_5_moe"], ["qwen3_vl_moe"]))
def test_the_load_balancing_loss(model_type):
    """That of one padded batch with its images."""
    made, eager = batch(model_type), build(model_type, "eager")
    lengths = torch.tensor([len(row) for row in made.sequences])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    ids = torch.zeros(mask.shape, dtype=torch.long)
    ids[mask] = torch.from_numpy(np.concatenate(made.sequences))
    kinds = {"attention_mask": mask.long(), "mm_token_type_ids": (ids == IMAGE).int()}
    shown = made.arguments | {"pixel_values": made.arguments["pixel_values"].float()}
    switches = {"use_cache": False, "output_router_logits": True}
    loss = eager(input_ids=ids, **kinds, **shown, **switches).aux_loss
    loss.backward()
    model, images = build(model_type), images_for(model_type)
    scores = pt.sequence_logprobs(
        model, pack_sequences(images.sequences), images=images, output_router_logits=True
    )
    torch.testing.assert_close(scores.aux_loss, loss, atol=1e-5, rtol=1e-5)
    scores.aux_loss.backward()
    wanted = {n: p.grad for n, p in eager.named_parameters() if p.grad is not None}
    assert any(n.startswith(ENCODERS) for n in wanted)
    norm = sum(float(g.norm()) ** 2 for g in wanted.values()) ** 0.5
    for name, parameter in model.named_parameters():
        if name in wanted:
            assert float((parameter.grad - wanted[name]).norm()) < 1e-5 * norm, name


# padded images
@pytest.mark.parametrize("model_type", mostly(TREE, ["gemma4"]))
def test_the_comparison_that_verify_makes(model_type):
    """Its runs take images, and its reference serves vision encoders, padded ones too."""
    made, images = batch(model_type), images_for(model_type)
    masks = [row != IMAGE for row in made.sequences]
    objective = random_objective(made.sequences, masks, 0)
    sequences = images.sequences
    alone = compare.run_replicated(
        build(model_type, EAGER_BY_ROWS), sequences, objective, images=images
    )
    packed = compare.run_packed(
        build(model_type), pack_sequences(images.sequences), objective, masks, images=images
    )
    assert compare.worst_difference(packed.logprobs, alone.logprobs) < 5e-5
    found = compare.gradient_differences(packed.gradients, alone.gradients)
    assert max(found.values()) < 5e-4 and any(n.startswith(ENCODERS) for n in found)
    assert all(g is not None and g.isfinite().all() for g in alone.gradients.values())


def test_text_alone():
    """Images.from_batch without images, and sequences of text without images=, are one."""
    model, made = build("qwen3_vl").eval(), batch("qwen3_vl")
    rows = [row[row < IMAGE] for row in made.sequences]
    images = pt.Images.from_batch(rows, None, None, model.config)
    packed = pt.pack(pt.PrefixForest.from_sequences(rows))
    with torch.no_grad():
        plain = pt.sequence_logprobs(model, packed).logprobs
        none = pt.sequence_logprobs(model, pack_sequences(images.sequences), images=images).logprobs
    assert all(map(torch.equal, plain, none))


def _sampled(model_type: str, beside: bool) -> Batch:
    """Placeholders that a policy sampled: alone, side by side, last; beside images those of
    videos."""
    made = batch(model_type)
    if beside:
        rows = [np.append(row, [7, VIDEO, VIDEO, 8, VIDEO]) for row in made.sequences]
        return Batch(rows, made.arguments, random_weights(rows))
    tails = [IMAGE], [VIDEO], [9, IMAGE, IMAGE, 10, VIDEO], [9, IMAGE, IMAGE, 11], [IMAGE, 5, IMAGE]
    rows = [np.array([3, 4, START, 5, *tail]) for tail in tails]
    return Batch(rows, {"pixel_values": None, "image_grid_thw": None}, random_weights(rows))


@pytest.mark.parametrize(
    ("model_type", "way"),
    mostly(in_turn(FAMILIES, ["beside images", "text", "a blank image", "no images"]), FIRST),
)
@pytest.mark.filterwarnings("ignore:the sequences hold")
def test_a_placeholder_that_was_sampled_is_text(model_type, way, monkeypatch):
    """As each sequence alone; also where other ranks have images, so that a vision encoder runs
    here."""
    made, model = _sampled(model_type, way == "beside images"), build(model_type)
    expected = run_alone(build(model_type, "eager"), made)
    if way == "text":
        packed = pt.pack(pt.PrefixForest.from_sequences(made.sequences))
        found = finished(model, pt.sequence_logprobs(model, packed).logprobs, made)
    else:
        if way == "a blank image":
            put(monkeypatch, "ranks in lockstep", lambda model: True)
        with counted([adapter.encoder_of(model)]) as calls:
            found = run_packed(model, made)
            assert calls() == (way in ("a blank image", "beside images"))
    for got, wanted in zip(found.logprobs, expected.logprobs, strict=True):
        assert (got - wanted).abs().max() < tolerance(model_type)
    of_encoder = found.gradients.keys() - expected.gradients.keys()
    assert all(name.startswith(ENCODERS) and not found.gradients[name].any() for name in of_encoder)
    got = {name: found.gradients[name] for name in expected.gradients}
    assert distance(got, expected.gradients) < tolerance(model_type)


def test_a_placeholder_that_was_sampled_is_named():
    """An image that was forgotten looks like it."""
    for token, name in ((IMAGE, "image"), (VIDEO, "video")):
        packed = pt.pack(pt.PrefixForest.from_sequences([[3, 4, token, 5]]))
        with pytest.warns(UserWarning, match=rf"hold {name}_token_id {token}: .*pass images="):
            pt.sequence_logprobs(build("qwen3_vl"), packed)


# ---- the comparison must turn red ----------------------------------------------------------------


def _wrong(model_type: str, run: Run) -> Any:
    """Errors of a run whose parameters may lack gradients."""
    expected = reference(model_type)
    for name, gradient in expected.gradients.items():
        run.gradients.setdefault(name, torch.zeros_like(gradient))
    return errors(run, expected)


@pytest.mark.parametrize("model_type", TREE)
def test_images_in_the_order_of_their_coming_are_wrong(model_type, monkeypatch):
    """The heaviest sibling is packed first, so packed order is another."""
    found = place

    def by_number(packed: Any, images: Any) -> Any:
        placements, paths = found(packed, images)
        order = np.argsort(placements.number, kind="stable")
        parts = (getattr(placements, name)[order] for name in ("start", "number", "frame"))
        return type(placements)(*parts), paths

    monkeypatch.setattr(adapter, "place", by_number)
    wrong = _wrong(model_type, run_packed(build(model_type), batch(model_type)))
    assert min(wrong.logprob, wrong.text, wrong.encoder) > 0.1


@pytest.mark.parametrize("model_type", TREE)
def test_images_that_differ_in_pixels_alone_must_not_be_shared(model_type):
    made = batch(model_type)
    names = [n for numbers in images_for(model_type).of_sequences for n in numbers]
    keys = clone(made, image_keys=names)
    found = errors(run_packed(build(model_type), keys), reference(model_type))
    assert found.largest < tolerance(model_type)
    # 0 and 2 are A and A2
    shared = clone(made, image_keys=[0 if n == 2 else n for n in names])
    wrong = _wrong(model_type, run_packed(build(model_type), shared))
    assert min(wrong.logprob, wrong.text, wrong.encoder) > 0.1


def test_other_frames_of_a_video_are_wrong(monkeypatch):
    """Those of the second of two videos, and those behind a branch inside a video."""
    found = place

    def first_frames(packed: Any, images: Any) -> Any:
        placements, paths = found(packed, images)
        frame = placements.frame * 0
        return type(placements)(placements.start, placements.number, frame), paths

    monkeypatch.setattr(adapter, "place", first_frames)
    run = run_packed(build("qwen3_vl"), videos("qwen3_vl"))
    wrong = errors(run, reference("qwen3_vl", "videos"))
    assert min(wrong.logprob, wrong.text, wrong.encoder) > 0.1


def test_a_grid_left_out_of_the_key_is_seen():
    """The same patches as [1, 8, 4] and [1, 4, 8] are as many tokens, at other positions."""
    model, made = build("qwen3_vl"), batch("qwen3_vl")
    first = made.arguments["pixel_values"][:32]
    row = made.sequences[0]
    grids = torch.tensor([[1, 8, 4], [1, 4, 8]])
    arguments = {"pixel_values": torch.cat([first, first]), "image_grid_thw": grids}
    twice = Batch([row, row], arguments, made.weights[:1] * 2)
    images = images_of(model, twice)
    assert images.of_sequences == [[0], [1]]
    expected = run_alone(build("qwen3_vl", "eager"), twice)
    assert errors(run_packed(model, twice), expected).largest < 5e-5
    with pytest.raises(ValueError, match="images of one key must be equal"):
        images_of(model, clone(twice, image_keys=[0, 0]))
    # were they one, their positions would not be
    images.sequences[1] = images.sequences[0]
    wrong = run_packed(model, twice, images)
    assert errors(wrong, expected).logprob > 0.01


@pytest.mark.parametrize("model_type", TREE)
@pytest.mark.parametrize(
    "mistake", ["the vision encoder's", "that of a second place", "that of deepstack"]
)
def test_a_gradient_that_is_dropped_is_seen(model_type, mistake, monkeypatch):
    calls = []

    def dropped(repeated: Any, *args: Any) -> torch.Tensor:
        calls.append(None)
        out = repeated(*args)
        if mistake == "that of a second place":
            # the last placement is one of an image that is placed before
            return torch.cat([out[:-6], out[-6:].detach()])
        return out.detach() if mistake == "the vision encoder's" or len(calls) > 1 else out

    wrap(monkeypatch, "features of placements", dropped)
    wrong = _wrong(model_type, run_packed(build(model_type), batch(model_type)))
    assert wrong.logprob < tolerance(model_type)
    if mistake == "that of deepstack" and model_type != "qwen3_vl":
        assert len(calls) == 1 and wrong.encoder < tolerance(model_type)
    else:
        assert wrong.encoder > 0.01
        assert len(calls) == (3 if model_type == "qwen3_vl" else 1)


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("mistake", ["depths", "the packed row's"])
def test_other_positions_are_wrong(model_type, mistake, monkeypatch):
    def positions(base: Any, packed: Any, images: Any, paths: Any) -> torch.Tensor:
        if mistake == "depths":
            return packed.position_ids.expand(4, 1, -1)
        placements, _ = place(packed, images)
        numbers = placements.number.tolist()
        inputs = adapter.alone_inputs(images, packed.input_ids.numpy(), numbers)
        three, _ = base.get_rope_index(**inputs)
        return torch.cat([packed.position_ids[None, None], three])

    put(monkeypatch, "positions of images", positions)
    wrong = _wrong(model_type, run_packed(build(model_type), batch(model_type)))
    assert min(wrong.logprob, wrong.text, wrong.encoder) > 0.1


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl"])
def test_positions_read_no_pixels(model_type, monkeypatch):
    """Those of every path, of which a batch has as many as samples, would be joined for nothing."""
    model, images = build(model_type), images_for(model_type)

    def positions() -> list[torch.Tensor]:
        each = zip(images.sequences, images.of_sequences, strict=True)
        return [adapter.positions_alone(model.model, images, *of) for of in each]

    expected = positions()
    monkeypatch.setattr(adapter, "pixels_of", None)
    for found, wanted in zip(positions(), expected, strict=True):
        assert torch.equal(found, wanted)
