"""Calls that are refused, each with a message of its own that names the fix."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import prefixtree as pt
from prefixtree.models import families
from prefixtree.scoring.logprobs import sequence_logprobs
from tests.support.family_configs import FAMILIES
from tests.support.full import in_turn
from tests.support.models import (
    CACHE,
    build,
    mostly_full,
    ragged_sequences,
    ready,
)
from tests.support.variant_configs import PARTS


@pytest.fixture(scope="module")
def packed() -> pt.PackedForest:
    return pt.pack(pt.PrefixForest.from_sequences(ragged_sequences()))


# ---- calls of the model --------------------------------------------------------------------------
# for every family, most of them with --full: each has its own forward, and some do not hand every
# keyword on


@pytest.mark.parametrize("model_type", mostly_full(FAMILIES))
def test_no_tree_mask(model_type, packed):
    inputs = packed.model_inputs()
    del inputs["tree_mask"]
    with pytest.raises(ValueError, match=r"needs the forest's mask.*packed\.model_inputs\(\)"):
        ready(build(model_type))(**inputs)


@pytest.mark.parametrize(
    ("model_type", "kind"),
    in_turn(mostly_full(FAMILIES), ["ones", "bool ones", "padding", "one row of 4-D", "4-D"]),
)
def test_an_attention_mask(model_type, kind, packed):
    tokens = packed.num_tokens
    mask = torch.ones(1, tokens, dtype=torch.long)
    if kind == "bool ones":
        mask = mask.bool()
    elif kind == "padding":
        mask[0, -3:] = 0
    elif kind == "one row of 4-D":
        mask = torch.zeros(1, 1, 1, tokens)
    elif kind == "4-D":
        mask = torch.zeros(1, 1, tokens, tokens)
    with pytest.raises(ValueError, match=r"no attention_mask|not pass an attention_mask"):
        build(model_type)(**packed.model_inputs(), attention_mask=mask)


def test_ready_made_masks_a_layer_type(packed):
    """A dictionary of masks, which `generate` prepares and gemma accepts."""
    tokens = packed.num_tokens
    mask = dict.fromkeys(("full_attention", "sliding_attention"), torch.zeros(1, 1, tokens, tokens))
    with pytest.raises(ValueError, match="not pass an attention_mask"):
        build("gemma3_text")(**packed.model_inputs(), attention_mask=mask)


@pytest.mark.parametrize("model_type", mostly_full(FAMILIES))
def test_a_batch_of_two(model_type, packed):
    inputs = packed.model_inputs()
    for name in ("input_ids", "position_ids"):
        inputs[name] = inputs[name].repeat(2, 1)
    with pytest.raises(ValueError, match="expected batch size 1, got 2"):
        ready(build(model_type))(**inputs)


# their layers are not told about use_cache, only given a cache, which is gone before attention
_CACHE_UNSEEN = [
    "cwm",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "gemma3n_text",
    "gemma4",
    "gemma4_text",
    "gemma4_unified_text",
    "glm46v",
    "glm4v",
    "laguna",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "longcat_flash",
    "mellum",
    "mimo_v2_flash",
    "modernbert-decoder",
    "nanochat",
    "olmo3",
    "opt",
    "qwen3_vl",
    "qwen3_vl_moe",
    "vaultgemma",
]


@pytest.mark.parametrize("model_type", mostly_full(sorted(FAMILIES.keys() - _CACHE_UNSEEN)))
def test_use_cache(model_type, packed):
    for inputs in ({**packed.model_inputs(), "use_cache": True}, packed.model_inputs()):
        if not inputs["use_cache"]:
            del inputs["use_cache"]  # the configuration's own default is True
        with pytest.raises(ValueError, match="no key-value cache: pass use_cache=False"):
            pt.prepare(build(model_type))(**inputs)


@pytest.mark.parametrize("model_type", mostly_full(_CACHE_UNSEEN))
def test_use_cache_where_it_cannot_be_seen(model_type, packed):
    """An empty cache is filled and changes nothing; to go on with it is refused."""
    model = pt.prepare(build(model_type))
    inputs = families.forward_inputs(packed, model)
    with torch.no_grad():
        expected = model(**inputs).logits
        output = model(**{**inputs, "use_cache": True})
        assert torch.equal(output.logits, expected)
        with pytest.raises(ValueError, match="rows, the mask has"):
            model(**inputs, **{CACHE: output[CACHE]})


@pytest.mark.parametrize("model_type", mostly_full(FAMILIES))
def test_a_cache_that_is_already_filled(model_type, packed):
    """Whatever use_cache says: the keys of another call are not in the tree."""
    model = build(model_type, "eager").eval()
    with torch.no_grad():
        cache = model(torch.tensor([[5, 6, 7]]), use_cache=True)[CACHE]
    model.set_attn_implementation("prefixtree")
    with pytest.raises(ValueError, match=r"cache|rows, the mask has"):
        model(**packed.model_inputs(), **{CACHE: cache})


@pytest.mark.parametrize("model_type", mostly_full(FAMILIES))
def test_packed_sequence_keywords(model_type, packed):
    """The keywords of padding-free training name another way of packing."""
    ends = torch.tensor([0, packed.num_tokens], dtype=torch.int32)
    with pytest.raises(ValueError, match="cannot be combined with cu_seq_lens_q"):
        model = pt.prepare(build(model_type))
        model(**packed.model_inputs(), cu_seq_lens_q=ends, cu_seq_lens_k=ends)


def test_positions_of_another_length(packed):
    with pytest.raises((ValueError, RuntimeError)):
        build("qwen3")(**{**packed.model_inputs(), "position_ids": torch.arange(3)[None]})


def test_a_single_wrong_position(packed):
    position_ids = packed.position_ids.clone()
    position_ids[-1] += 1
    with pytest.raises(
        ValueError, match=r"not the tokens' positions.*packed\.position_ids\[None\]"
    ):
        build("qwen3")(**{**packed.model_inputs(), "position_ids": position_ids[None]})


def test_a_mask_of_another_forest(packed):
    other = pt.pack(pt.PrefixForest.from_sequences([[1, 2, 3], [1, 2, 4]]))
    with pytest.raises(ValueError, match=r"tokens|queries|position_ids"):
        build("qwen3")(**{**packed.model_inputs(), "tree_mask": other.mask})


def test_something_else_for_a_mask(packed):
    with pytest.raises((TypeError, ValueError), match=r"TreeMask|packed\.mask"):
        build("qwen3")(**{**packed.model_inputs(), "tree_mask": packed})


# ---- images --------------------------------------------------------------------------------------

_VISION = sorted(set(PARTS.values()))


@pytest.mark.parametrize("model_type", _VISION)
@pytest.mark.parametrize("placeholder", ["image_token_id", "video_token_id"])
def test_placeholders_of_images(model_type, placeholder):
    model = build(model_type)
    setattr(model.config, placeholder, 7)
    text = pt.pack(pt.PrefixForest.from_sequences([[3, 4, 5], [3, 4, 6]]))
    assert sequence_logprobs(model, text).logprobs[0].isfinite().all()
    images = pt.pack(pt.PrefixForest.from_sequences([[3, 4, 5], [3, 7, 6]]))
    with pytest.warns(UserWarning, match=rf"hold {placeholder} 7: .* read as text"):
        sequence_logprobs(model, images)


@pytest.mark.parametrize("model_type", _VISION)
@pytest.mark.parametrize("gradients", [True, False])
def test_images(model_type, gradients, packed):
    model = build(model_type)
    vision = model.config.vision_config
    size = vision.in_channels if hasattr(vision, "in_channels") else vision.in_chans
    patches = torch.randn(4, size * vision.temporal_patch_size * vision.patch_size**2)
    inputs = {**packed.model_inputs(), "position_ids": packed.position_ids.expand(4, 1, -1)}
    with (
        torch.set_grad_enabled(gradients),
        pytest.raises(pt.UnsupportedError, match="scored with sequence_logprobs"),
    ):
        model(**inputs, pixel_values=patches, image_grid_thw=torch.tensor([[1, 2, 2]]))


# ---- arguments of sequence_logprobs --------------------------------------------------------------


def test_a_forest_without_tokens():
    forest = pt.PrefixForest.from_parents([-1, 0, 0], [3, 4, 2])
    with pytest.raises(pt.ForestError, match="no token ids; give from_parents its tokens="):
        sequence_logprobs(build("qwen3"), pt.pack(forest))


@pytest.mark.parametrize("temperature", [[1.0], [1.0] * 13, []])
def test_temperatures_of_another_shape(temperature, packed):
    with pytest.raises(
        ValueError, match=r"one number or one array \[n\] per sequence \(12\), got shape"
    ):
        sequence_logprobs(build("qwen3"), packed, temperature=temperature)


@pytest.mark.parametrize(
    ("bad", "error", "match"),
    [
        (np.ones(3), pt.ForestError, r"temperature\[4\] must have the sequence's length 27"),
        (np.ones((27, 2)), pt.ForestError, r"temperature\[4\] must have .*got no 1-D array"),
        (["warm"] * 27, TypeError, r"temperature\[4\] must be a number, or one number or one"),
        (np.zeros(27), ValueError, "temperatures must be finite and above 0"),
        (torch.ones(27, requires_grad=True), pt.ForestError, r"temperature\[4\] requires a grad"),
    ],
)
def test_temperatures_per_token(bad, error, match, packed):
    temperatures = [np.ones(len(s)) for s in ragged_sequences()]
    temperatures[4] = bad
    with pytest.raises(error, match=match):
        sequence_logprobs(build("qwen3"), packed, temperature=temperatures)
    with pytest.raises(pt.ForestError, match="one entry per sequence: expected 12, got 11"):
        sequence_logprobs(build("qwen3"), packed, temperature=temperatures[1:])


@pytest.mark.parametrize("temperature", [True, "warm", "0.5", [True] * 12, ["a"] * 12, 1j])
def test_temperatures_that_are_no_numbers(temperature, packed):
    match = r"temperature must be a number, or one number or one array \[n\] per sequence, got"
    with pytest.raises(TypeError, match=match):
        sequence_logprobs(build("qwen3"), packed, temperature=temperature)


# logits of 1e3 by 1e-36 are beyond float32
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 1e-60, 1e-40, 1e-36])
def test_temperatures_that_cannot_divide(value, packed):
    for temperature in (value, [1.0] * 11 + [value]):
        with pytest.raises(ValueError, match="temperatures must be finite and above 0"):
            sequence_logprobs(build("qwen3"), packed, temperature=temperature)


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_loss_masks_of_another_shape(kind, packed):
    lengths = [len(s) for s in ragged_sequences()]
    masks = [kind([1] * n) for n in lengths]
    model = build("qwen3")
    with pytest.raises(pt.ForestError, match="one entry per sequence: expected 12, got 11"):
        sequence_logprobs(model, packed, loss_mask=masks[:-1])
    short = [*masks[:2], kind([1] * (lengths[2] - 1)), *masks[3:]]
    match = rf"loss_mask\[2\] must have the sequence's length {lengths[2]}, got length"
    with pytest.raises(pt.ForestError, match=match):
        sequence_logprobs(model, packed, loss_mask=short)
    deep = [*masks[:3], kind([[1] * lengths[3]]), *masks[4:]]
    with pytest.raises(pt.ForestError, match=r"loss_mask\[3\].*got no 1-D array"):
        sequence_logprobs(model, packed, loss_mask=deep)
    with pytest.raises(pt.ForestError, match="one mask per sequence, got none"):
        sequence_logprobs(model, packed, loss_mask=[])


@pytest.mark.parametrize("chunk_size", [0, -1, True, "a", 2.5, [3]])
def test_chunks_of_no_rows(chunk_size, packed):
    with pytest.raises(ValueError, match="chunk_size must be None or an integer >= 1, got"):
        sequence_logprobs(build("qwen3"), packed, chunk_size=chunk_size)


@pytest.mark.parametrize("changes", [{"n_group": 4}, {"n_routed_experts": 3}], ids=str)
def test_experts_that_do_not_divide_into_groups(changes, packed):
    """The router reads the scores of several tokens as those of one, or dies of their number."""
    with pytest.raises(pt.UnsupportedError, match=r"does not divide into config\.n_group \([42]\)"):
        sequence_logprobs(build("deepseek_v2/grouped", **changes), packed)
    sequence_logprobs(build("deepseek_v2", n_group=3), packed)
