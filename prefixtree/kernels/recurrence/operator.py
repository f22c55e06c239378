"""The registered torch operators of the recurrent layers: kernels, fakes and autograd.

The mask goes in as its handle, as in `kernels.attention.operator`, so one graph serves every
forest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from prefixtree.kernels.operators import (
    as_given,
    first_call,
    new_library,
    note_call,
    register,
    uncompiled,
)
from prefixtree.kernels.recurrence.backends import choose, warn_if_slow
from prefixtree.kernels.recurrence.protocol import Call, ConvCall, DeltaCall, Kernels, SsdCall
from prefixtree.kernels.runtime import Backend
from prefixtree.packing.host_mask import host_of

_library = new_library("_recurrence_library")


# out, final if there is one, saved
_Results = tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]


class _Operator(NamedTuple):
    """A forward and its backward."""

    # (tensors.., handle, options.., backend) -> out, [final] or [], saved
    forward: Any
    # (dout, saved, dfinal, tensors.., handle, options.., backend) -> gradients of the tensors that
    # there are
    backward: Any
    # the tensors at the start of a call
    num_tensors: int
    # whether states may enter and leave; num_final is its last option then
    has_states: bool

    def num_finals(self, arguments: Sequence[Any]) -> int:
        """Counts the tensors between out and the saved ones, 0 or 1."""
        return int(self.has_states and arguments[-2] is not None)


def _register(name: str, call_type: Callable[..., Call], tensors: str, options: str) -> _Operator:
    """Registers `name` and `name`_backward, whose arguments are the fields of `call_type`."""
    num_tensors = tensors.count("Tensor")

    def as_call(arguments: tuple[Any, ...], mask: Any) -> Call:
        # tensors, handle, options, backend
        return call_type(*arguments[:num_tensors], mask, *arguments[num_tensors + 1 : -1])

    def forward(*arguments: Any) -> _Results:
        mask = host_of(arguments[num_tensors])
        note_call(mask, "recurrence")
        call = as_call(arguments, mask)
        backend = choose(arguments[-1], call)
        if arguments[-1] == "auto":
            warn_if_slow(call, backend)
        with as_given(arguments[0]), _first(f"{name}'s forward", backend, call):
            out, saved, final = backend.kernels.forward(call)
            return out, [] if final is None else [final], saved

    @uncompiled
    def backward(
        dout: torch.Tensor,
        saved: list[torch.Tensor],
        dfinal: torch.Tensor | None,
        *arguments: Any,
    ) -> list[torch.Tensor]:
        call = as_call(arguments, host_of(arguments[num_tensors]))
        backend = choose(arguments[-1], call)
        with as_given(dout), _first(f"{name}'s backward", backend, call):
            return backend.kernels.backward(call, dout, saved, dfinal)

    def fake_forward(*arguments: Any) -> _Results:
        call = as_call(arguments, None)
        like = call.value if isinstance(call, DeltaCall) else call.x
        saved = choose(arguments[-1], call).kernels.saves(call)
        final = []
        if not isinstance(call, ConvCall) and call.num_final is not None:
            wide = torch.promote_types(like.dtype, torch.float32)
            final = [like.new_empty(call.num_final, *call.state_shape, dtype=wide)]
        return like.new_empty(like.shape), final, saved

    def fake_backward(
        dout: torch.Tensor,
        saved: list[torch.Tensor],
        dfinal: torch.Tensor | None,
        *arguments: Any,
    ) -> list[torch.Tensor]:
        return [x.new_empty(x.shape) for x in arguments[:num_tensors] if x is not None]

    arguments = f"{tensors}, Tensor handle, {options}str backend"
    operator = _Operator(
        register(
            _library, name, f"({arguments}) -> (Tensor, Tensor[], Tensor[])", forward, fake_forward
        ),
        register(
            _library,
            f"{name}_backward",
            f"(Tensor dout, Tensor[] saved, Tensor? dfinal, {arguments}) -> Tensor[]",
            backward,
            fake_backward,
        ),
        num_tensors,
        "num_final" in options,
    )

    @uncompiled
    def differentiable(*arguments: Any) -> _Results:
        tensors = arguments[:num_tensors]
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
            out, *rest = _Recurrence.apply(operator, *arguments)
            finals = operator.num_finals(arguments)
            return out, rest[:finals], rest[finals:]
        with torch._C._AutoDispatchBelowAutograd():
            return operator.forward(*arguments)

    _library.impl(name, differentiable, "Autograd")
    return operator


def _first(of: str, backend: Backend[Kernels], call: Call) -> AbstractContextManager[Any]:
    """Makes a context around a call that may compile; on a CPU nothing does."""
    first: torch.Tensor = call[0]
    if not first.is_cuda:
        return nullcontext()
    sizes = "x".join(map(str, first.shape[1:]))
    return first_call(f"{of}, backend {backend.name!r},", first.dtype, f"sizes {sizes}")


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operator: _Operator, *arguments: Any) -> tuple[torch.Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            out, final, saved = operator.forward(*arguments)
        ctx.out = out.shape, out.dtype
        handle_and_tensors = arguments[: operator.num_tensors + 1]
        ctx.save_for_backward(*handle_and_tensors, *saved)
        ctx.operator, ctx.options = operator, arguments[operator.num_tensors + 1 :]
        ctx.mark_non_differentiable(*saved)
        # no zeros for the gradients of saved tensors
        ctx.set_materialize_grads(False)
        return (out, *final, *saved)

    @staticmethod
    def backward(
        ctx: Any, dout: torch.Tensor | None, *rest: torch.Tensor | None
    ) -> tuple[Any, ...]:
        count = ctx.operator.num_tensors
        dfinal = rest[0] if ctx.operator.num_finals(ctx.options) else None
        # read once: checkpointing hands each of them out once
        kept = ctx.saved_tensors
        arguments, saved = kept[: count + 1], list(kept[count + 1 :])
        nothing = (None,) * (2 + len(ctx.options))
        if dout is None and dfinal is None:
            return (None, *(None for _ in arguments[:count]), *nothing[1:])
        if dout is None:
            assert dfinal is not None
            shape, dtype = ctx.out
            dout = dfinal.new_zeros(shape, dtype=dtype)
        # with create_graph, the gradients must not be taken for constants
        if torch.is_grad_enabled():
            gradients = _Once.apply(
                ctx.operator, len(saved), dout, *saved, dfinal, *arguments, *ctx.options
            )
        else:
            gradients = ctx.operator.backward(dout, saved, dfinal, *arguments, *ctx.options)
        left = iter(gradients)
        of_tensors = (None if x is None else next(left) for x in arguments[:count])
        return (None, *of_tensors, *nothing[1:])


class _Once(torch.autograd.Function):
    """The backward of a call whose second derivative may be asked for."""

    @staticmethod
    def forward(
        ctx: Any, operator: _Operator, num_saved: int, dout: torch.Tensor, *rest: Any
    ) -> tuple[torch.Tensor, ...]:
        return tuple(operator.backward(dout, list(rest[:num_saved]), *rest[num_saved:]))

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError("recurrent layers are differentiable once, not twice")


TREE_CONV = _register("tree_conv", ConvCall, "Tensor x, Tensor weight, Tensor? bias", "bool silu, ")
TREE_DELTA_RULE = _register(
    "tree_delta_rule",
    DeltaCall,
    "Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta, Tensor? initial",
    "float scale, bool qk_l2norm, int? num_final, ",
)
TREE_SSD = _register(
    "tree_ssd",
    SsdCall,
    "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? initial",
    "int? num_final, ",
)
