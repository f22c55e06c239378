"""FlashQLA's kernels over forests, on a Hopper GPU with flash-qla installed: against float64."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from prefixtree import pack
from prefixtree.kernels.recurrence import explain_recurrence, flash_qla, tree_delta_rule
from tests.support.recurrence_cases import FORESTS, Operator, forest_of, of_parts, relative, runs
from tests.support.strategies import mask_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("flash_qla") is None, reason="needs flash-qla"),
]
# the heads of Qwen3.5 9B, whose kernels the benchmarks compile too
HEADS, VALUE_HEADS, DIM = 16, 32, 128


@pytest.fixture(autouse=True)
def _also_short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_qla, "LEAST_TOKENS", 0)


def leaves_of(tokens: int) -> list[torch.Tensor]:
    """bfloat16 query, key, value and beta, float32 g, on the GPU."""
    draw = torch.Generator("cuda").manual_seed(2)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(tokens, *shape, generator=draw, device="cuda")

    leaves = [normal(HEADS, DIM), normal(HEADS, DIM), normal(VALUE_HEADS, DIM)]
    leaves = [x.bfloat16() for x in leaves]
    # decays of 0.05 and less leave what a parent handed down, and what children hand up
    return [*leaves, -0.05 * normal(VALUE_HEADS).abs(), normal(VALUE_HEADS).sigmoid().bfloat16()]


def _run(mask: Any, leaves: list[torch.Tensor], backend: str, **states: Any) -> Any:
    return tree_delta_rule(*leaves, mask, qk_l2norm=True, backend=backend, **states)


def gradients(
    name: str, leaves: list[torch.Tensor], cotangent: torch.Tensor | None, backend: str
) -> list[torch.Tensor]:
    """out, and gradients of the leaves."""
    mask = mask_of(forest_of(name)).to("cuda")
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = tree_delta_rule(*leaves, mask, qk_l2norm=True, backend=backend)
    cotangent = leaves[2] if cotangent is None else cotangent
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent.to(out.dtype))]


@pytest.mark.parametrize("name", FORESTS)
def test_float64(name: str) -> None:
    leaves = leaves_of(forest_of(name).num_tokens)
    want = gradients(name, [x.double() for x in leaves], None, "chunked")
    fla = gradients(name, leaves, None, "fla")
    for x, y, z in zip(gradients(name, leaves, None, "flash_qla"), want, fla, strict=True):
        assert relative(x, y) < max(1e-2, 1.5 * relative(z, y))


def test_parts_are_the_whole_forest() -> None:
    """States that leave one part enter the next, and their gradients come back."""
    op = Operator("delta", lambda tokens, draw: leaves_of(tokens), 5, _run)
    for name in ("caterpillar", "long and short"):
        packed = pack(forest_of(name)).to("cuda")
        mine = [x.requires_grad_() for x in leaves_of(packed.num_tokens)]
        exact = [x.detach().double().requires_grad_() for x in mine]
        results = []
        for leaves, backend in ((mine, "flash_qla"), (mine, "fla"), (exact, "chunked")):
            out = of_parts(op, runs(packed, 3), leaves, backend)
            results.append([out, *torch.autograd.grad(out, leaves, mine[2].detach().to(out.dtype))])
        whole = gradients(name, exact, mine[2].detach(), "chunked")
        for x, y, z, w in zip(*results, whole, strict=True):
            assert relative(z, w) < 1e-12
            assert relative(x, w) < max(1e-2, 1.5 * relative(y, w))


def test_the_same_bits_again() -> None:
    leaves = leaves_of(forest_of("long and short").num_tokens)
    first, again = (gradients("long and short", leaves, None, "flash_qla") for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize("name", ["caterpillar", "chain"])
def test_what_is_compiled_ahead_is_what_is_called(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tilelang.jit import JITImpl

    ahead: list[Any] = []
    called: list[Any] = []
    call = JITImpl.__call__

    def noted(factory: Any, *arguments: Any, **options: Any) -> Any:
        called.append((factory, arguments, options))
        return call(factory, *arguments, **options)

    monkeypatch.setattr(JITImpl, "__call__", noted)
    monkeypatch.setattr(flash_qla, "_known", set())
    monkeypatch.setattr(flash_qla, "_compile", ahead.extend)
    gradients(name, leaves_of(forest_of(name).num_tokens), None, "flash_qla")
    assert len(ahead) > 5 and all(one in ahead for one in called)
    assert all(one in called for one in ahead)


def test_it_is_what_auto_takes() -> None:
    mask = mask_of(forest_of("star")).to("cuda")
    assert "would run 'flash_qla'" in explain_recurrence(mask)
    assert "would run 'fla'" in explain_recurrence(mask, key_dim=64)
