"""Everything that the flash backend relies on in flash-attn-4: another version fails readably."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path
from types import FunctionType

import cutlass
import pytest
import torch
from flash_attn.cute import block_sparsity, cache_utils, interface
from flash_attn.cute.flash_bwd_postprocess import FlashAttentionBackwardPostprocess
from flash_attn.cute.flash_bwd_preprocess import FlashAttentionBackwardPreprocess
from flash_attn.cute.flash_bwd_sm90 import FlashAttentionBackwardSm90
from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90
from flash_attn.cute.tile_scheduler import SingleTileScheduler
from flash_attn.cute.utils import hash_callable
from torch._subclasses.fake_tensor import FakeTensorMode

from prefixtree.kernels.attention.flash import backwards, disk_cache, launch, mask_mods


def test_the_version() -> None:
    assert launch.installed() == launch.VERSION, (
        "go through tests/kernels/attention/flash/fa4, then move launch.VERSION"
    )


@pytest.mark.parametrize(
    "call, positional, keywords",
    [
        (
            "_flash_attn_fwd",
            ["q", "k", "v"],
            "softmax_scale learnable_sink score_mod mask_mod aux_scalars block_sparse_tensors "
            "pack_gqa out lse return_lse cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k "
            "causal window_size_left",
        ),
        (
            "_flash_attn_bwd",
            ["q", "k", "v", "out", "dout", "lse"],
            "softmax_scale score_mod score_mod_bwd mask_mod aux_scalars block_sparse_tensors dlse "
            "learnable_sink dq dk dv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k causal "
            "window_size_left",
        ),
    ],
)
def test_arguments_of_the_calls(call: str, positional: list[str], keywords: str) -> None:
    parameters = inspect.signature(getattr(interface, call)).parameters
    assert list(parameters)[: len(positional)] == positional
    missing = [name for name in keywords.split() if name not in parameters]
    assert not missing, f"{call} no longer takes {missing}"
    # what is left out must do nothing
    off = {
        "causal": False,
        "window_size_left": None,
        "window_size_right": None,
        "cu_seqlens_q": None,
        "mask_mod": None,
        "block_sparse_tensors": None,
        "deterministic": False,
        "num_splits": 1,
    }
    for name, default in off.items():
        if name in parameters:
            assert parameters[name].default == default, name


def test_fields_of_the_lists() -> None:
    names = "mask_block_cnt mask_block_idx full_block_cnt full_block_idx block_size"
    assert set(names.split()) <= set(block_sparsity.BlockSparseTensorsTorch._fields)


@pytest.mark.parametrize("d, d_v", launch.SERVED)
def test_tiles_are_the_ones_it_takes(d: int, d_v: int) -> None:
    ours = launch.tiles_for(d, d_v)
    forward = interface._tile_size_fwd_sm90(d, d_v, False, False, sparse_block_size_q=128)
    backward = interface._tile_size_bwd_sm90(d, d_v, False, False, sparse_block_size_q=128)
    assert ours.queries == forward.m_block_size == launch.TILE_ROWS
    assert ours.forward_keys == forward.n_block_size
    assert ours.backward_keys == backward.n_block_size
    assert ours.queries % backward.m_block_size == 0
    dense = interface._tile_size_bwd_sm90(d, d_v, False, False)
    if (ours := launch.dense_tiles_for(d, d_v)) is None:
        # with whole tiles of 80 queries lists of 128 do not go
        assert dense == backward or (d, dense.m_block_size) == (128, 80)
        return
    assert (ours.queries, ours.forward_keys) == (forward.m_block_size, forward.n_block_size)
    assert ours.backward_keys == dense.n_block_size != backward.n_block_size
    assert ours.queries % dense.m_block_size == 0


def test_what_gradients_in_float32_rest_on() -> None:
    """The conversion is a name of its module, and gets accumulator, result, scale and the tile."""
    convert = interface._bwd_postprocess_convert
    names = ["accum", "output", "scale", "cu_seqlens", "seqused", "arch", "dtype", "hdim"]
    assert list(inspect.signature(convert).parameters)[:9] == [*names, "block_size"]
    assert "_bwd_postprocess_convert" in interface._flash_attn_bwd.__code__.co_names
    source = inspect.getsource(interface._flash_attn_bwd)
    assert source.count("_bwd_postprocess_convert(") == 3
    for name, scale in (("dk", "softmax_scale"), ("dv", "1.0")):
        assert re.search(rf"_bwd_postprocess_convert\(\s+{name}_accum, {name}, {scale},", source)
    # a head's tiles one after the other
    for shape in ("seqlen_k_rounded * head_dim_rounded", "seqlen_k_rounded * head_dim_v_rounded"):
        assert re.search(rf"num_head_kv,\s+{re.escape(shape)},\s+dtype=torch.float32", source)
    assert convert.__name__ == backwards._CONVERT
    calls = (interface._flash_attn_bwd, backwards.heads_first)
    for call in (*calls, *map(backwards.in_dense_tiles, calls)):
        made, conversion = backwards._converting(call)
        assert made.__globals__["_bwd_postprocess_convert"] is conversion
        assert made.__globals__["_flash_attn_bwd"] is made
        assert made.compile_cache is call.compile_cache
        assert call.__globals__["_bwd_postprocess_convert"] is convert
        for name in ("_tile_size_bwd_sm90", "FlashAttentionBackwardSm90"):
            assert made.__globals__[name] is call.__globals__[name]


def test_accumulators_are_brought_into_rows() -> None:
    """By the order that the conversion shows: here one that turns a tile around."""
    rows, dim, heads = 8, 4, 3
    calls = []

    def convert(accum, output, scale, *how, **more):
        calls.append(output.shape)
        tiles = accum.view(output.shape[2], -1, rows * dim).flip(2)
        found = tiles.reshape(output.shape[2], -1, dim)[:, : output.shape[1]]
        output.copy_(scale * found.transpose(0, 1)[None])

    conversion = backwards._Conversion(convert)
    accumulated = torch.randn(1, heads, 3 * rows * dim)
    taken, other = torch.empty(2, 1, 19, heads, dim, dtype=torch.bfloat16)
    wide = torch.empty(19, heads, dim)
    conversion.wide = [(taken, wide)]
    how = (None, None, 90, "bfloat16", dim, rows, 256)
    for _ in range(2):
        conversion(accumulated, taken, 0.5, *how, fake_mode=False)
    conversion(accumulated, other, 0.5, *how, fake_mode=False)
    assert torch.equal(wide.bfloat16(), other[0])
    # the order is read once, by two numbers
    assert calls == [(1, rows, 1, dim)] * 2 + [other.shape]


def test_what_packing_heads_rests_on() -> None:
    """When a group that does not divide the rows is loaded by TMA, `launch.packs_heads` can go."""
    forward = inspect.getsource(FlashAttentionForwardSm90.__call__)
    assert "self.pack_gqa and self.tile_m % self.qhead_per_kvhead != 0" in forward
    assert "self.num_mma_regs, self.num_producer_regs = 224, 40" in forward
    # which the backward does not know
    assert "    pack_gqa = False\n" in inspect.getsource(interface._flash_attn_bwd)
    for group in range(1, 17):
        assert launch.packs_heads(group, 128) == (group > 1)
        assert launch.packs_heads(group, 192) == (group in (2, 4, 8, 16))


def widths(d: int, lists: bool = True) -> set[int]:
    """The width of a row of an accumulator for each kernel of a backward, in float32 numbers; with
    block lists, or of causal sequences."""
    queries = 128 if lists else None
    made = interface._tile_size_bwd_sm90(d, d, not lists, False, sparse_block_size_q=queries)
    rows, kept = made.m_block_size, 64 if made.dKV_swapAB else 32
    assert "hdim_multiple_of = 64 if arch // 10 == 9 and dKV_swapAB else 32" in inspect.getsource(
        interface._flash_attn_bwd
    )
    half = cutlass.BFloat16
    writes = FlashAttentionBackwardSm90(
        half, d, d, tile_m=rows, tile_n=made.n_block_size, dKV_swapAB=made.dKV_swapAB
    )
    zeroes = FlashAttentionBackwardPreprocess(half, d, d, rows, hdim_multiple_of=kept)
    reads = FlashAttentionBackwardPostprocess(half, d, 90, rows, hdim_multiple_of=kept)
    return {writes.tile_hdim, zeroes.head_dim_padded, reads.tile_hdim}


def test_head_dims_whose_accumulators_are_read_as_written() -> None:
    """On an H200 dQ was wrong at 16 and 80. When more agree, `launch.SERVED` can be longer."""
    agree = [d for d in range(16, 257, 16) if len(widths(d)) == 1]
    assert agree == [32, 64, 96, 128, 144, 160, 176, 192, 224, 256]
    served = {d for dims in launch.SERVED for d in dims}
    assert served <= set(agree)
    # and those of sequences of variable lengths
    assert all(len(widths(d, lists=False)) == 1 for d in served)


def test_a_causal_window_of_sequences_is_one_to_the_left() -> None:
    """Of `chains.Chains.arguments`: 0 is a window of the token itself, None of all before it."""
    resolve = interface._resolve_causal_local_window
    assert resolve(True, None, None) == (True, False, None, None)
    for left in (0, 7):
        assert resolve(True, left, None) == (False, True, left, 0)


def fake(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device="cuda")


def test_index_arrays_may_be_as_short_as_the_longest_list() -> None:
    """Of 1000 tokens, eight tiles: arrays of two columns, shared by all heads."""
    with FakeTensorMode():
        given = block_sparsity.BlockSparseTensorsTorch(
            fake(1, 1, 8), fake(1, 1, 8, 2), fake(1, 1, 8), fake(1, 1, 8, 1), block_size=(128, 128)
        )
        common = {"batch_size": 1, "num_head": 4, "seqlen_q": 1000, "seqlen_k": 1000}
        forward = block_sparsity.normalize_block_sparse_config(
            given, **common, block_size=(128, 128), q_stage=1
        )
        backward, _ = block_sparsity.normalize_block_sparse_config_bwd(
            given, **common, block_size=(64, 128), q_subtile_factor=2
        )
        for tensors in (forward.tensors, backward):
            assert tensors.mask_block_idx.shape == (1, 4, 8, 2)
            assert tensors.full_block_idx.shape == (1, 4, 8, 1)


def test_what_is_refused_because_of_it() -> None:
    """When one of these is gone, `launch.refusal` can let more through."""
    source = inspect.getsource(FlashAttentionBackwardSm90)
    assert "Deterministic not implemented for block-sparse backward" in source
    assert "GQA backward requires head_dim == head_dim_v" in source


def test_compiled_kernels_are_keyed_on_what_differs() -> None:
    functions = [
        mask_mods.visible,
        mask_mods.visible_in_window,
        *mask_mods.softcap(3.0),
        *mask_mods.softcap(5.0),
    ]
    keys = {hash_callable(function) for function in functions}
    assert len(keys) == len(functions)
    assert mask_mods.softcap(3.0) is mask_mods.softcap(3.0)


# ---- what `order` turns --------------------------------------------------------------------------


def test_the_backward_is_a_function_that_can_be_copied() -> None:
    """By its code and defaults alone, with the names that `order` gives another meaning."""
    call = interface._flash_attn_bwd
    assert type(call) is FunctionType and not hasattr(call, "__wrapped__")
    assert call.__closure__ is None and call.__kwdefaults__ is None
    assert call.__globals__ is vars(interface)
    source = inspect.getsource(call)
    assert source.count("FlashAttentionBackwardSm90(") == 1
    # filled and read by its own name, and nowhere else in its module
    assert set(re.findall(r"\S*compile_cache\b", source)) == {"_flash_attn_bwd.compile_cache"}
    assert backwards.heads_first.compile_cache is not call.compile_cache
    assert backwards.heads_first.__globals__["FlashAttentionBackwardSm90"] is not (
        interface.FlashAttentionBackwardSm90
    )


def test_a_kernel_knows_its_place_from_the_scheduler_that_it_is_given() -> None:
    backward = FlashAttentionBackwardSm90
    call = inspect.getsource(backward.__call__)
    assert "TileScheduler = SingleTileScheduler" in call
    assert call.count("self.kernel(") == call.count(".launch(") == call.count("grid=") == 1
    assert "grid=grid_dim," in call and "grid_dim = TileScheduler.get_grid_shape(" in call
    kernel = inspect.getsource(backward.kernel)
    # as an argument, and once used
    assert len(re.findall(r"\bTileScheduler\b", kernel)) == 2
    assert "partial(TileScheduler.create, tile_sched_params)" in kernel
    assert "block_idx" not in inspect.getsource(backward)
    # one block a tile and head: no clusters, no splits
    scheduler = inspect.getsource(SingleTileScheduler)
    assert "cluster" not in call[call.index("tile_sched_args =") : call.index("self.kernel(")]
    assert "block_idx, head_idx, batch_idx = self._blk_coord" in scheduler
    assert "blk_coord = cute.arch.block_idx()" in scheduler
    assert list(inspect.signature(SingleTileScheduler.create).parameters) == list(
        inspect.signature(backwards.HeadsFirst.create).parameters
    )


# ---- what `in_dense_tiles` changes ---------------------------------------------------------------


def test_what_dense_tiles_rest_on() -> None:
    """Tiles come from one function, by name, and are dense ones where it is told of no lists."""
    taken = interface._tile_size_bwd_sm90
    names = ["head_dim", "head_dim_v", "causal", "local", "sparse_block_size_q"]
    ours = backwards._tile_size_bwd_sm90
    assert list(inspect.signature(taken).parameters) == names
    assert list(inspect.signature(ours).parameters) == names and ours.__name__ == taken.__name__
    assert ours(256, 256, False, False, sparse_block_size_q=128) == taken(256, 256, False, False)
    assert ours(256, 256, False, False) != taken(256, 256, False, False, sparse_block_size_q=128)
    source = inspect.getsource(interface._flash_attn_bwd)
    assert source.count("_tile_size_bwd_sm90(") == 1
    for call in (interface._flash_attn_bwd, backwards.heads_first):
        made = backwards.in_dense_tiles(call)
        assert made is backwards.in_dense_tiles(call) is not call
        assert made.__globals__["_tile_size_bwd_sm90"] is ours
        assert made.__globals__["_flash_attn_bwd"] is made
        assert call.__globals__["_tile_size_bwd_sm90"] is taken
        kernel = "FlashAttentionBackwardSm90"
        assert made.__globals__[kernel] is call.__globals__[kernel]


def test_kernels_of_both_tilings_have_keys_of_their_own() -> None:
    """They are kept in one place."""
    source = inspect.getsource(interface._flash_attn_bwd)
    key = source[source.index("compile_key = (") :]
    key = key[: key.index("else:")]
    made = [interface._tile_size_bwd_sm90(256, 256, False, False, x) for x in (None, 128)]
    names = [field.name for field in fields(made[0])]
    differ = {name for name in names if len({getattr(x, name) for x in made}) == 2}
    assert differ == {"n_block_size", "num_stages_Q", "dKV_swapAB"}
    assert all(re.search(rf"\b{name},", key) for name in differ)
    for call in (interface._flash_attn_bwd, backwards.heads_first):
        assert backwards.in_dense_tiles(call).compile_cache is call.compile_cache


def test_our_kernels_are_kept_apart_on_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Beside flash-attn-4's, and apart by the text that makes them others."""
    monkeypatch.setattr(cache_utils, "CUTE_DSL_CACHE_ENABLED", True)
    monkeypatch.setattr(cache_utils, "CUTE_DSL_CACHE_DIR", str(tmp_path))
    ours, text = backwards.__file__, tmp_path / "text.py"
    text.write_text("changed")
    made = [disk_cache.cache_of("heads_first", *files) for files in ((ours,), (ours, str(text)))]
    theirs = cache_utils.get_jit_cache("bwd")
    assert all(type(cache) is cache_utils.JITPersistentCache for cache in (*made, theirs))
    assert len({cache.cache_path for cache in (*made, theirs)}) == 3
    assert {cache.cache_path.parent for cache in (*made, theirs)} == {theirs.cache_path.parent}
    monkeypatch.setattr(cache_utils, "CUTE_DSL_CACHE_ENABLED", False)
    assert type(disk_cache.cache_of("heads_first", ours)) is cache_utils.JITCache
    # what keep_on_disk sets before the import
    source = inspect.getsource(cache_utils)
    assert all(f'os.getenv("{name}"' in source for name in (disk_cache.ENABLED, disk_cache.FOLDER))
