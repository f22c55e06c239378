"""Which backend runs a call, and why: for `tree_attention` and `prefixtree.explain` alike."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch

from prefixtree.errors import UnsupportedError
from prefixtree.packing.mask import MaskPlan

BACKENDS = ("auto", "reference", "sdpa", "triton", "flash")

# "auto" passes flash over until it is verified (`flash.launch.VERIFIED`) and it is known on which
# forests it is the faster one
AUTO_TAKES_FLASH = False


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
    if AUTO_TAKES_FLASH and refusal("flash", q, k, v, scale, plan, deterministic) is None:
        return Choice("flash", "flash-attn-4 serves this call on this GPU")
    triton = refusal("triton", q, k, v, scale, plan, deterministic)
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
) -> str:
    """Why "auto" left flash; asked by `explain` alone, not in every call."""
    reason = refusal("flash", q, k, v, scale, plan, deterministic)
    return reason or "backend 'flash' would too, but only by name until it has been measured"


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
