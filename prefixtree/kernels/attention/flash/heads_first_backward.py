"""flash-attn-4's backward, with the heads of a key tile beside one another.

Its grid takes all key tiles of a head before the next head, so that the last head's longest lists
are begun last; ours takes all heads of a key tile. Nothing of flash-attn-4 is changed for it: the
kernel is a subclass, which turns the grid and reads it turned, and `flash_attn_bwd` is a copy of
the function that names this subclass, with compiled kernels of its own. Every name here that is
flash-attn-4's is held by tests/kernels/attention/flash/fa4.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from flash_attn.cute import interface
from flash_attn.cute.flash_bwd_sm90 import FlashAttentionBackwardSm90
from flash_attn.cute.tile_scheduler import SingleTileScheduler

from prefixtree.kernels.attention.flash import copied_call
from prefixtree.kernels.attention.flash.disk_cache import cache_of


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


flash_attn_bwd = copied_call.copied(
    interface._flash_attn_bwd,
    cache_of("heads_first", __file__, copied_call.__file__),
    {FlashAttentionBackwardSm90.__name__: HeadsFirstBackward},
)
