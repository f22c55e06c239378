"""Which layers gradients must pass, by what trains before them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from prefixtree.models.layers import GradientPaths, parts_in_order
from tests.support.family_configs import FAMILIES
from tests.support.hybrid_configs import HYBRIDS
from tests.support.models import build, mostly_full, with_random_lora


@pytest.mark.parametrize("model_type", mostly_full([*FAMILIES, *HYBRIDS]))
def test_parts_run_one_after_another(model_type: str) -> None:
    """What is said of a layer's place rests on it."""
    model = build(model_type, "eager")
    parts, ran = parts_in_order(model), []
    for part in parts:
        part.register_forward_pre_hook(lambda module, args: ran.append(parts.index(module)))
    with torch.no_grad():
        model(input_ids=torch.arange(1, 9)[None], use_cache=False)
    assert ran == list(range(len(parts)))
    # transformers does not say which are JetMoE's layers
    assert (len(parts) > 1) == (model_type != "jetmoe")


@dataclass
class Case:
    """What trains, and what a gradient must pass then."""

    trained: tuple[str, ...]
    passed: tuple[str, ...]
    not_passed: tuple[str, ...]


FIRST, SECOND, THIRD = (f"model.layers.{i}.self_attn.q_proj" for i in range(3))
CASES = {
    "nothing": Case((), (), (FIRST, THIRD, "lm_head")),
    "the head": Case(("lm_head",), (), (FIRST, THIRD, "lm_head")),
    "a layer": Case(("layers.1.self_attn.q_proj",), (THIRD, "lm_head"), (FIRST, SECOND)),
    "beside it": Case(("layers.1.self_attn.k_proj",), (SECOND, THIRD), (FIRST,)),
    "two": Case(("layers.0.mlp", "lm_head"), (FIRST, SECOND, "lm_head"), ()),
    "of no known place": Case(("model.norm",), (FIRST, SECOND, "lm_head"), ()),
}


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_what_gradients_must_pass(name: str, wrapped: bool) -> None:
    case, model = CASES[name], build("qwen3", "eager")
    for parameter, tensor in model.named_parameters():
        tensor.requires_grad_(any(part in parameter for part in case.trained))
    paths = GradientPaths(nn.Sequential(model) if wrapped else model)
    for passed, modules in ((True, case.passed), (False, case.not_passed)):
        for module in modules:
            assert paths.pass_through(model.get_submodule(module)) == passed, module
    with torch.no_grad():
        assert not GradientPaths(model).pass_through(model.lm_head)


# PEFT asks for what transformers renamed
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_adapter() -> None:
    """LoRA on a layer trains beside its weight, and in the layers before."""
    model = with_random_lora(build("qwen3", "eager"), "q_proj")
    layers = model.get_decoder().layers
    for layer in layers[:2]:
        layer.requires_grad_(False)
    paths = GradientPaths(model)
    assert not paths.pass_through(layers[1].mlp.up_proj)
    assert paths.pass_through(layers[2].self_attn.q_proj.base_layer)


def test_layers_that_share_a_module() -> None:
    """It runs last in the last of them; its own parameters train first in the first."""
    model = build("qwen3", "eager").requires_grad_(False)
    first, second, third = model.model.layers
    third.mlp = first.mlp
    second.requires_grad_(True)
    assert GradientPaths(model).pass_through(first.mlp.up_proj)
    assert not GradientPaths(model).pass_through(first.self_attn.q_proj)
    second.requires_grad_(False)
    third.mlp.requires_grad_(True)
    assert GradientPaths(model).pass_through(second.mlp.up_proj)


def test_a_model_without_known_layers() -> None:
    """Whatever trains counts as before a layer, but for the layer's own."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    paths = GradientPaths(model)
    assert paths.pass_through(model[0]) and not paths.pass_through(model[1])


def test_a_layer_whose_place_is_not_known() -> None:
    """As a value head is; it stands behind all."""
    model = nn.ModuleDict({"model": build("llama", "eager"), "beside": nn.Linear(4, 4)})
    assert GradientPaths(model).pass_through(model["beside"])
    model["model"].requires_grad_(False)
    assert not GradientPaths(model).pass_through(model["beside"])
    assert GradientPaths(model, may_change=True).pass_through(model["beside"])
