"""Models with layers of the gated delta rule or Mamba: a forest against one sequence at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.ssm import gated_delta_net
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from prefixtree.integrations.megatron import tree_spec
from prefixtree.states import protocol
from tests.integrations.megatron import runs
from tests.integrations.megatron.router_runs import make_sequences
from tests.integrations.megatron.runs import Case, Weights
from tests.support.megatron_cpu import Norm, in_float64
from tests.support.megatron_states import stand_in_for_kernels

DELTA = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 3,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "attention_output_gate": True,
}
MAMBA = {
    "mamba_state_dim": 8,
    "mamba_head_dim": 16,
    "mamba_num_groups": 2,
    "mamba_num_heads": 4,
}
layer_spec, stack_spec = runs.layer_spec, runs.stack_spec


def with_delta(layer: ModuleSpec) -> ModuleSpec:
    parts = GatedDeltaNetSubmodules(
        in_proj=ColumnParallelLinear, out_norm=Norm, out_proj=RowParallelLinear
    )
    delta = ModuleSpec(GatedDeltaNet, submodules=parts)
    return replace(layer, submodules=replace(layer.submodules, self_attention=delta))


def delta_layers(config: Any) -> TransformerBlockSubmodules:
    """Two layers with a state and one of attention, as Qwen3.5 has three and one."""
    plain = layer_spec(config)
    layers = [with_delta(plain), with_delta(plain), plain]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=Norm)


def mamba_stack(config: Any, wide: bool = False) -> ModuleSpec:
    parts = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    mamba = MambaLayerSubmodules(
        norm=Norm,
        mixer=ModuleSpec(MambaMixer, params={"D_has_hdim": wide}, submodules=parts),
        mamba_bda=get_bias_dropout_add,
    )
    stack = stack_spec(config)
    layers = replace(stack.submodules, mamba_layer=ModuleSpec(MambaLayer, submodules=mamba))
    return replace(stack, submodules=layers)


def build(case: Case, wrap: Callable[[Any], Any] = tree_spec, wide: bool = False) -> Any:
    """`runs.build`; a hybrid has Mamba, and other models the gated delta rule. `wide`: whether
    Mamba's D has a value per channel, not one per head."""

    def hybrid(config: Any, spec: Any, hybrid_layer_pattern: str, **kwargs: Any) -> Any:
        config.num_layers = 4
        return made(config, spec, hybrid_layer_pattern="M-M*", **kwargs)

    made = runs.HybridModel
    with (
        patch.object(runs, "stack_spec", partial(mamba_stack, wide=wide)),
        patch.object(runs, "HybridModel", hybrid),
        patch.object(runs, "layer_spec", delta_layers if case.model == "gpt" else layer_spec),
    ):
        # the stack takes the plain layer
        model = runs.build(case, wrap)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        # far from uniform, and not chaotic
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            if "conv1d" in name or name.endswith((".D", "dt_bias")):
                parameter.copy_(noise * 0.5)
            elif "A_log" in name:
                parameter.copy_(noise * 0.3 - 1)
    delta = getattr(gated_delta_net, "common", gated_delta_net)
    for module in model.modules():
        if type(module) is GatedDeltaNet:
            # Megatron's own rule in torch
            module.config = copy.copy(module.config)
            module.config.deterministic_mode = True
            module.gated_delta_rule = delta.torch_chunk_gated_delta_rule
    return model


def compared(case: Case, wide: bool = False) -> runs.Errors:
    with in_float64(), stand_in_for_kernels():
        sequences = make_sequences()
        weights = Weights.of(sequences)
        plain, model = build(case, lambda spec: spec, wide), build(case, wide=wide)
        expected = runs.run_replicated(plain, sequences, weights)
        assert all(g.any() for g in expected.gradients.values())
        return runs.errors(runs.run_forest(model, case, sequences, weights), expected)


def packed_convolution() -> Any:
    """The convolution runs through the tokens in packed order."""

    def conv(x: Any, weight: Any, bias: Any, mask: Any, activation: Any) -> torch.Tensor:
        rows = torch.nn.functional.pad(x.t()[None], (weight.shape[1] - 1, 0))
        out = torch.nn.functional.conv1d(rows, weight[:, None], bias, groups=len(weight))
        return torch.nn.functional.silu(out)[0].t()

    return patch.object(protocol, "tree_conv", conv)


def decay_without_gradient() -> Any:
    rule, scan = protocol.tree_delta_rule, protocol.tree_ssd

    def cut(query: Any, key: Any, value: Any, g: Any, *rest: Any) -> Any:
        return rule(query, key, value, g.detach(), *rest)

    def cut_scan(x: Any, dt: Any, A: Any, *rest: Any, **options: Any) -> Any:
        return scan(x, dt, A.detach(), *rest, **options)

    return patch.multiple(protocol, tree_delta_rule=cut, tree_ssd=cut_scan)
