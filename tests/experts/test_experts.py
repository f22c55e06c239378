"""Experts by grouped products: transformers' results, gradients without adding row by row."""

from __future__ import annotations

import copy
import itertools
import pickle
import types
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.testing._internal.two_tensor import TwoTensor
from transformers import Qwen3MoeConfig
from transformers.integrations import moe
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from prefixtree import compile_layers
from prefixtree.experts.products import _is_swiglu, _runs_grouped, prepare_layers
from prefixtree.kernels import expert_products
from prefixtree.models.along_tree import AlongTree
from tests.support.full import mostly
from tests.support.models import (
    assert_same,
    build,
    cases,
    ragged_objective,
    ragged_packed,
    run_packed,
)

# gated; with biases, transposed and gated by their own code; without a gate
_TYPES = ["qwen3_moe", "gpt_oss", "nemotron_h"]
TOKENS, CHOSEN = 13, 3


def experts_of(model_type: str, dtype: torch.dtype) -> Any:
    """The first experts of a tiny model, with weights that are not zero."""
    model = build(model_type).to(dtype)
    found = next(m for m in model.modules() if hasattr(m, "has_gate"))
    assert found.config._experts_implementation == "grouped_mm"
    for parameter in found.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return found


def inputs(experts: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    """Hidden states, chosen experts and weights."""
    size = experts.down_proj.shape[2 if experts.is_transposed else 1]
    x = torch.randn(TOKENS, size, dtype=dtype).requires_grad_()
    chosen = torch.rand(TOKENS, experts.num_experts).topk(CHOSEN).indices
    weights = torch.rand(TOKENS, CHOSEN, dtype=dtype)
    return [x, chosen, weights.requires_grad_()]


def run(experts: Any, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """Its result, and gradients of hidden states, weights and parameters."""
    out = experts(*given)
    draw = torch.Generator().manual_seed(1)
    cotangent = torch.randn(out.shape, generator=draw).to(out)
    leaves = [given[0], given[2], *experts.parameters()]
    return [out, *torch.autograd.grad(out, leaves, cotangent)]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("model_type", cases(_TYPES))
def test_gradients_are_those_of_transformers(
    model_type: str, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch has grouped products in float64 on no device
    monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *_: False)
    theirs = experts_of(model_type, torch.float64)
    ours = copy.deepcopy(theirs)
    prepare_layers(ours, None)
    given = inputs(theirs, torch.float64)
    wanted = run(theirs, given)
    # the fallback in float64 compiles in no transformers below 5.24
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: is_compiled)
    found = run(ours, given)
    # compiled, copies are weighted before the last product
    assert isinstance(ours, AlongTree) and torch.equal(found[0], wanted[0]) != is_compiled
    for x, y in zip(found, wanted, strict=True):
        assert y.abs().max() > 1e-3
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-13)


def as_quack() -> Any:
    """QuACK's functions in torch: rows are gathered, gates and what they gate stand in turns."""

    def product(a, b, cu_seqlens_m=None, cu_seqlens_k=None, rows=None) -> torch.Tensor:
        borders = (cu_seqlens_k if cu_seqlens_m is None else cu_seqlens_m).tolist()
        pieces = [slice(*border) for border in itertools.pairwise(borders)]
        if cu_seqlens_m is None:
            a = a if rows is None else a[:, rows]
            return torch.stack([a[:, piece] @ b[piece] for piece in pieces])
        a = a if rows is None else a[rows]
        return torch.cat([a[piece] @ b[e] for e, piece in enumerate(pieces)])

    def in_turns(x: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.stack(x.chunk(2, dim), dim).flatten(dim - 1, dim)

    def gemm(A, B, out=None, A_idx=None, concat_layout=None, tuned=None, **borders) -> torch.Tensor:
        B = in_turns(B, -2) if concat_layout == ("B",) else B
        made = product(A, B, rows=A_idx, **borders)
        if out is None:
            return made
        return out.copy_(
            torch.cat([made[..., ::2], made[..., 1::2]], -1) if concat_layout == ("out",) else made
        )

    def swiglu(preact: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(preact[..., ::2]) * preact[..., 1::2]

    def gemm_act(A, B, activation, cu_seqlens_m, A_idx, concat_layout, tuned) -> Any:
        assert (activation, concat_layout) == ("swiglu", ("B",))
        preact = product(A, in_turns(B, -1), cu_seqlens_m, rows=A_idx)
        return preact, swiglu(preact)

    def gemm_dact(A, B, preact, colvec_scale, cu_seqlens_m, A_idx, **options) -> Any:
        assert options.pop("config") == {"cluster_m": 1, "is_dynamic_persistent": False}
        assert options == {"activation": "swiglu", "colvec_reduce": True}
        grad = product(A, B, cu_seqlens_m, rows=A_idx)
        with torch.enable_grad():
            h = swiglu(preact.requires_grad_())
        (dpreact,) = torch.autograd.grad(h, preact, grad * colvec_scale[:, None])
        h = h.detach()
        return dpreact, h * colvec_scale[:, None], (h * grad).sum(1)

    return types.SimpleNamespace(
        gemm=gemm,
        gemm_act=gemm_act,
        gemm_dact=gemm_dact,
        GemmConfig=lambda *_, **options: options,
    )


@pytest.mark.parametrize("is_compiled", mostly([False, True], [False]))
def test_gated_experts_by_quack(is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *_: False)
    theirs = experts_of("qwen3_moe", torch.float64)
    ours = copy.deepcopy(theirs)
    prepare_layers(ours, None)
    given = inputs(theirs, torch.float64)
    wanted = run(theirs, given)
    assert expert_products.refusal(given[0], *ours.parameters()) == "it runs on Hopper"
    monkeypatch.setattr(expert_products, "refusal", lambda *_: None)
    monkeypatch.setattr(expert_products, "_quack", as_quack)
    called = torch.compile(ours, backend="aot_eager", fullgraph=True) if is_compiled else ours
    for x, y in zip(run(called, given), wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-13)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(ours(*given).sum(), given[0], create_graph=True)
    ours.gate_up_proj.requires_grad_(False)
    out = called(*given)
    assert torch.autograd.grad(out.sum(), ours.down_proj)[0].abs().max() > 1e-3
    ours.act_fn = torch.nn.GELU()
    assert not _is_swiglu(ours) and not _is_swiglu(experts_of("gpt_oss", torch.float64))


# of Dynamo, which looks at inputs of layers, and of PEFT
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize(
    "beside",
    mostly(["recompute", "steps", "LoRA", "compiled layers"], ["recompute", "steps", "LoRA"]),
)
def test_quack_goes_with(beside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *_: False)
    model = build("qwen3_moe")
    if beside == "LoRA":
        peft = pytest.importorskip("peft")
        names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        config = peft.LoraConfig(
            r=2, target_modules=[], target_parameters=names, init_lora_weights=False
        )
        model = peft.get_peft_model(model, config)
    packed, objective = ragged_packed(), ragged_objective()
    wanted = run_packed(model, packed, objective)
    monkeypatch.setattr(expert_products, "refusal", lambda *_: None)
    asked = []
    monkeypatch.setattr(expert_products, "_quack", lambda: asked.append(1) or as_quack())
    if beside == "compiled layers":
        compile_layers(model, backend="aot_eager")
    options = {
        "recompute": {"recompute": "all"},
        "steps": {"max_step_tokens": packed.num_tokens // 2},
    }
    assert_same(run_packed(model, packed, objective, **options.get(beside, {})), wanted)
    assert asked


def test_who_quack_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.nn.Parameter(torch.zeros(1, 16, 8))
    quantised = torch.nn.Parameter(TwoTensor(weight.detach(), weight.detach()))
    refusal = torch.compile(expert_products.refusal, backend="eager", fullgraph=True)
    for said in (expert_products.refusal, refusal):
        assert said(weight.data[0], quantised, weight) == "it takes plain tensors"
        assert said(weight.data[0], weight, weight) == "it runs on Hopper"
    path = "/venv/lib/python3.12/site-packages/cutlass/__init__.py"
    for version, place, word in [
        ("0.6.5", path, None),
        ("0.7.0", path, "0.7.0 is installed"),
        ("0.6.5", path.replace("site-", ""), "below site-packages"),
    ]:
        monkeypatch.setattr(expert_products, "version", lambda _, v=version: v)
        spec = types.SimpleNamespace(origin=place)
        monkeypatch.setattr(expert_products, "find_spec", lambda _, s=spec: s)
        problem = expert_products._package_problem()
        assert problem is None if word is None else word in problem


# of QuACK's own calls
@pytest.mark.filterwarnings("ignore:cutlass.utils:DeprecationWarning")
@pytest.mark.gpu
@pytest.mark.parametrize("is_compiled", [False, True])
def test_gated_experts_by_quack_on_a_gpu(
    is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As near to float32 as torch's grouped products are."""
    draw = torch.Generator("cuda").manual_seed(0)
    config = Qwen3MoeConfig(hidden_size=256, moe_intermediate_size=128, num_experts=16)
    config._experts_implementation = "grouped_mm"
    exact = Qwen3MoeExperts(config).cuda()
    for parameter in exact.parameters():
        torch.nn.init.normal_(parameter, std=0.05, generator=draw)
    x = torch.randn(1000, 256, device="cuda", generator=draw).bfloat16().requires_grad_()
    # an expert that no token chooses
    chosen = torch.rand(1000, 15, device="cuda", generator=draw).topk(4).indices
    weights = torch.rand(1000, 4, device="cuda", generator=draw).bfloat16().requires_grad_()
    ours = copy.deepcopy(exact).bfloat16()
    with torch.no_grad():
        for theirs, narrow in zip(exact.parameters(), ours.parameters(), strict=True):
            theirs.copy_(narrow)
    exact.config = copy.deepcopy(config)
    exact.config._experts_implementation = "eager"
    wide = [y.detach().float().requires_grad_() for y in (x, weights)]
    wanted = run(exact, [wide[0], chosen, wide[1]])
    prepare_layers(ours, None)
    if (problem := expert_products.refusal(x, *ours.parameters())) is not None:
        pytest.skip(f"QuACK: {problem}")
    found = run(torch.compile(ours) if is_compiled else ours, [x, chosen, weights])
    monkeypatch.setattr(expert_products, "refusal", lambda *_: "not here")
    for mine, grouped, y in zip(found, run(ours, [x, chosen, weights]), wanted, strict=True):
        assert (mine - y).norm() < max(1.2 * (grouped - y).norm(), 2e-3 * y.norm())


@pytest.mark.parametrize("is_ours", [False, True])
def test_a_compiled_gradient_adds_no_row_to_another(
    is_ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where transformers' does so: then this test would see ours."""
    # it logs the versions that it compares, which torch traces in no whole graph
    monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *_: True)
    experts = experts_of("qwen3_moe", torch.bfloat16)
    if is_ours:
        prepare_layers(experts, None)
    adds = []

    def note(graph: torch.fx.GraphModule, _: Any) -> Any:
        nodes = [n for n in graph.graph.nodes if n.target is torch.ops.aten.index_put.default]
        adds.extend(n for n in nodes if len(n.args) > 3 and n.args[3])
        return make_boxed_func(graph)

    given = inputs(experts, torch.bfloat16)
    wanted = run(experts, given)
    found = run(
        torch.compile(experts, backend=aot_autograd(fw_compiler=note), fullgraph=True), given
    )
    for x, y in zip(found, wanted, strict=True):
        assert (x - y).norm() < 1e-2 * y.norm()
    assert bool(adds) != is_ours


def test_copies_of_a_token_are_added_up_in_float32() -> None:
    theirs = experts_of("qwen3_moe", torch.bfloat16)
    ours, exact = copy.deepcopy(theirs), copy.deepcopy(theirs).float()
    prepare_layers(ours, None)
    x, chosen, weights = inputs(theirs, torch.bfloat16)
    wanted = run(exact, [x.detach().float().requires_grad_(), chosen, weights.float()])[1]
    errors = [(run(e, [x, chosen, weights])[1] - wanted).norm() for e in (ours, theirs)]
    assert errors[0] < errors[1]


def test_what_runs_otherwise_still_does() -> None:
    experts = experts_of("qwen3_moe", torch.float32)
    kind = type(experts)
    prepare_layers(experts, None)
    given = inputs(experts, torch.float32)
    wanted = run(experts, given)
    for implementation in ("eager", "batched_mm"):
        experts.config._experts_implementation = implementation
        alone = kind.forward(experts, *given)
        assert torch.equal(experts(*given), alone)
        torch.testing.assert_close(alone, wanted[0])
    experts.config._experts_implementation = "grouped_mm"
    # a rank's part of them
    experts.num_experts -= 1
    assert not _runs_grouped(experts)
    experts.num_experts += 1
    again = pickle.loads(pickle.dumps(experts))
    prepare_layers(again, None)
    assert type(again) is type(experts)
    assert all(map(torch.equal, run(again, given), wanted))
