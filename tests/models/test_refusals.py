"""Refusals of what cannot run exactly, each with a message of its own that names the fix."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModel, Qwen3Config, Qwen3ForCausalLM
from transformers.integrations.neftune import activate_neftune, deactivate_neftune

import prefixtree as pt
from prefixtree.integrations.transformers import allow_model_type, supported_model_types
from prefixtree.models import families
from prefixtree.scoring.logprobs import sequence_logprobs
from tests.support.family_configs import FAMILIES, PARTS, TINY
from tests.support.models import (
    CACHE,
    HIDDEN,
    AdaptedHead,
    assert_same,
    build,
    cases,
    make_objective,
    mostly_full,
    ragged_sequences,
    ready,
    run_packed,
    run_replicated,
)


@pytest.fixture(scope="module")
def packed() -> pt.PackedForest:
    return pt.pack(pt.PrefixForest.from_sequences(ragged_sequences()))


# ---- calls of the model -------------------------------------------------------------------------
# for every family: each has its own forward, and some do not hand every keyword on


@pytest.mark.parametrize("model_type", cases(FAMILIES))
def test_no_tree_mask(model_type, packed):
    inputs = packed.model_inputs()
    del inputs["tree_mask"]
    with pytest.raises(ValueError, match=r"needs the forest's mask.*packed\.model_inputs\(\)"):
        ready(build(model_type))(**inputs)


@pytest.mark.parametrize("model_type", mostly_full(FAMILIES))
@pytest.mark.parametrize("kind", ["ones", "bool ones", "padding", "one row of 4-D", "4-D"])
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


@pytest.mark.parametrize("model_type", cases(FAMILIES))
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


@pytest.mark.parametrize("model_type", cases(sorted(FAMILIES.keys() - _CACHE_UNSEEN)))
def test_use_cache(model_type, packed):
    for inputs in ({**packed.model_inputs(), "use_cache": True}, packed.model_inputs()):
        if not inputs["use_cache"]:
            del inputs["use_cache"]  # the configuration's own default is True
        with pytest.raises(ValueError, match="no key-value cache: pass use_cache=False"):
            pt.prepare(build(model_type))(**inputs)


@pytest.mark.parametrize("model_type", cases(_CACHE_UNSEEN))
def test_use_cache_where_it_cannot_be_seen(model_type, packed):
    """An empty cache is filled and changes nothing; to go on with it is refused."""
    model = pt.prepare(build(model_type))
    inputs = families.forward_inputs(packed, model.config)
    with torch.no_grad():
        expected = model(**inputs).logits
        output = model(**{**inputs, "use_cache": True})
        assert torch.equal(output.logits, expected)
        with pytest.raises(ValueError, match="rows, the mask has"):
            model(**inputs, **{CACHE: output[CACHE]})


@pytest.mark.parametrize("model_type", cases(FAMILIES))
def test_a_cache_that_is_already_filled(model_type, packed):
    """Whatever use_cache says: the keys of another call are not in the tree."""
    model = build(model_type, "eager").eval()
    with torch.no_grad():
        cache = model(torch.tensor([[5, 6, 7]]), use_cache=True)[CACHE]
    model.set_attn_implementation("prefixtree")
    with pytest.raises(ValueError, match=r"cache|rows, the mask has"):
        model(**packed.model_inputs(), **{CACHE: cache})


@pytest.mark.parametrize("model_type", cases(FAMILIES))
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


# ---- randomness ---------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", cases(FAMILIES))
def test_attention_dropout_in_training(model_type, packed):
    model = build(model_type, attention_dropout=0.1)
    with pytest.raises(pt.UnsupportedError, match=r"attention.dropout is 0\.1"):
        ready(model)(**packed.model_inputs())
    with pytest.raises(pt.UnsupportedError, match=r"attention_dropout is 0.1.*model\.eval\(\)"):
        sequence_logprobs(model, packed)


def test_attention_dropout_is_fine_in_eval(packed):
    model = build("qwen3", attention_dropout=0.1).eval()
    expected = sequence_logprobs(build("qwen3"), packed).logprobs
    for got, want in zip(sequence_logprobs(model, packed).logprobs, expected, strict=True):
        assert torch.equal(got, want)


def test_a_layer_left_in_training_mode(packed):
    model = build("qwen3", attention_dropout=0.1).eval()
    model.model.layers[1].train()
    with pytest.raises(pt.UnsupportedError, match=r"attention dropout is 0\.1"):
        sequence_logprobs(model, packed)


@pytest.mark.parametrize(
    "name",
    [
        "resid_pdrop",
        "embd_pdrop",
        "attn_pdrop",
        "hidden_dropout",
        "hidden_dropout_prob",
        "attention_probs_dropout_prob",
        "embedding_dropout",
        "activation_dropout",
        "layerdrop",
        "router_jitter_noise",
        "input_jitter_noise",
    ],
)
def test_dropouts_and_jitters_of_the_configuration(name, packed):
    model = build("qwen3_moe")
    setattr(model.config, name, 0.2)
    with pytest.raises(pt.UnsupportedError, match=rf"config\.{name} is 0.2.*set it to 0"):
        sequence_logprobs(model, packed)
    sequence_logprobs(model.eval(), packed)
    setattr(model.config, name, 0.0)
    sequence_logprobs(model.train(), packed)


class _Adapter(nn.Module):
    """A low-rank adapter as PEFT makes them: a dropout on its own branch."""

    def __init__(self, base: nn.Linear, dropout: float) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_dropout = nn.ModuleDict({"default": nn.Dropout(dropout)})
        self.lora_A = nn.Linear(base.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(self.lora_dropout["default"](x)))


# as transformers' quantisers have it
_GPTQ = SimpleNamespace(quantization_config=SimpleNamespace(quant_method="gptq"))


def test_noise_on_embeddings(packed):
    """NEFTune, as transformers' trainer switches it on and off."""
    model = build("qwen3")
    expected = sequence_logprobs(model, packed).logprobs
    handle = activate_neftune(model, 5.0)
    with pytest.raises(
        pt.UnsupportedError, match=r"NEFTune is active on model\.embed_tokens .*_alpha=5\.0"
    ):
        sequence_logprobs(model, packed)
    torch.testing.assert_close(sequence_logprobs(model.eval(), packed).logprobs, expected)
    deactivate_neftune(model.train(), handle)
    torch.testing.assert_close(sequence_logprobs(model, packed).logprobs, expected)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("hf_quantizer", _GPTQ, "that transformers loads quantised"),
        ("_use_kernels", True, "use_kernels replaces layers"),
    ],
)
def test_weights_and_layers(name, value, message, packed):
    model = build("qwen3")
    setattr(model, name, value)
    for outer in (model, nn.parallel.DataParallel(model)):
        with pytest.raises(pt.UnsupportedError, match=message):
            sequence_logprobs(outer, packed)


def test_dropout_of_an_adapter(packed):
    model = build("llama")
    attention = model.model.layers[2].self_attn
    attention.q_proj = _Adapter(attention.q_proj, 0.05)
    name = r"model\.layers\.2\.self_attn\.q_proj\.lora_dropout\.default"
    with pytest.raises(pt.UnsupportedError, match=rf"{name} is an active dropout \(p = 0.05\)"):
        sequence_logprobs(model, packed)
    sequence_logprobs(model.eval(), packed)
    attention.q_proj.lora_dropout["default"].p = 0.0
    sequence_logprobs(model.train(), packed)


@pytest.mark.parametrize("kind", [nn.Dropout, nn.Dropout1d, nn.AlphaDropout])
def test_dropout_outside_the_transformers_model(kind, packed):
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = build("llama")
            self.extra = kind(0.3)

        def forward(self, **inputs: Any) -> Any:
            return self.inner(**inputs)

    with pytest.raises(pt.UnsupportedError, match="extra is an active dropout"):
        sequence_logprobs(Wrapper(), packed)


# ---- RoPE that looks at the batch ---------------------------------------------------------------


_LONG = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 2.0}
_LONG["original_max_position_embeddings"] = 16
_ROPES = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    "longrope": {"rope_type": "longrope", "rope_theta": 1e4, **_LONG},
}


@pytest.mark.parametrize("kind", _ROPES)
def test_rope_of_the_longest_sequence(kind, packed):
    model = build("qwen3", rope_parameters=_ROPES[kind])
    match = rf"RoPE type '{kind}'.*default, linear, llama3, proportional, yarn"
    with pytest.raises(pt.UnsupportedError, match=match):
        sequence_logprobs(model, packed)
    with pytest.raises(pt.UnsupportedError, match=match):
        model.eval()(**packed.model_inputs())


@pytest.mark.parametrize("kind", _ROPES)
@pytest.mark.parametrize("layer_type", ["full_attention", "sliding_attention"])
def test_rope_of_the_longest_sequence_in_one_layer_type(kind, layer_type, packed):
    default = {"rope_type": "default", "rope_theta": 1e4}
    parameters = dict.fromkeys(("full_attention", "sliding_attention"), default)
    model = build("gemma3_text", rope_parameters={**parameters, layer_type: _ROPES[kind]})
    with pytest.raises(pt.UnsupportedError, match=f"RoPE type '{kind}'"):
        sequence_logprobs(model, packed)


# ---- models -------------------------------------------------------------------------------------


# what makes each unlike a replicated batch: they drop the mask's keyword (nemotron, stablelm), keep
# a state along packed order (jamba), attend in chunks (llama4_text), draw noise in their router
# (phimoe), bias scores by packed distance (bloom)
_REFUSED: dict[str, dict[str, Any]] = {
    "nemotron": {},
    "stablelm": {},
    "jamba": {
        "num_experts": 2,
        "mamba_dt_rank": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
    },
    "llama4_text": {},
    "phimoe": {},
    "bloom": {},
}


@pytest.mark.parametrize("model_type", _REFUSED)
def test_a_model_type_that_is_not_proven(model_type, packed):
    model = build(model_type, **_REFUSED[model_type])
    reason = re.escape(families.UNSERVED[model_type])
    with pytest.raises(pt.UnsupportedError, match=f"'{model_type}' is not served: {reason}"):
        sequence_logprobs(model, packed)


@pytest.mark.parametrize("model_type", sorted(_REFUSED.keys() - {"bloom"}))
def test_opting_in_to_one_of_them_is_refused_where_it_shows(model_type, packed, monkeypatch):
    monkeypatch.setitem(families._FAMILIES, model_type, families.Family())
    with pytest.raises(
        (ValueError, pt.UnsupportedError),
        match=r"needs the forest's mask|layers of type '(linear|chunked)_attention'|router_jitter",
    ):
        sequence_logprobs(build(model_type, **_REFUSED[model_type]), packed)


class _NobodyKnowsConfig(Qwen3Config):
    model_type = "nobody_knows"


def test_a_model_type_nobody_knows(packed):
    """A class of its own, though it inherits all from a family that is proven."""
    config = _NobodyKnowsConfig(**{**TINY, "head_dim": 16})
    config._attn_implementation = "prefixtree"
    model = Qwen3ForCausalLM(config)
    for run in (lambda: sequence_logprobs(model, packed), lambda: model(**packed.model_inputs())):
        with pytest.raises(
            pt.UnsupportedError, match=r"'nobody_knows' is not verified.*qwen3.*allow_model"
        ):
            run()


def test_the_model_alone_refuses_an_unproven_type_too(packed):
    with pytest.raises(pt.UnsupportedError, match="model type 'phimoe' is not served: its router"):
        build("phimoe", router_jitter_noise=0.0)(**packed.model_inputs())


@pytest.mark.parametrize("layer_type", ["linear_attention", "chunked_attention", "mamba"])
def test_layers_that_mix_by_packed_order(layer_type, packed):
    model = build("qwen3")
    model.config.__dict__["layer_types"] = ["full_attention", layer_type, "full_attention"]
    match = f"layers of type '{layer_type}'.*full_attention, sliding_attention"
    with pytest.raises(pt.UnsupportedError, match=match):
        sequence_logprobs(model, packed)


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text"])
def test_bidirectional_attention(model_type, packed):
    model = build(model_type, use_bidirectional_attention=True)
    with pytest.raises(pt.UnsupportedError, match="bidirectional attention has no prefix to share"):
        sequence_logprobs(model, packed)
    with pytest.raises(pt.UnsupportedError):
        model(**packed.model_inputs())


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_another_attention_implementation(implementation, packed):
    model = build("qwen3", implementation)
    match = rf"attn_implementation='{implementation}'.*set_attn_implementation\(\"prefixtree\"\)"
    with pytest.raises(pt.UnsupportedError, match=match):
        sequence_logprobs(model, packed)


def test_a_model_without_a_head(packed):
    config = build("qwen3").config
    model = AutoModel.from_config(config, attn_implementation="prefixtree")
    with pytest.raises(pt.UnsupportedError, match=r"AutoModelForCausalLM.*Qwen3Model has none"):
        sequence_logprobs(model, packed)


@pytest.mark.parametrize("adapted", [False, True], ids=["a linear layer", "with an adapter"])
def test_a_head_with_a_part_of_the_vocabulary(adapted, packed):
    """A rank's slice, say: a softmax over it would be finite and wrong."""
    model = build("llama")
    model.lm_head = nn.Linear(HIDDEN, 49, bias=False)
    if adapted:
        model.lm_head = AdaptedHead(model.lm_head)
    with pytest.raises(pt.UnsupportedError, match="gives 49 logits per token, expected the 97"):
        sequence_logprobs(model, packed)


def test_something_that_is_no_transformers_model(packed):
    with pytest.raises(pt.UnsupportedError, match="Linear has none"):
        sequence_logprobs(nn.Linear(2, 2), packed)


# ---- mixtures of experts: the load-balancing loss ------------------------------------------------

_MIXTURES = [
    name
    for name in FAMILIES
    if name in CONFIG_MAPPING
    and hasattr(CONFIG_MAPPING[name]().get_text_config(), "output_router_logits")
]


def test_the_mixtures_are_the_families_with_experts():
    experts = {
        case.values[0]
        for case in cases(FAMILIES)
        if not case.marks and any("experts" in n for n, _ in build(*case.values).named_parameters())
    }
    # which has no such loss
    assert experts - {"aria_text"} == set(_MIXTURES)


@pytest.mark.parametrize("model_type", cases(_MIXTURES))
@pytest.mark.parametrize("given", ["config", "keyword"])
def test_router_logits(model_type, given, packed):
    """Their loss counts tokens; what it is of a forest is not what it is of the batch.
    `sequence_logprobs` has the right one (test_router_loss.py)."""
    match = r"output_router_logits asks the model for its .*take scores.aux_loss.*to False"
    if given == "config":
        model = build(model_type, output_router_logits=True)
        with pytest.raises(pt.UnsupportedError, match=match):
            ready(model)(**packed.model_inputs())
    else:
        with pytest.raises(pt.UnsupportedError, match=match):
            ready(build(model_type))(**packed.model_inputs(), output_router_logits=True)


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
    with pytest.raises(pt.UnsupportedError, match=rf"hold {placeholder} 7, which would be shared"):
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


# ---- arguments of sequence_logprobs -------------------------------------------------------------


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


# ---- the opt-in ---------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["olmo2", "phi3", "granite", "cohere2"])
def test_opting_in_to_a_type_one_has_verified(model_type, monkeypatch):
    """And its figures are right, so that the message does not promise too much: four that are
    proven, taken off the list, the last two with a rule of their own for logits."""
    others = {name: f for name, f in families._FAMILIES.items() if name != model_type}
    monkeypatch.setattr(families, "_FAMILIES", others)
    if model_type == "granite":
        allow_model_type("granite", divisor="logits_scaling")
    elif model_type == "cohere2":
        allow_model_type("cohere2", scale="logit_scale")
    else:
        allow_model_type(model_type)
    assert model_type in supported_model_types()
    objective = make_objective(ragged_sequences())
    packed = pt.pack(pt.PrefixForest.from_sequences(objective.sequences))
    run = run_packed(build(model_type), packed, objective)
    assert_same(run, run_replicated(build(model_type, "eager"), objective))


def test_the_opt_in_ended_with_its_test():
    assert supported_model_types() == sorted([*FAMILIES, *PARTS])
