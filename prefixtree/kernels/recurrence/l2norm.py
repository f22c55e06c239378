"""Queries and keys of length one, and the gradients through them, in Triton.

fla-core has the same, but tries 25 configurations anew for every 65,536 rows more (2,048 tokens of
32 heads): a trainer whose micro-batches differ in length would compile for half a minute in many of
its first steps. Legend: R rows, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

# numbers that a program holds
_SIZE = 4096


@triton.jit
def _forward(x_ptr, y_ptr, factor_ptr, R, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLS)
    at = row[:, None] * D + column[None, :]
    inside = (row < R)[:, None] & (column < D)[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    # as fla and transformers have it
    factor = 1.0 / tl.sqrt(tl.sum(x * x, 1) + 1e-6)
    tl.store(y_ptr + at, x * factor[:, None], mask=inside)
    tl.store(factor_ptr + row, factor, mask=row < R)


@triton.jit
def _backward(
    y_ptr, factor_ptr, dy_ptr, dx_ptr, R, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLS)
    at = row[:, None] * D + column[None, :]
    inside = (row < R)[:, None] & (column < D)[None, :]
    y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(factor_ptr + row, mask=row < R, other=0.0)
    dx = (dy - y * tl.sum(dy * y, 1)[:, None]) * factor[:, None]
    tl.store(dx_ptr + at, dx, mask=inside)


def normed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [.., D] -> x / sqrt(sum of squares + 1e-6) in its dtype, and the factors, fp32 [..]."""
    x = x.contiguous()
    y, factors = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
    _launch(_forward, x, y, factors)
    return y, factors


def through(y: torch.Tensor, factors: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """The gradient of what `normed` was given, in the dtype of y: y, dy [.., D]; factors [..]."""
    dx = torch.empty_like(y)
    _launch(_backward, y, factors, dy.contiguous(), dx)
    return dx


def _launch(kernel: Any, x: torch.Tensor, *others: torch.Tensor) -> None:
    """Over the rows of x [.., D]."""
    dim = x.shape[-1]
    rows, columns = x.numel() // dim, triton.next_power_of_2(dim)
    size = max(1, _SIZE // columns)
    kernel[(triton.cdiv(rows, size),)](x, *others, rows, dim, ROWS=size, COLS=columns)
