"""The registered torch operator: its kernels, fakes and autograd, and how eager calls enter it.

Legend: T packed tokens, Tq query rows, H query heads, Hk kv heads, D and Dv head dims.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from prefixtree.kernels.attention.choice import choose
from prefixtree.kernels.attention.protocol import AttentionCall, Options
from prefixtree.kernels.operators import (
    as_given,
    first_call,
    new_library,
    note_call,
    register,
    uncompiled,
)
from prefixtree.packing.host_mask import host_of

# the mask goes in as its handle, a tensor, so that torch.compile has nothing to specialise on and
# makes one graph for every forest. `lse_used` keeps autograd from making a gradient that nobody
# asked for. Dynamo is kept out where eager calls enter, or it would compile the backends' host code
# in a model that is compiled in parts

_library = new_library("_library")
# a torch that does not say goes through the dispatcher, which is right and slower
_is_transformed = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    handle: torch.Tensor,
    *scalars: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    *options, lse_used, chosen = scalars
    mask, call_options = host_of(handle), Options(*options)
    note_call(mask, "attention")
    call = AttentionCall.of(q, k, v, sinks, mask, call_options, lse_used, chosen)
    with as_given(q):
        backend = choose(call_options.backend, call).backend
        with _first("forward", backend.name, call):
            return backend.kernels.forward(call)


@uncompiled
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
    *scalars: Any,
) -> list[torch.Tensor]:
    *options, chosen = scalars
    call_options = Options(*options)
    call = AttentionCall.of(q, k, v, sinks, host_of(handle), call_options, chosen=chosen)
    with as_given(q):
        backend = choose(call_options.backend, call).backend
        with _first("backward", backend.name, call):
            *grads, dsinks = backend.kernels.backward(call, dout, dlse, out, lse)
    return grads if dsinks is None else [*grads, dsinks]


def _first(direction: str, backend: str, call: AttentionCall) -> AbstractContextManager[Any]:
    """Makes a context around a call that may compile; on a CPU nothing does."""
    q, k, v = call.q, call.k, call.v
    if not q.is_cuda:
        return nullcontext()
    return first_call(
        f"tree_attention's {direction}, backend {backend!r},",
        q.dtype,
        f"{q.shape[1]} heads, {k.shape[1]} kv heads, dims {q.shape[2]} and {v.shape[2]}",
    )


def _fake_forward(q, k, v, *_):
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    return out, q.new_empty(q.shape[1], q.shape[0], dtype=dtype)


def _fake_backward(dout, dlse, q, k, v, sinks, *rest):
    *_, is_wide, _ = rest
    wide = torch.promote_types(k.dtype, torch.float32) if is_wide else k.dtype
    dk, dv = (x.new_empty(x.shape, dtype=wide) for x in (k, v))
    dsinks = [] if sinks is None else [sinks.new_empty(sinks.shape)]
    return [q.new_empty(q.shape), dk, dv, *dsinks]


# the fields of `Options`; the forward gets `wide` too, so that it takes a backend whose backward
# serves it. `chosen` has no default: torch hands arguments on without those at the end that have
# theirs
OPTIONS = "float scale, SymInt window, float softcap, bool deterministic, str backend, bool wide"
TREE_ATTENTION = register(
    _library,
    "tree_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor handle, "
    f"{OPTIONS}, bool lse_used, Tensor? chosen) -> (Tensor, Tensor)",
    _forward,
    _fake_forward,
)
# -> gradients of q, k, v and, where there are any, sinks
TREE_ATTENTION_BACKWARD = register(
    _library,
    "tree_attention_backward",
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor out, "
    f"Tensor lse, Tensor handle, {OPTIONS}, Tensor? chosen) -> Tensor[]",
    _backward,
    _fake_backward,
)


@uncompiled
def _differentiable(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    handle: torch.Tensor,
    *scalars: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator's kernel for autograd."""
    *options, chosen = scalars
    if torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (sinks is not None and sinks.requires_grad)
    ):
        return _TreeAttention.apply(q, k, v, sinks, handle, options, chosen)
    with torch._C._AutoDispatchBelowAutograd():
        return TREE_ATTENTION(q, k, v, sinks, handle, *options, chosen)


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
        chosen: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = TREE_ATTENTION(q, k, v, sinks, handle, *options, chosen)
        ctx.save_for_backward(q, k, v, sinks, out, lse, handle, chosen)
        *ctx.options, lse_used = options
        if not lse_used:
            ctx.mark_non_differentiable(lse)
            # no zeros for its gradient: backends would take them for one
            ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
        q, k, v, sinks, out, lse, handle, chosen = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        # with create_graph, the gradients must not be taken for constants
        gradients = _Once.apply if torch.is_grad_enabled() else TREE_ATTENTION_BACKWARD
        inputs = q, k, v, sinks, out, lse, handle, *ctx.options, chosen
        dq, dk, dv, *dsinks = gradients(dout, dlse, *inputs)
        return dq, dk, dv, dsinks[0] if dsinks else None, None, None, None


class _Once(torch.autograd.Function):
    """The backward of a call whose second derivative may be asked for."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor, ...]:
        return tuple(TREE_ATTENTION_BACKWARD(*arguments))

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError("tree_attention is differentiable once, not twice")


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    handle: torch.Tensor,
    options: Options,
    lse_used: bool,
    chosen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Calls the operator: out [Tq, H, Dv], lse [H, Tq], which has a gradient if `lse_used`."""
    # unless something transforms the call, enter where the dispatcher would: less work
    transformed = torch.compiler.is_compiling() or _is_transformed()
    run = TREE_ATTENTION if transformed else _differentiable
    return run(q, k, v, sinks, handle, *options, lse_used, chosen)
