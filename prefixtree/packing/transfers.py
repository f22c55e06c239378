"""Copies of tensors to a device, without waiting for them."""

from __future__ import annotations

from typing import Any

import torch

# Decorates what makes tensors that outlive the call: those made in inference mode could not be
# saved for a backward later, nor could views of them.
lasting = torch.inference_mode(False)


def check_device(device: Any) -> None:
    """Refuses what is no device, and the one that holds no numbers.

    Raises:
        TypeError: it is none. ValueError: "meta".
    """
    if isinstance(device, torch.dtype):
        raise TypeError(
            f"to() takes a device, got {device}: token ids, positions and masks are integers "
            "whatever the model computes in; model.to(dtype) is what sets that"
        )
    if not isinstance(device, (str, int, torch.device)):
        raise TypeError(
            f'to() takes a device, as "cuda" or model.device, got {type(device).__name__}'
        )
    if torch.device(device).type == "meta":
        raise ValueError("to() takes a device that holds numbers, and the meta device has none")


@lasting
def move(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """To `device`; from pageable host memory to CUDA through a pinned copy, without waiting."""
    device = torch.device(device)
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@lasting
def move_joined(tensors: list[torch.Tensor], device: torch.device | str) -> torch.Tensor:
    """`move` of `torch.cat(tensors)`; to CUDA they are joined in pinned memory, in one copy."""
    device, first = torch.device(device), tensors[0]
    is_plain = all(
        tensor.device.type == "cpu" and tensor.dtype == first.dtype and not tensor.requires_grad
        for tensor in tensors
    )
    if device.type != "cuda" or not is_plain:
        return move(torch.cat(tensors), device)
    shape = sum(map(len, tensors)), *first.shape[1:]
    pinned = torch.empty(shape, dtype=first.dtype, pin_memory=True)
    return torch.cat(tensors, out=pinned).to(device, non_blocking=True)


def to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in pinned memory, without waiting; what is on the CPU stays where it is."""
    if not tensor.is_cuda:
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


@lasting
def move_all(tensors: list[torch.Tensor], device: torch.device | str) -> list[torch.Tensor]:
    """`move` for several tensors of one dtype in one copy; each starts at a multiple of 64 bytes.

    Kernels are compiled for what they may assume of an address, so it must not vary by forest.
    """
    step = 64 // tensors[0].element_size()
    room = [-(-tensor.numel() // step) * step for tensor in tensors]
    flat = tensors[0].new_zeros(sum(room))
    for view, tensor in zip(flat.split(room), tensors, strict=True):
        view[: tensor.numel()] = tensor.reshape(-1)
    views = move(flat, device).split(room)
    return [
        view[: tensor.numel()].view(tensor.shape)
        for view, tensor in zip(views, tensors, strict=True)
    ]
