"""The DualKV call against dense float64 attention over replicated contexts, written out here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from prefixtree import TreeMask, UnsupportedError, tree_attention
from prefixtree.integrations import dualkv
from prefixtree.integrations.dualkv import dualkv_mask, flash_attn_dualkv_varlen_func
from tests.support.hooks import put

NAMES = ("q", "k_context", "v_context", "k_decoded", "v_decoded")


def cu_seqlens(lengths: Sequence[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(lengths, dtype=int)], dtype=dtype)


def draw(
    context: int,
    lengths: Sequence[int],
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.float64,
) -> list[torch.Tensor]:
    """q, k_context, v_context, k_decoded, v_decoded and a gradient of out."""
    generator = torch.Generator().manual_seed(0)
    (h, hk), (d, dv), rows = heads, dims, sum(lengths)
    shapes = [(rows, h, d), *[(n, hk, m) for n in (context, rows) for m in (d, dv)], (rows, h, dv)]
    return [torch.randn(*s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def replicated(
    inputs: Sequence[torch.Tensor], dout: torch.Tensor, lengths: Sequence[int], scale: float | None
) -> list[torch.Tensor]:
    """out and five gradients in float64: every response with a copy of the context of its own."""
    leaves = [x.detach().double().requires_grad_() for x in inputs]
    q, k_context, v_context, k_decoded, v_decoded = leaves
    context, group = k_context.shape[0], q.shape[1] // k_context.shape[1]
    scale = q.shape[2] ** -0.5 if scale is None else scale
    outs, at = [], 0
    for n in lengths:
        mine = slice(at, at + n)
        k = torch.cat([k_context, k_decoded[mine]]).repeat_interleave(group, 1)
        v = torch.cat([v_context, v_decoded[mine]]).repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q[mine], k) * scale
        causal = torch.arange(context + n) <= context + torch.arange(n)[:, None]
        p = scores.masked_fill(~causal, -torch.inf).softmax(-1)
        outs.append(torch.einsum("hqk,khd->qhd", p, v))
        at += n
    if not outs:
        return [torch.zeros_like(x).double() for x in (dout, *inputs)]
    out = torch.cat(outs)
    grads = torch.autograd.grad(out, leaves, dout.double(), materialize_grads=True)
    return [out.detach(), *grads]


def call(
    inputs: Sequence[torch.Tensor],
    lengths: Sequence[int],
    cu: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    cu = cu_seqlens(lengths) if cu is None else cu
    longest = max(lengths, default=0)
    return flash_attn_dualkv_varlen_func(
        *inputs, cu, cu.clone(), longest, inputs[1].shape[0], longest, **options
    )


def packed(
    inputs: Sequence[torch.Tensor], dout: torch.Tensor, lengths: Sequence[int], **options: Any
) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = call(leaves, lengths, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def assert_equal(got: list[torch.Tensor], want: list[torch.Tensor], tolerance: float) -> None:
    for name, a, b in zip(("out", *NAMES), got, want, strict=True):
        assert a.shape == b.shape, name
        torch.testing.assert_close(
            a.double(), b, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


# ---- equal to dense float64 ----------------------------------------------------------------------

CASES = {
    "ragged": (37, [5, 1, 130, 64, 9]),
    "one response": (20, [33]),
    "one token each": (3, [1, 1, 1]),
    "empty responses": (11, [0, 4, 0, 0, 7, 0]),
    "no context": (0, [6, 3, 8]),
    "no response": (8, []),
    "only empty responses": (8, [0, 0]),
    "nothing": (0, []),
}


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_out_and_all_gradients(case: str, planned: bool) -> None:
    context, lengths = CASES[case]
    *inputs, dout = draw(context, lengths)
    mask = dualkv_mask(cu_seqlens(lengths), context) if planned else None
    got = packed(inputs, dout, lengths, mask=mask)
    assert_equal(got, replicated(inputs, dout, lengths, None), 1e-12)


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (8, 2)])
@pytest.mark.parametrize("dims", [(16, 16), (24, 8), (8, 32)])
def test_heads_and_dims(heads: tuple[int, int], dims: tuple[int, int]) -> None:
    lengths = [7, 12, 3]
    *inputs, dout = draw(9, lengths, heads, dims)
    want = replicated(inputs, dout, lengths, 0.3)
    assert_equal(packed(inputs, dout, lengths, softmax_scale=0.3), want, 1e-12)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-5), (torch.bfloat16, 6e-2)])
def test_narrower_dtypes(dtype: torch.dtype, tolerance: float) -> None:
    lengths = [40, 3, 25]
    *inputs, dout = draw(50, lengths, dtype=dtype)
    got = packed(inputs, dout, lengths)
    assert all(x.dtype == dtype for x in got)
    assert_equal(got, replicated(inputs, dout, lengths, None), tolerance)


def test_the_comparison_turns_red_for_other_lengths() -> None:
    *inputs, dout = draw(10, [4, 6])
    with pytest.raises(AssertionError, match="out"):
        assert_equal(packed(inputs, dout, [5, 5]), replicated(inputs, dout, [4, 6], None), 1e-12)


def test_strided_inputs() -> None:
    """Slices of fused projections, and a gradient that is one number expanded."""
    lengths = [8, 5]
    *inputs, _ = draw(6, lengths)
    q, k_context, v_context, k_decoded, v_decoded = inputs
    wide = torch.cat([q, k_decoded, v_decoded], 1)  # [Tq, H + 2 Hk, D] of one projection
    strided = [
        wide[:, :4],
        torch.stack([k_context, v_context], 2)[:, :, 0],
        v_context.transpose(0, 2).contiguous().transpose(0, 2),
        wide[:, 4:6],
        wide[:, 6:],
    ]
    assert not any(x.is_contiguous() for x in strided)
    dout = torch.tensor(0.5, dtype=torch.float64).expand(q.shape)
    want = replicated(inputs, dout, lengths, None)
    assert_equal(packed(strided, dout, lengths), want, 1e-12)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_dtypes_of_cu_seqlens_and_slack_in_the_maxima(dtype: torch.dtype) -> None:
    lengths = [3, 9]
    *inputs, _ = draw(4, lengths)
    want = call(inputs, lengths)
    cu = cu_seqlens(lengths, dtype)
    got = flash_attn_dualkv_varlen_func(*inputs, cu, cu, 512, 4, 512)
    assert torch.equal(got, want)
    assert torch.equal(flash_attn_dualkv_varlen_func(*inputs, cu, cu, None, 4, None), want)


def test_backends_agree_and_the_keyword_reaches_them(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [3, 9]
    *inputs, _ = draw(4, lengths)
    seen = []

    def attend(*args: Any, **kwargs: Any) -> Any:
        seen.append((kwargs["backend"], kwargs["deterministic"]))
        return tree_attention(*args, **kwargs)

    monkeypatch.setattr(dualkv, "tree_attention", attend)
    dense = call(inputs, lengths, backend="reference", deterministic=True)
    torch.testing.assert_close(dense, call(inputs, lengths), rtol=1e-12, atol=1e-12)
    assert seen == [("reference", True), (None, None)]
    with pytest.raises(UnsupportedError, match="backend 'none'"):
        call(inputs, lengths, backend="none")


# ---- masks ---------------------------------------------------------------------------------------


def test_a_plan_reads_nothing_and_needs_no_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [3, 0, 9]
    *inputs, _ = draw(4, lengths)
    want = call(inputs, lengths)
    mask = dualkv_mask(cu_seqlens(lengths), 4)
    assert (mask.num_tokens, mask.num_queries) == (16, 12)
    # lengths on another device cannot be read without waiting; meta ones not at all
    device_cu = cu_seqlens(lengths).to("meta")
    got = flash_attn_dualkv_varlen_func(*inputs, device_cu, device_cu, 9, 4, 9, mask=mask)
    assert torch.equal(got, want)
    got = flash_attn_dualkv_varlen_func(*inputs, None, None, None, 4, None, mask=mask)
    assert torch.equal(got, want)
    put(monkeypatch, "mask of dualkv", None)  # a mask given is not made again
    assert torch.equal(call(inputs, lengths, mask=mask), want)


def test_equal_lengths_find_the_same_mask_and_others_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    masks = []

    def attend(q: Any, k: Any, v: Any, mask: TreeMask, **kwargs: Any) -> Any:
        masks.append(mask)
        return tree_attention(q, k, v, mask, **kwargs)

    monkeypatch.setattr(dualkv, "tree_attention", attend)
    for context, lengths in ((4, [3, 9]), (4, [3, 9]), (4, [9, 3]), (5, [3, 9])):
        call(draw(context, lengths)[:5], lengths)
    assert masks[0] is masks[1]
    assert len({id(mask) for mask in masks}) == 3


def test_a_deeper_plan_serves_too() -> None:
    """Any mask whose queries are the tokens behind the context: here the response forks again."""
    ends = np.array([8, 8, 8, 5, 5, 8, 8, 8])
    mask = TreeMask(ends).for_queries([(3, 8)])
    *inputs, _ = draw(3, [5])
    got = flash_attn_dualkv_varlen_func(*inputs, None, None, None, 3, None, mask=mask)
    whole = TreeMask(ends)
    q = torch.cat([torch.zeros_like(inputs[0][:3]), inputs[0]])
    k, v = torch.cat([inputs[1], inputs[3]]), torch.cat([inputs[2], inputs[4]])
    want = tree_attention(q, k, v, whole, backend="reference")[3:]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiles_whole_with_a_plan_and_once_for_all_lengths() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def layer(inputs, context, mask):
        out = flash_attn_dualkv_varlen_func(*inputs, None, None, None, context, None, mask=mask)
        return out.sin()

    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    graphs = []
    for i in range(6):
        context, lengths = 5 + 3 * i, [4 + i, 7, 11 - i, 2 + 2 * i]
        *inputs, dout = draw(context, lengths)
        mask = dualkv_mask(cu_seqlens(lengths), context)
        leaves = [x.requires_grad_() for x in inputs]
        got, want = compiled(leaves, context, mask), layer(leaves, context, mask)
        torch.testing.assert_close(got, want)
        for a, b in zip(
            torch.autograd.grad(got, leaves, dout),
            torch.autograd.grad(want, leaves, dout),
            strict=True,
        ):
            torch.testing.assert_close(a, b)
        graphs.append(counter.frame_count)
    # one for the first lengths, one for any lengths
    assert graphs[0] == 1
    assert graphs[-1] == graphs[1] <= 2, graphs
    torch._dynamo.reset()


@pytest.mark.full
def test_compiled_code_without_a_plan_breaks_its_graph_and_is_right() -> None:
    torch._dynamo.reset()

    def layer(inputs, cu):
        context = inputs[1].shape[0]
        return flash_attn_dualkv_varlen_func(*inputs, cu, cu, 99, context, 99).sin()

    compiled = torch.compile(layer, backend="eager")
    for context, lengths in ((5, [3, 4]), (6, [4, 0, 4]), (7, [5, 6])):
        *inputs, _ = draw(context, lengths)
        cu = cu_seqlens(lengths)
        torch.testing.assert_close(compiled(inputs, cu), layer(inputs, cu))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="give mask= for one graph"):
        torch.compile(layer, backend="eager", fullgraph=True)(inputs, cu)
    torch._dynamo.reset()


# ---- refusals ------------------------------------------------------------------------------------


def arguments(**changes: Any) -> dict[str, Any]:
    """A call that works, as keywords."""
    *inputs, _ = draw(4, [3, 5])
    cu = cu_seqlens([3, 5])
    return {
        **dict(zip(NAMES, inputs, strict=True)),
        "cu_seqlens_q": cu,
        "cu_seqlens_k_decoded": cu,
        "max_seqlen_q": 5,
        "context_seqlen": 4,
        "max_seqlen_k_decoded": 5,
    } | changes


def both(cu: Any) -> dict[str, Any]:
    return {"cu_seqlens_q": cu, "cu_seqlens_k_decoded": cu}


ROWS = torch.zeros(8, 2, 16, dtype=torch.float64)
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "not causal": ({"causal": False}, UnsupportedError, "causal=False"),
    "other lengths of q": (
        {"cu_seqlens_q": cu_seqlens([4, 4])},
        UnsupportedError,
        r"must be equal, got 4 and 3 at \[1\]",
    ),
    "other number of responses": (
        {"cu_seqlens_q": cu_seqlens([8])},
        UnsupportedError,
        "1 and 2 responses",
    ),
    "lengths too short": (both(cu_seqlens([3, 4])), ValueError, "end at 7.*have 8 rows"),
    "lengths too long": (both(cu_seqlens([3, 6])), ValueError, "end at 9.*have 8 rows"),
    "descending": (both(torch.tensor([0, 9, 8])), ValueError, "not descend"),
    "not from 0": (both(torch.tensor([1, 8])), ValueError, "start with 0"),
    "no entry": (both(torch.tensor([], dtype=torch.int32)), ValueError, r"responses \+ 1"),
    "two-dimensional": (both(cu_seqlens([3, 5])[None]), ValueError, r"responses \+ 1"),
    "floats": (both(cu_seqlens([3, 5]).float()), TypeError, "int32 or int64, got torch.float32"),
    "int16": (both(cu_seqlens([3, 5], torch.int16)), TypeError, "int32 or int64, got torch.int16"),
    "a list": (both([0, 3, 8]), TypeError, "must be a tensor, got list"),
    "none without a mask": (both(None), TypeError, "only with mask="),
    "maximum of q": ({"max_seqlen_q": 4}, ValueError, "max_seqlen_q is 4, the longest .* 5"),
    "maximum of k": ({"max_seqlen_k_decoded": 4}, ValueError, "max_seqlen_k_decoded is 4"),
    "context too long": ({"context_seqlen": 5}, ValueError, "context_seqlen is 5.*have 4 rows"),
    "context too short": ({"context_seqlen": 3}, ValueError, "context_seqlen is 3.*have 4 rows"),
    "context negative": ({"context_seqlen": -4}, ValueError, "must be an integer >= 0"),
    "context no integer": ({"context_seqlen": 4.0}, TypeError, "context_seqlen must be an integer"),
    "contexts differ": ({"v_context": ROWS[:3]}, ValueError, "k_context has 4 rows, v_context 3"),
    "decoded differ": ({"v_decoded": ROWS[:7]}, ValueError, "8, 8 and 7 rows"),
    "batched": ({"k_decoded": ROWS[None]}, ValueError, "k_decoded must be .* got 4 dimensions"),
    "kv heads": ({"k_decoded": ROWS[:, :1]}, ValueError, "k_context and k_decoded differ in heads"),
    "promoted": ({"k_decoded": ROWS.float()}, ValueError, "k_context and k_decoded must share"),
    "dtype of q": (
        {"q": torch.zeros(8, 4, 16)},
        ValueError,
        "must share one floating-point dtype",
    ),
    "device": ({"k_decoded": ROWS.to("meta")}, ValueError, "float64 on cpu and .* on meta"),
    "head dim of q": (
        {"q": torch.zeros(8, 4, 8, dtype=torch.float64)},
        ValueError,
        "differ in head dim",
    ),
    "mask of another type": ({"mask": [0, 3, 8]}, TypeError, "mask must be a TreeMask, got list"),
    "mask of the whole": (
        {"mask": TreeMask(np.full(12, 12))},
        ValueError,
        "0 context and 12 decoded tokens, the call has 4 and 8",
    ),
    "mask of another context": (
        {"mask": dualkv_mask(cu_seqlens([3, 6]), 3)},
        ValueError,
        "3 context and 9 decoded",
    ),
    "mask of other lengths": (
        {"mask": dualkv_mask(cu_seqlens([4, 4]), 4)},
        ValueError,
        "not those that the mask was made for",
    ),
    "mask of other queries": (
        {"mask": TreeMask(np.full(12, 12)).for_queries([(0, 8)])} | both(None),
        ValueError,
        "not the tokens behind the 4",
    ),
}


def test_the_call_that_refusals_start_from_works() -> None:
    assert flash_attn_dualkv_varlen_func(**arguments()).shape == (8, 4, 16)


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    changes, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        flash_attn_dualkv_varlen_func(**arguments(**changes))


@pytest.mark.parametrize(
    "cu, context, error, message",
    [
        (torch.tensor([0, 3, 2]), 4, ValueError, "not descend"),
        (torch.tensor([0.0, 3.0]), 4, TypeError, "int32 or int64"),
        (torch.tensor([0, 3]), -1, ValueError, "integer >= 0"),
    ],
)
def test_refusals_of_masks(
    cu: torch.Tensor, context: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        dualkv_mask(cu, context)


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("planned", [False, True])
def test_on_a_gpu(planned: bool) -> None:
    """Lengths on either device give the same; with a mask nothing waits."""
    lengths = [70, 0, 130, 5]
    *inputs, dout = draw(200, lengths, (8, 2), (64, 64), torch.bfloat16)
    want = replicated(inputs, dout, lengths, None)
    inputs, dout = [x.cuda() for x in inputs], dout.cuda()
    mask = dualkv_mask(cu_seqlens(lengths), 200, device="cuda") if planned else None
    for cu in (cu_seqlens(lengths), cu_seqlens(lengths).cuda()):
        packed(inputs, dout, lengths, cu=cu, mask=mask)  # compiles, and builds the tables
        torch.cuda.set_sync_debug_mode("error" if planned else "default")
        try:
            got = packed(inputs, dout, lengths, cu=cu, mask=mask)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert_equal([x.cpu() for x in got], want, 6e-2)
