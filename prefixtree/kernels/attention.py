"""`tree_attention`: checks its arguments, chooses a backend, calls the registered torch operator.

Legend: T packed tokens, Tq query rows, H query heads, Hk kv heads, D and Dv head dims.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Literal, overload

import torch

from prefixtree.errors import UnsupportedError
from prefixtree.kernels.choice import check_name, choose, module_of, passed_over
from prefixtree.kernels.options import Options
from prefixtree.kernels.reference import dense_attention
from prefixtree.packing.mask import MaskPlan, TreeMask, check_window, plan_of


@overload
def tree_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: TreeMask,
    scale: float | None = ...,
    window: int | None = ...,
    softcap: float | None = ...,
    sinks: torch.Tensor | None = ...,
    deterministic: bool = ...,
    backend: str = ...,
    return_lse: Literal[False] = ...,
) -> torch.Tensor: ...
@overload
def tree_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: TreeMask,
    scale: float | None = ...,
    window: int | None = ...,
    softcap: float | None = ...,
    sinks: torch.Tensor | None = ...,
    deterministic: bool = ...,
    backend: str = ...,
    *,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...
def tree_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: TreeMask,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    deterministic: bool = False,
    backend: str = "auto",
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of every packed token over its path in the forest: itself and its ancestors.

    Differentiable once in q, k, v, sinks and, where it is returned, through lse. The gradient of a
    shared token's key and value is the sum over all that see it, accumulated in float32.

    Args:
        q: [Tq, H, D]; Tq = T unless the mask is `for_queries(...)`. Strides are free.
        k: [T, Hk, D], H a multiple of Hk (query head h reads kv head h // (H / Hk)).
        v: [T, Hk, Dv].
        mask: the packed forest's TreeMask, on the device of q.
        scale: factor on q k^T; D ** -0.5 unless said.
        window: a token sees keys less than `window` above it in depth, itself counted.
        softcap: c in c tanh(scale q k^T / c), before the mask.
        sinks: [H] floating point, a logit a head that joins the softmax without a value (gpt-oss).
        deterministic: bitwise repeatable gradients; the mask's own option unless True.
        backend: "sdpa" (any device), "triton" (GPUs; float16 and bfloat16), "flash" (flash-attn-4
            on Hopper; refused until it is verified), "reference" (dense, T x T memory), or "auto":
            triton where it can serve the call, sdpa elsewhere (`explain` says which). The mask's
            own option unless another than "auto".
        return_lse: return lse as well.

    Returns:
        out [Tq, H, Dv] in q's dtype; with return_lse also lse [H, Tq], float32 (float64 for float64
        inputs), the natural log of the sum of exponentials over the keys, the sink left out.

    Raises:
        TypeError, ValueError: arguments that do not fit together, each with what was expected.
        UnsupportedError: a backend that does not exist or cannot serve this call, with the reason.
    """
    scale, window, softcap = _check(q, k, v, mask, scale, window, softcap, sinks)
    deterministic = deterministic or mask.deterministic
    backend = mask.backend if backend == "auto" else backend
    check_name(backend)
    if backend == "reference":
        visible = mask.dense(window or None)
        out, lse = dense_attention(q, k, v, visible, scale=scale, softcap=softcap, sinks=sinks)
    else:
        out, lse = _tree_attention(
            q, k, v, sinks, mask.handle, scale, window, softcap, deterministic, backend, return_lse
        )
    return (out, lse) if return_lse else out


def explain(
    mask: TreeMask,
    q: torch.Tensor | None = None,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    deterministic: bool = False,
    backend: str = "auto",
) -> str:
    """Which backend `tree_attention` would run for these arguments and why, in a sentence.

    Args:
        q, k, v: as for `tree_attention`; all of them or none, which stands for half precision
            (float32 on a CPU) with head dims of 128 on the mask's device.

    Raises:
        TypeError, ValueError: arguments that do not fit together, as in `tree_attention`.
    """
    if q is None or k is None or v is None:
        if not (q is None and k is None and v is None):
            raise ValueError("explain takes q, k and v together, or none of them")
        dtype = torch.bfloat16 if mask.device.type == "cuda" else torch.float32
        row = torch.empty(1, 1, 128, dtype=dtype, device=mask.device)
        q = row.expand(mask.num_queries, 1, 128)
        k = v = row.expand(mask.num_tokens, 1, 128)
    scale, _, _ = _check(q, k, v, mask, scale, window, softcap, sinks)
    backend = mask.backend if backend == "auto" else backend
    arguments = (q, k, v, scale, mask.plan, deterministic or mask.deterministic)
    try:
        chosen = choose(backend, *arguments)
    except UnsupportedError as error:
        return f"tree_attention would refuse: {error}."
    reason = chosen.reason
    if backend == "auto" and chosen.backend == "triton":
        reason += f" ({passed_over(*arguments)})"
    return f"tree_attention would run {chosen.backend!r}: {reason}."


def _backend(
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    plan: MaskPlan | None = None,
    deterministic: bool = False,
) -> ModuleType:
    """The module that serves a call; the same for a backward as for its forward."""
    return module_of(choose(name, q, k, v, scale, plan, deterministic).backend)


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: TreeMask,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> tuple[float, int, float]:
    """Raises on what does not fit; -> scale, window and softcap as numbers (0 for none)."""
    if not isinstance(mask, TreeMask):
        raise TypeError(f"mask must be a TreeMask (packed.mask), got {type(mask).__name__}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 3:
            raise ValueError(
                f"{name} must be [tokens, heads, head dim], got {x.ndim} dimensions; a batch is "
                "one packed forest: drop the batch dimension"
            )
        if not x.is_floating_point() or x.dtype != q.dtype:
            raise ValueError(
                "q, k and v must share one floating-point dtype, got "
                f"{q.dtype}, {k.dtype} and {v.dtype}"
            )
        if x.device != mask.device:
            raise ValueError(
                f"{name} is on {x.device}, the mask on {mask.device}; use packed.to({x.device})"
            )
    if q.shape[0] != mask.num_queries:
        raise ValueError(f"q has {q.shape[0]} rows, the mask has {mask.num_queries} queries")
    if k.shape[0] != mask.num_tokens or v.shape[0] != mask.num_tokens:
        raise ValueError(
            f"k and v have {k.shape[0]} and {v.shape[0]} rows, the mask has {mask.num_tokens} "
            "tokens"
        )
    if k.shape[1] != v.shape[1] or k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise ValueError(
            "the query heads must be a multiple of the kv heads, which k and v share; got "
            f"{q.shape[1]} query heads, {k.shape[1]} heads of k and {v.shape[1]} of v"
        )
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"q and k differ in head dim: {q.shape[2]} and {k.shape[2]}")
    if sinks is not None and (sinks.shape != q.shape[1:2] or not sinks.is_floating_point()):
        raise ValueError(
            f"sinks must be floating point [{q.shape[1]}], one a query head, got "
            f"{list(sinks.shape)} of {sinks.dtype}"
        )
    if sinks is not None and sinks.device != q.device:
        raise ValueError(f"sinks are on {sinks.device}, q is on {q.device}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be None or above 0, got {softcap}")
    scale = float(scale) if scale is not None else q.shape[2] ** -0.5
    return scale, check_window(window), float(softcap or 0.0)


# ---- the registered operator -----------------------------------------------------------------
# One graph for every forest: the mask goes in as its handle, a tensor, so that torch.compile has
# nothing to specialise on. `lse_used` keeps autograd from making a gradient nobody asked for.


@torch.library.custom_op("prefixtree::tree_attention", mutates_args=())
def _tree_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    handle: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
    deterministic: bool,
    backend: str,
    lse_used: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    plan = plan_of(handle)
    options = _options(plan, scale, window, softcap, deterministic)
    with _as_given(q):
        module = _backend(backend, q, k, v, scale, plan, deterministic)
        return module.forward(q, k, v, sinks, plan, options)


@_tree_attention.register_fake
def _(q, k, v, sinks, handle, scale, window, softcap, deterministic, backend, lse_used):
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    return out, q.new_empty(q.shape[1], q.shape[0], dtype=dtype)


@torch.library.custom_op("prefixtree::tree_attention_backward", mutates_args=())
def _tree_attention_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    handle: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
    deterministic: bool,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    plan = plan_of(handle)
    options = _options(plan, scale, window, softcap, deterministic)
    with _as_given(q):
        module = _backend(backend, q, k, v, scale, plan, deterministic)
        dq, dk, dv, dsinks = module.backward(dout, dlse, q, k, v, sinks, out, lse, plan, options)
    return dq, dk, dv, q.new_empty(0) if dsinks is None else dsinks


@_tree_attention_backward.register_fake
def _(dout, dlse, q, k, v, sinks, out, lse, handle, scale, window, softcap, deterministic, backend):
    grads = [x.new_empty(x.shape) for x in (q, k, v)]
    return (*grads, q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    q, k, v, sinks, handle, *ctx.options, ctx.lse_used = inputs
    ctx.save_for_backward(q, k, v, sinks, *output, handle)


def _autograd(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[Any, ...]:
    q, k, v, sinks, out, lse, handle = ctx.saved_tensors
    dq, dk, dv, dsinks = _tree_attention_backward(
        dout, dlse if ctx.lse_used else None, q, k, v, sinks, out, lse, handle, *ctx.options
    )
    return dq, dk, dv, None if sinks is None else dsinks, *[None] * 7


_tree_attention.register_autograd(_autograd, setup_context=_setup_context)


def _as_given(q: torch.Tensor) -> Any:
    """Autocast would reach into an operator and turn its float32 products into half precision."""
    return torch.autocast(q.device.type, enabled=False)


def _options(
    plan: MaskPlan, scale: float, window: int, softcap: float, deterministic: bool
) -> Options:
    # a window no path outgrows is none, and lets the plain kernels serve
    return Options(scale, 0 if window >= plan.deepest else window, softcap, deterministic)
