"""The models of `ways`: a type for each kind of layers, and what of it trains."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForTokenClassification

from tests.scoring.ways import VALUES
from tests.support import image_cases
from tests.support.models import adapted, build, quantised, randomise

LAYERS = {
    "attention": "llama",
    "windows, softcap": "gemma2",
    "sinks": "gpt_oss",
    "latent attention": "deepseek_v3",
    "experts": "qwen3_moe",
    "indexers": "deepseek_v32",
    "blocks that choose": "minimax_m3_vl_text",
    "compressed keys": "deepseek_v4",
    "delta rule": "qwen3_5",
    "Mamba-2": "nemotron_h",
    "convolutions": "lfm2",
    "images": "qwen3_vl",
}


def model_of(case: dict[str, str], implementation: str = "prefixtree") -> Any:
    """The model of a case, before anything is asked of a forward."""
    family = LAYERS[case["layers"]]
    torch.manual_seed(0)
    if case["layers"] == "images":
        model = image_cases.build(family, implementation)
    else:
        # the head of some models is their embedding
        tied = {"tie_word_embeddings": True} if case["layers"] == "sinks" else {}
        model = build(family, implementation, **tied)
    if case["way"] in VALUES:
        text = model.config.get_text_config()
        text.num_labels, text.classifier_dropout = 2, 0.0
        model.config.num_labels, model.config.classifier_dropout = 2, 0.0
        model = AutoModelForTokenClassification.from_config(
            model.config, attn_implementation=implementation
        )
        randomise(model)
        model.train()
    trained = case["trained"]
    if trained == "QLoRA":
        model = quantised(model)
    # or the end of a parameter's name
    model = _TRAINED[trained](model) if trained in _TRAINED else _ending(model, trained)
    if case["precision"] == "float64":
        model = model.double()
        if hasattr(model, "set_experts_implementation"):
            # grouped products know no float64
            model.set_experts_implementation("eager")
    return model


def _freeze(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        # keys and values, or inputs, of the first attention or state layer need no gradient
        beside = "layers.0." in name and name.endswith(("self_attn.q_proj.weight", "dt_bias"))
        parameter.requires_grad_(beside or "layers.1." in name or "layers.0.mlp" in name)
    return model


def _upper_lora(model: nn.Module) -> Any:
    layers = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and "layers." in name
        and "layers.0." not in name
        and not name.startswith(image_cases.ENCODERS)
        # PEFT refuses what mixers of Mamba-2 read as a weight
        and name.rpartition(".")[2]
        in (
            *("q_proj", "o_proj", "down_proj", "q_a_proj", "kv_b_proj", "wq_b"),
            *("in_proj", "in_proj_qkv"),
        )
    ]
    return adapted(model, *layers)


def _alone(model: nn.Module, module: Any) -> nn.Module:
    """The model, of which one module alone trains."""
    model.requires_grad_(False)
    module.requires_grad_(True)
    return model


def _some(model: nn.Module, count: int, most_dims: int = 9) -> nn.Module:
    """So many parameters, which a seed draws."""
    names = [n for n, p in model.named_parameters() if p.ndim <= most_dims]
    drawn = np.random.default_rng(len(names)).choice(names, count, replace=False)
    return _ending(model, *drawn)


def _ending(model: nn.Module, *ends: str) -> nn.Module:
    """The first parameter with each of these ends of a name."""
    names = [n for n, _ in model.named_parameters()]
    chosen = {next(n for n in names if n.endswith(end)) for end in ends}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in chosen)
    return model


_TRAINED: dict[str, Callable[[Any], Any]] = {
    "everything": lambda model: model,
    "frozen layers": _freeze,
    "LoRA without the first layer": _upper_lora,
    "QLoRA": _upper_lora,
    "head alone": lambda model: _alone(model, getattr(model, "score", None) or model.lm_head),
    "embedding alone": lambda model: _alone(model, model.get_input_embeddings()),
    "two vectors": partial(_some, count=2, most_dims=1),
    "three of all": partial(_some, count=3),
    "no parameter": lambda model: model.requires_grad_(False),
}
