"""The torch contracts of the recurrent layers (operators, compile, checkpoint) and refusals."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from prefixtree import ForestError, TreeMask, UnsupportedError
from prefixtree.kernels.recurrence import (
    backends,
    chunked,
    operator,
    tree_conv,
    tree_delta_rule,
    tree_ssd,
)
from prefixtree.kernels.recurrence.protocol import Computed, DeltaCall
from prefixtree.kernels.runtime import Backend
from prefixtree.packing import host_mask
from tests.support.full import mostly
from tests.support.recurrence_cases import OPERATORS, Operator, forest_of, gradients
from tests.support.strategies import mask_of, random_forest

BY_NAME = pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.name)
# torch knows three operators: what they are asked besides is a constant to it
_FEW = [OPERATORS[i] for i in (0, 5, 7)]
ONE_OF_EACH = pytest.mark.parametrize("op", _FEW, ids=lambda op: op.name)
A_FEW = pytest.mark.parametrize("op", mostly(OPERATORS, _FEW), ids=lambda op: op.name)


def _mask(seed: int) -> TreeMask:
    return mask_of(random_forest(np.random.default_rng(seed), 10, 20))


# ---- torch's contracts ---------------------------------------------------------------------------


@pytest.mark.parametrize("backend", mostly(["auto", "reference"], ["auto"]))
def test_opcheck(backend: str) -> None:
    mask = _mask(0)
    tokens, handle = mask.num_tokens, mask.handle
    conv, no_bias, delta, kimi, ssd = (OPERATORS[i] for i in (0, 1, 3, 5, 7))
    found = operator.TREE_CONV.forward
    torch.library.opcheck(found, (*conv.random(tokens), handle, True, backend))
    torch.library.opcheck(found, (*no_bias.random(tokens), None, handle, False, backend))
    for op in (delta, kimi):
        arguments = (*op.random(tokens), None, handle, 0.3, True, None, backend)
        torch.library.opcheck(operator.TREE_DELTA_RULE.forward, arguments)
    x, dt, B, C, A = ssd.random(tokens)
    torch.library.opcheck(operator.TREE_SSD.forward, (x, dt, A, B, C, None, handle, None, backend))


@ONE_OF_EACH
def test_compiles_whole_and_once_for_all_forests(op: Operator) -> None:
    torch._dynamo.reset()
    counter = CompileCounter()

    def layer(leaves: list[torch.Tensor], mask: TreeMask) -> torch.Tensor:
        return op.run(mask, leaves, "auto") * 2

    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    frames = []
    for seed in range(6):
        mask = _mask(seed)
        leaves = op.random(mask.num_tokens)
        out = compiled(leaves, mask)
        torch.testing.assert_close(out, layer(leaves, mask))
        out.sum().backward()
        frames.append(counter.frame_count)
    # one compilation for the first length, one for any length, none for a new forest
    assert frames[0] == 1
    assert frames[-1] == frames[1] <= 2, frames


@pytest.mark.parametrize(
    "op", mostly([OPERATORS[i] for i in (0, 5, 7)], [OPERATORS[5]]), ids=lambda op: op.name
)
def test_compiled_gradients_are_the_eager_ones(op: Operator) -> None:
    torch._dynamo.reset()

    def layer(leaves: list[torch.Tensor], mask: TreeMask) -> torch.Tensor:
        return op.run(mask, [leaves[0].sin(), *leaves[1:]], "auto").cos().sum()

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for seed in range(3):
        mask = _mask(seed)
        leaves = op.random(mask.num_tokens)
        got = torch.autograd.grad(compiled(leaves, mask), leaves)
        for a, b in zip(got, torch.autograd.grad(layer(leaves, mask), leaves), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("reentrant", [False, True])
@A_FEW
def test_checkpointing_carries_the_mask(op: Operator, reentrant: bool) -> None:
    mask = _mask(1)
    leaves = op.random(mask.num_tokens)

    def layer(*leaves: torch.Tensor) -> torch.Tensor:
        return op.run(mask, leaves, "auto")

    want = torch.autograd.grad(layer(*leaves).square().sum(), leaves)
    checkpoint(layer, *leaves, use_reentrant=reentrant).square().sum().backward()
    for x, b in zip(leaves, want, strict=True):
        assert torch.equal(x.grad, b)


@A_FEW
def test_a_backward_outlives_its_mask(op: Operator) -> None:
    mask = _mask(2)
    leaves = op.random(mask.num_tokens)
    want = torch.autograd.grad(op.run(mask, leaves, "auto").square().sum(), leaves)
    loss = op.run(mask, leaves, "auto").square().sum()
    stale = mask.handle.clone()
    del mask
    gc.collect()
    for a, b in zip(torch.autograd.grad(loss, leaves), want, strict=True):
        assert torch.equal(a, b)
    del loss
    gc.collect()
    with pytest.raises(ForestError, match="no longer exists"):
        host_mask.host_of(stale)


@BY_NAME
def test_differentiable_once(op: Operator) -> None:
    mask = _mask(3)
    leaves = op.random(mask.num_tokens)
    loss = op.run(mask, leaves, "auto").square().sum()
    grads = torch.autograd.grad(loss, leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="once, not twice"):
        torch.autograd.grad(grads[0].sum(), leaves)


@A_FEW
def test_only_the_gradients_that_are_asked_for_reach_leaves(op: Operator) -> None:
    mask = _mask(4)
    leaves = op.random(mask.num_tokens)
    whole = torch.autograd.grad(op.run(mask, leaves, "auto").square().sum(), leaves)
    for i, x in enumerate(leaves):
        alone = [y if y is x else y.detach() for y in leaves]
        (grad,) = torch.autograd.grad(op.run(mask, alone, "auto").square().sum(), [x])
        torch.testing.assert_close(grad, whole[i])
    with torch.no_grad():
        assert not op.run(mask, leaves, "auto").requires_grad
    # what inference made may not be saved for a backward, and tables must not be of it
    other = _mask(5)
    with torch.inference_mode():
        op.run(other, [x.detach() for x in op.random(other.num_tokens)], "auto")
    op.run(other, op.random(other.num_tokens), "auto").sum().backward()


@A_FEW
def test_autocast_does_not_reach_inside(op: Operator) -> None:
    mask = mask_of(forest_of("star"))
    leaves = op.random(mask.num_tokens, dtype=torch.float32)
    cotangent = torch.randn_like(op.run(mask, leaves, "auto"))
    want = gradients(op, mask, leaves, cotangent, "auto")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gradients(op, mask, leaves, cotangent, "auto")
    for a, b in zip(found, want, strict=True):
        assert torch.equal(a, b)


class Keeping:
    """Kernels that are chunked's. Saves its output twice for its backward, which looks at both."""

    refusal = staticmethod(chunked.refusal)

    def saves(self, call: Any) -> list[torch.Tensor]:
        like = call.value if isinstance(call, DeltaCall) else call.x
        return [like.new_empty(like.shape), like.new_empty(like.shape, dtype=torch.float32)]

    def forward(self, call: Any) -> Computed:
        out, _, final = chunked.forward(call)
        return Computed(out, [out.clone(), out.float()], final)

    def backward(
        self, call: Any, dout: torch.Tensor, saved: list[torch.Tensor], dfinal: Any
    ) -> list[torch.Tensor]:
        out, rounded = saved
        assert torch.equal(out, self.forward(call)[0]) and rounded.dtype == torch.float32
        return chunked.backward(call, dout, saved, dfinal)


@ONE_OF_EACH
def test_what_a_backend_saves_reaches_its_backward(
    op: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In eager code, under checkpointing and in compiled code."""
    monkeypatch.setitem(backends._NAMED, "keeping", Backend("keeping", Keeping))
    monkeypatch.setattr(backends, "NAMES", (*backends.NAMES, "keeping"))
    torch._dynamo.reset()
    mask = _mask(7)
    leaves = op.random(mask.num_tokens)

    def layer(*leaves: torch.Tensor) -> torch.Tensor:
        return op.run(mask, leaves, "keeping").square().sum()

    def checkpointed(*leaves: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, *leaves, use_reentrant=False)

    want = torch.autograd.grad(op.run(mask, leaves, "chunked").square().sum(), leaves)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for run in (layer, checkpointed, compiled):
        for a, b in zip(torch.autograd.grad(run(*leaves), leaves), want, strict=True):
            torch.testing.assert_close(a, b)
    if op.name.startswith("delta"):
        arguments = (*leaves, None, mask.handle, 0.3, True, None, "keeping")
        torch.library.opcheck(operator.TREE_DELTA_RULE.forward, arguments)


# ---- refusals ------------------------------------------------------------------------------------


def _conv_inputs(mask: TreeMask) -> dict[str, Any]:
    x, weight, bias = OPERATORS[0].random(mask.num_tokens)
    return {"x": x, "weight": weight, "bias": bias, "mask": mask}


def _delta_inputs(mask: TreeMask) -> dict[str, Any]:
    names = ("query", "key", "value", "g", "beta")
    return {**dict(zip(names, OPERATORS[3].random(mask.num_tokens), strict=True)), "mask": mask}


def _ssd_inputs(mask: TreeMask) -> dict[str, Any]:
    names = ("x", "dt", "B", "C", "A", "D", "dt_bias")
    return {**dict(zip(names, OPERATORS[6].random(mask.num_tokens), strict=True)), "mask": mask}


def _meta(x: torch.Tensor) -> torch.Tensor:
    return x.detach().to("meta")


REFUSED: list[tuple[Callable[..., Any], Callable[..., Any], str, Any, type, str]] = [
    (tree_conv, _conv_inputs, "mask", lambda m: m.subtree_end, TypeError, "must be a TreeMask"),
    (tree_conv, _conv_inputs, "mask", lambda m: m.for_queries([(0, 1)]), UnsupportedError, "whole"),
    (tree_conv, _conv_inputs, "x", lambda x: x[None], ValueError, "drop the batch dimension"),
    (tree_conv, _conv_inputs, "x", lambda x: x[1:], ValueError, r"\[tokens, channels\]: \["),
    (tree_conv, _conv_inputs, "x", lambda x: x.long(), ValueError, "must be floating point"),
    (tree_conv, _conv_inputs, "x", _meta, ValueError, r"x is on meta, the mask on cpu; use packed"),
    (tree_conv, _conv_inputs, "weight", lambda w: w[:, None], ValueError, r"\[channels, taps\]"),
    (tree_conv, _conv_inputs, "weight", lambda w: w[:, :0], ValueError, "at least one tap"),
    (tree_conv, _conv_inputs, "bias", lambda b: b[1:], ValueError, r"bias must be \[channels\]"),
    (tree_conv, _conv_inputs, "bias", lambda b: 1.0, TypeError, "bias must be a tensor, got float"),
    (tree_conv, _conv_inputs, "activation", "gelu", UnsupportedError, "apply it to the result"),
    (
        tree_conv,
        _conv_inputs,
        "backend",
        "sdpa",
        UnsupportedError,
        "use one of auto, triton, fla",
    ),
    (tree_delta_rule, _delta_inputs, "query", lambda q: q[..., 1:], ValueError, "as key's"),
    (tree_delta_rule, _delta_inputs, "value", lambda v: v[:, 1:], ValueError, "multiple of the"),
    (tree_delta_rule, _delta_inputs, "value", lambda v: v.float(), ValueError, "share one dtype"),
    (tree_delta_rule, _delta_inputs, "g", lambda g: g[:, :2], ValueError, "one per channel"),
    (tree_delta_rule, _delta_inputs, "g", lambda g: g[..., None], ValueError, "one per channel"),
    (tree_delta_rule, _delta_inputs, "beta", lambda b: b[:, 1:], ValueError, "beta must be"),
    (tree_ssd, _ssd_inputs, "x", lambda x: x[:, :3], ValueError, "dt must be"),
    (tree_ssd, _ssd_inputs, "A", lambda a: a[:, None], ValueError, r"A must be \[heads\]"),
    (tree_ssd, _ssd_inputs, "C", lambda c: c[:, :1], ValueError, "as B's"),
    (tree_ssd, _ssd_inputs, "B", lambda b: b.float(), ValueError, "share one dtype"),
    (tree_ssd, _ssd_inputs, "D", lambda d: d[1:], ValueError, "D must be"),
    (tree_ssd, _ssd_inputs, "dt_bias", lambda d: d[1:], ValueError, "dt_bias must be"),
    (tree_ssd, _ssd_inputs, "dt_limit", (2.0, 1.0), ValueError, r"\(least, greatest\)"),
    (tree_ssd, _ssd_inputs, "mask", lambda m: m.for_queries([(0, 1)]), UnsupportedError, "whole"),
]


@pytest.mark.parametrize("function, inputs, name, change, error, match", REFUSED)
def test_what_does_not_fit_is_refused(
    function: Callable[..., torch.Tensor],
    inputs: Callable[[TreeMask], dict[str, Any]],
    name: str,
    change: Any,
    error: type[Exception],
    match: str,
) -> None:
    arguments = inputs(mask_of(forest_of("star")))
    function(**arguments)
    arguments[name] = change(arguments[name]) if callable(change) else change
    with pytest.raises(error, match=match):
        function(**arguments)


def test_groups_of_heads_must_divide() -> None:
    inputs = _ssd_inputs(mask_of(forest_of("star")))
    for name in ("B", "C"):
        inputs[name] = torch.cat([inputs[name], inputs[name][:, :1]], 1)
    with pytest.raises(ValueError, match="4 heads of x and 3 groups of B"):
        tree_ssd(**inputs)


def test_a_backend_that_refuses_says_why_and_auto_passes_it_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other: Any = Backend("elsewhere", backends.CHUNKED.load, package="fla-that-is-not-there")
    monkeypatch.setattr(backends, "ON_GPU", (other,))
    monkeypatch.setitem(backends._NAMED, "elsewhere", other)
    monkeypatch.setattr(backends, "NAMES", (*backends.NAMES, "elsewhere"))
    mask = mask_of(forest_of("star"))
    with pytest.raises(UnsupportedError, match=r"'elsewhere': it needs .* use backend='chunked'"):
        tree_conv(**_conv_inputs(mask), backend="elsewhere")

    class OnGpu:
        is_cuda = True

    call: Any = (OnGpu(),)
    assert backends.choose("auto", call) is backends.CHUNKED
    backends._warn.cache_clear()
    with pytest.warns(UserWarning, match="slow: backend 'elsewhere': it needs"):
        backends.warn_if_slow(call, backends.CHUNKED)
    # once
    backends.warn_if_slow(call, backends.CHUNKED)
    backends._warn.cache_clear()
