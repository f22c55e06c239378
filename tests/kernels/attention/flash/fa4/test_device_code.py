"""Code that can be compiled for the CPU and run: the mask functions, as flash-attn-4 calls them,
and the lists, as it reads them."""

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
from prefixtree.kernels.attention.flash import mask_mods
from prefixtree.kernels.attention.flash.block_lists import Tiles, lists_of
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


@pytest.mark.parametrize("window", [0, 7])
def test_mask_functions_of_rows_are_the_mask(window: int) -> None:
    both = mask_mods.visible_to_rows, mask_mods.visible_in_window_to_rows
    call = compiled(both[window > 0], 4 if window else 2)
    for seed in range(8):
        whole = mask_of(random_forest(np.random.default_rng(seed), 20, 30))
        end = whole.num_tokens
        mask = whole.for_queries([(2, 18), (20, 52), (end - 5, end)])
        made = lists_of(mask.host, Tiles(16, 16, 16), window, torch.device("cpu"))
        arrays = [made.spans, made.positions, made.reach, made.query_tokens]
        rows, tokens = mask.num_queries, mask.num_tokens
        out = torch.full((rows + 16, tokens + 16), -1, dtype=torch.int32)
        given = tuple(mask_mods.address(x) for x in arrays if x is not None)
        call(out, AuxData(None, given))
        assert torch.equal(out[:rows, :tokens].bool(), mask.dense(window or None))
        # keys behind the last token are seen by none, and rows behind the last see none
        assert (out[:, tokens:] == 0).all() and (out[rows:] == 0).all()
