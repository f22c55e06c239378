"""What can be compiled for the CPU, and so run: the mask functions, as flash-attn-4 calls them, and
the lists, as it reads them."""

import itertools
from typing import Any

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
import torch
from cutlass import Int32
from cutlass.cute.runtime import from_dlpack
from flash_attn.cute import utils
from flash_attn.cute.block_sparsity import (
    BlockSparseTensors,
    BlockSparseTensorsTorch,
    to_cute_block_sparse_tensors,
)
from flash_attn.cute.mask import call_mask_mod
from flash_attn.cute.utils import AuxData

from prefixtree import PrefixForest
from prefixtree.kernels.flash import mask_mods, shared_out_backward, work_items
from prefixtree.kernels.flash.block_lists import Tiles, lists_of
from tests.support.strategies import mask_of, random_forest


@cute.jit
def every_pair(out: cute.Tensor, function: cutlass.Constexpr, aux: AuxData):
    for q in cutlass.range(cute.size(out.shape[0])):
        for k in cutlass.range(cute.size(out.shape[1])):
            zero = utils.scalar_to_ssa(Int32(0), Int32)
            seen = call_mask_mod(
                function,
                zero,
                zero,
                utils.scalar_to_ssa(q, Int32),
                utils.scalar_to_ssa(k, Int32),
                None,
                aux,
            )
            out[q, k] = Int32(1) if cutlass.Boolean(utils.ssa_to_scalar(seen)) else Int32(0)


def compiled(function: Any, arrays: int) -> Any:
    out = from_dlpack(torch.empty(2, 2, dtype=torch.int32), enable_tvm_ffi=True)
    aux = AuxData(None, (cutlass.Int64(0),) * arrays)
    options = "--enable-tvm-ffi"
    return cute.compile(every_pair, out.mark_layout_dynamic(1), function, aux, options=options)


@cute.jit
def entry(out: cute.Tensor, given: BlockSparseTensors, head: Int32, row: Int32, at: Int32):
    """As the kernels read an entry: the row first."""
    partial = given.mask_block_idx[0, head, row, None]
    full = given.full_block_idx[0, head, row, None]
    out[0] = given.mask_block_cnt[0, head, row]
    out[1] = given.full_block_cnt[0, head, row]
    out[2] = partial[at]
    out[3] = full[at]


def test_lists_are_read_as_they_are_written() -> None:
    """Through flash-attn-4's own conversion, rows that overlap in memory and rows that do not,
    by a function that was compiled for one forest and one direction."""
    heads, call = 3, None
    for seed, forest in enumerate(
        [
            PrefixForest.from_parents([-1, 0, 0], [70, 30, 40]),
            random_forest(np.random.default_rng(3), 12, 20),
        ]
    ):
        made = lists_of(mask_of(forest).host, Tiles(8, 8, 8), 0, torch.device("cpu"))
        for lists in (made.backward, made.forward):
            rows = lists.full_count.shape[2]
            arrays = [
                lists.partial_count.expand(1, heads, rows),
                lists.partial_index.expand(1, heads, rows, -1),
                lists.full_count.expand(1, heads, rows),
                lists.full_index.expand(1, heads, rows, -1),
            ]
            out = torch.zeros(4, dtype=torch.int32)
            if call is None:
                assert arrays[3].stride() == (arrays[3].stride(0), 0, 1, 1)
                given = to_cute_block_sparse_tensors(BlockSparseTensorsTorch(*arrays))
                call = cute.compile(
                    entry,
                    from_dlpack(out, enable_tvm_ffi=True),
                    given,
                    *[Int32(0)] * 3,
                    options="--enable-tvm-ffi",
                )
            for head, row in itertools.product(range(heads), range(rows)):
                most = min(arrays[1].shape[3], arrays[3].shape[3])
                for at in range(most):
                    call(out, (*arrays, None, None, None, None), head, row, at)
                    want = [x[0, head, row] for x in (arrays[0], arrays[2])]
                    want += [x[0, head, row, at] for x in (arrays[1], arrays[3])]
                    assert out.tolist() == [int(x) for x in want], (seed, row, at)


@pytest.mark.parametrize("window", [0, 1, 7])
def test_mask_functions_are_the_mask(window: int) -> None:
    function = mask_mods.visible_in_window if window else mask_mods.visible
    # one compiled function serves every forest and every window
    call = compiled(function, 3 if window else 1)
    for seed in range(8):
        mask = mask_of(random_forest(np.random.default_rng(seed), 12, 20))
        made = lists_of(mask.host, Tiles(16, 16, 16), window, torch.device("cpu"))
        arrays = [x for x in (made.spans, made.positions, made.reach) if x is not None]
        tokens = mask.num_tokens
        out = torch.full((tokens + 16, tokens + 16), -1, dtype=torch.int32)
        call(out, AuxData(None, tuple(mask_mods.address(x) for x in arrays)))
        assert torch.equal(out[:tokens, :tokens].bool(), mask.dense(window or None))
        # keys behind the last token are seen by none, whatever the query
        assert (out[:, tokens:] == 0).all() and (out >= 0).all()


# ---- work items ----------------------------------------------------------------------------------

GROUP = 4


@cute.jit
def an_item(
    out: cute.Tensor, given: BlockSparseTensors, place: Int32, kv_head: Int32, blocks: Int32
):
    """As the kernels read an item: lengths of lists first, then entry by entry."""
    item = shared_out_backward._Item.read(given, place, kv_head, GROUP, blocks)
    partial_count, partial, full_count, full = item.lists
    out[0], out[1], out[2] = item.tile, item.head, item.slot
    out[3], out[4] = partial_count[0, 0, 0], full_count[0, 0, 0]
    partial, full = partial[0, 0, 0, None], full[0, 0, 0, None]
    for i in cutlass.range(out[3]):
        out[5 + i] = partial[i]
    for i in cutlass.range(out[4]):
        out[5 + out[3] + i] = full[i]


def test_items_are_read_as_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every head's query blocks of every key tile, once."""
    monkeypatch.setattr(work_items, "LEAST", 12)
    forest = random_forest(np.random.default_rng(3), 12, 20)
    made = lists_of(mask_of(forest).host, Tiles(8, 8, 8, 4), 0, torch.device("cpu"))
    items, split = work_items.work_items(made.partial_visits, made.full_visits, GROUP, 2, 132)
    back = made.backward
    given = BlockSparseTensorsTorch(
        back.partial_count, back.partial_index, back.full_count, back.full_index
    )._replace(cu_total_m_blocks=torch.from_numpy(items).flatten())
    out = torch.zeros(5 + 12, dtype=torch.int32)
    call = cute.compile(
        an_item,
        from_dlpack(out, enable_tvm_ffi=True),
        to_cute_block_sparse_tensors(given),
        *[Int32(0)] * 3,
        options="--enable-tvm-ffi",
    )
    blocks = 1000
    want, found = [], []
    for name in ("partial", "full"):
        counts = getattr(back, f"{name}_count")[0, 0].tolist()
        for tile, n in enumerate(counts):
            listed = getattr(back, f"{name}_index")[0, 0, tile, :n].tolist()
            want += [(name, tile, h * blocks + m) for h in range(GROUP) for m in listed]
    for place, item in enumerate(items):
        call(out, (*given[:6], *given[7:9]), place, 1, blocks)
        tile, head, slot, partial, full = out[:5].tolist()
        assert head == GROUP and tile == item[0]
        assert slot == (split.tolist().index(tile) if tile in split else -1)
        entries = out[5 : 5 + partial + full].tolist()
        found += [("partial", tile, m) for m in entries[:partial]]
        found += [("full", tile, m) for m in entries[partial:]]
    assert len(split) and (items[:, 2] > 1).any()
    assert sorted(found) == sorted(want)


@cute.jit
def first_rows(out: cute.Tensor, tokens: Int32, heads: Int32):
    """The row and head at which each query block of the second group begins."""
    x = cute.make_identity_tensor((tokens, 16, heads, 1))
    blocks = cute.ceil_div(tokens, 8)
    x = shared_out_backward.of_group(x, 8, blocks, GROUP)[None, None, GROUP, 0]
    tiles = cute.group_modes(cute.local_tile(x, (8, 16), (None, 0)), 0, 2)
    for block in cutlass.range(GROUP * blocks):
        place = tiles[None, block][0]
        out[block, 0], out[block, 1] = place[0], place[2]


@pytest.mark.parametrize("tokens", [1, 8, 37])
def test_query_blocks_of_a_group_follow_one_another(tokens: int) -> None:
    blocks = -(-tokens // 8)
    out = torch.zeros(GROUP * blocks, 2, dtype=torch.int32)
    first_rows(from_dlpack(out), tokens, 8)
    want = [[8 * m, GROUP + h] for h in range(GROUP) for m in range(blocks)]
    assert out.tolist() == want
