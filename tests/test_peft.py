"""PEFT adapters: gradients of every adapter parameter, several adapters, what is refused."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from models import (
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
from torch import nn

import prefixtree as pt
from prefixtree.integrations.transformers import sequence_logprobs

peft = pytest.importorskip("peft")

pytestmark = [
    # PEFT asks transformers under the old name of the property
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
]

_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"]


@cache
def _objective() -> Objective:
    return make_objective(ragged_sequences())


def _pack(sequences: Any, keys: Any = None) -> pt.PackedForest:
    return pt.pack(pt.PrefixForest.from_sequences(sequences, keys=keys))


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
    "config",
    [
        {},
        {"target_modules": [*_TARGETS, "lm_head"]},
        {"target_modules": ["lm_head"]},
        {"target_modules": [*_TARGETS, "embed_tokens"]},
        {"use_rslora": True, "use_dora": True},
        {"modules_to_save": ["lm_head", "embed_tokens"]},
        {"bias": "all"},
    ],
    ids=["layers", "layers and head", "head", "embedding", "dora", "saved modules", "biases"],
)
@pytest.mark.parametrize("model_type", ["qwen3", "gemma2"])
def test_one_adapter(model_type, config):
    model = _adapted(model_type, **config)
    run = run_packed(model, _pack(_objective().sequences), _objective())
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert run.gradients.keys() == trained and all(g.any() for g in run.gradients.values())
    reference = run_replicated(_adapted(model_type, "eager", **config), _objective())
    assert_same(run, reference)


@pytest.mark.parametrize("use_reentrant", [False, True])
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
    packed = _pack(sequences, keys=_ADAPTER_OF)
    parts = [_pack(_part(_objective(), name).sequences).num_tokens for name in ("red", "blue")]
    assert packed.num_tokens == sum(parts) > _pack(sequences).num_tokens
    adapters = packed.pack_values(_adapter_a_token())
    assert sorted(adapters.unique().tolist()) == [0, 1]
    with pytest.raises(pt.ForestError, match="give them keys"):
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
    """Where an implementation takes an adapter a token, one forest with keys= holds them all."""
    objective = _objective()
    model, routed = _routed("prefixtree")
    packed = _pack(objective.sequences, keys=_ADAPTER_OF)
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


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (peft.PromptTuningConfig, "position_ids are not the tokens' depths"),
        (peft.PrefixTuningConfig, "takes no key-value cache|has no key-value cache"),
    ],
)
# PEFT says which inputs it drops
@pytest.mark.filterwarnings("ignore:.*are not supported for parameter efficient tuning")
def test_virtual_tokens(config, message):
    """They would have to stand before every tree; PEFT drops the positions, or gives a cache."""
    base = build("qwen3")
    model = peft.get_peft_model(base, config(task_type="CAUSAL_LM", num_virtual_tokens=4))
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled), pytest.raises(ValueError, match=message):
            sequence_logprobs(model, _pack(_objective().sequences))
