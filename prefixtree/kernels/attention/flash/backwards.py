"""Three other ways to run flash-attn-4's backward: in dense tiles, with heads first, in float32.

Nothing of flash-attn-4 is changed. Each way is a copy of its function, or of another copy, in which
a name of flash-attn-4's stands for an object of ours. tests/kernels/attention/flash/fa4 holds every
such name.

- **Dense tiles.** At head dim 256 the dense backward works in tiles of 64 queries x 48 keys, with
  two stages of q and the products of dk and dv turned. Given block lists it falls back to 64 x 64
  keys with one stage. The copy chooses tiles as if there were no lists. Its compiled kernels are
  kept with those of the copied function, by a key that names their tiles.
- **Heads first.** flash-attn-4's grid takes all key tiles of a head before the next head, so the
  last head's longest lists begin last. Ours takes all heads of a key tile first. A subclass of the
  kernel turns the grid and reads it turned; its compiled kernels are its alone.
- **In float32.** If query heads share a kv head, the kernel adds dk and dv up in float32, in the
  order in which its registers hold a tile. A second kernel brings them into rows and rounds them.
  The gradients of imported rows, which ranks of a group return, must not be rounded before they are
  added up, so the accumulators are brought into rows here. The second kernel itself tells their
  order: it is given the places of a tile as numbers.

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
    """Copies `_flash_attn_bwd`, or a copy of it, with its own cache and other global names."""
    scope = dict(call.__globals__)
    copy: Any = FunctionType(call.__code__, scope, call.__name__, call.__defaults__)
    # it looks for its cache at its own name
    copy.compile_cache = compile_cache
    scope |= {call.__name__: copy, **names}
    return copy


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
    """Copies `_flash_attn_bwd`, or `heads_first`, with dense tiles."""
    return copied(call, call.compile_cache, {_tile_size_bwd_sm90.__name__: _tile_size_bwd_sm90})


class HeadsFirst(SingleTileScheduler):
    """Finds the tile and head of a block in a grid of heads x tiles."""

    @staticmethod
    def create(params: Any, ctx: Any = None, *, loc: Any = None, ip: Any = None) -> Any:
        head, tile, batch = cute.arch.block_idx()
        return SingleTileScheduler(params, (tile, head, batch), loc=loc, ip=ip)


class TurnedLaunch:
    """Launches a kernel of a grid of tiles x heads over heads x tiles."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def launch(self, *, grid: Any, **how: Any) -> Any:
        tiles, heads, batch = grid
        return self.kernel.launch(grid=(heads, tiles, batch), **how)


class HeadsFirstBackward(FlashAttentionBackwardSm90):
    """Changes the order by scheduler and grid, unless the kernel takes another scheduler."""

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
# a place in a tile is written as two digits, which 8 bits of mantissa hold
_BASE = 128


class _Conversion:
    """Replaces flash-attn-4's conversion of dK and dV, for one backward at a time."""

    def __init__(self, convert: Any) -> None:
        self.convert = convert
        # pairs of a tensor that flash-attn-4 is to write, and the float32 result
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
        in_rows = tiles.index_select(2, order).view(heads, -1, dim)[:, :rows]
        torch.mul(in_rows.transpose(0, 1), scale, out=wide)

    def _order(
        self, accumulated: torch.Tensor, out: torch.Tensor, *how: Any, **more: Any
    ) -> torch.Tensor:
        """Finds where each number of a tile is in an accumulated tile, int64 [rows x D]."""
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
    """Copies `_flash_attn_bwd`, or a copy of it, with our conversion."""
    conversion = _Conversion(getattr(interface, _CONVERT))
    # the kernels are the same
    return copied(call, call.compile_cache, {_CONVERT: conversion}), conversion


def in_float32(
    call: Any, *tensors: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, **how: Any
) -> Any:
    """Runs a backward whose query heads share kv heads, with float32 dk and dv [1, K, Hk, D].

    tensors are q, k, v, out, dout and lse; dk and dv are written. The results of `call` are
    returned, in which dk and dv hold nothing. Sequences of variable lengths are not served.
    """
    run, conversion = _converting(call)
    written = [torch.empty_like(x) for x in tensors[1:3]]
    conversion.wide = list(zip(written, (dk[0], dv[0]), strict=True))
    try:
        return run(*tensors, dk=written[0], dv=written[1], **how)
    finally:
        conversion.wide = []
