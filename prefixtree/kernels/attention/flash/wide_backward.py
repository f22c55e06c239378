"""flash-attn-4's backward with the gradients of keys and values in float32.

Where query heads share a kv head, its kernel adds dk and dv up in float32, in the order in which
its registers hold a tile, and a second kernel brings them into rows and rounds them. What the ranks
of a group return of borrowed rows must not be rounded before it is added up. So the accumulators
are brought into rows here. Their order is read off that second kernel itself: it is given the
places of a tile as numbers. Nothing of flash-attn-4 is changed for it: its backward runs as a copy
of the function that names another conversion. Every name here that is flash-attn-4's is held by
tests/kernels/attention/flash/fa4.

Legend: K key rows, Hk kv heads, D head dim.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from flash_attn.cute import interface

from prefixtree.kernels.attention.flash.copied_call import copied

_CONVERT = "_bwd_postprocess_convert"
# of a place in a tile, as two numbers that 8 bits of mantissa hold
_BASE = 128


class _Conversion:
    """In the place of flash-attn-4's; its backward runs in one thread at a time.

    Attributes:
        wide: float32 results by what flash-attn-4 takes for the tensor to write.
    """

    def __init__(self, convert: Any) -> None:
        self.convert = convert
        self.wide: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._orders: dict[Any, torch.Tensor] = {}

    def __call__(
        self, accumulated: torch.Tensor, out: torch.Tensor, scale: float, *how: Any, **more: Any
    ) -> None:
        wide = next((wide for taken, wide in self.wide if taken is out), None)
        if wide is None:
            self.convert(accumulated, out, scale, *how, **more)
            return
        rows, heads, dim = wide.shape
        # cu_seqlens, seqused, architecture, dtype, head dim, rows of a tile
        assert how[:2] == (None, None) and how[4] == dim, "flash-attn-4 takes other arguments"
        order = self._order(accumulated, out, *how, **more)
        tiles = accumulated.view(heads, -1, len(order))
        found = tiles.index_select(2, order).view(heads, -1, dim)[:, :rows]
        torch.mul(found.transpose(0, 1), scale, out=wide)

    def _order(
        self, accumulated: torch.Tensor, out: torch.Tensor, *how: Any, **more: Any
    ) -> torch.Tensor:
        """int64 [rows x D of a tile]: where in an accumulated tile each of its numbers stands."""
        key = (accumulated.device, *how, *sorted(more.items()))
        if key not in self._orders:
            rows, dim = how[5], how[4]
            place = torch.arange(rows * dim, device=accumulated.device)
            digits = []
            for digit in (place // _BASE, place % _BASE):
                shown = out.new_empty(1, rows, 1, dim)
                self.convert(digit.float().view(1, 1, -1), shown, 1.0, *how, **more)
                digits.append(shown.flatten().long())
            order = digits[0] * _BASE + digits[1]
            assert torch.equal(order.sort().values, place), "not the places of a tile"
            self._orders[key] = order
        return self._orders[key]


@cache
def _copied(call: Any) -> tuple[Any, _Conversion]:
    """`_flash_attn_bwd`, or a copy of it, as it would be with our conversion."""
    conversion = _Conversion(getattr(interface, _CONVERT))
    # the kernels are the same
    return copied(call, call.compile_cache, {_CONVERT: conversion}), conversion


def flash_attn_bwd(
    call: Any, *tensors: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, **how: Any
) -> Any:
    """A backward with query heads that share kv heads.

    Args:
        call: `_flash_attn_bwd`, or that of `heads_first_backward`.
        tensors: its first arguments: q, k, v, out, dout and lse.
        dk, dv: float32 [1, K, Hk, D]; written.
        how: its other arguments by keyword, without sequences of variable lengths.

    Returns:
        What `call` returns; dk and dv in it hold nothing.
    """
    run, conversion = _copied(call)
    taken = [torch.empty_like(x) for x in tensors[1:3]]
    conversion.wide = list(zip(taken, (dk[0], dv[0]), strict=True))
    try:
        return run(*tensors, dk=taken[0], dv=taken[1], **how)
    finally:
        conversion.wide = []
