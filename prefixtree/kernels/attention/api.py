"""`tree_attention` checks its arguments and calls the operator; `explain` names the backend.

Legend: T packed tokens, Tq query rows, H query heads, Hk kv heads, D and Dv head dims.
"""

from __future__ import annotations

from typing import Literal, overload

import torch

from prefixtree._numbers import number
from prefixtree.errors import UnsupportedError
from prefixtree.kernels.attention import operator
from prefixtree.kernels.attention.choice import REFERENCE, TRITON, check_name, choose, passed_over
from prefixtree.kernels.attention.protocol import AttentionCall, Options
from prefixtree.kernels.chosen import words
from prefixtree.kernels.operators import note_call
from prefixtree.packing.mask import TreeMask, check_mask, check_window


@overload
def tree_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: TreeMask,
    *,
    scale: float | None = ...,
    window: int | None = ...,
    softcap: float | None = ...,
    sinks: torch.Tensor | None = ...,
    chosen: torch.Tensor | None = ...,
    deterministic: bool | None = ...,
    backend: str | None = ...,
    return_lse: Literal[False] = ...,
) -> torch.Tensor: ...
@overload
def tree_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: TreeMask,
    *,
    scale: float | None = ...,
    window: int | None = ...,
    softcap: float | None = ...,
    sinks: torch.Tensor | None = ...,
    chosen: torch.Tensor | None = ...,
    deterministic: bool | None = ...,
    backend: str | None = ...,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...
def tree_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: TreeMask,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    chosen: torch.Tensor | None = None,
    deterministic: bool | None = None,
    backend: str | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes attention of every packed token to itself and its ancestors in the forest.

    It is differentiable once in q, k, v, sinks and, with return_lse, through lse. The gradient of a
    shared token's key and value is the sum over all queries that see it, accumulated in float32.

    Args:
        q: [Tq, H, D], floating point; Tq = T unless the mask is `for_queries(...)`. Any strides.
        k: [T, Hk, D] in q's dtype. H is a multiple of Hk; query head h reads kv head h // (H / Hk).
        v: [T, Hk, Dv] in q's dtype.
        mask: the packed forest's TreeMask, on the device of q, k and v.
        scale: the factor on q k^T. Default: D ** -0.5.
        window: the sliding window, in tokens: a token sees the keys less than `window` positions
            before it on its path, itself included. Default: no window.
        softcap: c in c tanh(scale q k^T / c), applied before the mask. Default: no soft cap.
        sinks: [H] floating point, one logit per query head that joins the softmax without a value
            (gpt-oss). Default: no sinks.
        chosen: int32 [Tq, W], W = ceil(tokens of the longest path / 32), one bit per key of a
            query's path. Bit d % 32 of word d // 32 stands for the key at position d. A query
            attends to the keys that it sees and whose bit is set; other bits count for nothing. If
            a query has no such key, its row of out is NaN. "flash" does not take chosen keys.
            Default: all keys.
        deterministic: whether gradients are bitwise repeatable. Default: the option of the mask
            (False until `with_options` changes it).
        backend: "sdpa" (any device), "triton" (GPUs; float16 and bfloat16), "flash" (flash-attn-4
            on Hopper), "reference" (dense, T x T memory), or "auto". On a GPU, "auto" is triton or
            flash, whichever was measured to be faster. It is sdpa if neither serves the call, and
            off the GPU. `explain` says which. Default: the option of the mask ("auto" until
            `with_options` changes it).
        return_lse: whether to return lse as well. Default: False.

    Returns:
        out [Tq, H, Dv] in q's dtype. With return_lse also lse [H, Tq], float32 (float64 for float64
        inputs): the natural log of the sum of exponentials over the keys, without the sink.

    Raises:
        TypeError: a mask that is no TreeMask; q, k, v or sinks that are no tensors.
        ValueError: arguments that do not fit together, with what was expected.
        UnsupportedError: a backend that does not exist or cannot serve this call, with the reason.
    """
    options = checked_call(q, k, v, mask, scale, window, softcap, sinks, backend, deterministic)
    if chosen is not None:
        check_chosen(chosen, q, mask)
    if options.backend == REFERENCE.name:
        # not through the operator: autograd differentiates the oracle itself, as often as asked
        if not torch.compiler.is_compiling():
            note_call(mask.host, "attention")
        call = AttentionCall(q, k, v, sinks, mask.host, *options[:3], chosen=chosen)
        out, lse = REFERENCE.kernels.forward(call)
    else:
        out, lse = operator.attend(q, k, v, sinks, mask.handle, options, return_lse, chosen)
    return (out, lse) if return_lse else out


def explain(
    mask: TreeMask,
    q: torch.Tensor | None = None,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    deterministic: bool | None = None,
    backend: str | None = None,
) -> str:
    """Says which backend `tree_attention` would run for these arguments, and why.

    The arguments are those of `tree_attention`. Without q, k and v they are one head of dim 128 on
    the mask's device, bfloat16 on CUDA and float32 elsewhere.

    Returns:
        One sentence. If `tree_attention` would raise an UnsupportedError, it starts with
        "tree_attention would refuse" and gives the reason.

    Raises:
        TypeError: a mask that is no TreeMask.
        ValueError: arguments that do not fit together, as in `tree_attention`; some of q, k and v
            without the others.
    """
    check_mask(mask)
    if q is None or k is None or v is None:
        if not (q is None and k is None and v is None):
            raise ValueError("explain takes q, k and v together, or none of them")
        dtype = torch.bfloat16 if mask.device.type == "cuda" else torch.float32
        row = torch.empty(1, 1, 128, dtype=dtype, device=mask.device)
        q = row.expand(mask.num_queries, 1, 128)
        k = v = row.expand(mask.num_tokens, 1, 128)
    options = _check(q, k, v, mask, scale, window, softcap, sinks, backend, deterministic)
    call = AttentionCall.of(q, k, v, sinks, mask.host, options)
    try:
        choice = choose(options.backend, call)
    except UnsupportedError as error:
        return f"tree_attention would refuse: {error}."
    reason = choice.reason
    if options.backend == "auto" and choice.backend is TRITON:
        reason += f" ({passed_over(call)})"
    return f"tree_attention would run {choice.backend.name!r}: {reason}."


def checked_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: TreeMask,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    backend: str | None,
    deterministic: bool | None,
    own: int | None = None,
) -> Options:
    """Checks a call and gives its options; with `own`, q, k and v are of so many tokens."""
    options = _check(q, k, v, mask, scale, window, softcap, sinks, backend, deterministic, own)
    check_name(options.backend)
    return options


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: TreeMask,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    backend: str | None,
    deterministic: bool | None,
    own: int | None = None,
) -> Options:
    """Checks that the arguments fit together and returns the options; `backend` may be any text."""
    check_mask(mask)
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, x)
    dtype, device = q.dtype, mask.device
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 3:
            raise ValueError(
                f"{name} must be [tokens, heads, head dim], got {x.ndim} dimensions; a batch is "
                "one packed forest: drop the batch dimension"
            )
        if x.dtype != dtype or not dtype.is_floating_point:
            raise ValueError(
                "q, k and v must share one floating-point dtype, got "
                f"{q.dtype}, {k.dtype} and {v.dtype}"
            )
        if x.device != device:
            raise ValueError(
                f"{name} is on {x.device}, the mask on {device}; use packed.to({x.device})"
            )
    (rows, heads, dim), (k_rows, k_heads, k_dim) = q.shape, k.shape
    v_rows, v_heads, v_dim = v.shape
    # compiled code must not see whether a part's mask is a subset
    queries = mask.num_queries if own is None else own
    if rows != queries:
        raise ValueError(f"q has {rows} rows, the mask has {queries} queries")
    expected = mask.num_tokens if own is None else own
    if k_rows != v_rows or k_rows != expected:
        whose = "the mask has" if own is None else "the part owns"
        raise ValueError(f"k and v have {k_rows} and {v_rows} rows, {whose} {expected} tokens")
    if k_heads != v_heads or k_heads == 0 or heads == 0 or heads % k_heads != 0:
        raise ValueError(
            "the query heads must be at least 1 and a multiple of the kv heads, which k and v "
            f"share; got {heads} query heads, {k_heads} heads of k and {v_heads} of v"
        )
    if dim != k_dim:
        raise ValueError(f"q and k differ in head dim: {dim} and {k_dim}")
    if dim == 0 or v_dim == 0:
        raise ValueError(f"head dims must be at least 1, got {dim} of q and k, {v_dim} of v")
    if sinks is not None:
        _check_tensor("sinks", sinks)
        if sinks.shape != (heads,) or not sinks.is_floating_point():
            raise ValueError(
                f"sinks must be floating point [{heads}], one per query head, got "
                f"{list(sinks.shape)} of {sinks.dtype}"
            )
        if sinks.device != device:
            raise ValueError(f"sinks are on {sinks.device}, q is on {device}")
    scale = dim**-0.5 if scale is None else number("scale", scale, or_none=True)
    softcap = 0.0 if softcap is None else number("softcap", softcap, above=0, or_none=True)
    return Options(
        float(scale),
        check_window(window),
        float(softcap),
        mask.deterministic if deterministic is None else deterministic,
        mask.backend if backend is None else backend,
    )


def check_chosen(chosen: torch.Tensor, q: torch.Tensor, mask: TreeMask) -> None:
    """Refuses `chosen` that does not fit the queries and their paths."""
    _check_tensor("chosen", chosen)
    expected = (q.shape[0], words(mask.host.deepest))
    if chosen.shape != expected or chosen.dtype != torch.int32 or chosen.device != q.device:
        raise ValueError(
            f"chosen must be int32 {list(expected)} on {q.device}, a bit per position of a query's "
            f"path, got {list(chosen.shape)} of {chosen.dtype} on {chosen.device}"
        )


def _check_tensor(name: str, x: object) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
