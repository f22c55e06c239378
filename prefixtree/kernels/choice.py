"""Which backend runs a call, and why: for `tree_attention` and `prefixtree.explain` alike."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from prefixtree.errors import UnsupportedError
from prefixtree.packing.mask import MaskPlan, TileShape

BACKENDS = ("auto", "reference", "sdpa", "triton", "flash")

# Where flash is the faster one: (head dim of q, of v, grouped heads) -> the most work
# (`flash_work`) up to which it is. What is not listed was not measured, and triton keeps it.
# One H200, bf16 (benchmarks/results/h200/backends.json; tests hold this table to that file):
# milliseconds of triton over those of flash, forward + backward, by work, at 32 / 8 heads of 128
#   1.02 prompt 32K x 16 x 2K   1.42    1.23 documents 32 x 4K        1.37
#   1.06 prompt 8K x 16 x 2K    1.42    1.30 caterpillar 12           1.27
#   1.08 4K then 4-2-2-1 x 1K   1.38    1.34 caterpillar 24           1.24
#   1.20 8 x (2K, 8 x 512, ..)  1.34    1.46 prompt 512 x 64 x 1K     1.32
#   1.22 airline per turn       1.32    2.23 prompt 256 x 1024 x 256  0.94
# and at works of 1.08, 1.34, 1.46: 32 / 8 x 64 1.18, 1.02, 1.02; 32 / 8 x 256 1.20, 1.14, 1.03;
# 32 / 32 x 128 1.50, 1.43, 1.58; at 1.34 and 1.46: 32 / 8 x 96 1.43, 1.49; 16 / 8 x 192 2.02, 1.98.
MOST_WORK = {
    (64, 64, True): 1.8,
    (96, 96, True): 1.8,
    (128, 128, True): 1.8,
    (128, 128, False): 1.8,
    (192, 192, True): 1.8,
    (256, 256, True): 1.8,
}

# the tiles that flash-attn-4 works in, and what it spends on a query tile besides them (starting,
# storing), in full tiles: 16.5 us beside 6.15, forward + backward, in a model fitted to one H200
_TILE = 128
_STARTING = 2.7


def most_work(heads: int, kv_heads: int, d: int, d_v: int) -> float | None:
    """The work up to which flash was measured to be the faster one; None where it was not measured.

    Args:
        heads, kv_heads: query heads and kv heads.
        d, d_v: head dims of q and k, and of v.
    """
    return MOST_WORK.get((d, d_v, heads > kv_heads))


@dataclass(frozen=True)
class Choice:
    """A backend, and what `explain` says of it."""

    backend: str
    reason: str


def check_name(name: str) -> None:
    """Raises where a backend does not exist."""
    if name not in BACKENDS:
        raise UnsupportedError(
            f"backend {name!r} does not exist in this version; use one of {', '.join(BACKENDS)}"
        )


def choose(
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    plan: MaskPlan | None = None,
    deterministic: bool = False,
    window: int = 0,
) -> Choice:
    """The backend for these inputs; the same for a backward as for its forward.

    Raises:
        UnsupportedError: `name` does not exist or cannot serve the call, with the reason.
    """
    check_name(name)
    if name != "auto":
        reason = refusal(name, q, k, v, scale, plan, deterministic)
        if reason is not None:
            other = "auto" if name == "flash" else "sdpa"
            raise UnsupportedError(f"{reason}; use backend={other!r}")
        return Choice(name, "it was asked for by name")
    if not q.is_cuda:
        return Choice("sdpa", f"q is on {q.device}, and the other backends need a GPU")
    if plan is None:
        return _automatic(q, k, v, scale, None, deterministic, window)
    # all that the choice looks at; asked in every call, so looked up
    of_call = (q.device, q.dtype, q.shape, k.shape[1], v.shape[2], scale, deterministic, window)
    chosen = _chosen.get(plan)
    if chosen is None:
        chosen = _chosen[plan] = {}
    if of_call not in chosen:
        chosen[of_call] = _automatic(q, k, v, scale, plan, deterministic, window)
    return chosen[of_call]


# choices live as long as the plan they are of
_chosen: weakref.WeakKeyDictionary[MaskPlan, dict[Any, Choice]] = weakref.WeakKeyDictionary()


def _automatic(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    plan: MaskPlan | None,
    deterministic: bool,
    window: int,
) -> Choice:
    triton = refusal("triton", q, k, v, scale, plan, deterministic)
    if plan is not None and refusal("flash", q, k, v, scale, plan, deterministic) is None:
        is_faster, reason = _compared(q, k, v, plan, window)
        if is_faster or triton is not None:
            return Choice("flash", triton or reason)
    if triton is not None:
        return Choice("sdpa", triton)
    return Choice("triton", "it serves this call")


def passed_over(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    plan: MaskPlan,
    deterministic: bool,
    window: int = 0,
) -> str:
    """Why "auto" left flash; asked by `explain` alone, not in every call."""
    reason = refusal("flash", q, k, v, scale, plan, deterministic)
    return reason or _compared(q, k, v, plan, window)[1]


def _compared(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: MaskPlan, window: int
) -> tuple[bool, str]:
    """Whether flash, which serves the call, is expected to be faster than triton, and why."""
    heads, kv_heads, dims = q.shape[1], k.shape[1], (q.shape[2], v.shape[2])
    most = most_work(heads, kv_heads, *dims)
    if most is None:
        return False, (
            f"backend 'flash' would too, but was not measured against it for head dims {dims[0]} "
            f"and {dims[1]} with {heads} query and {kv_heads} kv heads"
        )
    work = flash_work(plan, window)
    is_faster = work <= most
    return is_faster, (
        f"flash-attn-4 {'does' if is_faster else 'would do'} {work:.2f} times the work of the "
        f"visible pairs on this forest, and was faster than triton up to {most:.2f} times"
    )


def flash_work(plan: MaskPlan, window: int) -> float:
    """What flash-attn-4's tiles and starts cost, over what the visible pairs alone would.

    Near 1 where queries see many keys and nodes are long; tiles that need the mask, pairs that are
    computed for nothing and query tiles with little to do raise it.
    """
    tables = plan.tables(TileShape(_TILE, _TILE), window, torch.device("cpu"))
    # costs are in half full tiles, 3 a partial one
    tiles = int(tables.q_cost.sum()) / 2 + _STARTING * len(tables.q_cost)
    return tiles * _TILE**2 / max(1, plan.visible_pairs(window))


def refusal(
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    plan: MaskPlan | None,
    deterministic: bool,
) -> str | None:
    """Why a backend cannot serve a call, starting with its name; None where it can."""
    if name == "triton":
        if not _installed("triton"):
            return "backend 'triton' needs the package triton"
        from prefixtree.kernels.triton import launch

        reason = launch.refusal(q, k, v, scale)
    elif name == "flash":
        from prefixtree.kernels.flash import launch as flash

        reason = flash.refusal(q, k, v, scale, plan, deterministic)
    else:
        return None
    return None if reason is None else f"backend {name!r}: {reason}"


@cache
def _installed(package: str) -> bool:
    # looking is slow beside a launch
    return find_spec(package) is not None


def module_of(backend: str) -> ModuleType:
    """The module that serves the calls of a backend, imported only now."""
    if backend == "triton":
        from prefixtree.kernels.triton import launch

        return launch
    if backend == "flash":
        from prefixtree.kernels.flash import launch as flash

        return flash
    from prefixtree.kernels import sdpa

    return sdpa
