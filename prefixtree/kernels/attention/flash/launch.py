"""The host side of the flash backend: what flash-attn-4 serves, and its calls. No synchronisation.

Legend: T packed tokens, H query heads, Hk kv heads, D and Dv head dims.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from dataclasses import dataclass
from functools import cache, partial
from importlib import metadata
from typing import Any

import torch

from prefixtree.kernels import runtime
from prefixtree.kernels.attention.flash.block_lists import (
    ForestLists,
    Lists,
    Tiles,
    chains_of,
    lists_of,
)
from prefixtree.kernels.attention.flash.disk_cache import keep_on_disk
from prefixtree.kernels.attention.protocol import CHOSEN, AttentionCall
from prefixtree.packing.copies import RowRuns
from prefixtree.packing.host_mask import HostMask

# `_flash_attn_fwd` and `_flash_attn_bwd` are not public: the public function is an autograd node,
# which a registered operator cannot take apart. So one version; tests/kernels/attention/flash/fa4
# holds what we rely on
VERSION = "4.0.0b36"
# head dims (of q and k, of v) that tests/kernels/attention/flash/test_on_gpu.py holds to the bounds
# on an H200. Gradients of others may be wrong, silently: flash-attn-4's backward writes
# accumulators as wide as the head dim rounded up to 16 and reads them as rounded up to 32, which
# differ for 16, 80, 112 and others, with block lists and without (Dao-AILab/flash-attention, pull
# request 2896; tests/kernels/attention/flash/fa4 says when that is mended)
SERVED = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
# the tail (`heads_first`) from which on the backward takes the heads of a key tile first. Tails of
# the benchmarks' workloads, in thousandths, and the change of the backward's time on an H200 (bf16,
# 32 / 8 heads, D 128; the forward gained 3 to 6 % on the prompts of short responses and lost
# 1 to 5 % elsewhere, and keeps its order):
#   documents 32 x 4K            8   + 3 %    caterpillar 12             139
#   prompt 32K x 16 x 2K        21            caterpillar 24             163   - 1 %
#   8 x (2K, 8 x 512, ..)       27            prompt 512 x 64 x 1K       488   -19 %
#   prompt 8K x 16 x 2K         64            prompt 256 x 1024 x 256  1,179   -35 %
#   4K then 4-2-2-1 x 1K        83     0 %
#   airline per turn           120   + 3 %
HEADS_FIRST_FROM = 0.28
# query tokens per list (`ForestLists.mean_list`) from which on the backward takes the tiles of
# flash-attn-4's dense backward, at head dim 256: 48 keys, where it takes 64 with block lists. A
# visit of 64 queries then takes 2.4 us instead of 4.4. But there are a third more key tiles, and
# the start and end of a block of threads, one per key tile and query head, take 29 us instead of 13
# (benchmarks/notebook.md). Break-even is at about 1,450 tokens. Milliseconds of the backward on an
# H200 (bf16, 16 / 2 heads; benchmarks/results/h200/tiles.json), with 64 keys and with 48:
#   prompt 512 x 64 x 1K     1,129   11.2  12.6     airline per turn       4,367   82.9  66.7
#   caterpillar 24           3,117   46.2  37.0     4K then 4-2-2-1 x 1K   6,409   41.4  34.1
DENSE_TILES_FROM = 1500
# rows of a query tile of the forward, whatever the head dim: lists are over as many queries
TILE_ROWS = 128
# key tiles are the second dimension of that grid
MOST_TILES = 65535
# numbers of out that are multiplied at once in float32
_CHUNK = 1 << 24
# the CuTe DSL compiles in one thread at a time; in two (autograd has one per device) it raises or
# takes the process down. Only flash-attn-4 knows which call compiles, so every call holds this
_TURN = threading.RLock()


def refusal(call: AttentionCall) -> str | None:
    """Says why this backend cannot serve a call; None if it can."""
    q = call.q
    version = installed()
    if version != VERSION:
        return (
            f"it needs flash-attn-4 {VERSION} (pip install 'prefixtree-attention[fa4]'), and "
            f"{'it is not installed' if version is None else f'{version} is installed'}"
        )
    if not q.is_cuda or torch.version.hip is not None:
        return f"it runs on NVIDIA GPUs, and q is on {'an AMD GPU' if q.is_cuda else q.device}"
    if (capability := runtime.capability(q.device))[0] != 9:
        return (
            "it was compiled and checked for compute capability 9.x (Hopper), and this is "
            f"{capability[0]}.{capability[1]}"
        )
    return refused_features(call) or import_problem()


def refused_features(call: AttentionCall) -> str | None:
    """Says why the call, and not the machine, is refused; None if it is served."""
    q, v = call.q, call.v
    d, d_v = q.shape[2], v.shape[2]
    if call.chosen is not None:
        return CHOSEN
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 and bfloat16, and q is {q.dtype}"
    if (d, d_v) not in SERVED:
        equal = ", ".join(str(a) for a, b in SERVED if a == b)
        other = ", ".join(f"{a} with {b} of v" for a, b in SERVED if a != b)
        return (
            f"head dims {d} and {d_v} are not among those checked on a GPU ({equal}; {other}), and "
            "with some, 80 among them, its gradients are wrong"
        )
    if d != d_v and q.shape[1] != v.shape[1]:
        return f"its backward takes head dims that differ ({d} and {d_v}) without grouped queries"
    if not call.scale > 0:
        return f"scale must be above 0, and is {call.scale}"
    if call.deterministic:
        return "flash-attn-4 has no deterministic backward with block lists on Hopper"
    if call.wide and q.shape[1] == v.shape[1]:
        return (
            "without grouped queries its backward rounds dk and dv to q's dtype; those of a part "
            "are summed in float32"
        )
    return None


@cache
def installed() -> str | None:
    """Finds the installed version of flash-attn-4, or None."""
    try:
        return metadata.version("flash-attn-4")
    except metadata.PackageNotFoundError:
        return None


@cache
def import_problem() -> str | None:
    """Says why flash-attn-4, though installed, cannot be imported; None if it can."""
    keep_on_disk()
    try:
        # packages that it imports warn of deprecations, which must not fail where warnings raise
        with warnings.catch_warnings(action="ignore"):
            from flash_attn.cute import interface  # noqa: F401
    except Exception as problem:  # packages that it imports raise errors of many types
        return f"flash-attn-4 is installed but cannot be imported ({problem!r})"
    # the CuTe DSL warns, each time that flash-attn-4 compiles, of arguments that it then takes
    warnings.filterwarnings("ignore", r"Argument aux_data .* cannot be converted", UserWarning)
    return None


@cache
def tiles_for(d: int, d_v: int) -> Tiles:
    """The tiles that flash-attn-4 takes on Hopper by itself, given lists over 128 queries."""
    if d <= 128:
        return Tiles(TILE_ROWS, 128, 128)
    if d <= 192:
        return Tiles(TILE_ROWS, 128 if d_v <= 128 else 112, 96)
    return Tiles(TILE_ROWS, 80, 64)


@cache
def dense_tiles_for(d: int, d_v: int) -> Tiles | None:
    """The tiles of `backwards.in_dense_tiles`, if they differ and were measured to be faster."""
    return Tiles(TILE_ROWS, 80, 48) if (d, d_v) == (256, 256) else None


def packs_heads(group: int, d: int) -> bool:
    """Whether a tile of the forward holds 128 / group tokens of each query head of a kv head."""
    # otherwise it holds 128 tokens of one head, and as many tiles are visited. The copy engine
    # cannot load a packed group that does not divide 128. Four warps then copy q row by row, out
    # goes back the same way, and their registers come from those of the products, which spill 480
    # bytes per thread at head dim 192 and 4 KB at 256, and nothing up to 128. Forward of 24 / 4
    # heads on agent turns, one H200 (benchmarks/results/h200/pack_gqa.json), packed and apart: D
    # 256 34.6 and 6.6 ms, D 192 6.4 and 5.0, D 128 3.6 and 3.7, D 96 3.2 and 3.3
    return group > 1 and (d <= 128 or TILE_ROWS % group == 0)


def forward(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes out [Tq, H, Dv] in q's dtype, and lse [H, Tq] float32 over the keys."""
    v = call.v
    if call.q.shape[0] == 0:
        heads = call.q.shape[1]
        lse = call.q.new_empty(heads, 0, dtype=torch.float32)
        return call.q.new_empty(0, heads, v.shape[2]), lse
    from flash_attn.cute import interface

    arguments = _given(call)
    queries = Queries(call, arguments.lists)
    q, k = queries.spread(call.q), call.k
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    inside, around = _sinks_where(call.sinks, call.lse_used)
    with _TURN, runtime.current(q.device):
        interface._flash_attn_fwd(
            *arguments.rows(q, k, v),
            softmax_scale=call.scale,
            learnable_sink=inside,
            score_mod=_score_functions(call.softcap)[0],
            pack_gqa=packs_heads(q.shape[1] // k.shape[1], q.shape[2]),
            return_lse=True,
            **dict(zip(("out", "lse"), arguments.rows(out, lse), strict=True)),
            **arguments.forward,
        )
    out, lse = queries.own(out), queries.own_columns(lse)
    if around is not None:
        out *= keys_share(lse, around)
    return out, lse if inside is None else keys_lse(lse, inside)


def backward(
    call: AttentionCall,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Computes dq, dk, dv in the inputs' dtypes, contiguous, and dsinks."""
    q, k, v, sinks = call.q, call.k, call.v, call.sinks
    wide = torch.float32 if call.wide else None
    dk, dv = (x.new_empty(x.shape, dtype=wide) for x in (k, v))
    if q.shape[0] == 0:
        return torch.empty_like(q), dk.zero_(), dv.zero_(), _zeros_like(sinks)
    arguments = _given(call)
    inside, around = _sinks_where(sinks, dlse is not None)
    total = lse if inside is None else torch.logaddexp(lse, inside.unsqueeze(1))
    scaled_dout = dout
    if around is not None:
        share = keys_share(lse, around)
        scaled_dout = torch.mul(dout, share, out=dout.new_empty(dout.shape))
    queries = Queries(call, arguments.lists)
    spread_q, *rows = (queries.spread(x) for x in (q, out, scaled_dout))
    spread_dlse = None if dlse is None else queries.spread_columns(dlse)
    dq = spread_q.new_empty(spread_q.shape)
    score, score_gradient = _score_functions(call.softcap)
    with _TURN, runtime.current(q.device):
        run = _backward_call(
            arguments.lists is not None
            and heads_first(arguments.lists, q.shape[1], runtime.processors(q.device)),
            arguments.in_dense_tiles,
            call.wide,
        )
        results = run(
            *arguments.rows(spread_q, k, v, *rows, queries.spread_columns(total)),
            softmax_scale=call.scale,
            score_mod=score,
            score_mod_bwd=score_gradient,
            dlse=None if spread_dlse is None else arguments.rows(spread_dlse)[0],
            learnable_sink=inside,
            **dict(zip(("dq", "dk", "dv"), arguments.rows(dq, dk, dv), strict=True)),
            **arguments.backward,
        )
    dq = queries.own(dq)
    if sinks is None:
        return dq, dk, dv, None
    dsinks = results[3] if around is None else sinks_gradient(dout, out, lse, around)
    return dq, dk, dv, dsinks.to(sinks.dtype)


def _zeros_like(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else torch.zeros_like(x)


# ---- queries of a part ---------------------------------------------------------------------------


class Queries:
    """Rows of q in the form that the lists need."""

    # if a mask `for_queries(...)` has tiles of neighbouring tokens, the lists are over its rows;
    # otherwise they are square, and tokens without a row get zeros: their scores are 0, and so are
    # their dout and its factors, so they add nothing to dk and dv; tiles of such tokens alone are
    # hardly visited (`block_lists`)

    def __init__(self, call: AttentionCall, lists: ForestLists | None) -> None:
        mask, device = call.mask, call.q.device
        self._count = mask.num_tokens
        self._rows = None
        if mask.is_subset and (lists is None or lists.query_tokens is None):
            by_device = _query_rows.setdefault(mask, {})
            if device not in by_device:
                start, _, length = mask.query_runs.T
                by_device[device] = RowRuns(start, length, device)
            self._rows = by_device[device]

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """Spreads x [rows of q, ...] to one row per packed token."""
        return x if self._rows is None else self._rows.spread(x, self._count)

    def spread_columns(self, x: torch.Tensor) -> torch.Tensor:
        """Spreads x [H, rows of q] to one column per packed token."""
        if self._rows is None:
            return x
        out = x.new_zeros(x.shape[0], self._count)
        return out.index_copy_(1, self._rows.index, x)

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """Takes the rows of q."""
        if self._rows is None:
            return x
        return self._rows.take(x, x.new_empty(self._rows.count, *x.shape[1:]))

    def own_columns(self, x: torch.Tensor) -> torch.Tensor:
        """Takes the columns of q's rows."""
        return x if self._rows is None else x.index_select(1, self._rows.index)


# rows live as long as their mask
_query_rows: weakref.WeakKeyDictionary[HostMask, dict[torch.device, RowRuns]] = (
    weakref.WeakKeyDictionary()
)


# ---- tiles of the backward and their order -------------------------------------------------------


def lists_and_tiles(call: AttentionCall) -> tuple[ForestLists, Tiles]:
    """Gives a call's block lists and their tiles, the same for its forward and its backward."""
    dims = call.q.shape[2], call.v.shape[2]
    if (dense := dense_tiles_for(*dims)) is not None:
        lists = lists_of(call.mask, dense, call.window, call.q.device)
        # lists over both tilings are made only if those over dense tiles are too short
        if lists.mean_list >= DENSE_TILES_FROM:
            return lists, dense
    tiles = tiles_for(*dims)
    return lists_of(call.mask, tiles, call.window, call.q.device), tiles


def heads_first(lists: ForestLists, heads: int, processors: int) -> bool:
    """Whether the backward takes the heads of a key tile before the next key tile."""
    # a key tile's list is one block's work. In flash-attn-4's order the longest list (a prompt's)
    # of the last head begins last and may leave a tail: its length over a multiprocessor's share of
    # all work
    tail = lists.longest_list_share * processors / heads
    return tail > HEADS_FIRST_FROM and lists.backward.full_count.shape[2] <= MOST_TILES


def _backward_call(heads_first: bool, in_dense_tiles: bool, wide: bool) -> Any:
    from flash_attn.cute import interface

    if not (heads_first or in_dense_tiles or wide):
        return interface._flash_attn_bwd
    from prefixtree.kernels.attention.flash import backwards

    call = backwards.heads_first if heads_first else interface._flash_attn_bwd
    if in_dense_tiles:
        call = backwards.in_dense_tiles(call)
    return partial(backwards.in_float32, call) if wide else call


# ---- sinks ---------------------------------------------------------------------------------------
# flash-attn-4's lse is over the keys and the sink. Ours, which the operator returns and saves, is
# over the keys alone. If a sink takes nearly everything, the sum of both has forgotten the keys:
# lse would be off by units, its gradient would come back multiplied by exp(sink - lse), and dsinks
# would be a small difference of large sums. So if lse or its gradient counts, the kernels run
# without the sink, which is applied around them: with s the keys' share of the softmax and
# x = softmax v,
#
#     out = s x    ds = softmax (dp s - (dout . out) s + dlse)    dv = softmax^T (dout s)
#
# which is the kernel's backward for dout s in place of dout, given our out.


def _sinks_where(
    sinks: torch.Tensor | None, lse_counts: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Splits float32 sinks into those that the kernel takes, and those applied around it."""
    wide = None if sinks is None else sinks.float()
    return (None, wide) if lse_counts else (wide, None)


def keys_lse(total: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Computes lse over the keys, [H, T], from that over keys and sink; for a backward alone."""
    # if a sink takes nearly everything, the error grows with exp(sink - lse), and lse stays within
    # 16 of the total; the backward adds the sink again, which undoes it
    share = (sinks.unsqueeze(1) - total).clamp(max=-(2.0**-23))
    return total + torch.log(-torch.expm1(share))


def keys_share(lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Computes the keys' share of the softmax, float32 [T, H, 1]."""
    return torch.sigmoid(lse - sinks.unsqueeze(1)).t().unsqueeze(2)


def sinks_gradient(
    dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """Computes float32 [H]: minus the sum over rows of the sink's share times dout . out."""
    rows = max(1, _CHUNK // (out.shape[1] * out.shape[2]))
    parts = zip(dout.split(rows), out.split(rows), strict=True)
    delta = torch.cat([(a.float() * b.float()).sum(2) for a, b in parts])
    return -(torch.sigmoid(sinks.unsqueeze(1) - lse) * delta.t()).sum(1)


# ---- arguments -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Given:
    """The keyword arguments of either call that say what a query sees, and its block lists."""

    forward: dict[str, Any]
    backward: dict[str, Any]
    # None for chains, whose tensors have no batch dimension
    lists: ForestLists | None
    in_dense_tiles: bool = False

    def rows(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Brings tensors into flash-attn-4's form: a batch of one, except for chains."""
        # flash-attn-4 copies tensors whose last stride is not 1. It takes expanded tensors (the
        # gradient of a sum) as they are, but no key of a compiled kernel holds strides, so those
        # are copied
        whole = (x.contiguous() if 0 in x.stride() else x for x in tensors)
        return [x if self.lists is None else x.unsqueeze(0) for x in whole]


def _given(call: AttentionCall) -> _Given:
    chains = None if call.wide else chains_of(call.mask, call.q.device)
    if chains is not None:
        arguments = chains.arguments(call.window)
        return _Given(arguments, arguments, None)
    lists, tiles = lists_and_tiles(call)
    in_dense_tiles = tiles == dense_tiles_for(call.q.shape[2], call.v.shape[2])
    return _Given(*_arguments_of(lists, tiles), lists, in_dense_tiles)


# arguments live as long as their lists, and lists as long as their mask
_made: weakref.WeakKeyDictionary[ForestLists, tuple[dict[str, Any], dict[str, Any]]] = (
    weakref.WeakKeyDictionary()
)


def _arguments_of(lists: ForestLists, tiles: Tiles) -> tuple[dict[str, Any], dict[str, Any]]:
    pair = _made.get(lists)
    if pair is None:
        mask = _mask_arguments(lists)
        forward = _block_sparse(lists.forward, tiles.queries, tiles.forward_keys)
        backward = _block_sparse(lists.backward, tiles.queries, tiles.backward_keys)
        pair = _made[lists] = (
            {"block_sparse_tensors": forward, **mask},
            {"block_sparse_tensors": backward, **mask},
        )
    return pair


def _block_sparse(lists: Lists, queries: int, keys: int) -> Any:
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    return BlockSparseTensorsTorch(
        mask_block_cnt=lists.partial_count,
        mask_block_idx=lists.partial_index,
        full_block_cnt=lists.full_count,
        full_block_idx=lists.full_index,
        block_size=(queries, keys),
    )


def _mask_arguments(lists: ForestLists) -> dict[str, Any]:
    from prefixtree.kernels.attention.flash import mask_mods

    to_rows = lists.query_tokens is not None
    if lists.positions is None or lists.reach is None:
        arrays = [lists.spans]
        function = mask_mods.visible_to_rows if to_rows else mask_mods.visible
    else:
        arrays = [lists.spans, lists.positions, lists.reach]
        function = mask_mods.visible_in_window_to_rows if to_rows else mask_mods.visible_in_window
    if lists.query_tokens is not None:
        arrays.append(lists.query_tokens)
    return {"mask_mod": function, "aux_scalars": tuple(mask_mods.address(x) for x in arrays)}


def _score_functions(softcap: float) -> tuple[Any, Any]:
    if not softcap:
        return None, None
    from prefixtree.kernels.attention.flash import mask_mods

    return mask_mods.softcap(softcap)
