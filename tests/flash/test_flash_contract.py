"""What the flash backend relies on in flash-attn-4, so that another version fails readably."""

from __future__ import annotations

import inspect

import pytest
import torch
from flash_attn.cute import block_sparsity, interface
from flash_attn.cute.flash_bwd_sm90 import FlashAttentionBackwardSm90
from flash_attn.cute.utils import hash_callable
from torch._subclasses.fake_tensor import FakeTensorMode

from prefixtree.kernels.flash import device, launch


def test_the_version() -> None:
    assert launch.installed() == launch.VERSION, "go through tests/flash, then move launch.VERSION"


@pytest.mark.parametrize(
    "call, positional, keywords",
    [
        (
            "_flash_attn_fwd",
            ["q", "k", "v"],
            "softmax_scale learnable_sink score_mod mask_mod aux_scalars block_sparse_tensors out "
            "lse return_lse",
        ),
        (
            "_flash_attn_bwd",
            ["q", "k", "v", "out", "dout", "lse"],
            "softmax_scale score_mod score_mod_bwd mask_mod aux_scalars block_sparse_tensors dlse "
            "learnable_sink dq dk dv",
        ),
    ],
)
def test_arguments_of_the_calls(call: str, positional: list[str], keywords: str) -> None:
    parameters = inspect.signature(getattr(interface, call)).parameters
    assert list(parameters)[: len(positional)] == positional
    missing = [name for name in keywords.split() if name not in parameters]
    assert not missing, f"{call} no longer takes {missing}"
    # what is left out must do nothing
    off = {"causal": False, "window_size_left": None, "deterministic": False, "num_splits": 1}
    for name, default in off.items():
        if name in parameters:
            assert parameters[name].default == default, name


def test_fields_of_the_lists() -> None:
    names = "mask_block_cnt mask_block_idx full_block_cnt full_block_idx block_size"
    assert set(names.split()) <= set(block_sparsity.BlockSparseTensorsTorch._fields)


@pytest.mark.parametrize("d", range(8, 257, 8))
def test_tiles_are_the_ones_it_takes(d: int) -> None:
    for d_v in {d, *range(64, d, 64)}:
        ours = launch.tiles_for(d, d_v)
        forward = interface._tile_size_fwd_sm90(d, d_v, False, False, sparse_block_size_q=128)
        backward = interface._tile_size_bwd_sm90(d, d_v, False, False, sparse_block_size_q=128)
        assert ours.queries == forward.m_block_size == 128
        assert ours.forward_keys == forward.n_block_size
        assert ours.backward_keys == backward.n_block_size
        assert ours.queries % backward.m_block_size == 0


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
        device.visible,
        device.visible_in_window,
        *device.softcap(3.0),
        *device.softcap(5.0),
    ]
    keys = {hash_callable(function) for function in functions}
    assert len(keys) == len(functions)
    assert device.softcap(3.0) is device.softcap(3.0)
