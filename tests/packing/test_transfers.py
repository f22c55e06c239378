"""Copies to a device equal what they copy."""

import pytest
import torch

from prefixtree.packing.copies import move, move_joined

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("dtypes", [["float32"], ["bfloat16"], ["float32", "bfloat16"]])
def test_joined(device: str, dtypes: list[str]) -> None:
    """Also of tensors that no one pinned copy holds: those of several dtypes, those on the device,
    and those that want a gradient."""
    generator = torch.Generator().manual_seed(0)
    each = [
        torch.randn(1 + 700 * n, 33, generator=generator).to(dtype)
        for n, dtype in enumerate(getattr(torch, name) for name in (dtypes * 5)[:5])
    ]
    # pinned memory is reused: no copy may still be under way then
    copies = [(move_joined(each[n:], device), torch.cat(each[n:])) for n in [0, 1, 2, 0, 3, 0]]
    for got, expected in copies:
        assert got.device.type == device
        assert got.dtype == expected.dtype
        assert torch.equal(got.cpu(), expected)
    on_device = [move(each[0], device), each[0]] if device == "cpu" else [each[0].to(device)] * 2
    assert torch.equal(move_joined(on_device, device).cpu(), torch.cat([each[0]] * 2))
    wanting = each[0].clone().requires_grad_()
    move_joined([wanting, wanting], device).float().sum().backward()
    assert wanting.grad is not None
    assert torch.equal(wanting.grad, torch.full_like(wanting, 2))
