"""`CompiledPartMask`: attention of a part in compiled layers, as operators in one graph per kind.

Rows of other parts come and go outside the graph: an operator brings them, and the backward of
attention gives their gradients back. The exchange of a layer enters by a handle, one per call of
the layer. Numbers are those of `part_attention`.

Legend: t own tokens, K rows of the part (own and imported), H query heads, Hk kv heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from prefixtree.kernels.attention.api import checked_call
from prefixtree.kernels.attention.operator import (
    OPTIONS,
    TREE_ATTENTION,
    TREE_ATTENTION_BACKWARD,
)
from prefixtree.kernels.operators import new_library, register, uncompiled
from prefixtree.packing.host_mask import held_by, make_handle
from prefixtree.parallel.attention import KeyValueExchange, PartMask


class _Call:
    """A call of one layer in a part: what its operators find by a handle."""

    def __init__(self, mask: PartMask, attention: nn.Module) -> None:
        self._mask, self._attention = mask, attention
        self._exchange: KeyValueExchange | None = None

    def import_rows(self, *own: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Makes the exchange anew: a layer that is recomputed imports again."""
        self._exchange = exchange = self._mask.exchange_of(self._attention)
        return exchange.import_rows(*own)

    def give_back(self, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert self._exchange is not None
        return self._exchange.give_back(*gradients)


class CellMask(PartMask):
    """A `PartMask` whose attention is a part of the graphs of compiled layers."""

    # that of `HeadsMask` is none, as rows of one turn travel while another is computed

    def in_compiled(self, attention: nn.Module) -> PartMask:
        return CompiledPartMask(self, attention)


class CompiledPartMask(PartMask):
    """A `PartMask` in one call of a compiled layer, which has this attention alone."""

    def __init__(self, mask: PartMask, attention: nn.Module) -> None:
        super().__init__(mask.part, mask.exchange_of, mask.states_of)
        # numbers that compiled code holds as symbols: of shapes of tensors it would note which are
        # alike, as they are where nothing is imported
        self.num_own, self.num_rows = mask.part.num_tokens, mask.mask.num_tokens
        self.call = make_handle(_Call(mask, attention))

    def attend(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        # eager where torch does not compile after all, and without what stands in no graph
        if not torch.compiler.is_compiling() or options.get("chosen") is not None:
            return super().attend(layer, query, key, value, **options)
        return self._in_graph(query, key, value, **options)

    def _in_graph(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float | None,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        rows, numbers = (query, key, value), (scale, window, softcap)
        checked = checked_call(*rows, self.mask, *numbers, sinks, None, None, own=self.num_own)
        handles = self.call, self.mask.handle
        # also where a part shares no row: a graph of its own would cost more than it saves
        of_call = checked._replace(wide=True)
        out: torch.Tensor = _PART_ATTENTION(*rows, sinks, *handles, self.num_rows, *of_call)
        return out


# ---- operators -----------------------------------------------------------------------------------


def _rows(
    k: torch.Tensor, v: torch.Tensor, call: torch.Tensor, num_rows: int
) -> tuple[torch.Tensor, ...]:
    found: _Call = held_by(call)
    own = k.data_ptr(), v.data_ptr()
    # no output may be an input: where nothing is imported, own rows come back as they are
    return tuple(
        x.clone(memory_format=torch.contiguous_format) if x.data_ptr() == at else x.contiguous()
        for x, at in zip(found.import_rows(k, v), own, strict=True)
    )


def _backward(*arguments: Any) -> list[torch.Tensor]:
    *attention, call, gives, _ = arguments
    dquery, dkey, dvalue, *dsinks = TREE_ATTENTION_BACKWARD(*attention)
    if not gives:
        return [dquery, *dsinks]
    found: _Call = held_by(call)
    # they stay in float32 until other parts' are added
    of_own = found.give_back(dkey, dvalue)
    of_own = tuple(x.to(y.dtype).contiguous() for x, y in zip(of_own, attention[3:5], strict=True))
    return [dquery, *of_own, *dsinks]


def _fake_rows(k, v, call, num_rows):
    return tuple(x.new_empty(num_rows, *x.shape[1:]) for x in (k, v))


def _fake_backward(dout, dlse, q, keys, values, sinks, *rest):
    *_, gives, own = rest
    of_own = [x.new_empty(own, *x.shape[1:]) for x in (keys, values)] if gives else []
    return [
        q.new_empty(q.shape),
        *of_own,
        *([] if sinks is None else [sinks.new_empty(sinks.shape)]),
    ]


_part_library = new_library("_part_library")
# (own keys, own values) -> those of the part, K rows each
_PART_ROWS = register(
    _part_library,
    "part_rows",
    "(Tensor k, Tensor v, Tensor call, SymInt num_rows) -> (Tensor, Tensor)",
    _rows,
    _fake_rows,
)
# -> gradients of q, if `gives` of own keys and values, and of sinks, where there are any
_PART_BACKWARD = register(
    _part_library,
    "part_attention_backward",
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor keys, Tensor values, Tensor? sinks, Tensor out, "
    f"Tensor lse, Tensor handle, {OPTIONS}, Tensor? chosen, Tensor call, bool gives, SymInt own) "
    "-> Tensor[]",
    _backward,
    _fake_backward,
)


def _attended(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    call: torch.Tensor,
    handle: torch.Tensor,
    num_rows: int,
    *options: Any,
) -> tuple[torch.Tensor, ...]:
    """Computes the part's keys and values, out and lse."""
    # two operators: a checkpoint that keeps attention keeps no rows of others
    keys, values = _PART_ROWS(k, v, call, num_rows)
    return keys, values, *TREE_ATTENTION(q, keys, values, sinks, handle, *options, False, None)


def _forward(*arguments: Any) -> torch.Tensor:
    return _attended(*arguments)[2]


class _PartAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        q, _, _, sinks, call, handle, _, *options = arguments
        with torch._C._AutoDispatchBelowAutograd():
            keys, values, out, lse = _attended(*arguments)
        ctx.save_for_backward(q, keys, values, sinks, out, lse, handle, call)
        ctx.options = options
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        *tensors, handle, call = ctx.saved_tensors
        sinks = tensors[3]
        # the same on all ranks: the model says which tensors need gradients
        gives = any(ctx.needs_input_grad[1:3])
        attention = dout, None, *tensors, handle, *ctx.options, None
        dq, *others = _PART_BACKWARD(*attention, call, gives, dout.shape[0])
        dk, dv = others[:2] if gives else (None, None)
        none = (None,) * (len(ctx.needs_input_grad) - 4)
        return dq, dk, dv, None if sinks is None else others[-1], *none


@uncompiled
def _differentiable(*arguments: Any) -> torch.Tensor:
    """The operator's kernel for autograd."""
    inputs = arguments[:4]
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        out: torch.Tensor = _PartAttention.apply(*arguments)
        return out
    with torch._C._AutoDispatchBelowAutograd():
        return _forward(*arguments)


_PART_ATTENTION = register(
    _part_library,
    "part_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor call, Tensor handle, SymInt num_rows, "
    f"{OPTIONS}) -> Tensor",
    _forward,
    lambda q, k, v, *_: q.new_empty(q.shape[0], q.shape[1], v.shape[2]),
)
_part_library.impl("part_attention", _differentiable, "Autograd")
