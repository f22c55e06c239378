"""The torch contracts of tree_attention: the operator, compile, checkpoint, lifetimes."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import prefixtree as pt
from prefixtree import ForestError, TreeMask, UnsupportedError, tree_attention
from prefixtree.kernels.attention import operator, sdpa
from prefixtree.kernels.attention.flash.block_lists import Tiles, lists_of
from prefixtree.packing import host_mask as mask_module
from prefixtree.packing.copies import GatherIndex
from tests.support.attention_checks import (
    Case,
    assert_as_promised,
    assert_wide_gradients_are_narrow_ones_before_the_cast,
    ours,
    run,
)
from tests.support.full import mostly
from tests.support.pairs import pairwise
from tests.support.strategies import mask_of, random_forest
from tests.support.warm import run_warm


def _mask(seed: int) -> TreeMask:
    return mask_of(random_forest(np.random.default_rng(seed), 10, 20))


def _inputs(mask: TreeMask, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    shapes = [(mask.num_queries, 4, 8), (mask.num_tokens, 2, 8), (mask.num_tokens, 2, 8)]
    return [torch.randn(*s, dtype=dtype, requires_grad=True) for s in shapes]


OPCHECKED = pairwise([False, True], [(0, 0.0), (5, 2.0)], [False, True], [False, True])


@pytest.mark.parametrize(
    "sinks, features, lse_used, of_part",
    mostly(OPCHECKED, OPCHECKED[1:4]),
)
def test_opcheck(sinks: bool, features: tuple[int, float], lse_used: bool, of_part: bool) -> None:
    mask = _mask(0)
    if of_part:
        mask = mask.for_queries([(1, 5), (8, 20)])
    sink = torch.randn(4, requires_grad=True) if sinks else None
    arguments = (
        *_inputs(mask),
        sink,
        mask.handle,
        0.3,
        *features,
        False,
        "sdpa",
        of_part,
        lse_used,
        None,
    )
    torch.library.opcheck(operator.TREE_ATTENTION, arguments)


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize("options", [{}, {"window": 5, "softcap": 2.0}])
def test_wide_gradients_are_those_before_the_cast(backend: str, options: dict) -> None:
    for mask in (_mask(0), _mask(0).for_queries([(1, 5), (8, 20)])):
        for dtype in (torch.bfloat16, torch.float64):
            case = Case.random(mask, (4, 2), (8, 8), dtype, sinks=True, **options)
            assert_wide_gradients_are_narrow_ones_before_the_cast(case, mask, backend)


EXTRAS = [{}, {"sinks": True, "dlse": True}]
OPTIONS = [{}, {"window": 5}, {"softcap": 2.0}]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@pytest.mark.parametrize(
    ("extras", "options", "dtype"),
    mostly(
        itertools.product(EXTRAS, OPTIONS, DTYPES),
        [(EXTRAS[i != 1], OPTIONS[i], DTYPES[i]) for i in range(3)],
    ),
)
def test_results_are_laid_out_as_compiled_code_is_told(
    dtype: torch.dtype, options: dict, extras: dict
) -> None:
    for mask in (_mask(0), _mask(0).for_queries([(1, 5), (8, 20)])):
        case = Case.random(mask, (4, 2), (8, 8), dtype, **extras, **options)
        assert_as_promised(case, mask, backend="sdpa")


def test_gradcheck() -> None:
    mask = mask_of(random_forest(np.random.default_rng(5), 4, 3))
    inputs = [
        *_inputs(mask, torch.float64),
        torch.randn(4, dtype=torch.float64, requires_grad=True),
    ]

    def attend(q, k, v, sinks):
        return tree_attention(
            q, k, v, mask, softcap=2.0, window=4, sinks=sinks, return_lse=True, backend="sdpa"
        )

    assert torch.autograd.gradcheck(attend, inputs)


@pytest.mark.parametrize("subset", mostly([False, True], [True]))
def test_compiles_whole_and_once_for_all_forests(subset: bool) -> None:
    torch._dynamo.reset()
    counter = CompileCounter()

    def layer(q, k, v, mask):
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

    def layer(q, k, v, mask):
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


def test_host_masks_are_freed_and_their_numbers_never_used_again() -> None:
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
        mask_module.host_of(stale)
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


@pytest.mark.parametrize("through", [lambda x: x, torch.square])
def test_a_second_derivative_is_refused(
    through: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    mask = _mask(1)
    q, k, v = _inputs(mask)
    loss = through(tree_attention(q, k, v, mask)).sum()
    (grad,) = torch.autograd.grad(loss, q, create_graph=True)
    assert torch.equal(
        grad, torch.autograd.grad(through(tree_attention(q, k, v, mask)).sum(), q)[0]
    )
    with pytest.raises(RuntimeError, match="once, not twice"):
        # k has another way to the loss, so that a graph cut at the gradient would go unseen
        torch.autograd.grad(grad.sum() + k.sum(), k)


@pytest.mark.parametrize("needed", [(0,), (1, 2), (3,), (0, 1, 2, 3)])
@pytest.mark.parametrize("outputs", ["out", "lse", "both"])
def test_gradients_of_some_inputs_through_some_outputs(
    needed: tuple[int, ...], outputs: str
) -> None:
    mask = _mask(3)
    inputs = [*_inputs(mask, torch.float64), torch.randn(4, dtype=torch.float64)]
    q, k, v, sinks = (x.detach().requires_grad_(i in needed) for i, x in enumerate(inputs))
    leaves = [(q, k, v, sinks)[i] for i in needed]

    def gradients(backend: str) -> tuple[torch.Tensor | None, ...]:
        out, lse = tree_attention(q, k, v, mask, sinks=sinks, backend=backend, return_lse=True)
        losses = {"out": out.cos().sum(), "lse": lse.sin().sum()}
        loss = sum(losses.values()) if outputs == "both" else losses[outputs]
        return torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)

    if outputs == "lse" and needed == (3,):
        # lse leaves the sinks out; the operator cannot tell and says 0
        assert gradients("sdpa")[0].abs().max() == 0
        return
    for a, b in zip(gradients("sdpa"), gradients("reference"), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_without_gradients(without: Callable[[], AbstractContextManager[None]]) -> None:
    mask = _mask(4)
    inputs = _inputs(mask)
    with without():
        out, lse = tree_attention(*inputs, mask, return_lse=True)
    want = tree_attention(*inputs, mask, return_lse=True)
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1])
    assert not out.requires_grad and not lse.requires_grad
    assert out.is_inference() == (without is torch.inference_mode)


@pytest.mark.parametrize(
    "made",
    [
        lambda mask: TreeMask(mask.subtree_end),
        lambda mask: mask.for_queries([(0, 3), (5, 9)]),
        lambda mask: pickle.loads(pickle.dumps(mask)),
    ],
    ids=["new", "for_queries", "pickle"],
)
def test_a_mask_from_inference_mode_trains_later(made: Callable[[TreeMask], TreeMask]) -> None:
    want_mask = made(_mask(4))
    with torch.inference_mode():
        mask = made(_mask(4))
        inputs = _inputs(mask)
        tree_attention(*inputs, mask)
    inputs = _inputs(mask)
    got, want = (
        torch.autograd.grad(tree_attention(*inputs, m).sum(), inputs) for m in (mask, want_mask)
    )
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@torch.inference_mode()
def test_nothing_kept_is_of_inference_mode() -> None:
    """Also what no backward saves today. Another device, though one that computes nothing."""
    packed = pt.pack(random_forest(np.random.default_rng(1), 10, 20)).to("meta")
    mask = packed.mask.for_queries([(0, 3), (5, 9)])
    tables = mask.tables(pt.TileShape(16, 16))
    lists = lists_of(packed.mask.host, Tiles(128, 128, 128), 5, torch.device("cpu"))
    index = GatherIndex(np.array([0, 1, 1, -1]), 2, packed.device)
    kept = {
        name: x
        for holder in (packed, mask, tables, lists, lists.forward, lists.backward, index)
        for name, x in vars(holder).items()
    }
    kept |= {"rows": index.rows, **dict(enumerate((*packed.edges(), *index.copies)))}
    tensors = {name: x for name, x in kept.items() if isinstance(x, torch.Tensor)}
    assert len(tensors) > 30
    assert not [name for name, x in tensors.items() if x.is_inference()]


def test_lse_is_differentiable_only_where_it_is_used() -> None:
    mask = _mask(4)
    rest = (None, mask.handle, 0.3, 0, 0.0, False, "sdpa", False)
    _, lse = operator.TREE_ATTENTION(*_inputs(mask), *rest, False, None)
    assert not lse.requires_grad
    _, lse = operator.TREE_ATTENTION(*_inputs(mask), *rest, True, None)
    assert lse.requires_grad


@pytest.mark.parametrize("extras", [{}, {"sinks": True, "dlse": True, "softcap": 2.0, "window": 5}])
def test_the_operator_runs_the_backend_of_the_name(
    extras: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also "reference", which `tree_attention` runs without the operator."""
    mask = _mask(4)
    case = Case.random(mask, (4, 2), (8, 8), torch.float64, **extras)
    want = run(case, ours(mask, backend="reference"))
    monkeypatch.setattr(sdpa, "forward", lambda *_: pytest.fail("ran sdpa"))

    def attend(q, k, v, sinks, window=0, softcap=0.0):
        rest = (8**-0.5, window, softcap, False, "reference", False, True, None)
        return operator.TREE_ATTENTION(q, k, v, sinks, mask.handle, *rest)

    for name, value in run(case, attend).items():
        torch.testing.assert_close(value, want[name])
    with pytest.raises(UnsupportedError, match="'dense' does not exist"):
        operator.TREE_ATTENTION(
            *_inputs(mask), None, mask.handle, 0.3, 0, 0.0, False, "dense", False, False, None
        )


def test_modes_see_the_operator_and_run_its_fake() -> None:
    """Selective checkpointing, profilers and FLOP counters rest on the first."""
    seen = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    mask = _mask(5)
    inputs = _inputs(mask)
    with Log():
        tree_attention(*inputs, mask).sum().backward()
    assert operator.TREE_ATTENTION in seen
    assert operator.TREE_ATTENTION_BACKWARD in seen
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(x) for x in inputs]
        out, lse = tree_attention(*fake, mask, return_lse=True)
        gradients = torch.autograd.grad(out.sum() + lse.sum(), fake)
    assert isinstance(out, FakeTensor) and out.shape == (mask.num_queries, 4, 8)
    assert lse.shape == (4, mask.num_queries)
    assert [x.shape for x in gradients] == [x.shape for x in inputs]


def test_saved_tensors_may_be_kept_elsewhere() -> None:
    mask = _mask(5)
    inputs = _inputs(mask)
    want = torch.autograd.grad(tree_attention(*inputs, mask).square().sum(), inputs)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        loss = tree_attention(*inputs, mask).square().sum()
    for a, b in zip(torch.autograd.grad(loss, inputs), want, strict=True):
        assert torch.equal(a, b)


def test_function_transforms_are_refused() -> None:
    mask = _mask(5)
    q, k, v = (x.detach() for x in _inputs(mask))
    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.grad(lambda q: tree_attention(q, k, v, mask).sum())(q)


# dynamo's own look at .grad of its inputs
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_partly_compiled_model_leaves_the_backends_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where Dynamo skips the frame that calls, it still looks at all frames below."""
    torch._dynamo.reset()
    counter = CompileCounter()
    mask = _mask(7)
    inputs = _inputs(mask)
    want = torch.autograd.grad(
        tree_attention(inputs[0].sin(), *inputs[1:], mask).cos().sum(), inputs
    )
    skipped = torch._dynamo.disable(tree_attention, recursive=False)
    compiling: list[object] = []
    callback = torch._C._dynamo.eval_frame.get_eval_frame_callback

    def watched(name: str) -> Callable[..., object]:
        original = getattr(sdpa, name)

        def run(*arguments: object) -> object:
            compiling.append(callback())
            return original(*arguments)

        return run

    for name in ("forward", "backward"):
        monkeypatch.setattr(sdpa, name, watched(name))

    @torch.compile(backend=counter)
    def step(q, k, v):
        loss = skipped(q.sin(), k, v, mask).cos().sum()
        torch._dynamo.graph_break()
        loss.backward()

    step(*inputs)
    assert compiling == [None, None]
    assert counter.frame_count > 0
    for x, b in zip(inputs, want, strict=True):
        torch.testing.assert_close(x.grad, b)


@pytest.mark.full
def test_a_second_import_takes_the_operator_over() -> None:
    code = """
import importlib, sys
import torch

def attend(compiles):
    import prefixtree as pt
    mask = pt.pack(pt.PrefixForest.from_parents([-1, 0, 0], [4, 3, 2])).mask
    q = torch.ones(9, 2, 4, requires_grad=True)
    pt.tree_attention(q, q, q, mask).sum().backward()
    if compiles:
        torch.compile(pt.tree_attention, backend="eager", fullgraph=True)(q, q, q, mask)

attend(False)
for room in ("api", "operator"):
    importlib.reload(sys.modules[f"prefixtree.kernels.attention.{room}"])
    attend(room == "operator")
for name in [name for name in sys.modules if name.startswith("prefixtree")]:
    del sys.modules[name]
attend(True)
"""
    run = run_warm(code)
    assert run.returncode == 0, run.stderr
