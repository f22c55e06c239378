"""The recurrent layers through torch's operations on a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.support.recurrence_cases import (
    FORESTS,
    OPERATORS,
    Operator,
    forest_of,
    gradients,
    relative,
)
from tests.support.strategies import mask_of

pytestmark = pytest.mark.gpu
BY_NAME = pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.name)


@pytest.mark.parametrize("name", FORESTS)
@BY_NAME
def test_chunks_on_a_gpu_are_the_reference_on_the_cpu(op: Operator, name: str) -> None:
    mask = mask_of(forest_of(name))
    leaves = op.random(mask.num_tokens)
    cotangent = torch.randn_like(op.run(mask, leaves, "reference"))
    want = gradients(op, mask, leaves, cotangent, "reference")
    moved = [x.detach().cuda().requires_grad_() for x in leaves]
    found = gradients(op, mask.to("cuda"), moved, cotangent.cuda(), "chunked")
    for a, b in zip(found, want, strict=True):
        assert relative(a.cpu(), b) < 1e-12


@BY_NAME
def test_bitwise_repeatable_on_a_gpu(op: Operator) -> None:
    mask = mask_of(forest_of("star")).to("cuda")
    leaves = [
        x.detach().cuda().requires_grad_() for x in op.random(mask.num_tokens, dtype=torch.float32)
    ]
    cotangent = torch.randn_like(op.run(mask, leaves, "chunked"))
    first, again = (gradients(op, mask, leaves, cotangent, "chunked") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
