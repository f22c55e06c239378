"""PEFT adapters: gradients of every adapter parameter, several adapters, what is refused."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from packaging import version
from torch import nn
from transformers.integrations.peft import MIN_PEFT_VERSION

import prefixtree as pt
from prefixtree.models.adapters import LORA_VARIANTS, METHODS, check_adapters
from prefixtree.scoring.logprobs import sequence_logprobs
from tests.support.full import in_turn, mostly
from tests.support.models import (
    Objective,
    Run,
    assert_same,
    build,
    enable_checkpointing,
    make_objective,
    ragged_sequences,
    randomise,
    run_packed,
    run_replicated,
)
from tests.support.step_ranks import LIGHT

peft = pytest.importorskip("peft")

pytestmark = [
    # PEFT asks transformers under the old name of the property
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    # what it says of compilers that are missing, dense kernels, adapters beside others
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]

_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"]


@cache
def _objective() -> Objective:
    return make_objective(ragged_sequences())


def _pack(sequences: Any, namespaces: Any = None) -> pt.PackedForest:
    return pt.pack(pt.PrefixForest.from_sequences(sequences, namespaces=namespaces))


def _adapted(
    model_type: str, implementation: str = "prefixtree", seed: int = 3, **config: Any
) -> Any:
    """A tiny model with an adapter, no parameter of which is at its neutral start."""
    config = {"r": 4, "lora_alpha": 16, "target_modules": _TARGETS, **config}
    model = peft.get_peft_model(
        build(model_type, implementation, tie_word_embeddings=False), peft.LoraConfig(**config)
    )
    _randomise_adapters(model, seed)
    return model.train()


def _randomise_adapters(model: nn.Module, seed: int) -> None:
    """B starts at 0, where A has no gradient."""
    copied = nn.Module()
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            copied.register_parameter(name.replace(".", "/"), parameter)
    randomise(copied, seed)


@pytest.mark.parametrize(
    ("config", "model_type"),
    in_turn(
        [
            pytest.param({}, id="layers"),
            pytest.param(
                {"target_modules": [*_TARGETS, "lm_head"]},
                id="layers and head",
                marks=pytest.mark.full,
            ),
            pytest.param({"target_modules": ["lm_head"]}, id="head", marks=pytest.mark.full),
            pytest.param({"target_modules": [*_TARGETS, "embed_tokens"]}, id="embedding"),
            pytest.param({"use_rslora": True, "use_dora": True}, id="dora", marks=pytest.mark.full),
            pytest.param({"modules_to_save": ["lm_head", "embed_tokens"]}, id="saved modules"),
            pytest.param({"bias": "all"}, id="biases", marks=pytest.mark.full),
        ],
        ["qwen3", "gemma2"],
    ),
)
def test_one_adapter(config, model_type):
    model = _adapted(model_type, **config)
    run = run_packed(model, _pack(_objective().sequences), _objective())
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert run.gradients.keys() == trained and all(g.any() for g in run.gradients.values())
    reference = run_replicated(_adapted(model_type, "eager", **config), _objective())
    assert_same(run, reference)


# the methods besides LoRA that are let through, at sizes that fit the tiny model
_LAYERS = {"target_modules": _TARGETS}
_OTHER_METHODS: dict[str, dict[str, Any]] = {
    "ADALORA": {**_LAYERS, "init_r": 4, "total_step": 10},
    "BOFT": _LAYERS,
    "C3A": {**_LAYERS, "block_size": 8},
    "DELORA": {**_LAYERS, "r": 4},
    "FOURIERFT": {**_LAYERS, "n_frequency": 50},
    "GRALORA": {**_LAYERS, "r": 4},
    "HRA": {**_LAYERS, "r": 4},
    "IA3": {**_LAYERS, "feedforward_modules": ["up_proj"]},
    "LN_TUNING": {"target_modules": ["input_layernorm", "post_attention_layernorm", "norm"]},
    "LOHA": {**_LAYERS, "r": 4},
    "LOKR": {**_LAYERS, "r": 4},
    "MISS": {**_LAYERS, "r": 4},
    "OFT": {**_LAYERS, "oft_block_size": 8},
    "RANDLORA": {**_LAYERS, "r": 4},
    "ROAD": {**_LAYERS, "group_size": 8},
    "SHIRA": {**_LAYERS, "r": 4},
    "TRAINABLE_TOKENS": {"target_modules": ["embed_tokens"], "token_indices": [*range(3, 40)]},
    "VBLORA": {**_LAYERS, "r": 4, "vector_length": 8, "num_vectors": 16},
    "VERA": {**_LAYERS, "r": 4},
    "WAVEFT": {**_LAYERS, "n_frequency": 50},
}


def _config(method: str, **changes: Any) -> Any:
    configs = {getattr(k, "value", k): v for k, v in peft.PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    return configs[method](**{**_OTHER_METHODS.get(method, _LAYERS), **changes})


def _with_method(config: Any, implementation: str = "prefixtree") -> Any:
    """A tiny model with an adapter of any method, all that it trains moved from its start."""
    torch.manual_seed(0)
    model = peft.get_peft_model(build("qwen3", implementation, tie_word_embeddings=False), config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model.train()


def test_every_method_that_is_let_through_is_compared():
    assert {"LORA", *_OTHER_METHODS} == set(METHODS)


@pytest.mark.parametrize(
    # one per kind: factors, rotations, embeddings, vectors of all layers
    "method",
    mostly(_OTHER_METHODS, {"IA3", "OFT", "TRAINABLE_TOKENS", "VBLORA"}),
)
def test_other_methods(method):
    run = run_packed(_with_method(_config(method)), _pack(_objective().sequences), _objective())
    # of VB-LoRA's vectors those count that are among the largest
    assert run.gradients and all(g.any() for g in run.gradients.values())
    assert_same(run, run_replicated(_with_method(_config(method), "eager"), _objective()))


def _blocks() -> Any:
    columns = [name for name in _TARGETS if name != "o_proj"]
    return peft.tuners.lora.config.BdLoraConfig(
        target_modules_bd_a=["o_proj"], target_modules_bd_b=columns, nblocks=2
    )


_VARIANTS: dict[str, Any] = {
    "BdLora": lambda: {"use_bdlora": _blocks()},
    "Dora": lambda: {"use_dora": True},
    "Kasa": lambda: {"kasa_config": peft.tuners.lora.config.KasaConfig()},
    "MiCA": lambda: {"init_lora_weights": "mica"},
}


@pytest.mark.parametrize("variant", mostly(LORA_VARIANTS, {"Dora"}))
def test_variants_of_lora(variant):
    def make(implementation: str) -> Any:
        config = peft.LoraConfig(r=4, **_LAYERS, **_VARIANTS[variant]())
        return _with_method(config, implementation)

    model = make("prefixtree")
    layers = [m for m in model.modules() if getattr(m, "lora_variant", None)]
    assert layers and type(layers[0].lora_variant["default"]).__name__.startswith(variant)
    run = run_packed(model, _pack(_objective().sequences), _objective())
    assert_same(run, run_replicated(make("eager"), _objective()))


_EXPERTS = [f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]


# of PEFT, on the rank that it gives fused parameters
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")
@pytest.mark.parametrize(
    ("model_type", "config"),
    mostly(
        [
            ("qwen3_moe", {"target_modules": "all-linear"}),
            ("gpt_oss", {"target_modules": ["q_proj"], "target_parameters": _EXPERTS}),
        ],
        [("gpt_oss", {"target_modules": ["q_proj"], "target_parameters": _EXPERTS})],
    ),
)
def test_experts(model_type, config):
    """PEFT adapts a parameter while a module runs; in one forward and in steps."""
    reference = run_replicated(_adapted(model_type, "eager", **config), _objective())
    assert any("experts.lora_A" in name for name in reference.gradients)
    model, packed = _adapted(model_type, **config), _pack(_objective().sequences)
    assert_same(run_packed(model, packed, _objective()), reference)
    assert_same(
        run_packed(model, packed, _objective(), max_step_tokens=33, import_cost=LIGHT), reference
    )


@pytest.mark.parametrize("use_reentrant", mostly([False, True], [True]))
def test_with_checkpointing(use_reentrant):
    model = _adapted("qwen3", target_modules=[*_TARGETS, "lm_head"])
    enable_checkpointing(model.base_model.model, use_reentrant)
    model.enable_input_require_grads()
    run = run_packed(model, _pack(_objective().sequences), _objective())
    reference = _adapted("qwen3", "eager", target_modules=[*_TARGETS, "lm_head"])
    assert_same(run, run_replicated(reference, _objective()))


def test_a_tied_head():
    def make(implementation: str) -> Any:
        base = build("qwen3", implementation, tie_word_embeddings=True)
        model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=_TARGETS))
        _randomise_adapters(model, 3)
        return model.train()

    run = run_packed(make("prefixtree"), _pack(_objective().sequences), _objective())
    assert_same(run, run_replicated(make("eager"), _objective()))


def test_switched_off_the_base_model_answers():
    """The reference policy of GRPO: the same model with its adapter off."""
    model, packed = _adapted("qwen3", target_modules=[*_TARGETS, "lm_head"]), _pack([[5, 6, 7, 8]])
    base = sequence_logprobs(build("qwen3", tie_word_embeddings=False), packed).logprobs
    with torch.no_grad(), model.disable_adapter():
        off = sequence_logprobs(model, packed).logprobs
    torch.testing.assert_close(off[0], base[0].detach())
    on = sequence_logprobs(model, packed).logprobs
    assert (on[0] - base[0]).abs().max() > 1e-2


def test_it_generates_too():
    model = _adapted("qwen3")
    ids = torch.from_numpy(_objective().sequences[0])[None]
    got = model.generate(input_ids=ids, max_new_tokens=5, do_sample=False)
    model.base_model.model.set_attn_implementation("sdpa")
    assert torch.equal(got, model.generate(input_ids=ids, max_new_tokens=5, do_sample=False))
    assert got.shape[1] == ids.shape[1] + 5


# ---- several adapters ----------------------------------------------------------------------------

_ADAPTER_OF = ["red", "blue", "red"] + ["red", "blue", "blue"] * 2 + ["red"] * 3
_NUMBERS = [int(name == "blue") for name in _ADAPTER_OF]


def _adapter_a_token() -> list[list[int]]:
    return [[n] * len(s) for n, s in zip(_NUMBERS, _objective().sequences, strict=True)]


def _two_adapters(implementation: str) -> Any:
    model = _adapted("qwen3", implementation, target_modules=[*_TARGETS, "lm_head"])
    model.add_adapter("red", peft.LoraConfig(r=4, target_modules=[*_TARGETS, "lm_head"]))
    model.add_adapter("blue", peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    _randomise_adapters(model, 5)
    return model


def _part(objective: Objective, adapter: str) -> Objective:
    chosen = [i for i, name in enumerate(_ADAPTER_OF) if name == adapter]
    assert objective.loss_masks is not None
    return Objective(
        [objective.sequences[i] for i in chosen],
        [objective.temperatures[i] for i in chosen],
        [objective.loss_masks[i] for i in chosen],
        [objective.weights[i] for i in chosen],
    )


def test_several_adapters_a_forest_each():
    """PEFT runs one adapter a row, and a forest is one row: so one forest an adapter, backward
    before the next one is switched on (switching sets requires_grad, and checkpointing would
    recompute with the wrong adapter). Prefixes are shared within an adapter only."""
    sides = []
    for implementation in ("prefixtree", "eager"):
        model = _two_adapters(implementation)
        gradients: dict[str, torch.Tensor] = {}
        for adapter in ("red", "blue"):
            model.set_adapter(adapter)
            part = _part(_objective(), adapter)
            if implementation == "prefixtree":
                run = run_packed(model, _pack(part.sequences), part)
            else:
                run = run_replicated(model, part)
            assert run.gradients and all(adapter in name for name in run.gradients)
            gradients |= run.gradients
        sides.append(Run(run.logprobs, run.entropy, gradients))
    assert_same(*sides)


def test_keys_keep_adapters_apart():
    """Shared tokens under two adapters are two packed tokens; the trees of one adapter are those it
    would have alone."""
    sequences = _objective().sequences
    packed = _pack(sequences, namespaces=_ADAPTER_OF)
    parts = [_pack(_part(_objective(), name).sequences).num_tokens for name in ("red", "blue")]
    assert packed.num_tokens == sum(parts) > _pack(sequences).num_tokens
    adapters = packed.pack_values(_adapter_a_token())
    assert sorted(adapters.unique().tolist()) == [0, 1]
    with pytest.raises(pt.ForestError, match="namespaces="):
        _pack(sequences).pack_values(_adapter_a_token())


class Routed(nn.Module):
    """A linear layer with two low-rank adapters, chosen token by token, as servers batch them."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.empty(2, base.in_features, 3))
        self.b = nn.Parameter(torch.empty(2, 3, base.out_features))
        self.adapter = torch.empty(0)  # [tokens] or [1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        blue = (self.adapter == 1)[:, None]
        red, other = (x @ a @ b for a, b in zip(self.a, self.b, strict=True))
        return self.base(x) + torch.where(blue, other, red)


def _routed(implementation: str) -> tuple[Any, list[Routed]]:
    model = build("qwen3", implementation).requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.k_proj = Routed(layer.self_attn.k_proj)
    randomise(model)
    return model, [layer.self_attn.k_proj for layer in model.model.layers]


def test_adapters_routed_by_token_in_one_forest():
    """Where an implementation takes an adapter per token, one forest with namespaces= holds all."""
    objective = _objective()
    model, routed = _routed("prefixtree")
    packed = _pack(objective.sequences, namespaces=_ADAPTER_OF)
    for layer in routed:
        layer.adapter = packed.pack_values(_adapter_a_token())
    run = run_packed(model, packed, objective)

    model, routed = _routed("eager")
    numbers = iter(_NUMBERS)

    def choose(*_: Any) -> None:
        number = torch.tensor([next(numbers)])
        for layer in routed:
            layer.adapter = number

    model.register_forward_pre_hook(choose)
    reference = run_replicated(model, objective)
    assert len(run.gradients) == 2 * len(routed)
    assert all(g[i].any() for g in reference.gradients.values() for i in range(2))
    assert_same(run, reference)


# ---- refused -------------------------------------------------------------------------------------


def test_active_dropout_of_an_adapter():
    packed = _pack(_objective().sequences)
    model = _adapted("qwen3", lora_dropout=0.1)
    with pytest.raises(pt.UnsupportedError, match=r"lora_dropout.*active dropout.*lora_dropout=0"):
        sequence_logprobs(model, packed)
    expected = run_packed(_adapted("qwen3").eval(), packed, _objective())
    assert_same(run_packed(model.eval(), packed, _objective()), expected, 1e-7)


def _refusal(model: Any) -> str:
    with pytest.raises(pt.UnsupportedError) as refused:
        sequence_logprobs(model, _pack(_objective().sequences))
    return str(refused.value)


def _activated() -> Any:
    """aLoRA whose invocation tokens are in the root that most sequences share."""
    tokens = [int(token) for token in _objective().sequences[0][3:5]]
    return peft.LoraConfig(
        r=4, lora_alpha=16, task_type="CAUSAL_LM", alora_invocation_tokens=tokens, **_LAYERS
    )


def test_activated_lora():
    """It searches the row for its invocation tokens and adapts what comes behind the last ones: a
    packed row holds many sequences. Alone, log p would differ by up to 1.3."""
    assert "'default' is the LoRA variant alora_invocation_tokens" in _refusal(
        _with_method(_activated())
    )


@pytest.mark.parametrize(
    ("config", "setting"),
    [
        (lambda: {"monteclora_config": peft.tuners.lora.config.MontecloraConfig()}, "monteclora"),
        (lambda: {"velora_config": peft.tuners.lora.config.VeloraConfig()}, "velora"),
    ],
    ids=["noise", "averages of the batch"],
)
def test_other_variants_of_lora(config, setting):
    model = _with_method(peft.LoraConfig(r=4, **_LAYERS, **config()))
    assert f"'default' is the LoRA variant {setting}_config" in _refusal(model)


@pytest.mark.parametrize("method", ["LILY", "PVERA"])
def test_methods_that_look_along_the_row_or_draw_noise(method):
    assert f"PEFT method {method} of adapter 'default'" in _refusal(_with_method(_config(method)))


def test_a_method_that_replaces_attention():
    config = peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=2, task_type="CAUSAL_LM")
    model = peft.get_peft_model(build("llama"), config).train()
    assert "PEFT method ADAPTION_PROMPT" in _refusal(model)


@pytest.mark.parametrize("method", sorted({kind.value for kind in peft.PeftType} - {*METHODS}))
def test_every_other_method(method):
    """By name, so that a method of a later PEFT is refused until a test compares it."""
    model = _adapted("qwen3")
    model.peft_config["default"].peft_type = peft.PeftType(method)
    with pytest.raises(pt.UnsupportedError, match=f"PEFT method {method} .* use LoRA, or one of"):
        check_adapters(model)


@pytest.mark.parametrize(
    ("method", "setting"),
    mostly(
        [
            ("LOHA", "rank_dropout"),
            ("LOHA", "module_dropout"),
            ("LOKR", "rank_dropout"),
            ("LOKR", "module_dropout"),
            ("OFT", "module_dropout"),
            ("BOFT", "boft_dropout"),
        ],
        [("LOHA", "rank_dropout"), ("OFT", "module_dropout"), ("BOFT", "boft_dropout")],
    ),
)
def test_dropout_without_a_layer(method, setting):
    model = _with_method(_config(method, **{setting: 0.25}))
    assert f"adapter 'default' has {setting}=0.25" in _refusal(model)
    packed = _pack(_objective().sequences)
    expected = sequence_logprobs(_with_method(_config(method)).eval(), packed).logprobs
    torch.testing.assert_close(sequence_logprobs(model.eval(), packed).logprobs, expected)


def test_what_does_not_take_part_is_not_refused():
    """An adapter that is not active, or switched off; where it is switched on it is refused."""
    model = _with_method(peft.LoraConfig(r=4, **_LAYERS))
    model.add_adapter("activated", _activated())
    run = run_packed(model, _pack(_objective().sequences), _objective())
    assert_same(
        run, run_replicated(_with_method(peft.LoraConfig(r=4, **_LAYERS), "eager"), _objective())
    )
    model.set_adapter("activated")
    assert "adapter 'activated'" in _refusal(model)
    with model.disable_adapter():
        off = sequence_logprobs(model, _pack([[5, 6, 7, 8]])).logprobs
    base = sequence_logprobs(build("qwen3", tie_word_embeddings=False), _pack([[5, 6, 7, 8]]))
    torch.testing.assert_close(off, base.logprobs)
    # layer by layer, around the outermost model
    model.base_model.set_adapter("default")
    check_adapters(model)
    model.base_model.set_adapter("activated")
    assert "adapter 'activated'" in _refusal(model)


@pytest.mark.skipif(
    version.parse(MIN_PEFT_VERSION) > version.parse(peft.__version__),
    reason=f"this transformers adds adapters with PEFT {MIN_PEFT_VERSION} and later alone",
)
def test_adapters_without_a_peft_model():
    """transformers' own way to add them, and a model inside another module."""
    model = build("qwen3", tie_word_embeddings=False)
    model.add_adapter(peft.LoraConfig(r=4, **_LAYERS), "plain")
    model.add_adapter(_config("LILY", r=4), "mixing")
    model.set_adapter("plain")
    check_adapters(nn.Sequential(model))
    model.set_adapter("mixing")
    for outer in (model, nn.Sequential(model)):
        with pytest.raises(pt.UnsupportedError, match="PEFT method LILY of adapter 'mixing'"):
            check_adapters(outer)
    model.disable_adapters()
    check_adapters(model)


@pytest.mark.parametrize(
    ("config", "method"),
    [
        (peft.PromptTuningConfig, "PROMPT_TUNING"),
        (peft.PromptEncoderConfig, "P_TUNING"),
        (peft.PrefixTuningConfig, "PREFIX_TUNING"),
    ],
)
def test_virtual_tokens(config, method):
    """They would have to stand before every tree."""
    base = build("qwen3")
    model = peft.get_peft_model(base, config(task_type="CAUSAL_LM", num_virtual_tokens=4))
    packed = _pack(_objective().sequences)
    expected = sequence_logprobs(build("qwen3"), packed).logprobs
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            assert f"PEFT method {method} of adapter 'default'" in _refusal(model)
            with model.disable_adapter():
                torch.testing.assert_close(sequence_logprobs(model, packed).logprobs, expected)
