"""Queries and keys of length one: in the interpreter, natively where there is a GPU."""

from __future__ import annotations

import pytest
import torch

from prefixtree.kernels.recurrence import fla
from tests.support.recurrence_cases import relative

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    "shape",
    [(1, 1, 16), (7, 3, 128), (33, 2, 48), (5, 1, 256)],
    ids=lambda s: "x".join(map(str, s)),
)
def test_beside_its_definition(shape: tuple[int, ...]) -> None:
    x, dy = (torch.randn(shape, dtype=torch.float64) for _ in range(2))
    x[0, 0] = 0
    leaf = x.clone().requires_grad_()
    expected = leaf * (leaf.square().sum(-1, True) + 1e-6).rsqrt()
    (dx,) = torch.autograd.grad(expected, leaf, dy)
    # heads that lie apart, as views of a layer's projection
    given, dgiven = (torch.stack([t, t], 1)[:, 0].float().to(DEVICE) for t in (x, dy))
    y, factors = fla.l2norm(given)
    assert relative(y.cpu(), expected) < 1e-6
    assert relative(fla.through_l2norm(y, factors, dgiven).cpu(), dx) < 1e-5


def test_half_precision_rounds_once() -> None:
    x = torch.randn(9, 4, 128).half().to(DEVICE)
    y, factors = fla.l2norm(x)
    assert y.dtype == torch.float16 and factors.dtype == torch.float32
    exact = x.double() * (x.double().square().sum(-1, True) + 1e-6).rsqrt()
    assert (y.double() - exact).abs().max() <= 2.0**-12
