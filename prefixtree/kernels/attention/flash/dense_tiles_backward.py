"""flash-attn-4's backward over block lists, in the tiles of its dense backward.

At head dim 256 it works in tiles of 64 queries x 48 keys, with two stages of q and the products of
dk and dv turned, but given block lists it falls back to 64 x 64 keys with one stage. Nothing of
flash-attn-4 is changed for it: the copies choose tiles as if there were no lists. Their compiled
kernels are kept with those of the function that is copied, by a key that says their tiles. Every
name here that is flash-attn-4's is held by tests/kernels/attention/flash/fa4.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from flash_attn.cute import interface

from prefixtree.kernels.attention.flash.copied_call import copied


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
    """A copy of `_flash_attn_bwd`, or of that of `heads_first_backward`, with dense tiles."""
    return copied(call, call.compile_cache, {_tile_size_bwd_sm90.__name__: _tile_size_bwd_sm90})
