"""The recurrent layers along the tree: exact against each sequence alone, in every dtype."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from prefixtree import PrefixForest, TreeMask
from prefixtree.kernels.recurrence import chunked, tree_conv, tree_delta_rule, tree_ssd
from prefixtree.packing.segments import segments_of
from tests.support.float64 import Float64
from tests.support.full import in_turn, mostly
from tests.support.recurrence_cases import (
    FORESTS,
    OPERATORS,
    RECURRENCES,
    Operator,
    chain,
    cotangents_for,
    forest_of,
    gradients,
    relative,
    worst_errors,
)
from tests.support.strategies import forests, mask_of, random_forest

BY_NAME = pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.name)
# a convolution, a delta rule with a gate per channel, a state space
ONE_OF_EACH = [OPERATORS[i] for i in (0, 5, 7)]
A_FEW = pytest.mark.parametrize("op", mostly(OPERATORS, ONE_OF_EACH), ids=lambda op: op.name)
_OTHERS = [op for op in OPERATORS if op not in ONE_OF_EACH]
_SHAPES = ["caterpillar", "ends inside runs", "duplicates"]


def cut_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few tokens, pieces of a few chunks, slabs of a channel or two."""
    monkeypatch.setattr(chunked, "_CHUNK", 4)
    monkeypatch.setattr(chunked, "_CHUNK_PER_CHANNEL", 3)
    monkeypatch.setattr(chunked, "_PIECE_NUMBERS", 700)
    monkeypatch.setattr(chunked, "_SLAB_NUMBERS", 50)


# ---- float64 -------------------------------------------------------------------------------------


_BY_REFERENCE = [(op, "reference", name) for op, name in zip(OPERATORS, _SHAPES * 3, strict=False)]


@pytest.mark.parametrize(
    "op, backend, name",
    mostly(
        [
            *itertools.product(ONE_OF_EACH, ["chunked"], FORESTS),
            # of the others two forests each
            *((op, "chunked", name) for op, name in zip(_OTHERS * 2, FORESTS, strict=False)),
            *_BY_REFERENCE,
        ],
        [
            *((op, "chunked", name) for op, name in zip(ONE_OF_EACH * 4, FORESTS, strict=False)),
            *((op, "chunked", name) for op, name in zip(_OTHERS, FORESTS, strict=False)),
            *_BY_REFERENCE[:3],
        ],
    ),
    ids=lambda x: getattr(x, "name", x),
)
def test_named_forests_are_each_sequence_alone(op: Operator, backend: str, name: str) -> None:
    out, grads = worst_errors(op, forest_of(name), backend)
    assert out < 1e-13 and grads < 1e-12


@A_FEW
@settings(max_examples=12)
@given(forest=forests())
def test_any_forest_is_each_sequence_alone(op: Operator, forest: PrefixForest) -> None:
    out, grads = worst_errors(op, forest, "chunked")
    assert out < 1e-13 and grads < 1e-12


@A_FEW
@settings(max_examples=8)
@given(forest=forests(max_length=11))
def test_any_cut_into_chunks_and_pieces(op: Operator, forest: PrefixForest) -> None:
    with pytest.MonkeyPatch.context() as patch:
        cut_small(patch)
        out, grads = worst_errors(op, forest, "chunked")
    assert out < 1e-13 and grads < 1e-12


@pytest.mark.parametrize("name", mostly(["chain", "long and short", "star"], ["long and short"]))
@pytest.mark.parametrize("op", mostly(RECURRENCES, ONE_OF_EACH), ids=lambda op: op.name)
def test_long_segments_take_heads_in_parts(
    op: Operator, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_small(monkeypatch)
    counts = []
    whole = chunked._Scan.head_parts

    def counted(scan: Any) -> int:
        counts.append(whole(scan))
        return counts[-1]

    monkeypatch.setattr(chunked._Scan, "head_parts", counted)
    out, grads = worst_errors(op, forest_of(name), "chunked")
    assert out < 1e-13 and grads < 1e-12
    assert counts and min(counts) > 1


# gradients are compared with autograd's, token by token, above
@pytest.mark.parametrize("op", mostly(ONE_OF_EACH, ONE_OF_EACH[:1]), ids=lambda op: op.name)
def test_gradcheck(op: Operator) -> None:
    mask = mask_of(random_forest(np.random.default_rng(5), 4, 3))
    leaves = op.random(mask.num_tokens)

    def run(*leaves: torch.Tensor) -> torch.Tensor:
        return op.run(mask, leaves, "chunked")

    assert torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize(
    "op", [op for op in RECURRENCES if op.name.startswith("delta")], ids=lambda op: op.name
)
def test_a_decay_of_nothing_forgets_everything(op: Operator) -> None:
    mask = mask_of(forest_of("long and short"))
    leaves = op.random(mask.num_tokens)
    with torch.no_grad():
        leaves[3][::7] = -torch.inf
        leaves[3][3::7] = -1e4
    cotangent = torch.randn(mask.num_tokens, 4, 5, dtype=torch.float64)
    ours, want = (gradients(op, mask, leaves, cotangent, b) for b in ("chunked", "reference"))
    for a, b in zip(ours, want, strict=True):
        assert b.isfinite().all() and relative(a, b) < 1e-12


# ---- the meters see what is wrong ----------------------------------------------------------------


@pytest.mark.parametrize("op", mostly(RECURRENCES, ONE_OF_EACH), ids=lambda op: op.name)
def test_states_that_are_not_handed_down_show(
    op: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = chunked._before

    def forgotten(*arguments: Any) -> torch.Tensor:
        return torch.zeros_like(whole(*arguments))

    monkeypatch.setattr(chunked, "_before", forgotten)
    out, grads = worst_errors(op, forest_of("caterpillar"), "chunked")
    assert out > 1e-2 and grads > 1e-2


@pytest.mark.parametrize("op", mostly(RECURRENCES, ONE_OF_EACH), ids=lambda op: op.name)
def test_gradients_that_do_not_pass_through_states_show(
    op: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "_add_to_parents", lambda *_: None)
    out, grads = worst_errors(op, forest_of("caterpillar"), "chunked")
    assert out < 1e-13 and grads > 1e-2


def test_a_convolution_in_packed_order_shows() -> None:
    op = OPERATORS[0]
    forest = forest_of("caterpillar")
    mask = mask_of(forest)
    leaves = op.random(mask.num_tokens)
    packed = op.run(chain(mask.num_tokens), leaves, "chunked")
    assert relative(packed, op.run(mask, leaves, "reference")) > 1e-2


# ---- float32 and half precision ------------------------------------------------------------------


@pytest.mark.parametrize(
    "op, dtype_and_name",
    mostly(
        in_turn(
            [pytest.param(op, id=op.name) for op in OPERATORS],
            [
                (torch.float32, "long and short"),
                (torch.bfloat16, "caterpillar"),
                (torch.float16, "star"),
            ],
        ),
        ONE_OF_EACH,
    ),
)
def test_rounding_is_that_of_token_by_token(
    op: Operator, dtype_and_name: tuple[torch.dtype, str]
) -> None:
    """Worst errors against float64 at most twice those of the reference in the same dtype."""
    dtype, name = dtype_and_name
    mask = mask_of(forest_of(name))
    leaves = op.random(mask.num_tokens, dtype=dtype)
    torch.manual_seed(0)
    cotangent = torch.randn_like(op.run(mask, leaves, "reference"))
    ours, same = (gradients(op, mask, leaves, cotangent, b) for b in ("chunked", "reference"))
    double = [x.detach().double().requires_grad_() for x in leaves]
    want = gradients(op, mask, double, cotangent, "reference")
    for number, (a, b, exact) in enumerate(zip(ours, same, want, strict=True)):
        assert a.dtype == b.dtype == dtype
        error, eager = ((x.double() - exact).abs().max() for x in (a, b))
        limit = 2 * eager + 4 * torch.finfo(dtype).eps * exact.abs().max()
        assert error <= limit, f"{number}: {error:.2e} against {eager:.2e}"


@A_FEW
def test_the_oracle_rounds_at_the_ends_alone(op: Operator) -> None:
    mask = mask_of(forest_of("star"))
    leaves = op.random(mask.num_tokens, dtype=torch.bfloat16)
    cotangent = torch.randn_like(op.run(mask, leaves, "reference"))
    exact = [x.detach().double().requires_grad_() for x in leaves]
    ours, want = (gradients(op, mask, x, cotangent, "reference") for x in (leaves, exact))
    for a, b in zip(ours, want, strict=True):
        assert relative(a, b) < torch.finfo(torch.bfloat16).eps


def test_gates_may_have_a_dtype_of_their_own() -> None:
    mask = mask_of(forest_of("star"))
    op = OPERATORS[3]
    query, key, value, g, beta = op.random(mask.num_tokens, dtype=torch.bfloat16)
    g = g.detach().float().requires_grad_()
    out = op.run(mask, [query, key, value, g, beta], "chunked")
    out.sum().backward()
    assert out.dtype == torch.bfloat16
    assert g.grad is not None and g.grad.dtype == torch.float32
    assert beta.grad is not None and beta.grad.dtype == torch.bfloat16


# ---- against the families' own code --------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 64, 150])
@pytest.mark.parametrize(
    "op", [op for op in OPERATORS if op.name.split()[0] in ("conv", "ssd")], ids=lambda op: op.name
)
def test_conv_and_ssd_of_one_sequence_are_transformers(op: Operator, tokens: int) -> None:
    from transformers.models.nemotron_h import modeling_nemotron_h as nemotron

    leaves = op.random(tokens)
    ours = op.run(chain(tokens), leaves, "chunked")
    with Float64():
        if op.name.startswith("ssd"):
            x, dt, B, C, A, *rest = leaves
            extras = {"D": rest[0], "dt_bias": rest[1]} if rest else {}
            options = {"dt_softplus": True, "dt_limit": (0.3, 2.0)} if rest else {}
            theirs = inspect.unwrap(nemotron.mamba2_chunk_scan)(
                x[None], dt[None], A, B[None], C[None], chunk_size=16, **extras, **options
            )[0]
        else:
            x, weight, *rest = leaves
            activation = op.name.split()[-1].replace("None", "").replace("swish", "silu")
            theirs = inspect.unwrap(nemotron.causal_conv1d_fn)(
                x.t()[None], weight, rest[0] if rest else None, activation=activation or None
            )[0].t()
    cotangent = torch.randn_like(ours)
    assert relative(ours, theirs) < 1e-13
    grads = (torch.autograd.grad(out, leaves, cotangent) for out in (ours, theirs))
    for a, b in zip(*grads, strict=True):
        assert relative(a, b) < 1e-12


@pytest.mark.parametrize("tokens", [1, 64, 150])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("l2norm", [False, True])
def test_delta_rule_of_one_sequence_is_transformers(
    tokens: int, per_channel: bool, l2norm: bool
) -> None:
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    rule = chunk_kimi_delta_attention if per_channel else torch_chunk_gated_delta_rule
    # Kimi's has as many key heads as value heads, Qwen's fewer
    op = OPERATORS[5] if per_channel else OPERATORS[3]
    query, key, *rest = op.random(tokens)
    if per_channel:
        query, key = (x.detach().repeat_interleave(2, 1).requires_grad_() for x in (query, key))
    if not l2norm:
        key = torch.nn.functional.normalize(key.detach(), dim=-1).requires_grad_()
    leaves = [query, key, *rest]
    ours = tree_delta_rule(*leaves, chain(tokens), qk_l2norm=l2norm)
    with Float64():
        query, key, value, g, beta = (x[None] for x in leaves)
        theirs = inspect.unwrap(rule)(
            query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=l2norm
        )[0][0]
    cotangent = torch.randn_like(ours)
    assert relative(ours, theirs) < 1e-13
    grads = (torch.autograd.grad(out, leaves, cotangent) for out in (ours, theirs))
    for a, b in zip(*grads, strict=True):
        assert relative(a, b) < 1e-12


# ---- memory and repeatability --------------------------------------------------------------------


@pytest.mark.parametrize("op", RECURRENCES, ids=lambda op: op.name)
def test_no_state_is_gathered_for_every_segment(
    op: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 300 branches' initial states only a piece's exist at a time."""
    sequences = [[0, 1, 1000 + i, *range(i % 3)] for i in range(300)]
    mask = mask_of(PrefixForest.from_sequences(sequences))
    monkeypatch.setattr(chunked, "_PIECE_NUMBERS", 30 * 4 * 16**2 * 6)
    most = 0
    before = chunked._before

    def measured(*arguments: Any) -> torch.Tensor:
        nonlocal most
        state = before(*arguments)
        most = max(most, len(state))
        return state

    monkeypatch.setattr(chunked, "_before", measured)
    leaves = op.random(mask.num_tokens)
    op.run(mask, leaves, "chunked").sum().backward()
    assert segments_of(mask.host).num_states == 1 and 0 < most <= 30


@BY_NAME
def test_what_is_saved_is_the_inputs(op: Operator) -> None:
    mask = mask_of(forest_of("caterpillar"))
    leaves = op.random(mask.num_tokens)
    saved = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        op.run(mask, leaves, "chunked")
    numbers = sum(x.numel() for x in leaves)
    # dt's bias, softplus and limits and D's product save what elementwise operations do
    assert sum(x.numel() for x in saved) <= (4 if op.name.startswith("ssd") else 1) * numbers + 8


@A_FEW
def test_bitwise_repeatable(op: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_small(monkeypatch)
    mask = mask_of(forest_of("star"))
    leaves = op.random(mask.num_tokens, dtype=torch.float32)
    cotangent = torch.randn_like(op.run(mask, leaves, "chunked"))
    first, again = (gradients(op, mask, leaves, cotangent, "chunked") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@BY_NAME
def test_nothing_unwritten_is_read(op: Operator, poison: Any) -> None:
    mask = mask_of(forest_of("long and short"))
    leaves = op.random(mask.num_tokens)
    cotangent = torch.ones_like(op.run(mask, leaves, "reference"))
    for x in gradients(op, mask, leaves, cotangent, "chunked"):
        assert x.isfinite().all()
    assert poison.tensors > 0


@BY_NAME
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_no_tokens_at_all(op: Operator, backend: str) -> None:
    mask = TreeMask(np.empty(0, np.int32))
    leaves = op.random(0)
    out = op.run(mask, leaves, backend)
    assert out.shape[0] == 0
    for x, grad in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
        assert grad.shape == x.shape and (grad == 0).all()


@BY_NAME
def test_strides_are_free(op: Operator) -> None:
    mask = mask_of(forest_of("star"))
    leaves = op.random(mask.num_tokens)
    spread = [
        torch.stack([x.detach(), x.detach() + 1], -1)[..., 0].requires_grad_() for x in leaves
    ]
    cotangent = cotangents_for(op, PrefixForest.from_sequences([[1] * mask.num_tokens]))[0]
    assert not spread[0].is_contiguous()
    wanted = gradients(op, mask, leaves, cotangent, "chunked")
    found = gradients(op, mask, spread, cotangent, "chunked")
    assert found[0].is_contiguous()
    for a, b in zip(found, wanted, strict=True):
        assert relative(a, b) < 1e-13


def test_padding_tokens_change_nothing() -> None:
    from prefixtree import pack

    forest = forest_of("caterpillar")
    mask, padded = (pack(forest, pad_to_multiple_of=n).mask for n in (None, 64))
    extra = padded.num_tokens - mask.num_tokens
    assert extra > 0
    for op in OPERATORS:
        leaves = op.random(padded.num_tokens)
        cut = [x[: mask.num_tokens] if i < op.per_token else x for i, x in enumerate(leaves)]
        out = op.run(padded, leaves, "chunked")
        assert torch.equal(out[: mask.num_tokens], op.run(mask, cut, "chunked")), op.name
        assert out.isfinite().all()


def test_public_names() -> None:
    import prefixtree.kernels.recurrence as room

    operators = ["tree_conv", "tree_delta_rule", "tree_ssd"]
    assert room.__all__ == ["StateBorders", "explain_recurrence", *operators]
    assert tree_conv.__doc__ and tree_ssd.__doc__
