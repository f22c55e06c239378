"""fla's kernels inside chunks, ours between them: each sequence alone, in float64."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import pytest
import torch

from prefixtree import UnsupportedError, pack
from prefixtree.kernels.recurrence import fla, fla_rules, states, tree_delta_rule, tree_ssd
from tests.support.recurrence_cases import (
    Leaves,
    Operator,
    _normal,
    along_the_tree,
    cotangents_for,
    forest_of,
    gradients,
    of_parts,
    one_by_one,
    relative,
    runs,
)
from tests.support.strategies import mask_of

NATIVE = torch.cuda.is_available()
DEVICE = torch.device("cuda" if NATIVE else "cpu")
DTYPE = torch.bfloat16 if NATIVE else torch.float32
# key and value head dims
K, V = (64, 64) if NATIVE else (32, 16)
# of a tensor as a whole; bfloat16 keeps 8 bits. dA sums a difference over all tokens.
BOUND = 1e-2 if NATIVE else 2e-6
BOUND_OF_SUMS = 2e-2 if NATIVE else 1e-4


def _delta(key_heads: int, per_channel: bool, l2norm: bool) -> Operator:
    def leaves(tokens: int, generator: torch.Generator) -> Leaves:
        def normal(*shape: int) -> torch.Tensor:
            return _normal(generator, *shape)

        gates = (tokens, 2, K) if per_channel else (tokens, 2)
        key = normal(tokens, key_heads, K)
        return [
            normal(tokens, key_heads, K),
            key if l2norm else torch.nn.functional.normalize(key, dim=-1),
            normal(tokens, 2, V),
            -0.2 * normal(*gates).abs(),
            normal(tokens, 2).sigmoid(),
        ]

    def run(mask: Any, leaves: Sequence[torch.Tensor], backend: str, **states: Any) -> Any:
        return tree_delta_rule(*leaves, mask, qk_l2norm=l2norm, backend=backend, **states)

    return Operator(f"delta {key_heads} {per_channel} {l2norm}", leaves, 5, run)


def _ssd() -> Operator:
    def leaves(tokens: int, generator: torch.Generator) -> Leaves:
        def normal(*shape: int) -> torch.Tensor:
            return _normal(generator, *shape)

        x, B, C = normal(tokens, 4, V), normal(tokens, 2, K), normal(tokens, 2, K)
        return [x, normal(tokens, 4), B, C, -(normal(4) / 2).exp(), normal(4), normal(4)]

    def run(mask: Any, leaves: Sequence[torch.Tensor], backend: str, **states: Any) -> Any:
        x, dt, B, C, A, D, bias = leaves
        options = {"dt_bias": bias, "dt_softplus": True, "dt_limit": (0.01, 2.0)}
        return tree_ssd(x, dt, A, B, C, mask, D=D, **options, backend=backend, **states)

    return Operator("ssd", leaves, 4, run)


RULES = [_delta(1, False, True), _delta(2, False, False), _ssd(), _delta(1, True, True)]
BY_NAME = pytest.mark.parametrize("op", RULES, ids=lambda op: op.name)


def converted(op: Operator, leaves: Leaves) -> Leaves:
    """Rounded to the dtype under test, gates and parameters in float32."""
    rounded = []
    for i, x in enumerate(leaves):
        gate = i in ((1, 4, 5, 6) if op.name == "ssd" else (3,))
        rounded.append(x.detach().to(DEVICE, torch.float32 if gate else DTYPE).requires_grad_())
    return rounded


@pytest.mark.parametrize(
    "name", ["star", "caterpillar", "duplicates", "long and short", "one token"]
)
@BY_NAME
def test_each_sequence_alone(op: Operator, name: str) -> None:
    if op.name == "delta 1 True True" and name != "caterpillar" and not NATIVE:
        pytest.skip("20 s each in the interpreter")
    forest = forest_of(name)
    mine = converted(op, op.random(forest.num_tokens))
    cotangents = [c.to(DTYPE).double() for c in cotangents_for(op, forest)]
    exact = [x.detach().double().cpu().requires_grad_() for x in mine]
    outs, grads = along_the_tree(op, forest, mine, [c.to(DEVICE) for c in cotangents], "fla")
    alone_outs, alone_grads = one_by_one(op, forest, exact, cotangents)
    for a, b in zip(outs, alone_outs, strict=True):
        assert relative(a.cpu(), b) < BOUND
    for i, (a, b) in enumerate(zip(grads, alone_grads, strict=True)):
        assert relative(a.cpu(), b) < (BOUND if i < op.per_token else BOUND_OF_SUMS), i


@BY_NAME
def test_states_that_hand_nothing_back_are_missed(
    op: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient that a child sends its parent is part of every gradient above it."""
    mask = mask_of(forest_of("caterpillar")).to(DEVICE)
    leaves = converted(op, op.random(mask.num_tokens))
    out = op.run(mask, leaves, "fla")
    cotangent = torch.randn_like(out)
    full = torch.autograd.grad(out, leaves, cotangent, retain_graph=True)

    real = fla_rules.carry_gradients

    def cut(schedule: object, *args: object, **kwargs: object) -> tuple[torch.Tensor, ...]:
        chunks, dinitial = real(schedule, *args, **kwargs)  # type: ignore[arg-type]
        last = schedule.first_chunk[1:].long() - 1  # type: ignore[attr-defined]
        chunks[last] = 0
        return chunks, dinitial

    monkeypatch.setattr(fla_rules, "carry_gradients", cut)
    parts = torch.autograd.grad(out, leaves, cotangent)
    assert max(relative(a, b) for a, b in zip(parts, full, strict=True)) > 1e-2


@BY_NAME
def test_parts_are_the_whole_forest(op: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    """States that leave one part enter the next, and their gradients come back."""
    packed = pack(forest_of("caterpillar")).to(DEVICE)
    parts = runs(packed, 4 if NATIVE else 2)
    mine = converted(op, op.random(packed.num_tokens))
    exact = [x.detach().double().requires_grad_() for x in mine]
    want = op.run(packed.mask, exact, "chunked")
    cotangent = torch.randn_like(want)
    right = torch.autograd.grad(want, exact, cotangent)
    out = of_parts(op, parts, mine, "fla")
    assert relative(out, want) < BOUND
    grads = torch.autograd.grad((out.double() * cotangent).sum(), mine)
    for i, (a, b) in enumerate(zip(grads, right, strict=True)):
        assert relative(a, b) < (BOUND if i < op.per_token else BOUND_OF_SUMS), i
    if op.name != "delta 2 False False" and not NATIVE:
        return
    real = fla_rules.carry_gradients
    monkeypatch.setattr(
        fla_rules, "carry_gradients", lambda *given, dfinal, **options: real(*given, **options)
    )
    cut = of_parts(op, parts, mine, "fla")
    assert torch.equal(cut, out)
    grads = torch.autograd.grad((cut.double() * cotangent).sum(), mine)
    assert max(relative(a, b) for a, b in zip(grads, right, strict=True)) > 5 * BOUND_OF_SUMS


@BY_NAME
def test_bitwise_repeatable(op: Operator) -> None:
    if op.name == "delta 1 True True" and not NATIVE:
        pytest.skip("20 s each in the interpreter")
    mask = mask_of(forest_of("star")).to(DEVICE)
    leaves = converted(op, op.random(mask.num_tokens))
    cotangent = torch.randn_like(op.run(mask, leaves, "fla"))
    first, again = (gradients(op, mask, leaves, cotangent, "fla") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.skipif(not NATIVE, reason="the interpreter reads tensors that compiled code has not")
@BY_NAME
def test_one_graph(op: Operator) -> None:
    compiled = torch.compile(lambda mask, leaves: op.run(mask, leaves, "fla"), fullgraph=True)
    for name in ("star", "caterpillar"):
        mask = mask_of(forest_of(name)).to(DEVICE)
        leaves = converted(op, op.random(mask.num_tokens))
        out = op.run(mask, leaves, "fla")
        assert relative(compiled(mask, leaves), out) < 1e-3


def test_the_tested_version_is_installed() -> None:
    assert version("fla-core") in fla.VERSIONS
    assert fla.CHUNK == states.CHUNK


def test_what_is_relied_on_of_fla() -> None:
    """The inner functions of fla take the keywords that `fla_rules` gives them."""
    from fla.ops.gated_delta_rule import chunk as delta
    from fla.ops.kda import chunk_bwd, chunk_fwd

    # the two steps that walk from chunk to chunk are as many as we replace
    for whole in (delta.chunk_gated_delta_rule_fwd, chunk_fwd.chunk_kda_fwd):
        assert inspect.getsource(whole).count("= chunk_gated_delta_rule_fwd_h(") == 1
    for whole in (delta.chunk_gated_delta_rule_bwd, chunk_bwd.chunk_kda_bwd):
        text = inspect.getsource(whole)
        assert text.count("= chunk_gated_delta_rule_fwd_h(") == 1
        assert text.count("= chunk_gated_delta_rule_bwd_dhu(") == 1


def test_calls_it_cannot_serve() -> None:
    op = RULES[1]
    mask = mask_of(forest_of("chain")).to(DEVICE)
    leaves = converted(op, op.random(150))
    with pytest.raises(UnsupportedError, match=r"bfloat16, and the inputs are torch\.float64"):
        op.run(mask, [x.double() for x in leaves], "fla")
    with pytest.raises(UnsupportedError, match=f"head dims must be 16 to 256, and are 8 and {V}"):
        op.run(mask, [leaves[0][..., :8], leaves[1][..., :8], *leaves[2:]], "fla")


def test_another_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fla, "version", lambda _: "0.9.9")
    fla._package_refusal.cache_clear()
    try:
        assert fla._package_refusal() == "it works with fla-core 0.6.0, and 0.9.9 is installed"
    finally:
        fla._package_refusal.cache_clear()
