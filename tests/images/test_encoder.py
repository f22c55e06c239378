"""A vision encoder's forward: patches by products, and runs of images, as all at once with the
activations of one run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import prefixtree as pt
from prefixtree.images import encoder, vision
from prefixtree.images.encoder import EncoderRuns, EncoderShape, in_few_calls, with_borders
from prefixtree.images.vision import PlacedImages, encoder_of
from prefixtree.recompute.counted import LiveBytes
from prefixtree.recompute.layers import checkpoint_of_encoder, keeping_in_encoder
from prefixtree.recompute.plan import RecomputePlan
from tests.images.test_vision import FAMILIES, made_of
from tests.support.float64 import Float64
from tests.support.full import in_turn, mostly
from tests.support.hooks import wrap
from tests.support.image_cases import (
    TREE,
    batch,
    build,
    errors,
    images_of,
    reference,
    run_alone,
    run_forward,
    run_packed,
    screenshots,
    tolerance,
)
from tests.support.models import counted, enable_checkpointing


def _layers(model: Any) -> Any:
    encoder = encoder_of(model)
    return encoder.blocks if hasattr(encoder, "blocks") else encoder.encoder.layers


def test_runs_of_images():
    shape = EncoderShape([32, 32, 24, 100, 8], 49)
    assert shape.runs(64) == ([(0, 2), (2, 3), (3, 4), (4, 5)], [])
    assert shape.runs(1) == ([(i, i + 1) for i in range(5)], [])
    assert shape.runs(196) == ([(0, 5)], []) and shape.runs(195) == ([(0, 4), (4, 5)], [])
    # the last of at most 132 patches have runs of their own
    assert shape.runs(64, 132) == ([(0, 2)], [(2, 3), (3, 4), (4, 5)])
    assert shape.runs(64, 107) == ([(0, 2), (2, 3), (3, 4)], [(4, 5)])
    assert shape.runs(64, 7) == shape.runs(64, -1) == shape.runs(64)
    assert shape.runs(200, 196) == ([], [(0, 5)])


# ---- exact ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "kind"),
    mostly(
        [("qwen3_vl", "images"), ("qwen2_5_vl", "videos"), ("gemma4", "images")],
        [("qwen3_vl", "images")],
    ),
)
def test_float64_is_exact(model_type, kind):
    """Runs of one and of two images, the last one's kept, with blanks around."""
    made = made_of(model_type, kind)
    with Float64():
        expected = run_alone(build(model_type, "eager", torch.float64), made)
        for patches, kept in ((1, 0), (80, 0), (1, 40), (80, 72), (80, 1000)):
            model = build(model_type, dtype=torch.float64)
            again = checkpoint_of_encoder(encoder_of(model), "all")

            def around(run: Any, *tensors: Any, again: Any = again) -> Any:
                def in_float64(*tensors: Any) -> Any:
                    # a backward is a call of torch, in which the mode around it is off
                    with Float64():
                        return run(*tensors)

                return again(in_float64, *tensors)

            runs = EncoderRuns(patches, around, 3, kept, keeping_in_encoder(encoder_of(model)), 2)
            found = errors(run_forward(model, made, runs), expected)
            assert found.largest < 1e-12


@contextmanager
def _small_runs(patches: int = 40) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(vision, "RUN", patches)
        yield


_WAYS = ["all", "all_but_attention", "plan", "kept", "reentrant", "non-reentrant"]
# each way once
_QUICK = ("qwen2_5_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "gemma4")


@pytest.mark.parametrize(("model_type", "mode"), mostly(in_turn(FAMILIES, _WAYS), _QUICK))
def test_as_layers_are_recomputed(model_type, mode):
    """Each image is a run, computed twice, whoever asked for it, unless a plan keeps it. Its
    layers are not checkpointed one by one then, whatever was set."""
    model = build(model_type)
    options: dict[str, Any] = {}
    if mode.endswith("reentrant"):
        enable_checkpointing(model, use_reentrant=mode == "reentrant")
    else:
        layers = len(model.get_decoder().layers)
        plan = RecomputePlan(("nothing",) * layers, 0, patches=40, kept=40 if mode == "kept" else 0)
        options["recompute"] = plan if mode in ("plan", "kept") else mode
        if mode == "kept":
            enable_checkpointing(model, use_reentrant=False)
    with _small_runs(), counted(_layers(model)[:1]) as blocks:
        found = errors(run_packed(model, batch(model_type), **options), reference(model_type))
        assert blocks() == 2 * 3 - (mode == "kept")
    assert found.largest < tolerance(model_type)


class _Attention(TorchDispatchMode):
    """Counts the calls of torch's attention."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        self.calls += "_scaled_dot_product" in name and not name.endswith("backward")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("model_type", mostly(TREE, ["qwen3_vl"]))
def test_attention_that_is_kept_runs_once(model_type):
    calls = {}
    for mode in ("all_but_attention", "all"):
        with _small_runs(), _Attention() as counter:
            run_packed(build(model_type), batch(model_type), recompute=mode)
        calls[mode] = counter.calls
    assert calls["all"] == 2 * calls["all_but_attention"] > 0


@pytest.mark.parametrize("mode", mostly(["all", "all_but_attention"], ["all_but_attention"]))
def test_the_same_bits_under_autocast(mode):
    """A weight's cast that autocast has kept is not in both runs of a checkpoint."""
    with torch.autocast("cpu", torch.bfloat16):
        plain, again = (
            run_packed(build("qwen3_vl"), batch("qwen3_vl"), recompute=recompute)
            for recompute in ("nothing", mode)
        )
    assert all(map(torch.equal, plain.logprobs, again.logprobs))
    for name, gradient in plain.gradients.items():
        assert torch.equal(again.gradients[name], gradient), name


def test_without_gradients_runs_are_as_short():
    made, model = batch("qwen3_vl"), build("qwen3_vl")
    images = images_of(model, made)
    packed = pt.pack(pt.PrefixForest.from_sequences(images.sequences))
    with _small_runs(), torch.no_grad(), counted(_layers(model)[:1]) as blocks:
        scores = pt.sequence_logprobs(model, packed, images=images).logprobs
        assert blocks() == 3
    wanted = reference("qwen3_vl").logprobs
    assert max(float((a - b).abs().max()) for a, b in zip(scores, wanted, strict=True)) < 5e-5


@pytest.mark.parametrize("model_type", mostly(TREE, ["qwen3_vl"]))
def test_a_run_without_gradient_is_seen(model_type, monkeypatch):
    def dropped(joined: Any, parts: list[Any], *blanks: int) -> Any:
        if isinstance(parts[0], torch.Tensor):
            parts = [*parts[:-1], parts[-1].detach()]
        return joined(parts, *blanks)

    wrap(monkeypatch, "joined runs of a vision encoder", dropped)
    model = build(model_type)
    kept = RecomputePlan(("all",) * len(model.get_decoder().layers), 0, patches=40, kept=40)
    for mode in ("all", kept):
        with _small_runs():
            run = run_packed(model, batch(model_type), recompute=mode)
        wrong = errors(run, reference(model_type))
        assert wrong.logprob < tolerance(model_type) and wrong.encoder > 0.2
        model.zero_grad(set_to_none=True)


# ---- patches by products -------------------------------------------------------------------------


class _Convolutions(TorchDispatchMode):
    """Counts torch's convolutions."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func is torch.ops.aten.convolution.default
        return func(*args, **(kwargs or {}))


class _Embeds(nn.Module):
    """A vision encoder of one convolution, and the shape that it sees."""

    def __init__(self, convolution: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.convolution, self.shape = convolution.double(), shape

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        return self.convolution(patches.view(-1, *self.shape))


_FLAT: dict[str, Any] = {"kernel_size": (2, 4, 4), "stride": (2, 4, 4)}


@pytest.mark.parametrize(
    ("convolution", "shape", "is_product"),
    [
        (nn.Conv3d(3, 8, **_FLAT), (3, 2, 4, 4), True),
        (nn.Conv3d(3, 8, bias=False, **_FLAT), (3, 2, 4, 4), True),
        (nn.Conv2d(3, 8, 4, 4), (3, 4, 4), True),
        # as LoRA has it behind its own
        (nn.Conv3d(3, 8, 1, 1), (3, 1, 1, 1), True),
        # several places
        (nn.Conv2d(3, 8, 4, 4), (3, 8, 8), False),
        (nn.Conv3d(3, 8, (2, 4, 4), (1, 4, 4)), (3, 2, 4, 4), False),
        (nn.Conv2d(3, 8, 4, 4, padding=1), (3, 4, 4), False),
        (nn.Conv2d(3, 8, 4, 4, padding="valid"), (3, 4, 4), False),
        (nn.Conv2d(3, 8, 2, 2, dilation=3), (3, 4, 4), False),
        (nn.Conv2d(4, 8, 4, 4, groups=2), (4, 4, 4), False),
    ],
)
def test_patches_in_few_calls(convolution, shape, is_product):
    """The same values and gradients, and the module's hooks."""
    encoder, seen = _Embeds(convolution, shape), []
    convolution.register_forward_hook(lambda module, given, output: seen.append(output))
    patches = torch.randn(5, torch.Size(shape).numel(), dtype=torch.float64, requires_grad=True)
    held = [patches, *encoder.parameters()]
    outputs, gradients, calls = [], [], []
    for forward in (encoder, in_few_calls(encoder)):
        with _Convolutions() as counter:
            outputs.append(forward(patches))
        calls.append(counter.calls)
        gradients.append(torch.autograd.grad(outputs[-1].square().sum(), held))
    assert calls == [1, 0 if is_product else 1]
    assert outputs[0].shape == outputs[1].shape and seen[0] is outputs[0] and seen[1] is outputs[1]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=1e-14)
    for found, expected in zip(gradients[1], gradients[0], strict=True):
        assert float((found - expected).norm() / expected.norm()) < 1e-14
    assert "forward" not in vars(convolution)


@pytest.mark.parametrize("model_type", mostly(["qwen2_5_vl", "qwen3_vl", "glm4v"], ["qwen3_vl"]))
def test_only_our_calls_multiply(model_type):
    model, made = build(model_type), batch(model_type)
    with _Convolutions() as ours:
        run = run_packed(model, made, recompute="all")
    assert ours.calls == 0
    assert errors(run, reference(model_type)).largest < tolerance(model_type)
    model.set_attn_implementation("sdpa")
    with _Convolutions() as theirs:
        run_alone(model, made)
    assert theirs.calls > 0


# ---- attention -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "kind", "calls"),
    mostly(
        [
            # two blocks, images of two sizes
            ("qwen3_vl", "images", 4),
            ("glm4v", "images", 4),
            # a block with windows of two sizes
            ("qwen2_5_vl", "images", 4),
            # frames of clips; the image and the clips are apart
            ("qwen3_vl", "videos", 4),
        ],
        [("qwen2_5_vl", "images", 4), ("qwen3_vl", "videos", 4)],
    ),
)
def test_images_of_one_size_are_one_call(model_type, kind, calls):
    model = build(model_type)
    for attention in ("prefixtree", "sdpa"):
        names = {"": "prefixtree", "text_config": "prefixtree", "vision_config": attention}
        model.set_attn_implementation(names)
        with _Attention() as counter:
            run = run_packed(model, made_of(model_type, kind))
        assert errors(run, reference(model_type, kind)).largest < tolerance(model_type)
        assert counter.calls == calls
    # a user's own call is the family's
    model.set_attn_implementation("sdpa")
    with _Attention() as counter:
        run_alone(model, made_of(model_type, kind))
    assert counter.calls > 2 * calls


#: A global of those forwards.
is_flash_attention_requested = None


def test_borders_are_found_as_every_python_compiles_keywords():
    """A tuple of names up to 3.13, later a constant per name, as here one alone in any."""

    def of_many(_, attend, borders, **rest):
        return attend(is_flash_attention_requested, scaling=1, cu_seq_lens_q=borders, **rest)

    def of_one(_, attend, borders, **rest):
        return attend(is_flash_attention_requested, cu_seq_lens_q=borders, **rest)

    def of_none(_, attend, borders, **rest):
        return attend(is_flash_attention_requested, scaling=1, q=borders, **rest)

    kinds = [type("Attention", (), {"forward": f}) for f in (of_many, of_one, of_none)]
    assert [with_borders(kind) is not None for kind in kinds] == [True, True, False]


def test_layers_that_are_recomputed_by_themselves():
    """They run again in the backward, when what was changed for the call is not."""
    model = build("qwen3_vl")
    enable_checkpointing(model, use_reentrant=False)
    run = run_packed(model, batch("qwen3_vl"), recompute="nothing")
    assert errors(run, reference("qwen3_vl")).largest < tolerance("qwen3_vl")


@pytest.mark.parametrize("model_type", mostly(["qwen3_vl", "qwen2_5_vl"], ["qwen3_vl"]))
def test_attention_across_borders_is_seen(model_type, monkeypatch):
    """Two images of one size as one."""
    attend = encoder.image_attention

    def across(*given: Any) -> Any:
        return attend(*given[:-1], given[-1][[0, *range(2, len(given[-1]))]])

    monkeypatch.setattr(encoder, "image_attention", across)
    wrong = errors(run_packed(build(model_type), batch(model_type)), reference(model_type))
    assert wrong.logprob > 0.01 and wrong.encoder > 0.01


@pytest.mark.parametrize("left_out", ["the bias", "the weight's gradient"])
def test_a_product_without_is_seen(left_out, monkeypatch):
    def without(product: Any, module: Any, patches: torch.Tensor) -> torch.Tensor:
        if left_out == "the bias":
            return product(module, patches) - module.bias.view(-1, 1, 1, 1)
        return product(module, patches).detach() + 0 * (module.weight.sum() + module.bias.sum())

    wrap(monkeypatch, "product of patches", without)
    wrong = errors(run_packed(build("qwen3_vl"), batch("qwen3_vl")), reference("qwen3_vl"))
    print(wrong)
    assert wrong.encoder > 1e-3 and (left_out == "the bias") == (wrong.logprob > 1e-3)


# ---- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", mostly(["qwen3_vl", "qwen2_5_vl"], ["qwen3_vl"]))
def test_activations_do_not_grow_with_images(model_type):
    """Bytes that a vision encoder holds after its forward and at the most in its backward, beside
    pixels and features, of twice as many images."""
    held: dict[str, list[int]] = {"at once": [], "in runs": []}
    most: dict[str, list[int]] = {"at once": [], "in runs": []}
    for how in held:
        for count in (4, 8):
            model = build(model_type)
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            encoder = encoder_of(model)
            images = images_of(model, screenshots(count))
            packed = pt.pack(pt.PrefixForest.from_sequences(images.sequences))
            placed = PlacedImages(model, model, packed, images).forward()
            runs = EncoderRuns(256, checkpoint_of_encoder(encoder, "all"))
            if how == "at once":
                runs = EncoderRuns(None)
            shown, grids = placed.inputs["pixel_values"], placed.inputs["image_grid_thw"]
            known = (x for p in model.parameters() for x in (p, p.grad))
            live = LiveBytes([shown, *known])
            with placed.encoded(runs), live:
                output = encoder(shown, grid_thw=grids)
                features = [
                    output.pooler_output,
                    *(getattr(output, "deepstack_features", ()) or ()),
                ]
                del output
                size = sum(f.nbytes for f in features)
                held[how].append(live.bytes - size)
                live.restart()
                torch.autograd.backward(features, [torch.ones_like(f) for f in features])
                # features, those before they were placed, and gradients of both
                most[how].append(live.restart() - 4 * size)
    print(held, most)
    few, many = held["in runs"]
    # grids
    assert many < 400 * 8 and held["at once"][1] > 1.9 * held["at once"][0] > 1 << 20
    few, many = most["in runs"]
    assert many < 1.05 * few and most["at once"][1] > 1.9 * most["at once"][0]
    assert most["at once"][1] > 6 * many
