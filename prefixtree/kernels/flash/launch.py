"""The host side of the flash backend: what flash-attn-4 serves, and its calls. No synchronisation.

Legend: T packed tokens, H query heads, Hk kv heads, D and Dv head dims.
"""

from __future__ import annotations

import contextlib
from functools import cache
from importlib import metadata
from typing import Any

import torch

from prefixtree.kernels.flash.lists import ForestLists, Lists, Tiles, lists_of
from prefixtree.kernels.options import Options
from prefixtree.packing.mask import MaskPlan

# `_flash_attn_fwd` and `_flash_attn_bwd` are not public: the public function is an autograd node,
# which a registered operator cannot take apart. So one version; tests/flash holds what we rely on
VERSION = "4.0.0b36"
# On its first run on an H200 (2026-11-20) dQ was wrong for grouped queries of head dim 80, in
# tests/test_flash_gpu.py; the cause is not known yet, so nothing is let through.
VERIFIED = False


def refusal(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    plan: MaskPlan | None = None,
    deterministic: bool = False,
) -> str | None:
    """Why this backend cannot serve a call; None where it can."""
    found = installed()
    if found != VERSION:
        return (
            f"it needs flash-attn-4 {VERSION} (pip install 'prefixtree[fa4]'), and "
            f"{'it is not installed' if found is None else f'{found} is installed'}"
        )
    if not q.is_cuda or torch.version.hip is not None:
        return f"it runs on NVIDIA GPUs, and q is on {'an AMD GPU' if q.is_cuda else q.device}"
    if (capability := _capability(q.device))[0] != 9:
        return (
            "it was compiled and checked for compute capability 9.x (Hopper), and this is "
            f"{capability[0]}.{capability[1]}"
        )
    reason = refused_features(q, v, scale, plan, deterministic)
    if reason is None and not VERIFIED:
        reason = (
            "its gradients were wrong in a first run on a GPU; it is refused until they are not"
        )
    return reason


def refused_features(
    q: torch.Tensor, v: torch.Tensor, scale: float, plan: MaskPlan | None, deterministic: bool
) -> str | None:
    """The part of `refusal` that is about the call and not about the machine."""
    d, d_v = q.shape[2], v.shape[2]
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 and bfloat16, and q is {q.dtype}"
    if not (8 <= d_v <= d <= 256 and d % 8 == d_v % 8 == 0):
        return (
            "head dims must be multiples of 8 up to 256, that of v not above that of q, and are "
            f"{d} and {d_v}"
        )
    if d != d_v and (q.shape[1] != v.shape[1] or d % 64 or d_v % 64):
        return (
            f"its backward takes head dims that differ ({d} and {d_v}) only as multiples of 64 and "
            "without grouped queries"
        )
    if not scale > 0:
        return f"scale must be above 0, and is {scale}"
    if deterministic:
        return "flash-attn-4 has no deterministic backward with block lists on Hopper"
    if plan is not None and plan.is_subset:
        return "its block lists take q whole, and this mask is for_queries(...)"
    return None


@cache
def installed() -> str | None:
    """The version of flash-attn-4, None where it is not installed."""
    try:
        return metadata.version("flash-attn-4")
    except metadata.PackageNotFoundError:
        return None


def tiles_for(d: int, d_v: int) -> Tiles:
    """The tiles that flash-attn-4 takes on Hopper, given lists over 128 queries."""
    if d <= 128:
        return Tiles(128, 128, 128)
    if d <= 192:
        return Tiles(128, 128 if d_v <= 128 else 112, 96)
    return Tiles(128, 80, 64)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    plan: MaskPlan,
    options: Options,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> out [T, H, Dv] in q's dtype, lse [H, T] float32 over the keys, natural log."""
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    if q.shape[0] == 0:
        return out, lse
    from flash_attn.cute import interface

    tiles = tiles_for(q.shape[2], v.shape[2])
    lists = lists_of(plan, tiles, options.window, q.device)
    with _on(q.device):
        interface._flash_attn_fwd(
            q.unsqueeze(0),
            k.unsqueeze(0),
            v.unsqueeze(0),
            softmax_scale=options.scale,
            learnable_sink=None if sinks is None else sinks.float(),
            score_mod=_score_functions(options)[0],
            block_sparse_tensors=_given(lists.forward, tiles.queries, tiles.forward_keys),
            out=out.unsqueeze(0),
            lse=lse.unsqueeze(0),
            return_lse=True,
            **_mask_arguments(lists),
        )
    return out, lse if sinks is None else keys_lse(lse, sinks)


def backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    plan: MaskPlan,
    options: Options,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """-> dq, dk, dv in the inputs' dtypes, contiguous; dsinks."""
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    if q.shape[0] == 0:
        return dq, dk, dv, None if sinks is None else torch.zeros_like(sinks)
    from flash_attn.cute import interface

    tiles = tiles_for(q.shape[2], v.shape[2])
    lists = lists_of(plan, tiles, options.window, q.device)
    total, dtotal = lse, dlse
    if sinks is not None:
        total, dtotal = with_sinks(lse, dlse, sinks)
    score, score_gradient = _score_functions(options)
    with _on(q.device):
        results = interface._flash_attn_bwd(
            q.unsqueeze(0),
            k.unsqueeze(0),
            v.unsqueeze(0),
            out.unsqueeze(0),
            dout.unsqueeze(0),
            total.unsqueeze(0),
            softmax_scale=options.scale,
            score_mod=score,
            score_mod_bwd=score_gradient,
            block_sparse_tensors=_given(lists.backward, tiles.queries, tiles.backward_keys),
            dlse=None if dtotal is None else dtotal.unsqueeze(0),
            learnable_sink=None if sinks is None else sinks.float(),
            dq=dq.unsqueeze(0),
            dk=dk.unsqueeze(0),
            dv=dv.unsqueeze(0),
            **_mask_arguments(lists),
        )
    if sinks is None:
        return dq, dk, dv, None
    return dq, dk, dv, sinks_gradient(results[3], sinks, total, dtotal)


# ---- sinks -------------------------------------------------------------------------------------
# flash-attn-4's lse is over the keys and the sink; ours, which the operator returns and saves, is
# over the keys alone.


def keys_lse(total: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """lse over the keys [H, T] from that over keys and sink.

    Where a sink takes nearly everything, total holds little of the keys: the error grows with
    exp(sink - lse), and lse stays within 16 of the total. `with_sinks` undoes it all the same.
    """
    share = (sinks.float().unsqueeze(1) - total).clamp(max=-(2.0**-23))
    return total + torch.log(-torch.expm1(share))


def with_sinks(
    lse: torch.Tensor, dlse: torch.Tensor | None, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """lse over keys and sink, and the gradient that arrives there: both [H, T].

    The kernel multiplies by a key's probability with the sink, lse's gradient goes by that without.
    """
    total = torch.logaddexp(lse, sinks.float().unsqueeze(1))
    return total, None if dlse is None else dlse * torch.exp(total - lse)


def sinks_gradient(
    dsinks: torch.Tensor, sinks: torch.Tensor, total: torch.Tensor, dtotal: torch.Tensor | None
) -> torch.Tensor:
    """dsinks [H] without the part by way of lse: flash-attn-4's lse holds the sink, ours not."""
    if dtotal is not None:
        dsinks = dsinks - (torch.exp(sinks.float().unsqueeze(1) - total) * dtotal).sum(1)
    return dsinks.to(sinks.dtype)


# ---- arguments -----------------------------------------------------------------------------------


def _given(lists: Lists, queries: int, keys: int) -> Any:
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    return BlockSparseTensorsTorch(
        mask_block_cnt=lists.partial_count,
        mask_block_idx=lists.partial_index,
        full_block_cnt=lists.full_count,
        full_block_idx=lists.full_index,
        block_size=(queries, keys),
    )


def _mask_arguments(lists: ForestLists) -> dict[str, Any]:
    from prefixtree.kernels.flash import device

    if lists.positions is None or lists.reach is None:
        arrays, function = [lists.spans], device.visible
    else:
        arrays, function = [lists.spans, lists.positions, lists.reach], device.visible_in_window
    return {"mask_mod": function, "aux_scalars": tuple(device.address(x) for x in arrays)}


def _score_functions(options: Options) -> tuple[Any, Any]:
    if not options.softcap:
        return None, None
    from prefixtree.kernels.flash import device

    return device.softcap(options.softcap)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """flash-attn-4 launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
