"""`tree_spec` of TransformerEngine's layer specs: its linear layers and norms stay. Stand-ins have
the signatures of Megatron's source and the sums of its local layers, since it needs a GPU."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.extensions import transformer_engine
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from packaging.version import Version

from prefixtree.integrations.megatron import tree_spec
from prefixtree.integrations.megatron.layers import is_served_attention
from prefixtree.integrations.megatron.version import installed
from tests.integrations.megatron import runs
from tests.integrations.megatron.runs import Case, Weights, build, latent, make_sequences, moe
from tests.integrations.megatron.test_contract import TransformerEnginesAttention, names
from tests.support.hooks import put
from tests.support.megatron_cpu import Norm, in_float64


class TEColumnParallelLinear(ColumnParallelLinear):
    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Any,
        gather_output: bool,
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool,
        skip_weight_param_allocation: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: Any = None,
        stride: int = 1,
        name: str | None = None,
    ) -> None:
        super().__init__(
            input_size,
            output_size,
            config=config,
            init_method=init_method,
            gather_output=gather_output,
            bias=bias,
            skip_bias_add=skip_bias_add,
            is_expert=is_expert,
            tp_group=tp_group,
        )


class TELayerNormColumnParallelLinear(TEColumnParallelLinear):
    """The norm and the product are one module, whose norm has a weight of another name."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Any,
        gather_output: bool,
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool,
        skip_weight_param_allocation: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: Any = None,
        stride: int = 1,
        name: str | None = None,
    ) -> None:
        given = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        super().__init__(**given)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size))

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(F.rms_norm(x, x.shape[-1:], self.layer_norm_weight, 1e-5))


class TERowParallelLinear(RowParallelLinear):
    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Any,
        bias: bool,
        input_is_parallel: bool,
        skip_bias_add: bool,
        is_expert: bool,
        tp_comm_buffer_name: str | None = None,
        tp_group: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            input_size,
            output_size,
            config=config,
            init_method=init_method,
            bias=bias,
            input_is_parallel=input_is_parallel,
            skip_bias_add=skip_bias_add,
            is_expert=is_expert,
            tp_group=tp_group,
        )


class TELinear(torch.nn.Module):
    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        parallel_mode: str | None,
        config: Any,
        init_method: Any,
        bias: bool,
        skip_bias_add: bool,
        skip_weight_param_allocation: bool,
        tp_comm_buffer_name: str | None = None,
        is_expert: bool = False,
        symmetric_ar_type: str | None = None,
        tp_group: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        assert parallel_mode == "duplicated" and not bias
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size))
        init_method(self.weight)

    def forward(self, x: torch.Tensor) -> Any:
        return F.linear(x, self.weight), None


LINEARS = (
    TEColumnParallelLinear,
    TELayerNormColumnParallelLinear,
    TERowParallelLinear,
    TELinear,
)


class Provider(BackendSpecProvider):
    """Megatron's TESpecProvider, of stand-ins."""

    def linear(self) -> type:
        return TELinear

    def column_parallel_linear(self) -> type:
        return TEColumnParallelLinear

    def row_parallel_linear(self) -> type:
        return TERowParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return TELayerNormColumnParallelLinear

    def layer_norm(self, *args: Any, **kwargs: Any) -> Any:
        return Norm

    def core_attention(self) -> type:
        return TransformerEnginesAttention

    def activation_func(self) -> None:
        return None

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
        parts = MLPSubmodules(linear_fc1=TEColumnParallelLinear, linear_fc2=TERowParallelLinear)
        return functools.partial(SequentialMLP, submodules=parts)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpt_layer_specs, "TESpecProvider", Provider, raising=False)
    # it asks which linear layers it is given
    for stand_in in LINEARS:
        monkeypatch.setattr(multi_latent_attention, stand_in.__name__, stand_in, raising=False)
    put(monkeypatch, "core of TransformerEngine", lambda: TransformerEnginesAttention)


def spec_of(config: Any) -> ModuleSpec:
    return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts,
        qk_layernorm=True,
        multi_latent_attention=config.multi_latent_attention,
    )


def differing(one: Any, other: Any) -> Iterator[tuple[Any, Any]]:
    """The leaves of two specs that are not the same."""
    assert isinstance(other, type(one)) or isinstance(one, type)
    if isinstance(one, functools.partial):
        one, other = (one.func, one.args, one.keywords), (other.func, other.args, other.keywords)
    elif is_dataclass(one) and not isinstance(one, type):
        one, other = vars(one), vars(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        one, other = list(one.values()), list(other.values())
    if isinstance(one, (list, tuple)):
        for a, b in zip(one, other, strict=True):
            yield from differing(a, b)
    elif one is not other and one != other:
        yield one, other


KINDS: dict[str, tuple[dict[str, Any], set[type]]] = {
    "dense": ({}, {SelfAttention, TransformerEnginesAttention}),
    "experts": (moe(), {SelfAttention, TransformerEnginesAttention, TopKRouter}),
    "latent attention": (latent(), {MLASelfAttention, TransformerEnginesAttention}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_linear_layers_and_norms_stay(kind: str) -> None:
    config, expected = KINDS[kind]
    spec = spec_of(runs.make_config(Case(config)))
    pairs = list(differing(spec, tree_spec(spec)))
    assert {one for one, _ in pairs} == expected
    assert all(issubclass(other, one) for one, other in pairs)


#: Since 0.19 latent attention puts TransformerEngine's layers in the place of those of its spec.
RUN = [
    kind for kind in KINDS if kind != "latent attention" or Version(installed()) < Version("0.19")
]


@pytest.mark.parametrize("kind", RUN)
def test_equals_sequences(kind: str) -> None:
    case, sequences = Case({"num_layers": 1} | KINDS[kind][0]), make_sequences()
    weights = Weights.of(sequences)
    with in_float64():
        plain = build(case, lambda spec: spec_of(runs.make_config(case)))
        expected = runs.run_replicated(plain, sequences, weights)
        model = build(case, lambda spec: tree_spec(spec_of(runs.make_config(case))))
        found = runs.errors(runs.run_forest(model, case, sequences, weights), expected)
    assert any("layer_norm_weight" in name for name in expected.gradients)
    assert all(g.any() for g in expected.gradients.values()) and found.worst < 1e-13, found


@pytest.mark.parametrize("stand_in", LINEARS)
def test_the_stand_ins_have_the_sources_signatures(stand_in: Any) -> None:
    tree = ast.parse(Path(transformer_engine.__file__).read_text())
    kind = stand_in.__name__
    (found,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == kind)
    (made,) = (n for n in found.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
    theirs = [a.arg for a in (*made.args.args, *made.args.kwonlyargs)]
    # newer versions have more behind them
    assert names(stand_in.__init__) == theirs[: len(names(stand_in.__init__))]


def test_attention_of_transformer_engines_specs_is_served() -> None:
    spec = spec_of(runs.make_config(Case()))
    assert is_served_attention(spec.submodules.self_attention.module)
