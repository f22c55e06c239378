"""Grouped products of gated experts by QuACK, which comes with flash-attn-4 (Hopper).

They gather their rows, apply SwiGLU and weigh their results. No copies of tokens are side by side
before the first product, and a forward keeps the pre-activations alone. The order of the products
in the backward is SonicMoE's (arXiv 2512.14080).

Legend: T tokens, k experts per token, E experts, D hidden size, I intermediate size. rows [T * k]
int32: the tokens of the copies, expert by expert; starts [E + 1] int32: where experts begin.
gate_up [E, 2 I, D]; down [E, D, I]. Pre-activations [T * k, 2 I] alternate gates and gated values.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from prefixtree.kernels.operators import new_library, register

_Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _package_problem() -> str | None:
    try:
        installed = version("quack-kernels")
    except PackageNotFoundError:
        return "it needs the package quack-kernels, which comes with flash-attn-4"
    if not installed.startswith("0.6."):
        return f"version 0.6 of quack-kernels is served, and {installed} is installed"
    # it fingerprints functions, and would follow those of a package outside site-packages
    path = getattr(find_spec("cutlass"), "origin", None) or ""
    if not {"site-packages", "dist-packages"} & set(Path(path).parts):
        return f"it takes packages below site-packages, and cutlass is at {path}"
    return None


_PACKAGE_PROBLEM = _package_problem()


def refusal(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> str | None:
    """Says why QuACK cannot run these experts, to follow its name; None if it can."""
    for tensor in (x, gate_up, down):
        # sharded or quantised
        if hasattr(type(tensor), "__tensor_flatten__"):
            return "it takes plain tensors"
    # Dynamo knows these properties, and follows no function that keeps what it returns
    if not x.is_cuda or torch.cuda.get_device_properties(x.device).major != 9:
        return "it runs on Hopper"
    if _PACKAGE_PROBLEM is not None:
        return _PACKAGE_PROBLEM
    if {x.dtype, gate_up.dtype, down.dtype} != {torch.bfloat16}:
        return "it takes bfloat16"
    # 16 bytes are copied at once
    if x.shape[1] % 8 or down.shape[2] % 8:
        return f"it takes multiples of 8, and the sizes are {x.shape[1]} and {down.shape[2]}"
    if not (gate_up.is_contiguous() and down.is_contiguous()):
        return "it takes contiguous weights"
    return None


def _quack() -> Any:
    from quack import gemm_interface

    return gemm_interface


def _up(
    x: torch.Tensor, gate_up: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    preact, h = _quack().gemm_act(
        x,
        gate_up.mT,
        activation="swiglu",
        cu_seqlens_m=starts,
        A_idx=rows,
        concat_layout=("B",),
        tuned=False,
    )
    return preact, h


def _up_fake(
    x: torch.Tensor, gate_up: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    both = gate_up.shape[1]
    return x.new_empty(len(rows), both), x.new_empty(len(rows), both // 2)


def _product(x: torch.Tensor, weight: torch.Tensor, starts: torch.Tensor, turns: bool) -> Any:
    layout = ("B",) if turns else None
    return _quack().gemm(x, weight, cu_seqlens_m=starts, concat_layout=layout, tuned=False)


def _product_fake(x: torch.Tensor, weight: torch.Tensor, starts: torch.Tensor, turns: bool) -> Any:
    return x.new_empty(len(x), weight.shape[-1])


def _act_gradient(
    grad: torch.Tensor,
    down: torch.Tensor,
    preact: torch.Tensor,
    weights: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
) -> _Three:
    quack = _quack()
    # 1.27 ms for Qwen3-30B-A3B on an H200; 1.87 with the default, 128 x 192 in clusters of two
    tile = quack.GemmConfig(128, 128, cluster_m=1, is_dynamic_persistent=False)
    dpreact, weighed, dweights = quack.gemm_dact(
        grad,
        down,
        preact,
        activation="swiglu",
        colvec_scale=weights,
        colvec_reduce=True,
        cu_seqlens_m=starts,
        A_idx=rows,
        config=tile,
    )
    return dpreact, weighed, dweights


def _act_gradient_fake(
    grad: torch.Tensor,
    down: torch.Tensor,
    preact: torch.Tensor,
    weights: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
) -> _Three:
    half = preact.new_empty(len(preact), preact.shape[1] // 2)
    return torch.empty_like(preact), half, weights.new_empty(len(preact))


def _weight_gradient(
    x: torch.Tensor, rows: torch.Tensor, grad: torch.Tensor, starts: torch.Tensor, turns: bool
) -> torch.Tensor:
    out = _weight_gradient_fake(x, rows, grad, starts, turns)
    _quack().gemm(
        x.mT,
        grad,
        out=out.mT if turns else out,
        cu_seqlens_k=starts,
        A_idx=rows,
        concat_layout=("out",) if turns else None,
        tuned=False,
    )
    return out


def _weight_gradient_fake(
    x: torch.Tensor, rows: torch.Tensor, grad: torch.Tensor, starts: torch.Tensor, turns: bool
) -> torch.Tensor:
    size = (grad.shape[1], x.shape[1]) if turns else (x.shape[1], grad.shape[1])
    return x.new_empty(len(starts) - 1, *size)


_expert_library = new_library("_expert_library")
# x [T, D], gate_up -> pre-activations, h [T * k, I]
up: Any = register(
    _expert_library,
    "experts_up",
    "(Tensor x, Tensor gate_up, Tensor rows, Tensor starts) -> (Tensor, Tensor)",
    _up,
    _up_fake,
)
# x [T * k, K], weight [E, K, N] -> [T * k, N]; with `turns` the rows of a weight are gate_up's, and
# those of x alternate
product: Any = register(
    _expert_library,
    "experts_product",
    "(Tensor x, Tensor weight, Tensor starts, bool turns) -> Tensor",
    _product,
    _product_fake,
)
# grad [T, D], weights [T * k] float32 -> the gradient of pre-activations; h weighed [T * k, I]; the
# gradient of weights [T * k] float32
act_gradient: Any = register(
    _expert_library,
    "experts_act_gradient",
    "(Tensor grad, Tensor down, Tensor preact, Tensor weights, Tensor rows, Tensor starts)"
    " -> (Tensor, Tensor, Tensor)",
    _act_gradient,
    _act_gradient_fake,
)
# x [T, D], grad [T * k, N] -> [E, D, N]; with `turns` [E, N, D], as gate_up
weight_gradient: Any = register(
    _expert_library,
    "experts_weight_gradient",
    "(Tensor x, Tensor rows, Tensor grad, Tensor starts, bool turns) -> Tensor",
    _weight_gradient,
    _weight_gradient_fake,
)
