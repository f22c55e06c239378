"""The launches of the convolution's Triton kernels.

Legend: T packed tokens, D channels, W taps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from prefixtree.kernels import runtime
from prefixtree.kernels.recurrence.conv_kernels import (
    conv_backward,
    conv_backward_branches,
    conv_forward,
)
from prefixtree.kernels.recurrence.protocol import Call, Computed, ConvCall
from prefixtree.packing.segments import Taps, tables_of

INTERPRETED = not isinstance(conv_forward, triton.JITFunction)
# taps that the kernels' registers hold
_MOST_TAPS = 4


@dataclass(frozen=True)
class Config:
    """Channels of a program, and its warps."""

    columns: int
    warps: int


# the best of seven measured on an H200 with 8,192 channels (benchmarks/notebook.md)
FORWARD = Config(columns=256, warps=2)
BACKWARD = Config(columns=256, warps=2)
# entries of a branch token that are summed at once, and channels of a program
_ENTRIES, _COLUMNS = 16, 128
# parts of a sum over tokens: each is a row of fp32 per tap
_MOST_PARTS = 2048


def refusal(call: Call) -> str | None:
    """Says why this backend cannot serve a call; None if it can."""
    if not isinstance(call, ConvCall):
        return "it has the convolution alone; use backend='fla'"
    x = call.x
    if not (x.is_cuda or INTERPRETED):
        return f"it runs on GPUs, and x is on {x.device}"
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"it computes in float32, and x is {x.dtype}"
    if x.shape[0] == 0 or x.shape[1] == 0:
        return "there are no tokens or no channels"
    if call.weight.shape[1] > _MOST_TAPS:
        return f"it takes at most {_MOST_TAPS} taps, and there are {call.weight.shape[1]}"
    if x.is_cuda and runtime.capability(x.device) < (8, 0):
        return "it needs compute capability 8.0 (Ampere) or later"
    return None


def saves(call: Call) -> list[torch.Tensor]:
    """Returns nothing: the backward computes the forward again."""
    return []


def forward(call: Call) -> Computed:
    """Computes out [T, D] in x's dtype, and saves nothing."""
    assert isinstance(call, ConvCall)
    x, weight, bias, taps = _inputs(call)
    out = torch.empty_like(x)
    runs, per_program, programs = _shares(taps)
    blocks = triton.cdiv(x.shape[1], FORWARD.columns)
    with runtime.current(x.device):
        conv_forward[(blocks, programs)](
            *(x, weight, bias, out, taps.ancestors, taps.run_start),
            *(*x.shape, runs, per_program),
            W=weight.shape[1],
            SILU=call.silu,
            COLUMNS=FORWARD.columns,
            num_warps=FORWARD.warps,
        )
    return Computed(out, [])


def backward(
    call: Call, dout: torch.Tensor, saved: list[torch.Tensor], dfinal: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Computes the gradients of x, weight and, if there is one, bias."""
    assert isinstance(call, ConvCall)
    x, weight, bias, taps = _inputs(call)
    dout, dx = dout.contiguous(), torch.empty_like(x)
    channels, width = weight.shape
    runs, per_program, programs = _shares(taps)
    dweight = x.new_empty(programs, width, channels, dtype=torch.float32)
    dbias = None if bias is None else x.new_empty(programs, channels, dtype=torch.float32)
    with runtime.current(x.device):
        conv_backward[(triton.cdiv(channels, BACKWARD.columns), programs)](
            *(x, weight, bias, dout, dx, dweight, dbias, taps.ancestors, taps.run_start),
            *(*x.shape, runs, per_program),
            W=width,
            SILU=call.silu,
            COLUMNS=BACKWARD.columns,
            num_warps=BACKWARD.warps,
        )
        if len(taps.branch_tokens):
            # a grid's second dimension ends at 65,535
            conv_backward_branches[(len(taps.branch_tokens), triton.cdiv(channels, _COLUMNS))](
                *(x, weight, bias, dout, dx),
                *(taps.ancestors, taps.branch_tokens, taps.start, taps.token, taps.tap),
                *x.shape,
                W=width,
                SILU=call.silu,
                ROWS=_ENTRIES,
                COLUMNS=_COLUMNS,
            )
    grads = [dx, dweight.sum(0).t().to(weight.dtype).contiguous()]
    return grads if bias is None or dbias is None else [*grads, dbias.sum(0).to(bias.dtype)]


def _shares(taps: Taps[torch.Tensor]) -> tuple[int, int, int]:
    """Counts runs, runs per program, and programs."""
    runs = len(taps.run_start) - 1
    per_program = triton.cdiv(runs, _MOST_PARTS)
    return runs, per_program, triton.cdiv(runs, per_program)


def _inputs(
    call: ConvCall,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, Taps[torch.Tensor]]:
    """Gives x, weight and bias contiguous, and the tables."""
    assert call.mask is not None
    width = call.weight.shape[1]
    bias = None if call.bias is None else call.bias.contiguous()
    taps = tables_of(call.mask, call.x.device).taps(width)
    return call.x.contiguous(), call.weight.contiguous(), bias, taps
