"""`tree_attention`: checks its arguments, chooses a backend, calls the registered torch operator.

Legend: T packed tokens, Tq query rows, H query heads, Hk kv heads, D and Dv head dims.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, overload

import torch

from prefixtree.errors import UnsupportedError
from prefixtree.kernels.calls import note_call
from prefixtree.kernels.choice import check_name, choose, module_of, passed_over
from prefixtree.kernels.options import Options
from prefixtree.kernels.reference import dense_attention
from prefixtree.packing.mask import TreeMask, check_mask, check_window
from prefixtree.packing.mask_plan import MaskPlan, plan_of


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
    scale: float | None = ...,
    window: int | None = ...,
    softcap: float | None = ...,
    sinks: torch.Tensor | None = ...,
    deterministic: bool | None = ...,
    backend: str | None = ...,
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
    deterministic: bool | None = None,
    backend: str | None = None,
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
        deterministic: whether gradients are bitwise repeatable; default: the mask's own option
            (False unless `with_options` changed it).
        backend: "sdpa" (any device), "triton" (GPUs; float16 and bfloat16), "flash" (flash-attn-4
            on Hopper), "reference" (dense, T x T memory), or "auto": on a GPU the faster of triton
            and flash by what was measured, sdpa where neither serves (`explain` says which).
            Default: the mask's own option ("auto" unless `with_options` changed it).
        return_lse: return lse as well.

    Returns:
        out [Tq, H, Dv] in q's dtype; with return_lse also lse [H, Tq], float32 (float64 for float64
        inputs), the natural log of the sum of exponentials over the keys, the sink left out.

    Raises:
        TypeError, ValueError: arguments that do not fit together, each with what was expected.
        UnsupportedError: a backend that does not exist or cannot serve this call, with the reason.
    """
    scale, window, softcap = _check(q, k, v, mask, scale, window, softcap, sinks)
    backend, deterministic = _of_mask(mask, backend, deterministic)
    check_name(backend)
    if backend == "reference":
        if not torch.compiler.is_compiling():
            note_call(mask.plan)
        visible = mask.dense(window or None)
        out, lse = dense_attention(q, k, v, visible, scale=scale, softcap=softcap, sinks=sinks)
    else:
        # unless something transforms the call, what the dispatcher would come to first: less work
        transformed = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
        attend = _tree_attention if transformed else _differentiable
        out, lse = attend(
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
    deterministic: bool | None = None,
    backend: str | None = None,
) -> str:
    """Which backend `tree_attention` would run for these arguments and why, in a sentence.

    Args:
        mask: the packed forest's TreeMask.
        q, k, v: as for `tree_attention`; all of them or none, which stands for half precision
            (float32 on a CPU) with head dims of 128 on the mask's device.
        scale, window, softcap, sinks, deterministic, backend: as for `tree_attention`; its defaults
            too, so that the mask's own options count.

    Raises:
        TypeError, ValueError: arguments that do not fit together, as in `tree_attention`.
    """
    check_mask(mask)
    if q is None or k is None or v is None:
        if not (q is None and k is None and v is None):
            raise ValueError("explain takes q, k and v together, or none of them")
        dtype = torch.bfloat16 if mask.device.type == "cuda" else torch.float32
        row = torch.empty(1, 1, 128, dtype=dtype, device=mask.device)
        q = row.expand(mask.num_queries, 1, 128)
        k = v = row.expand(mask.num_tokens, 1, 128)
    scale, reach, cap = _check(q, k, v, mask, scale, window, softcap, sinks)
    backend, deterministic = _of_mask(mask, backend, deterministic)
    reach = _options(mask.plan, scale, reach, cap, deterministic).window
    arguments = (q, k, v, scale, mask.plan, deterministic, reach)
    try:
        chosen = choose(backend, *arguments)
    except UnsupportedError as error:
        return f"tree_attention would refuse: {error}."
    reason = chosen.reason
    if backend == "auto" and chosen.backend == "triton":
        reason += f" ({passed_over(*arguments)})"
    return f"tree_attention would run {chosen.backend!r}: {reason}."


def _of_mask(mask: TreeMask, backend: str | None, deterministic: bool | None) -> tuple[str, bool]:
    """The two options of a call: the mask's own where none is given."""
    return (
        mask.backend if backend is None else backend,
        mask.deterministic if deterministic is None else deterministic,
    )


def _backend(
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    plan: MaskPlan | None = None,
    deterministic: bool = False,
    window: int = 0,
) -> ModuleType:
    """The module that serves a call; the same for a backward as for its forward."""
    return module_of(choose(name, q, k, v, scale, plan, deterministic, window).backend)


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
    check_mask(mask)
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
    (rows, heads, dim), (k_rows, k_heads, k_dim), (v_rows, v_heads, _) = q.shape, k.shape, v.shape
    if rows != mask.num_queries:
        raise ValueError(f"q has {rows} rows, the mask has {mask.num_queries} queries")
    if k_rows != v_rows or k_rows != mask.num_tokens:
        raise ValueError(
            f"k and v have {k_rows} and {v_rows} rows, the mask has {mask.num_tokens} tokens"
        )
    if k_heads != v_heads or k_heads == 0 or heads % k_heads != 0:
        raise ValueError(
            "the query heads must be a multiple of the kv heads, which k and v share; got "
            f"{heads} query heads, {k_heads} heads of k and {v_heads} of v"
        )
    if dim != k_dim:
        raise ValueError(f"q and k differ in head dim: {dim} and {k_dim}")
    if sinks is not None:
        if sinks.shape != (heads,) or not sinks.is_floating_point():
            raise ValueError(
                f"sinks must be floating point [{heads}], one a query head, got "
                f"{list(sinks.shape)} of {sinks.dtype}"
            )
        if sinks.device != device:
            raise ValueError(f"sinks are on {sinks.device}, q is on {device}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be None or above 0, got {softcap}")
    scale = float(scale) if scale is not None else dim**-0.5
    return scale, check_window(window), float(softcap or 0.0)


# ---- the registered operator -----------------------------------------------------------------
# One graph for every forest: the mask goes in as its handle, a tensor, so that torch.compile has
# nothing to specialise on. `lse_used` keeps autograd from making a gradient nobody asked for.
# Registered by hand: what `torch.library.custom_op` does in every call takes longer than all here.
# Dynamo is kept out where eager calls enter, or it would compile the backends' host code in a model
# that is compiled in parts.

_namespace: Any = torch.ops.prefixtree
if (_earlier := getattr(_namespace, "_library", None)) is not None:
    # imported a second time (importlib.reload): torch takes no name twice
    _earlier._destroy()
# kept where a second import finds it
_library = _namespace._library = torch.library.Library("prefixtree", "FRAGMENT")


def _register(
    name: str, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]
) -> Callable[..., Any]:
    """-> the operator: `kernel` on every device, `fake` where only shapes are asked for."""
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"prefixtree::{name}", fake, lib=_library)
    return getattr(_namespace, name).default


def _forward(
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
    note_call(plan)
    options = _options(plan, scale, window, softcap, deterministic, lse_used)
    with _as_given(q):
        module = _backend(backend, q, k, v, scale, plan, deterministic, options.window)
        return module.forward(q, k, v, sinks, plan, options)


@torch._disable_dynamo
def _backward(
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
) -> list[torch.Tensor]:
    plan = plan_of(handle)
    options = _options(plan, scale, window, softcap, deterministic)
    with _as_given(q):
        module = _backend(backend, q, k, v, scale, plan, deterministic, options.window)
        *grads, dsinks = module.backward(dout, dlse, q, k, v, sinks, out, lse, plan, options)
    return grads if dsinks is None else [*grads, dsinks]


def _fake_forward(q, k, v, sinks, handle, scale, window, softcap, deterministic, backend, lse_used):
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    return out, q.new_empty(q.shape[1], q.shape[0], dtype=dtype)


def _fake_backward(dout, dlse, q, k, v, sinks, *_):
    return [x.new_empty(x.shape) for x in (q, k, v, sinks) if x is not None]


_OPTIONS = "float scale, SymInt window, float softcap, bool deterministic, str backend"
_tree_attention = _register(
    "tree_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor handle, "
    f"{_OPTIONS}, bool lse_used) -> (Tensor, Tensor)",
    _forward,
    _fake_forward,
)
# -> gradients of q, k, v and, where there are any, sinks
_tree_attention_backward = _register(
    "tree_attention_backward",
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor out, "
    f"Tensor lse, Tensor handle, {_OPTIONS}) -> Tensor[]",
    _backward,
    _fake_backward,
)


@torch._disable_dynamo
def _differentiable(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    handle: torch.Tensor,
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator's kernel for autograd."""
    if torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (sinks is not None and sinks.requires_grad)
    ):
        return _TreeAttention.apply(q, k, v, sinks, handle, options)
    with torch._C._AutoDispatchBelowAutograd():
        return _tree_attention(q, k, v, sinks, handle, *options)


_library.impl("tree_attention", _differentiable, "Autograd")


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        handle: torch.Tensor,
        options: tuple[Any, ...],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = _tree_attention(q, k, v, sinks, handle, *options)
        ctx.save_for_backward(q, k, v, sinks, out, lse, handle)
        *ctx.options, lse_used = options
        if not lse_used:
            ctx.mark_non_differentiable(lse)
            # no zeros in the place of its gradient, which backends take for one
            ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
        q, k, v, sinks, out, lse, handle = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        # with create_graph, what follows must not be taken for a constant
        gradients = _Once.apply if torch.is_grad_enabled() else _tree_attention_backward
        dq, dk, dv, *dsinks = gradients(dout, dlse, q, k, v, sinks, out, lse, handle, *ctx.options)
        return dq, dk, dv, dsinks[0] if dsinks else None, None, None


class _Once(torch.autograd.Function):
    """The backward of a call whose second derivative may be asked for."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor, ...]:
        return tuple(_tree_attention_backward(*arguments))

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError("tree_attention is differentiable once, not twice")


_NOTHING = contextlib.nullcontext()


def _as_given(q: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Autocast would reach into an operator and turn its float32 products into half precision."""
    device = q.device.type
    # entered only where it is on: entering costs more than all checks
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else _NOTHING


def _options(
    plan: MaskPlan,
    scale: float,
    window: int,
    softcap: float,
    deterministic: bool,
    lse_used: bool = False,
) -> Options:
    # a window no path outgrows is none, and lets the plain kernels serve
    reach = 0 if window >= plan.deepest else window
    return Options(scale, reach, softcap, deterministic, lse_used)
