"""The torch contracts of tree_attention: the operator, compile, checkpoint, lifetimes."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from strategies import mask_of, random_forest
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from prefixtree import ForestError, TreeMask, tree_attention
from prefixtree.kernels import attention
from prefixtree.packing import mask as mask_module


def _mask(seed: int) -> TreeMask:
    return mask_of(random_forest(np.random.default_rng(seed), 10, 20))


def _inputs(mask: TreeMask, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    shapes = [(mask.num_queries, 4, 8), (mask.num_tokens, 2, 8), (mask.num_tokens, 2, 8)]
    return [torch.randn(*s, dtype=dtype, requires_grad=True) for s in shapes]


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window, softcap", [(0, 0.0), (5, 2.0)])
@pytest.mark.parametrize("lse_used", [False, True])
@pytest.mark.parametrize("subset", [False, True])
def test_opcheck(sinks: bool, window: int, softcap: float, lse_used: bool, subset: bool) -> None:
    mask = _mask(0)
    if subset:
        mask = mask.for_queries([(1, 5), (8, 20)])
    sink = torch.randn(4, requires_grad=True) if sinks else None
    arguments = (*_inputs(mask), sink, mask.handle, 0.3, window, softcap, False, "sdpa", lse_used)
    torch.library.opcheck(attention._tree_attention, arguments)


def test_gradcheck() -> None:
    mask = mask_of(random_forest(np.random.default_rng(5), 4, 3))
    inputs = [
        *_inputs(mask, torch.float64),
        torch.randn(4, dtype=torch.float64, requires_grad=True),
    ]

    def attend(q, k, v, sinks):  # type: ignore[no-untyped-def]
        return tree_attention(
            q, k, v, mask, softcap=2.0, window=4, sinks=sinks, return_lse=True, backend="sdpa"
        )

    assert torch.autograd.gradcheck(attend, inputs)


@pytest.mark.parametrize("subset", [False, True])
def test_compiles_whole_and_once_for_all_forests(subset: bool) -> None:
    torch._dynamo.reset()
    counter = CompileCounter()

    def layer(q, k, v, mask):  # type: ignore[no-untyped-def]
        return tree_attention(q, k, v, mask, softcap=3.0) * 2

    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    frames = []
    for seed in range(8):
        mask = _mask(seed)
        if subset:
            mask = mask.for_queries([(0, 1), (2, 4 + seed)])
        inputs = _inputs(mask)
        out = compiled(*inputs, mask)
        torch.testing.assert_close(out, layer(*inputs, mask))
        out.sum().backward()
        frames.append(counter.frame_count)
    # one compilation for the first length, one for any length, none for a new forest
    assert frames[0] == 1
    assert frames[-1] == frames[1] <= 2, frames


def test_compiled_gradients_are_the_eager_ones() -> None:
    torch._dynamo.reset()

    def layer(q, k, v, mask):  # type: ignore[no-untyped-def]
        out, lse = tree_attention(q.sin(), k, v, mask, window=6, return_lse=True)
        return out.cos().sum() + (lse * lse).sum()

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for seed in range(3):
        mask = _mask(seed)
        inputs = _inputs(mask)
        got = torch.autograd.grad(compiled(*inputs, mask), inputs)
        for a, b in zip(got, torch.autograd.grad(layer(*inputs, mask), inputs), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_carries_the_mask(reentrant: bool) -> None:
    mask = _mask(1)
    inputs = _inputs(mask)
    want = torch.autograd.grad(tree_attention(*inputs, mask).square().sum(), inputs)
    out = checkpoint(tree_attention, *inputs, mask, use_reentrant=reentrant)
    out.square().sum().backward()
    for x, b in zip(inputs, want, strict=True):
        assert torch.equal(x.grad, b)


def test_a_backward_outlives_its_mask() -> None:
    mask = _mask(2)
    inputs = _inputs(mask)
    want = torch.autograd.grad(tree_attention(*inputs, mask).square().sum(), inputs)
    loss = tree_attention(*inputs, mask).square().sum()
    del mask
    gc.collect()
    for a, b in zip(torch.autograd.grad(loss, inputs), want, strict=True):
        assert torch.equal(a, b)


def test_plans_are_freed_and_their_numbers_never_used_again() -> None:
    gc.collect()
    alive = len(mask_module._buffers)
    mask = _mask(3)
    inputs = _inputs(mask)
    number = int(mask.handle)
    loss = tree_attention(*inputs, mask).sum()
    assert len(mask_module._buffers) == alive + 1
    stale = mask.handle.clone()
    del loss, mask
    gc.collect()
    assert len(mask_module._buffers) == alive
    with pytest.raises(ForestError, match="no longer exists"):
        mask_module.plan_of(stale)
    assert int(_mask(4).handle) > number


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
@pytest.mark.parametrize("subset", [False, True])
def test_copies_and_pickles_attend_alike(
    duplicate: Callable[[TreeMask], TreeMask], subset: bool
) -> None:
    mask = _mask(6)
    mask = mask.for_queries([(0, 3), (5, 9)]) if subset else mask
    mask = mask.with_options(deterministic=True)
    other = duplicate(mask)
    assert other.deterministic and other.backend == "auto"
    inputs = _inputs(mask)
    assert torch.equal(tree_attention(*inputs, mask), tree_attention(*inputs, other))


def test_saved_for_backward_is_inputs_out_and_lse() -> None:
    mask = mask_of(random_forest(np.random.default_rng(8), 20, 60))
    inputs = _inputs(mask)
    saved = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = tree_attention(*inputs, mask)
    numbers = sum(x.numel() for x in saved)
    allowed = sum(x.numel() for x in inputs) + out.numel() + 4 * mask.num_tokens + 1
    assert numbers == allowed, [tuple(x.shape) for x in saved]


def test_a_second_derivative_is_refused() -> None:
    mask = _mask(1)
    q, k, v = _inputs(mask)
    (grad,) = torch.autograd.grad(tree_attention(q, k, v, mask).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError):
        grad.sum().backward()
