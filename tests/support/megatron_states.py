"""Stand-ins for fla and mamba-ssm, whose kernels need a GPU: Megatron's layers with a state, of one
unpacked sequence, on a CPU; for tests alone."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F


class NormOfGroups(torch.nn.Module):
    """mamba-ssm's norm."""

    def __init__(self, size: int, eps: float = 1e-5, group_size: int = 0, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))
        self.eps, self.group_size = eps, group_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grouped = x.unflatten(-1, (-1, self.group_size))
        scaled = grouped * (grouped.square().mean(-1, True) + self.eps).rsqrt()
        return scaled.flatten(-2) * self.weight


def scan(
    zxBCdt: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    *,
    headdim: int | None,
    ngroups: int,
    **_: Any,
) -> torch.Tensor:
    """mamba_split_conv1d_scan_combined of one sequence, token by token."""
    heads, taps = len(A), weight.shape[1]
    headdim = D.shape[1] if headdim is None else headdim
    inner = heads * headdim
    states = (zxBCdt.shape[-1] - 2 * inner - heads) // 2
    z, xBC, dt = zxBCdt[0].split([inner, inner + 2 * states, heads], -1)
    xBC = F.conv1d(F.pad(xBC.t()[None], (taps - 1, 0)), weight[:, None], bias, groups=len(weight))
    x, B, C = F.silu(xBC)[0].t().split([inner, states, states], -1)
    x, dt = x.unflatten(-1, (heads, headdim)), F.softplus(dt + dt_bias)
    B, C = (m.unflatten(-1, (ngroups, -1)).repeat_interleave(heads // ngroups, 1) for m in (B, C))
    skip = D if D.ndim == 2 else D[:, None]
    state, out = x.new_zeros(heads, B.shape[-1], headdim), []
    for t in range(len(x)):
        new = B[t][:, :, None] * (x[t] * dt[t][:, None])[:, None]
        state = state * (dt[t] * A).exp()[:, None, None] + new
        out.append((C[t][:, :, None] * state).sum(1) + x[t] * skip)
    return (torch.stack(out).flatten(1) * F.silu(z))[None]


def l2norm(x: torch.Tensor, dim: int = -1, eps: float = 1e-6) -> torch.Tensor:
    return x * (x.square().sum(dim, True) + eps).rsqrt()


def rearrange(x: torch.Tensor, pattern: str, p: int = 0) -> torch.Tensor:
    """einops', as far as Mamba's training calls it."""
    if pattern in ("l b d -> b l d", "b l d -> l b d"):
        return x.transpose(0, 1)
    return {"d 1 w -> d w": lambda: x[:, 0], "(h p) -> h p": lambda: x.view(-1, p)}[pattern]()


def _needs_a_gpu(*_: Any, **__: Any) -> Any:
    raise AssertionError("fla's kernel was called")


def _nothing(**_: Any) -> Any:
    return contextlib.nullcontext()


@contextlib.contextmanager
def stand_in_for_kernels() -> Iterator[None]:
    """While open, Megatron makes and runs its layers with a state. Its gated delta rule runs as
    torch, with `deterministic_mode`."""
    from megatron.core.ssm import gated_delta_net, mamba_context_parallel, mamba_mixer
    from megatron.core.tensor_parallel import random

    delta = getattr(gated_delta_net, "common", gated_delta_net)
    # since 0.19 in a module beside
    of_class = sys.modules[gated_delta_net.GatedDeltaNet.__module__]
    with (
        patch.multiple(delta, HAVE_FLA=True, l2norm=l2norm),
        patch.object(of_class, "chunk_gated_delta_rule", _needs_a_gpu),
        # the environment of an older version has no einops
        patch.dict(vars(mamba_mixer), rearrange=rearrange),
        patch.object(mamba_context_parallel, "HAVE_EINOPS", True),
        # recomputing a norm asks TransformerEngine whether FP8 is on
        patch.dict(
            vars(random),
            FP8GlobalStateManager=SimpleNamespace(is_fp8_enabled=lambda: False),
            activation_recompute_forward=_nothing,
            fp8_autocast=_nothing,
        ),
        patch.multiple(
            mamba_mixer,
            HAVE_MAMBA_SSM=True,
            HAVE_EINOPS=True,
            ExtendedRMSNorm=NormOfGroups,
            mamba_split_conv1d_scan_combined=scan,
        ),
    ):
        yield
