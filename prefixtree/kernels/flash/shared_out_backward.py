"""flash-attn-4's backward over work items (`work_items`) in place of key tiles x query heads.

The m blocks of the query heads of a kv head are numbered one head after the other: block m of head
h of the group is h x M + m. Where statistics and the accumulator of dq lie, that is what is there
already: rows of a head follow those of the head before, padded to whole blocks. The copy of q and
dout is given a layout that says so. Masks are given m alone.

Nothing of flash-attn-4 is changed for it, see `heads_first_backward`: the kernel is a subclass, and
`flash_attn_bwd` a copy of the function that names this subclass. Every name here that is
flash-attn-4's is held by tests/kernels/flash/fa4.

Legend: M query blocks of a head.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any

import cutlass.cute as cute
import torch
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync
from flash_attn.cute import block_sparsity, interface
from flash_attn.cute.block_info import BlockInfo
from flash_attn.cute.cache_utils import JITCache
from flash_attn.cute.flash_bwd_sm90 import FlashAttentionBackwardSm90
from flash_attn.cute.tile_scheduler import SingleTileScheduler

from prefixtree.kernels.flash import mask_mods
from prefixtree.kernels.flash.copied_call import copied
from prefixtree.kernels.flash.work_items import FIELDS


class _AllHeads(BlockInfo):
    """Query blocks of all heads: the lists say which there are."""

    def get_m_block_min_max(self, seqlen_info: Any, n_block: Any) -> Any:
        return 0, Int32(2**31 - 1)


class _Value:
    """A number in the place of a tensor of counts."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __getitem__(self, place: Any) -> Any:
        return self.value


class _Entries:
    """A part of a list, for several heads in turn, in the place of a list."""

    def __init__(self, row: Any, first: Any, count: Any, head: Any, blocks: Any) -> None:
        self.row, self.first, self.count, self.head, self.blocks = row, first, count, head, blocks

    def __getitem__(self, i: Any) -> Any:
        turn = i // self.count
        block = self.row[self.first + i - turn * self.count]
        return (self.head + turn) * self.blocks + block


@dataclass
class _Item:
    """What this block of threads does; `counts` and `entries`: of the partial and full lists."""

    tile: Any
    head: Any
    lists: tuple[Any, ...]
    slot: Any

    @classmethod
    def read(cls, lists: Any, place: Any, kv_head: Any, group: int, blocks: Any) -> _Item:
        items = lists.cu_total_m_blocks
        field = [items[place * FIELDS + i] for i in range(FIELDS)]
        views: list[Any] = []
        for index, first, count in (
            (lists.mask_block_idx, *field[3:5]),
            (lists.full_block_idx, *field[5:7]),
        ):
            row = index[0, 0, field[0], None]
            entries = _Entries(row, first, count, field[1], blocks)
            views += [_Value(count * field[2]), _Value(entries)]
        return cls(field[0], kv_head * group, tuple(views), field[7])


def of_group(x: Any, tile: int, blocks: Any, group: int) -> Any:
    """Rows x D x heads x batch with the rows of the heads that follow behind a head's own."""
    d, heads, batch = x.shape[1:]
    row, column, head, outer = x.stride
    layout = cute.make_layout(
        ((tile, (blocks, group)), d, heads, batch),
        stride=((row, (row * tile, head)), column, head, outer),
    )
    return cute.make_tensor(x.iterator, layout)


def _named(function: Any, *given: Any) -> dict[str, Any]:
    """Arguments by the names of the parameters."""
    return inspect.signature(function).bind(*given).arguments


class SharedOutBackward(FlashAttentionBackwardSm90):
    """Loads, products and stores over items; `turned`: the kv heads of an item beside another."""

    turned = False
    qhead_per_kvhead: int

    def kernel(self, *given: Any) -> Any:
        lists = next(x for x in given if isinstance(x, block_sparsity.BlockSparseTensors))
        count = cute.size(lists.cu_total_m_blocks) // FIELDS
        return _Launch(super().kernel(*given), count, self.qhead_per_kvhead, self.turned)

    def load(self, *given: Any) -> Any:
        return self._over_item(super().load, given)

    def mma(self, *given: Any, is_dQ_wg: bool = True) -> Any:
        return self._over_item(partial(super().mma, is_dQ_wg=is_dQ_wg), given)

    def dQaccum_store(self, *given: Any) -> Any:
        return self._over_item(super().dQaccum_store, given)

    def mma_one_m_block(self, m_block: Any, *given: Any, **more: Any) -> Any:
        return super().mma_one_m_block(m_block % self._blocks, *given, **more)

    def _over_item(self, run: Any, given: tuple[Any, ...]) -> Any:
        bound = inspect.signature(run).bind(*given)
        named = bound.arguments
        rows = named["SeqlenInfoCls"](Int32(0)).seqlen_q
        blocks = cute.ceil_div(rows, self.tile_m)
        x, y, _ = cute.arch.block_idx()
        place, kv_head = (y, x) if self.turned else (x, y)
        group = self.qhead_per_kvhead
        item = _Item.read(named["blocksparse_tensors"], place, kv_head, group, blocks)
        named["blocksparse_tensors"] = item.lists
        info = named["block_info"]
        named["block_info"] = _AllHeads(**{x: getattr(info, x) for x in info.__dataclass_fields__})
        (params,) = named["TileSchedulerCls"].args
        named["TileSchedulerCls"] = partial(
            SingleTileScheduler, params, (item.tile, item.head, Int32(0))
        )
        for name in ("mQ", "mdO"):
            if name in named:
                named[name] = of_group(named[name], self.tile_m, blocks, group)
        self._blocks, self._slot = blocks, item.slot
        return run(*bound.args, **bound.kwargs)


class _Launch:
    """A kernel that is about to be launched over tiles x heads, and will be over the items."""

    def __init__(self, kernel: Any, count: Any, group: int, turned: bool) -> None:
        self.kernel, self.count, self.group, self.turned = kernel, count, group, turned

    def launch(self, *, grid: Any, **how: Any) -> Any:
        _, heads, batch = grid
        of = (self.count, heads // self.group)
        return self.kernel.launch(grid=(*(reversed(of) if self.turned else of), batch), **how)


class TurnedSharedOutBackward(SharedOutBackward):
    turned = True


def _normalized(lists: Any, **about: Any) -> Any:
    """Lists for all heads; flash-attn-4 would refuse a table of items among them."""
    heads = about["num_head"]
    names = ("mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx")
    whole = {x: getattr(lists, x) for x in names}
    lists = lists._replace(
        **{x: of.expand(-1, heads, *[-1] * (of.ndim - 2)) for x, of in whole.items()}
    )
    return lists, block_sparsity.get_block_sparse_broadcast_pattern(lists)


def _made(kernel: type, **more: Any) -> Any:
    names = {
        FlashAttentionBackwardSm90.__name__: kernel,
        "normalize_block_sparse_config_bwd": _normalized,
        **more,
    }
    return copied(interface._flash_attn_bwd, JITCache(), names)


flash_attn_bwd = _made(SharedOutBackward)
turned_flash_attn_bwd = _made(TurnedSharedOutBackward)


# ---- dk and dv stored where one item has all of them ---------------------------------------------


class StoringBackward(SharedOutBackward):
    """An item that does all of a key tile stores dk and dv, rounded, as where query heads are not
    grouped. Others add theirs up in float32, in a slot per key tile."""

    def kernel(self, *given: Any) -> Any:
        bound = inspect.signature(FlashAttentionBackwardSm90.kernel).bind(self, *given)
        named = bound.arguments
        rows, depth, kv_heads = named["mK"].shape[0], self.tile_hdim, named["mK"].shape[2]
        step = cute.assume(kv_heads * depth, divby=8)
        layout = cute.make_layout((rows, depth, kv_heads, 1), stride=(step, 1, depth, step))
        for name, at, smem in (("dK", -2, self.sK_layout), ("dV", -1, self.sV_layout)):
            address = named["aux_data"].scalars[at]
            pointer = cute.make_ptr(self.dtype, address, cute.AddressSpace.gmem, assumed_align=16)
            named[f"tma_atom_{name}"], _ = cpasync.make_tiled_tma_atom(
                cpasync.CopyBulkTensorTileS2GOp(),
                cute.make_tensor(pointer, layout),
                cute.select(smem, mode=[0, 1]),
                (self.tile_n, depth),
            )
        return super().kernel(*bound.args[1:])

    def load(self, *given: Any) -> Any:
        # dk and dv have its shape, and the copy engine's coordinates
        self._keys = _named(FlashAttentionBackwardSm90.load, self, *given)["mK"]
        return super().load(*given)

    def mma(self, *given: Any, is_dQ_wg: bool = True) -> Any:
        self._scale = _named(FlashAttentionBackwardSm90.mma, self, *given)["softmax_scale"]
        return super().mma(*given, is_dQ_wg=is_dQ_wg)

    @cute.jit
    def epilogue_dKV(
        self,
        acc_dV,
        mdV,
        sV,
        acc_dK,
        mdK,
        sK,
        seqlen,
        tma_atom_dK,
        tma_atom_dV,
        tiled_mma_dK,
        tiled_mma_dV,
        tidx,
        n_block,
        head_idx,
        batch_idx,
        qhead_per_kvhead_divmod=None,
        mdK_semaphore=None,
        mdV_semaphore=None,
    ):
        middle = (seqlen, tma_atom_dK, tma_atom_dV, tiled_mma_dK, tiled_mma_dV, tidx)
        if self._slot < 0:
            head = head_idx // qhead_per_kvhead_divmod
            acc_dK.store(acc_dK.load() * self._scale)
            self._store(acc_dV, sV, acc_dK, sK, middle, (n_block, head, batch_idx))
        else:
            self._add(
                (acc_dV, mdV, sV, acc_dK, mdK, sK, *middle, self._slot, head_idx, batch_idx),
                qhead_per_kvhead_divmod,
            )

    def _store(self, acc_dv: Any, s_v: Any, acc_dk: Any, s_k: Any, middle: Any, at: Any) -> None:
        group, self.qhead_per_kvhead = self.qhead_per_kvhead, 1
        try:
            FlashAttentionBackwardSm90.epilogue_dKV(
                self, acc_dv, self._keys, s_v, acc_dk, self._keys, s_k, *middle, *at
            )
        finally:
            self.qhead_per_kvhead = group

    def _add(self, given: Any, group: Any) -> None:
        FlashAttentionBackwardSm90.epilogue_dKV(self, *given, group)


@dataclass(frozen=True)
class Slots:
    """The rows of dk and dv that are added up in float32.

    Attributes:
        count: slots, each of the keys of a tile.
        rows, places: int64 [n], rows of dk and dv, and where they lie in the slots.
    """

    count: int
    rows: torch.Tensor
    places: torch.Tensor


class _Torch:
    """`torch` in the place of flash-attn-4's, of which it makes accumulators of slots alone.

    Its backward runs in one thread at a time.
    """

    def __init__(self) -> None:
        self.elements = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *shape: int, **how: Any) -> torch.Tensor:
        assert len(shape) == 3, "flash-attn-4 makes other accumulators"
        return torch.zeros(*shape[:2], self.elements, **how)


class _Conversion:
    """In the place of flash-attn-4's: of dk and dv, the slots."""

    def __init__(self) -> None:
        self.slots: tuple[tuple[torch.Tensor, ...], Slots, int] | None = None

    def __call__(
        self, accumulated: torch.Tensor, out: torch.Tensor, *how: Any, **more: Any
    ) -> None:
        assert self.slots is not None
        grads, slots, keys = self.slots
        convert = interface._bwd_postprocess_convert
        if not any(out is x for x in grads):
            convert(accumulated, out, *how, **more)
        elif slots.count:
            rows = out.new_empty(1, slots.count * keys, *out.shape[2:])
            convert(accumulated, rows, *how, **more)
            out[0].index_copy_(0, slots.rows, rows[0].index_select(0, slots.places))


_torch, _conversion = _Torch(), _Conversion()
_storing = _made(StoringBackward, torch=_torch, _bwd_postprocess_convert=_conversion)


def storing_flash_attn_bwd(
    *tensors: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    aux_scalars: tuple[Any, ...],
    block_sparse_tensors: Any,
    slots: Slots,
    **how: Any,
) -> Any:
    """`_flash_attn_bwd` with dk and dv stored by the items that have all of a key tile.

    Args:
        tensors, dk, dv, aux_scalars, block_sparse_tensors, how: its arguments.
        slots: of the key tiles that have several items.
    """
    keys = block_sparse_tensors.block_size[1]
    _torch.elements = max(1, slots.count) * keys * dk.shape[-1]
    _conversion.slots = ((dk, dv), slots, keys)
    try:
        return _storing(
            *tensors,
            dk=dk,
            dv=dv,
            aux_scalars=(*aux_scalars, mask_mods.address(dk), mask_mods.address(dv)),
            block_sparse_tensors=block_sparse_tensors,
            **how,
        )
    finally:
        _conversion.slots = None


storing_flash_attn_bwd.compile_cache = _storing.compile_cache  # type: ignore[attr-defined]
storing_globals = _storing.__globals__
