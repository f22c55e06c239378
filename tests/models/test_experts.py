"""Experts by grouped products: transformers' results, gradients without adding row by row."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from transformers.integrations import moe

from prefixtree.models.along_tree import AlongTree
from prefixtree.models.experts import _runs_grouped, prepare_experts
from tests.support.models import build, cases

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
    cotangent = torch.randn(out.shape, generator=draw).to(out.dtype)
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
    prepare_experts(ours)
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


@pytest.mark.parametrize("is_ours", [False, True])
def test_a_compiled_gradient_adds_no_row_to_another(
    is_ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where transformers' does so: then this test would see ours."""
    # it logs the versions that it compares, which torch traces in no whole graph
    monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *_: True)
    experts = experts_of("qwen3_moe", torch.bfloat16)
    if is_ours:
        prepare_experts(experts)
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
    prepare_experts(ours)
    x, chosen, weights = inputs(theirs, torch.bfloat16)
    wanted = run(exact, [x.detach().float().requires_grad_(), chosen, weights.float()])[1]
    errors = [(run(e, [x, chosen, weights])[1] - wanted).norm() for e in (ours, theirs)]
    assert errors[0] < errors[1]


def test_what_runs_otherwise_still_does() -> None:
    experts = experts_of("qwen3_moe", torch.float32)
    kind = type(experts)
    prepare_experts(experts)
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
    prepare_experts(again)
    assert type(again) is type(experts)
    assert all(map(torch.equal, run(again, given), wanted))
