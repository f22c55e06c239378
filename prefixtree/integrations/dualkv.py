"""`flash_attn_dualkv_varlen_func`: the call of DualKV's paper, on this project's kernels.

N responses share one context, whose keys and values exist once (arXiv 2605.15422, Listing 1;
written from the paper, not from its authors' code). The forest has the context as its root and the
responses as its children; q holds the responses alone. A DualKV user changes one import:

    from prefixtree.integrations.dualkv import flash_attn_dualkv_varlen_func

Legend: C context tokens, Tq decoded tokens of all responses, N responses, H query heads, Hk kv
heads, D and Dv head dims.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from prefixtree._numbers import integer, number
from prefixtree.errors import UnsupportedError
from prefixtree.kernels.attention import tree_attention
from prefixtree.packing.mask import TreeMask

_FIX = "make one with dualkv_mask(cu_seqlens, context_seqlen, device=q.device)"


def flash_attn_dualkv_varlen_func(
    q: torch.Tensor,
    k_context: torch.Tensor,
    v_context: torch.Tensor,
    k_decoded: torch.Tensor,
    v_decoded: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k_decoded: torch.Tensor | None,
    max_seqlen_q: int | None,
    context_seqlen: int,
    max_seqlen_k_decoded: int | None,
    softmax_scale: float | None = None,
    causal: bool = True,
    *,
    mask: TreeMask | None = None,
    backend: str | None = None,
    deterministic: bool | None = None,
) -> torch.Tensor:
    """Computes attention of decoded tokens to the whole context and, causally, to their response.

    It is differentiable in q and in all keys and values; the context's gradient is the sum over all
    responses. The keys (and values) of context and responses are copied into one tensor.

    Without a mask, a `cu_seqlens` on a GPU is read back: one synchronisation per call. One on the
    CPU needs none. Calls with the same lengths reuse the mask and the tables of an earlier call.
    With a mask nothing is read from a device, and torch.compile sees one graph; without a mask, the
    graph breaks here.

    Args:
        q: [Tq, H, D], the queries of the decoded tokens, response after response; a dtype that the
            backend serves (`tree_attention`).
        k_context: [C, Hk, D] in q's dtype, keys of the context; C may be 0.
        v_context: [C, Hk, Dv] in q's dtype, values of the context.
        k_decoded: [Tq, Hk, D] in q's dtype, keys of the decoded tokens.
        v_decoded: [Tq, Hk, Dv] in q's dtype, values of the decoded tokens.
        cu_seqlens_q: int32 or int64 [N + 1], 0 and the ends of the responses in q; a response may
            be empty. None only with a mask.
        cu_seqlens_k_decoded: the same numbers, as q holds every decoded token.
        max_seqlen_q: an upper bound of the longest response, in tokens. It is only checked; None
            skips the check.
        context_seqlen: C, the number of context tokens.
        max_seqlen_k_decoded: like max_seqlen_q.
        softmax_scale: the factor on q k^T. Default: D ** -0.5.
        causal: must be True: other attention is not that of a forest. Default: True.
        mask: the mask that `dualkv_mask` returned for these lengths, or any mask whose queries are
            all the tokens after the context. `cu_seqlens` are then compared with it only if they
            are on the CPU, and not in compiled code; the maxima are ignored. Default: made from
            `cu_seqlens`.
        backend: as in `tree_attention`. Default: the option of the mask.
        deterministic: as in `tree_attention`. Default: the option of the mask.

    Returns:
        out [Tq, H, Dv] in q's dtype.

    Raises:
        TypeError: an argument of another type, with the type that was expected.
        ValueError: arguments that do not fit together, with what was expected.
        UnsupportedError: causal=False, lengths of q other than those of the decoded keys, or a
            backend that cannot serve the call.
    """
    if causal is not True:
        raise UnsupportedError(
            f"causal={causal!r}: responses attend causally to themselves here; use causal=True"
        )
    if softmax_scale is not None:
        softmax_scale = number("softmax_scale", softmax_scale, or_none=True)
    _check_tensor("q", q)
    _check_shapes(q, k_context, v_context, k_decoded, v_decoded)
    context = integer("context_seqlen", context_seqlen, 0, wrong=TypeError)
    if context != k_context.shape[0]:
        raise ValueError(
            f"context_seqlen is {context}, k_context and v_context have {k_context.shape[0]} rows; "
            "slice a longer buffer to the context first"
        )
    if mask is None:
        mask = _find_mask(
            cu_seqlens_q,
            cu_seqlens_k_decoded,
            max_seqlen_q,
            max_seqlen_k_decoded,
            context,
            q.shape[0],
            q.device,
        )
    else:
        _check_mask(mask, context, q.shape[0])
        if not torch.compiler.is_compiling():
            _compare(mask, context, cu_seqlens_q, cu_seqlens_k_decoded)
    k = torch.cat([k_context, k_decoded])
    v = torch.cat([v_context, v_decoded])
    return tree_attention(
        q, k, v, mask, scale=softmax_scale, deterministic=deterministic, backend=backend
    )


def dualkv_mask(
    cu_seqlens: torch.Tensor, context_seqlen: int, device: torch.device | str | None = None
) -> TreeMask:
    """Makes the mask of `flash_attn_dualkv_varlen_func`, for all calls with these lengths.

    Kernels keep their tables on it, so one mask serves all layers and steps that share the lengths.

    Args:
        cu_seqlens: int32 or int64 [N + 1], 0 and the ends of the responses. On a GPU it is read
            back once, here.
        context_seqlen: C, the number of tokens of the shared context.
        device: the device of q. Default: that of cu_seqlens.

    Returns:
        A TreeMask of C + Tq tokens whose queries are the last Tq.

    Raises:
        TypeError: cu_seqlens that is no int32 or int64 tensor, or a context_seqlen that is no
            integer.
        ValueError: cu_seqlens that is not [N + 1], does not start with 0 or descends; a
            context_seqlen below 0.
    """
    ends = _read(cu_seqlens, cu_seqlens)
    _check_ends(ends, ends[-1], None, None)
    where = cu_seqlens.device if device is None else torch.empty(0, device=device).device
    return _mask(ends, integer("context_seqlen", context_seqlen, 0, wrong=TypeError), where)


# reading numbers from tensors breaks a graph: compiled code without a mask goes on after this call
@torch.compiler.disable(reason="lengths are read from cu_seqlens; give mask= for one graph")
def _find_mask(
    cu_q: Any,
    cu_k: Any,
    longest_q: int | None,
    longest_k: int | None,
    context: int,
    rows: int,
    device: torch.device,
) -> TreeMask:
    ends = _read(cu_q, cu_k)
    _check_ends(ends, rows, longest_q, longest_k)
    return _mask(ends, context, device)


# by value, never by address: a layer loop without a mask builds its tables once too
@lru_cache(maxsize=8)
def _mask(ends: tuple[int, ...], context: int, device: torch.device) -> TreeMask:
    total = context + ends[-1]
    subtree_end = np.full(total, total, np.int32)
    for start, end in itertools.pairwise(ends):
        subtree_end[context + start : context + end] = context + end
    queries = [(context, total)] if total > context else []
    return TreeMask(subtree_end).for_queries(queries).to(device)


def _check_shapes(
    q: torch.Tensor,
    k_context: torch.Tensor,
    v_context: torch.Tensor,
    k_decoded: torch.Tensor,
    v_decoded: torch.Tensor,
) -> None:
    """Checks shapes that `tree_attention` cannot see once context and responses are one tensor."""
    for name, context, decoded in (("k", k_context, k_decoded), ("v", v_context, v_decoded)):
        for part, x in (("context", context), ("decoded", decoded)):
            _check_tensor(f"{name}_{part}", x)
            if x.ndim != 3:
                raise ValueError(
                    f"{name}_{part} must be [tokens, heads, head dim], got {x.ndim} dimensions"
                )
        # torch.cat would promote dtypes, and a copy between devices is the caller's choice
        if context.dtype != decoded.dtype or context.device != decoded.device:
            raise ValueError(
                f"{name}_context and {name}_decoded must share dtype and device, got "
                f"{context.dtype} on {context.device} and {decoded.dtype} on {decoded.device}"
            )
        if context.shape[1:] != decoded.shape[1:]:
            raise ValueError(
                f"{name}_context and {name}_decoded differ in heads or head dim: "
                f"{list(context.shape)} and {list(decoded.shape)}"
            )
    if k_context.shape[0] != v_context.shape[0]:
        raise ValueError(f"k_context has {k_context.shape[0]} rows, v_context {v_context.shape[0]}")
    if not q.shape[0] == k_decoded.shape[0] == v_decoded.shape[0]:
        raise ValueError(
            "q, k_decoded and v_decoded hold the same decoded tokens, got "
            f"{q.shape[0]}, {k_decoded.shape[0]} and {v_decoded.shape[0]} rows"
        )


def _check_tensor(name: str, x: Any) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")


def _check_cu(cu: Any, name: str) -> torch.Tensor:
    _check_tensor(name, cu)
    if cu.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got {cu.dtype}")
    if cu.ndim != 1 or cu.shape[0] == 0:
        raise ValueError(f"{name} must be [responses + 1], got shape {list(cu.shape)}")
    return cu


def _read(cu_q: Any, cu_k: Any) -> tuple[int, ...]:
    """Reads the ends as numbers; waits for a device once at most."""
    if cu_q is None or cu_k is None:
        raise TypeError("cu_seqlens_q and cu_seqlens_k_decoded may be None only with mask=")
    cu_q, cu_k = _check_cu(cu_q, "cu_seqlens_q"), _check_cu(cu_k, "cu_seqlens_k_decoded")
    if cu_q is cu_k:
        return tuple(cu_q.tolist())
    if cu_q.shape != cu_k.shape:
        raise _differ(f"{cu_q.shape[0] - 1} and {cu_k.shape[0] - 1} responses")
    if cu_q.device == cu_k.device:
        # one copy, so that two tensors on a GPU do not wait twice
        ends_q, ends_k = torch.stack([cu_q.long(), cu_k.long()]).tolist()
    else:
        ends_q, ends_k = cu_q.tolist(), cu_k.tolist()
    for i, (a, b) in enumerate(zip(ends_q, ends_k, strict=True)):
        if a != b:
            raise _differ(f"{a} and {b} at [{i}]")
    return tuple(ends_q)


def _differ(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"cu_seqlens_q and cu_seqlens_k_decoded must be equal, got {what}: q holds every decoded "
        "token; for some of them use tree_attention with mask.for_queries(...)"
    )


def _check_ends(
    ends: tuple[int, ...], rows: int, longest_q: int | None, longest_k: int | None
) -> None:
    lengths = [b - a for a, b in itertools.pairwise(ends)]
    if ends[0] != 0 or min(lengths, default=0) < 0:
        raise ValueError(f"cu_seqlens must start with 0 and not descend, got {list(ends[:9])} ...")
    if ends[-1] != rows:
        raise ValueError(f"cu_seqlens end at {ends[-1]}, q and the decoded keys have {rows} rows")
    longest = max(lengths, default=0)
    for name, given in (("max_seqlen_q", longest_q), ("max_seqlen_k_decoded", longest_k)):
        if given is not None and integer(name, given, 0, wrong=TypeError) < longest:
            raise ValueError(f"{name} is {given}, the longest response has {longest} tokens")


def _check_mask(mask: Any, context: int, decoded: int) -> None:
    if not isinstance(mask, TreeMask):
        raise TypeError(f"mask must be a TreeMask, got {type(mask).__name__}; {_FIX}")
    if mask.num_queries != decoded or mask.num_tokens != context + decoded:
        raise ValueError(
            f"the mask is for {mask.num_tokens - mask.num_queries} context and "
            f"{mask.num_queries} decoded tokens, the call has {context} and {decoded}; {_FIX}"
        )


def _compare(mask: TreeMask, context: int, *given: Any) -> None:
    """Refuses lengths that differ from the mask's, as far as that costs no wait for a device."""
    host = mask.host
    # queries are as many as tokens after the context, so the first one tells
    if host.num_queries and host.query_runs[0, 0] != context:
        raise ValueError(
            f"the mask's queries are not the tokens behind the {context} of the context; {_FIX}"
        )
    for cu in given:
        if not isinstance(cu, torch.Tensor) or cu.device.type != "cpu":
            continue
        ends = context + _check_cu(cu, "cu_seqlens").numpy().astype(np.int64)
        starts, ends = ends[:-1][np.diff(ends) > 0], ends[1:][np.diff(ends) > 0]
        inside = len(ends) == 0 or (starts.min() >= context and ends.max() <= host.num_tokens)
        covered = int((ends - starts).sum()) == host.num_queries
        if not (inside and covered and (host.subtree_end[starts] == ends).all()):
            raise ValueError(f"cu_seqlens are not those that the mask was made for; {_FIX}")
