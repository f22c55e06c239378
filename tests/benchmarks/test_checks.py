"""The float64 check that attention passes before it is timed: what it finds and lets pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.lib import (
    checks,
)
from prefixtree import PrefixForest, TreeMask, pack, tree_attention
from tests.support.attention_checks import Case, eager, run
from tests.support.strategies import random_forest


def small_case(dtype: torch.dtype) -> tuple[PrefixForest, TreeMask, Case]:
    forest = random_forest(np.random.default_rng(3), 12, 30)
    mask = pack(forest).mask
    return forest, mask, Case.random(mask, (4, 2), (16, 8), dtype)


def groups(case: Case, mask: TreeMask, dtype: torch.dtype) -> Any:
    """`dense_group` for both kv heads, laid out like the results of `run`; chunks of 7."""
    parts = [
        checks.dense_group(
            case.q[:, 2 * h : 2 * h + 2],
            case.k[:, h],
            case.v[:, h],
            case.dout[:, 2 * h : 2 * h + 2],
            mask.subtree_end.numpy(),
            dtype,
            chunk=7,
        )
        for h in range(2)
    ]
    return {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}


@pytest.mark.parametrize("seed", range(3))
def test_chunked_float64_equals_autograd(seed: int) -> None:
    forest = random_forest(np.random.default_rng(seed), 12, 30)
    mask = pack(forest).mask
    case = Case.random(mask, (4, 2), (16, 8), torch.float64, seed=seed)
    want = run(case, eager(mask.dense()))
    for name, got in groups(case, mask, torch.float64).items():
        torch.testing.assert_close(got, want[name], rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_chunked_eager_rounds_where_autograd_does(dtype: torch.dtype) -> None:
    """Not bit by bit (sums have another order): its errors are as large as eager's, and the two lie
    much nearer to each other than to float64."""
    _, mask, case = small_case(dtype)
    exact = run(case, eager(mask.dense()), torch.float64)
    want = run(case, eager(mask.dense()))
    for name, got in groups(case, mask, dtype).items():
        apart = float((got - want[name].double()).abs().mean())
        error = float((want[name].double() - exact[name]).abs().mean())
        ours = float((got - exact[name]).abs().mean())
        assert error > 0, name
        assert 0.9 < ours / error < 1.1, name
        assert apart < 0.3 * error, name


def results(case: Case, mask: TreeMask, backend: str = "sdpa") -> dict[str, torch.Tensor]:
    """As the benchmark has them: lse is [H, T]."""
    inputs = [x.detach().requires_grad_() for x in (case.q, case.k, case.v)]
    out, lse = tree_attention(*inputs, mask, backend=backend, return_lse=True)
    grads = torch.autograd.grad(out, inputs, case.dout)
    return {"out": out.detach(), "lse": lse.detach()} | dict(
        zip(("dq", "dk", "dv"), grads, strict=True)
    )


def red(case: Case, got: Any, forest: PrefixForest) -> list[str]:
    verdicts = checks.check(case.q, case.k, case.v, case.dout, got, forest)
    assert [v.name for v in verdicts] == list(checks.NAMES)
    return [v.name for v in verdicts if v.is_red]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_a_right_result_is_green(dtype: torch.dtype, backend: str) -> None:
    forest, mask, case = small_case(dtype)
    assert red(case, results(case, mask, backend), forest) == []


@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv"])
def test_each_tensor_can_turn_red(name: str) -> None:
    """One number too large, one that is NaN, and a head that is a little off everywhere."""
    forest, mask, case = small_case(torch.bfloat16)
    good = results(case, mask)
    last = (-1, -1) if name == "lse" else (-1, -1, -1)
    for value in (float(good[name].abs().max()) * 1.5, float("nan")):
        bad = good[name].clone()
        bad[last] = value
        assert red(case, good | {name: bad}, forest) == [name]
    off = good[name].clone()
    head = off[0] if name == "lse" else off[:, 0]
    head *= 1.03
    assert red(case, good | {name: off}, forest) == [name]


def test_nan_in_a_head_that_is_not_judged_is_seen() -> None:
    forest, mask, _ = small_case(torch.float32)
    case = Case.random(mask, (3, 3), (8, 8), torch.float32)
    got = results(case, mask)
    got["dk"][5, 1, 2] = float("inf")
    verdicts = checks.check(case.q, case.k, case.v, case.dout, got, forest, kv_heads=2)
    assert [v.name for v in verdicts if v.is_red] == ["dk"]


def test_wrong_masks_turn_red() -> None:
    forest, mask, case = small_case(torch.bfloat16)
    causal = TreeMask(np.full(mask.num_tokens, mask.num_tokens))
    assert {"out", "dq", "dk"} <= set(red(case, results(case, causal), forest))
    # the wrong kv head for a query head
    swapped = replace(case, k=case.k.flip(1).contiguous(), v=case.v.flip(1).contiguous())
    assert "out" in red(case, results(swapped, mask), forest)
