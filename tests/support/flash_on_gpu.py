"""Shared by the tests of the flash backend on a Hopper GPU."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch

from prefixtree import PrefixForest, TreeMask
from prefixtree.kernels.attention import reference
from prefixtree.kernels.attention.flash import launch
from prefixtree.kernels.attention.protocol import AttentionCall
from tests.support.attention_checks import Case, ours, run
from tests.support.gpu_cases import cuda_mask

ON_HOPPER = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("flash_attn") is None
        or importlib.util.find_spec("flash_attn.cute") is None,
        reason="needs flash-attn-4 (pip install 'prefixtree-attention[fa4]')",
    ),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="needs compute capability 9.x",
    ),
    # of the CuTe DSL about its own internals
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def assert_wide_gradients(mask: TreeMask, case: Case) -> None:
    """dk and dv in float32: rounded they are what flash-attn-4 gives, and closer to float64."""
    inputs = case.q, case.k, case.v

    def gradients(wide: bool, dtype: torch.dtype, run: Any) -> tuple[torch.Tensor, ...]:
        q, k, v, dout = (x.to(dtype) for x in (*inputs, case.dout))
        call = AttentionCall(q, k, v, None, mask.host, 0.1, 0, 0.0, False, wide)
        out, lse = run.forward(call)
        return tuple(run.backward(call, dout, None, out, lse)[1:3])

    exact = gradients(False, torch.float64, reference)
    rounded = gradients(False, case.q.dtype, launch)
    for x, y, z in zip(gradients(True, case.q.dtype, launch), rounded, exact, strict=True):
        assert x.dtype == torch.float32 and x.is_contiguous()
        # the order of additions is that of the blocks, which differs from run to run
        assert (x.to(y.dtype) == y).float().mean() > 0.97
        torch.testing.assert_close(x.to(y.dtype), y, atol=1e-2, rtol=2e-2)
        assert (x.double() - z).norm() <= 1.01 * (y.double() - z).norm()


def assert_like_triton(heads: tuple[int, int], dims: tuple[int, int]) -> None:
    """Many tiles, long lists, the shared row of numbers: too large for a dense reference."""
    rng = np.random.default_rng(1)
    parents = [-1, *(int(rng.integers(max(-1, i - 30), i)) for i in range(1, 120))]
    forest = PrefixForest.from_parents(parents, rng.integers(20, 900, 120))
    mask = cuda_mask(forest)
    assert mask.num_tokens > 30_000
    case = Case.random(mask, heads, dims, torch.bfloat16).to("cuda")
    got = run(case, ours(mask, backend="flash"))
    for name, want in run(case, ours(mask, backend="triton")).items():
        error = (got[name].float() - want.float()).norm() / want.float().norm()
        assert error < 1e-2, (name, float(error))
