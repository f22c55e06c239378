"""Tiny models that see, a batch of sequences with images, and its runs: packed, and each sequence
alone in eager with transformers' own inputs and positions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from packaging import version
from transformers import AutoConfig, AutoModelForImageTextToText

import prefixtree as pt
from prefixtree.images.encoder import ALL_AT_ONCE, EncoderRuns
from prefixtree.images.vision import PlacedImages, alone_inputs
from prefixtree.models.families import forward_inputs
from tests.support.hybrid_configs import HYBRIDS, OLDEST_WITH_STATES
from tests.support.models import ENCODERS, TRANSFORMERS, as_lists, randomise

VOCABULARY, IMAGE, VIDEO, START, END = 64, 60, 61, 62, 63
HIDDEN, PATCH = 64, 4
# one sequence of text that no image's id interrupts
_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "depth": 2,
    "num_heads": 2,
    "out_hidden_size": HIDDEN,
    "in_channels": 3,
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
}
_DEEP = {**_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": (0, 1)}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_MIXED = {"head_dim": 16, "rope_parameters": {**_ROPE, "mrope_section": (4, 2, 2)}}
_HYBRID = {
    "head_dim": 16,
    "layer_types": ("linear_attention", "full_attention", "linear_attention"),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": {**_ROPE, "mrope_section": (1, 1, 0), "partial_rotary_factor": 0.25},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "text_config": {
            **_TEXT,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
            "rope_parameters": {**_ROPE, "mrope_section": (2, 3, 3)},
        },
        # two windows a side: another attention than over all of an image
        "vision_config": {**_VISION, "fullatt_block_indexes": (1,), "window_size": 16},
    },
    "qwen3_vl": {"text_config": {**_TEXT, **_MIXED}, "vision_config": _DEEP},
    "qwen3_vl_moe": {"text_config": {**_TEXT, **_MIXED, **_EXPERTS}, "vision_config": _DEEP},
    "qwen3_5": {
        "text_config": {**_TEXT, **_HYBRID},
        "vision_config": {**_VISION, "num_position_embeddings": 16},
    },
    "qwen3_5_moe": {
        "text_config": {
            **_TEXT,
            **_HYBRID,
            **_EXPERTS,
            "shared_expert_intermediate_size": 24,
        },
        "vision_config": {**_VISION, "num_position_embeddings": 16},
    },
    "glm4v": {
        "text_config": {**_TEXT, "rope_parameters": {**_ROPE, "mrope_section": (2, 3, 3)}},
        "vision_config": {**_VISION, "image_size": 16},
    },
    "glm46v": {
        "text_config": {
            "model_type": "glm4v_text",
            **_TEXT,
            "rope_parameters": {
                **_ROPE,
                "mrope_section": (1, 2, 1),
                "partial_rotary_factor": 0.5,
            },
        },
        "vision_config": {"model_type": "glm4v_vision", **_VISION, "image_size": 16},
    },
    "gemma4": {
        "text_config": {
            **_TEXT,
            "head_dim": 8,
            "global_head_dim": 16,
            "sliding_window": 6,
            "layer_types": ("sliding_attention", "full_attention") * 2,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 1,
            "final_logit_softcapping": 3.0,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
        },
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": PATCH,
            "pooling_kernel_size": 2,
            "position_embedding_size": 32,
        },
        "audio_config": None,
    },
}
# of tests of every family
FAMILIES = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            name in HYBRIDS and version.parse(OLDEST_WITH_STATES) > TRANSFORMERS,
            reason=f"hybrids are refused before transformers {OLDEST_WITH_STATES}",
        ),
    )
    for name in CONFIGS
]


# adapters of a vision encoder of Qwen3-VL, and of some of its text
ADAPTED = [("qkv", "patch_embed.proj"), ("qkv", "q_proj")]
# one type per way to embed images
TREE = ("qwen2_5_vl", "qwen3_vl", "gemma4")
# refused there
NO_VIDEOS = ("gemma4", "glm46v", "glm4v")


def build(
    model_type: str, implementation: Any = "prefixtree", dtype: torch.dtype = torch.float32
) -> Any:
    """A tiny model in training mode, in which every parameter matters."""
    config = AutoConfig.for_model(
        model_type,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        **({"vision_start_token_id": START} if model_type not in NO_VIDEOS else {}),
        **as_lists(CONFIGS[model_type]),
    )
    model = AutoModelForImageTextToText.from_config(config, attn_implementation=implementation)
    randomise(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # large enough that a wrong image, or a wrong position, shows
            if parameter.ndim > 1 and "A_log" not in name:
                parameter.mul_(1.5)
    model = model.to(dtype).train()
    if dtype == torch.float64 and "moe" in model_type:
        # grouped products know no float64
        model.set_experts_implementation("eager")
    return model


# each way to embed images, and a state
_QUICK = {
    *(("qwen2_5_vl", "images"), ("gemma4", "images"), ("qwen3_5", "images")),
    ("qwen3_vl", "videos"),
}
# of forests that run in parts: model type, and images or videos
IN_PARTS = [
    pytest.param(*case.values, kind, marks=[*case.marks, *more])
    for case in FAMILIES
    for kind in ("images", "videos")
    for more in [[pytest.mark.full] * ((*case.values, kind) not in _QUICK)]
]


# ---- the batch -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Sequences with processors' placeholders, their images, and a loss.

    Attributes:
        sequences: token ids.
        arguments: those of `Images.from_batch` but the sequences and the configuration.
        weights: float64 [n - 1] per sequence.
    """

    sequences: list[np.ndarray]
    arguments: dict[str, Any]
    weights: list[torch.Tensor]


def random_weights(rows: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """A loss of sequences: one weight per log-probability."""
    g = torch.Generator().manual_seed(7)
    return [torch.randn(len(row) - 1, generator=g, dtype=torch.float64) for row in rows]


def text(seed: int) -> Callable[[int], list[int]]:
    """Draws runs of text."""
    generator = np.random.default_rng(seed)
    return lambda count: generator.integers(3, 59, count).tolist()


def run(grid: Sequence[int], token: int = IMAGE) -> list[int]:
    """The placeholders of an image between their marks."""
    return [START, *[token] * (int(np.prod(grid)) // 4), END]


def pixels(seed: int, grid: Sequence[int]) -> torch.Tensor:
    """Patches of an image, in float64."""
    g = torch.Generator().manual_seed(seed)
    values = 3 * 2 * PATCH**2
    return torch.randn(int(np.prod(grid)), values, generator=g, dtype=torch.float64)


@cache
def batch(model_type: str) -> Batch:
    """9 sequences over 3 images: A and A2 have one grid and differ in pixels alone; A is placed
    three times and B twice, also below branches; one tree has no image."""
    grids = {"a": (1, 8, 4), "a2": (1, 8, 4), "b": (1, 4, 6)}
    shown = {name: pixels(i, grid) for i, (name, grid) in enumerate(grids.items())}
    draw = text(0)
    system, ask, ask2, turn, t1, t2, t3, t4 = (draw(n) for n in (5, 4, 4, 6, 7, 3, 9, 5))
    parts: list[list[Any]] = [
        [system, "a", ask, t1],
        # a shared image, with a branch behind it
        [system, "a", ask, t2],
        # a second image below a branch
        [system, "a", ask2, "b", turn, t1],
        [system, "a", ask2, "b", turn, t3, t3],
        # the first one's token ids, other pixels
        [system, "a2", ask, t1],
        # an image again, elsewhere
        [system, "a2", ask, "a", t4],
        [t4, "b", t2],
        [t4, "a", t3],
        [system, t1, t3],
    ]
    names = [part for row in parts for part in row if isinstance(part, str)]
    rows = [
        np.array([t for part in row for t in (run(grids[part]) if isinstance(part, str) else part)])
        for row in parts
    ]
    if model_type == "gemma4":
        values, positions = zip(*(_padded(shown[n], grids[n]) for n in names), strict=True)
        arguments = {
            "pixel_values": torch.stack(values),
            "image_grid_thw": None,
            "image_position_ids": torch.stack(positions),
        }
    else:
        arguments = {
            "pixel_values": torch.cat([shown[name] for name in names]),
            "image_grid_thw": torch.tensor([grids[name] for name in names]),
        }
    return Batch(rows, arguments, random_weights(rows))


def _padded(patches: torch.Tensor, grid: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Gemma 4's form: patches [40, values] and their positions, padding behind."""
    _, height, width = grid
    steps = torch.cartesian_prod(torch.arange(height), torch.arange(width))
    positions = torch.full((40, 2), -1)
    positions[: len(steps)] = steps
    values = torch.zeros(40, 3 * PATCH**2, dtype=patches.dtype)
    values[: len(steps)] = patches[:, : 3 * PATCH**2]
    return values, positions


def images_of(model: Any, made: Batch) -> pt.Images:
    """Of a batch, for a model."""
    return pt.Images.from_batch(made.sequences, config=model.config, **made.arguments)


@cache
def images_for(model_type: str) -> pt.Images:
    """Of the batch, for a model of the type."""
    return images_of(build(model_type), batch(model_type))


# ---- runs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """The results of one side."""

    logprobs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]


def finished(model: Any, logprobs: Sequence[torch.Tensor], made: Batch) -> Run:
    """The run behind its backward."""
    model.zero_grad(set_to_none=True)
    terms = zip(logprobs, made.weights, strict=True)
    sum((p * w.to(p.dtype)).sum() for p, w in terms).backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return Run([p.detach() for p in logprobs], found)


def run_alone(model: Any, made: Batch) -> Run:
    """Each sequence alone, with the keywords that its processor gives."""
    images = images_of(model, made)
    logprobs = []
    for tokens, numbers in zip(images.sequences, images.of_sequences, strict=True):
        inputs = alone_inputs(images, tokens, numbers)
        ids = inputs["input_ids"][0]
        logits = model(**inputs, use_cache=False).logits[0, :-1]
        logprobs.append(logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0])
    return finished(model, logprobs, made)


def run_packed(
    model: Any, made: Batch, images: pt.Images | None = None, pad: int = 1, **options: Any
) -> Run:
    """All sequences at once."""
    images = images or images_of(model, made)
    packed = pt.pack(pt.PrefixForest.from_sequences(images.sequences), pad)
    return finished(
        model, pt.sequence_logprobs(model, packed, images=images, **options).logprobs, made
    )


def run_forward(model: Any, made: Batch, runs: EncoderRuns = ALL_AT_ONCE) -> Run:
    """The same by a forward of the model, whose logits may be float64: `sequence_logprobs` without
    its lm_head."""
    pt.prepare(model)
    images = images_of(model, made)
    packed = pt.pack(pt.PrefixForest.from_sequences(images.sequences))
    placed = PlacedImages(model, model, packed, images)
    packed = placed.packed
    shown = placed.forward()
    with shown.encoded(runs):
        inputs = forward_inputs(packed, model) | placed.inputs | shown.inputs
        logits = model(**inputs).logits[0]
    log_p = logits[packed.predictor.long().clamp(min=0)].log_softmax(-1)
    of_tokens = log_p.gather(-1, packed.input_ids[:, None])[:, 0]
    return finished(model, [part[1:] for part in packed.unpack(of_tokens)], made)


@cache
def reference(model_type: str, kind: str = "images") -> Run:
    """Eager, in float32."""
    made = batch(model_type) if kind == "images" else videos(model_type)
    return run_alone(build(model_type, "eager"), made)


@dataclass(frozen=True)
class Errors:
    """How far a run is from the reference: the largest difference of a log-probability, and the
    norms of the differences of gradients over those of the reference."""

    logprob: float
    text: float
    encoder: float

    @property
    def largest(self) -> float:
        return max(self.logprob, self.text, self.encoder)


def errors(found: Run, expected: Run) -> Errors:
    """The differences of two runs, whose parameters have gradients alike."""
    assert found.gradients.keys() == expected.gradients.keys()

    def relative(of_encoder: bool) -> float:
        names = [n for n in expected.gradients if n.startswith(ENCODERS) == of_encoder]
        gap = [float((found.gradients[n] - expected.gradients[n]).norm()) for n in names]
        whole = [float(expected.gradients[n].norm()) for n in names]
        return float(np.linalg.norm(gap) / np.linalg.norm(whole))

    pairs = zip(found.logprobs, expected.logprobs, strict=True)
    return Errors(
        max(float((a - b).abs().max()) for a, b in pairs), relative(False), relative(True)
    )


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The norm of the differences of gradients over that of the expected ones."""
    assert found.keys() == expected.keys()
    gap = [float((found[name] - gradient).norm()) for name, gradient in expected.items()]
    whole = [float(gradient.norm()) for gradient in expected.values()]
    return float(np.linalg.norm(gap) / np.linalg.norm(whole))


def tolerance(model_type: str) -> float:
    """Of float32. States are read through exponentials of sums, which blow rounding up."""
    return 2e-4 if model_type in HYBRIDS else 5e-5


def clone(made: Batch, **changes: Any) -> Batch:
    """The same with other arguments."""
    return Batch(made.sequences, copy.copy(made.arguments) | changes, made.weights)


def screenshots(count: int) -> Batch:
    """As many sequences, each with an image of its own of 256 patches."""
    grid = (1, 16, 16)
    rows = [np.array([5, 6, *run(grid), 7, i % 50 + 3, 8]) for i in range(count)]
    shown = torch.cat([pixels(i, grid) for i in range(count)]).float()
    grids = torch.tensor([grid] * count)
    return Batch(rows, {"pixel_values": shown, "image_grid_thw": grids}, random_weights(rows))


@cache
def videos(model_type: str) -> Batch:
    """Six sequences over two videos of one grid and an image. Frames are apart, with their times as
    text between them, and in one sequence the times differ behind the first frame, so that the tree
    parts inside the video; Qwen2.5-VL has one run, and other seconds there."""
    apart = model_type != "qwen2_5_vl"
    grids = {"one": (3, 8, 4), "two": (3, 8, 4), "still": (1, 4, 4)}
    shown = {name: pixels(10 + i, grid) for i, (name, grid) in enumerate(grids.items())}
    draw = text(1)
    times, other = [draw(2) for _ in range(3)], [draw(2) for _ in range(2)]

    def clip(stamps: list[list[int]]) -> list[int]:
        if not apart:
            return run(grids["one"], VIDEO)
        return [t for stamp in stamps for t in (*stamp, *run((1, 8, 4), VIDEO))]

    written = {
        "one": clip(times),
        "two": clip(times),
        "late": clip([times[0], *other]),
        "still": run(grids["still"]),
    }
    shown["late"], grids["late"] = shown["one"], grids["one"]
    s, x, y, t1, t2 = (draw(n) for n in (5, 3, 4, 7, 5))
    parts: list[list[Any]] = [
        [s, "one", x, t1],
        [s, "one", x, t2],
        [s, "two", y, "still", t1],
        # packed first, as it is heavier
        [s, "still", x, "one", t1, t2, t1],
        # the second of two videos
        [s, "one", y, "two", t2],
        [s, "late", t1],
    ]
    rows = [
        np.array([t for part in row for t in (written[part] if isinstance(part, str) else part)])
        for row in parts
    ]
    names = [part for row in parts for part in row if isinstance(part, str)]
    clips = [name for name in names if name != "still"]
    arguments = {
        "pixel_values": torch.cat([shown["still"]] * names.count("still")),
        "image_grid_thw": torch.tensor([grids["still"]] * names.count("still")),
        "pixel_values_videos": torch.cat([shown[name] for name in clips]),
        "video_grid_thw": torch.tensor([grids[name] for name in clips]),
    }
    if not apart:
        seconds = [1.0 if name == "late" else 0.5 for name in clips]
        arguments["second_per_grid_ts"] = torch.tensor(seconds)
    return Batch(rows, arguments, random_weights(rows))
