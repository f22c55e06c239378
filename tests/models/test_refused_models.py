"""Models and configurations that cannot run exactly: refused with a message that names the fix."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import CONFIG_MAPPING, AutoModel, Qwen3Config, Qwen3ForCausalLM
from transformers.integrations.neftune import activate_neftune, deactivate_neftune

import prefixtree as pt
from prefixtree.errors import refuse
from prefixtree.images import refusals as image_refusals
from prefixtree.integrations.transformers import allow_model_type, supported_model_types
from prefixtree.models import dropout, families, prepared
from prefixtree.scoring.logprobs import sequence_logprobs
from tests.support.family_configs import FAMILIES, TINY
from tests.support.full import mostly
from tests.support.models import (
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
from tests.support.refusals import check_cases, pattern, rows_of
from tests.support.variant_configs import PARTS


@pytest.fixture(scope="module")
def packed() -> pt.PackedForest:
    return pt.pack(pt.PrefixForest.from_sequences(ragged_sequences()))


# ---- randomness ----------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", mostly_full(FAMILIES))
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


# ---- models --------------------------------------------------------------------------------------


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
    monkeypatch.setitem(families.FAMILIES, model_type, families.Family())
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


def test_a_configuration_is_checked_in_every_forward_and_where_layers_have_their_own(packed):
    model, inputs = build("qwen3"), packed.model_inputs()
    model(**inputs)
    model.config.use_bidirectional_attention = True
    with pytest.raises(pt.UnsupportedError, match="bidirectional attention"):
        model(**inputs)
    model.config.use_bidirectional_attention = False
    attention = model.model.layers[-1].self_attn
    attention.config = copy.copy(model.config)
    attention.config.is_causal = False
    with pytest.raises(pt.UnsupportedError, match="bidirectional attention"):
        model(**inputs)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_another_attention_implementation(implementation, packed):
    model = build("qwen3", implementation)
    match = rf"attn_implementation='{implementation}'.*prefixtree\.prepare\(model\)"
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


@pytest.mark.full
def test_the_mixtures_are_the_families_with_experts():
    experts = {
        case.values[0]
        for case in cases(FAMILIES)
        if not case.marks and any("experts" in n for n, _ in build(*case.values).named_parameters())
    }
    # which has no such loss
    assert experts - {"aria_text"} == set(_MIXTURES)


@pytest.mark.parametrize("model_type", mostly_full(_MIXTURES))
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


# ---- the opt-in ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model_type", mostly(["olmo2", "phi3", "granite", "cohere2"], ["olmo2", "granite"])
)
def test_opting_in_to_a_type_one_has_verified(model_type, monkeypatch):
    """And its figures are right, so that the message does not promise too much: four that are
    proven, taken off the list, the last two with a rule of their own for logits."""
    others = {name: f for name, f in families.FAMILIES.items() if name != model_type}
    monkeypatch.setattr(families, "FAMILIES", others)
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


# ---- every row of the tables ---------------------------------------------------------------------


def _shows(
    model: Any = None,
    modality: str = "image",
    tokens: Any = (1, 2),
    routes: Any = None,
    shares_dropout: bool = False,
    **fields: Any,
) -> image_refusals.Shows:
    causal_lm = build("qwen3", **fields)
    if shares_dropout:
        pt.share_dropout(causal_lm, 0)
    model = build("qwen3") if model is None else model
    forest = SimpleNamespace(routes=routes, tokens=np.array(tokens))
    packed: Any = SimpleNamespace(forest=forest)
    shown = [SimpleNamespace(modality=modality)]
    images: Any = SimpleNamespace(distinct=shown, placeholders={"image": 60, "video": 61})
    return image_refusals.Shows(model, causal_lm, packed, images)


def _with(layer: nn.Module, **attributes: Any) -> nn.Module:
    vars(layer).update(attributes)
    return nn.Sequential(layer)


class _Engine(nn.Sequential):
    """As if DeepSpeed had made it."""

    __module__ = "deepspeed.runtime.engine"


def _compiled() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.compile()
    return nn.Sequential(layer)


def _fsdp1() -> nn.Module:
    return FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))


def _fsdp2() -> nn.Module:
    return fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (2,)))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "MODULES: use_kernels": lambda: _with(nn.Linear(2, 2), _use_kernels=True),
    "MODULES: neftune_noise_alpha": lambda: _with(nn.Linear(2, 2), neftune_noise_alpha=5.0),
    "MODULES: dropout": lambda: nn.Sequential(nn.Dropout(0.1)),
}
SHOWN: dict[str, Callable[[], image_refusals.Shows]] = {
    "WITH_IMAGES: routes": lambda: _shows(routes=[]),
    "WITH_IMAGES: shared dropout": lambda: _shows(shares_dropout=True),
    "WITH_IMAGES: DeepSpeed": lambda: _shows(_Engine()),
    "WITH_IMAGES: FSDP1": lambda: _shows(_fsdp1()),
    "WITH_IMAGES: compiled modules": lambda: _shows(_compiled()),
    "WITH_IMAGES: tensor or expert parallel": (
        lambda: _shows(_with(nn.Linear(2, 2), _is_hooked=True))
    ),
    "WITH_IMAGES: videos under FSDP2": lambda: _shows(_fsdp2(), modality="video"),
    "WITH_IMAGES: RoPE by length": (
        lambda: _shows(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    ),
    "WITH_IMAGES: placeholders": lambda: _shows(tokens=[1, 60]),
}
UNPREPARED: dict[str, Callable[[], Any]] = {
    "UNPREPARED: indexers": lambda: build("deepseek_v32").config,
    "UNPREPARED: recurrent layers": lambda: build("qwen3_5_text").config,
}
SHARED: dict[str, Callable[[], nn.Module]] = {"SHARED: share_dropout": _fsdp2}
ROWS = rows_of(families, prepared, image_refusals, dropout)


def test_every_row_has_a_case() -> None:
    check_cases(ROWS, MODULES | SHOWN | UNPREPARED | SHARED)


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """Rank 0 of two that never speak."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_rows(name: str, two_ranks: None) -> None:
    with pytest.raises(pt.UnsupportedError, match=pattern(ROWS[name])):
        if name in MODULES:
            families.check_modules(MODULES[name]())
        elif name in UNPREPARED:
            refuse(prepared.UNPREPARED, UNPREPARED[name]())
        elif name in SHARED:
            refuse(dropout.SHARED, SHARED[name]())
        else:
            refuse(image_refusals.WITH_IMAGES, SHOWN[name]())


def test_what_the_rows_serve(two_ranks: None) -> None:
    families.check_modules(MODULES["MODULES: neftune_noise_alpha"]().eval())
    refuse(image_refusals.WITH_IMAGES, _shows(_fsdp2()))
    # a video's alone was sampled
    refuse(image_refusals.WITH_IMAGES, _shows(tokens=[1, 61]))
    refuse(image_refusals.WITH_IMAGES, _shows(modality="video"))
