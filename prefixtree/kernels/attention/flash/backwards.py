"""flash-attn-4's backward in three other ways: in dense tiles, with heads first, in float32.

Nothing of flash-attn-4 is changed for them: each is a copy of its function, or of another copy,
that names something of ours in the place of flash-attn-4's. Every name here that is flash-attn-4's
is held by tests/kernels/attention/flash/fa4.

- **Dense tiles.** At head dim 256 the dense backward works in tiles of 64 queries x 48 keys, with
  two stages of q and the products of dk and dv turned, but given block lists it falls back to
  64 x 64 keys with one stage. The copy chooses tiles as if there were no lists. Its compiled
  kernels are kept with those of the function that is copied, by a key that says their tiles.
- **Heads first.** The grid takes all key tiles of a head before the next head, so that the last
  head's longest lists are begun last; ours takes all heads of a key tile. A subclass of the kernel
  turns the grid and reads it turned; its compiled kernels are its alone.
- **In float32.** Where query heads share a kv head, the kernel adds dk and dv up in float32, in the
  order in which its registers hold a tile, and a second kernel brings them into rows and rounds
  them. What the ranks of a group return of imported rows must not be rounded before it is added up,
  so the accumulators are brought into rows here. Their order is read off that second kernel itself:
  it is given the places of a tile as numbers.

Legend: K key rows, Hk kv heads, D head dim.
"""

from __future__ import annotations

from functools import cache
from types import FunctionType
from typing import Any

import cutlass.cute as cute
import torch
from flash_attn.cute import interface
from flash_attn.cute.flash_bwd_sm90 import FlashAttentionBackwardSm90
from flash_attn.cute.tile_scheduler import SingleTileScheduler

from prefixtree.kernels.attention.flash.disk_cache import cache_of


def copied(call: Any, compile_cache: Any, names: dict[str, Any]) -> Any:
    """A copy of `_flash_attn_bwd`, or of another copy.

    Args:
        call: the function.
        compile_cache: where the copy keeps compiled kernels; it looks for it at its own name.
        names: what stands in the place of its module's names.
    """
    scope = dict(call.__globals__)
    made: Any = FunctionType(call.__code__, scope, call.__name__, call.__defaults__)
    made.compile_cache = compile_cache
    scope |= {call.__name__: made, **names}
    return made


def _tile_size_bwd_sm90(
    head_dim: int,
    head_dim_v: int,
    causal: bool,
    local: bool,
    sparse_block_size_q: int | None = None,
) -> Any:
    return interface._tile_size_bwd_sm90(head_dim, head_dim_v, causal, local)


@cache
def in_dense_tiles(call: Any) -> Any:
    """A copy of `_flash_attn_bwd`, or of `heads_first`, with dense tiles."""
    return copied(call, call.compile_cache, {_tile_size_bwd_sm90.__name__: _tile_size_bwd_sm90})


class HeadsFirst(SingleTileScheduler):
    """The tile and head of a block in a grid of heads x tiles."""

    @staticmethod
    def create(params: Any, ctx: Any = None, *, loc: Any = None, ip: Any = None) -> Any:
        head, tile, batch = cute.arch.block_idx()
        return SingleTileScheduler(params, (tile, head, batch), loc=loc, ip=ip)


class TurnedLaunch:
    """A kernel that is about to be launched over tiles x heads, and will be over heads x tiles."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def launch(self, *, grid: Any, **how: Any) -> Any:
        tiles, heads, batch = grid
        return self.kernel.launch(grid=(heads, tiles, batch), **how)


class HeadsFirstBackward(FlashAttentionBackwardSm90):
    """Order is a matter of scheduler and grid; where it takes another scheduler, both are left."""

    def kernel(self, *given: Any) -> Any:
        if not any(x is SingleTileScheduler for x in given):
            return super().kernel(*given)
        turned = (HeadsFirst if x is SingleTileScheduler else x for x in given)
        return TurnedLaunch(super().kernel(*turned))


heads_first = copied(
    interface._flash_attn_bwd,
    cache_of("heads_first", __file__),
    {FlashAttentionBackwardSm90.__name__: HeadsFirstBackward},
)


_CONVERT = "_bwd_postprocess_convert"
# of a place in a tile, as two numbers that 8 bits of mantissa hold
_BASE = 128


class _Conversion:
    """Replaces flash-attn-4's conversion of dK and dV, for one backward at a time.

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
def _converting(call: Any) -> tuple[Any, _Conversion]:
    """`_flash_attn_bwd`, or a copy of it, as it would be with our conversion."""
    conversion = _Conversion(getattr(interface, _CONVERT))
    # the kernels are the same
    return copied(call, call.compile_cache, {_CONVERT: conversion}), conversion


def in_float32(
    call: Any, *tensors: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, **how: Any
) -> Any:
    """A backward with query heads that share kv heads.

    Args:
        call: `_flash_attn_bwd`, `heads_first`, or a copy in dense tiles.
        tensors: its first arguments: q, k, v, out, dout and lse.
        dk, dv: float32 [1, K, Hk, D]; written.
        how: its other arguments by keyword, without sequences of variable lengths.

    Returns:
        What `call` returns; dk and dv in it hold nothing.
    """
    run, conversion = _converting(call)
    taken = [torch.empty_like(x) for x in tensors[1:3]]
    conversion.wide = list(zip(taken, (dk[0], dv[0]), strict=True))
    try:
        return run(*tensors, dk=taken[0], dv=taken[1], **how)
    finally:
        conversion.wide = []
