"""The backends as objects. Each imports its kernels when a call first needs them."""

from __future__ import annotations

from prefixtree.kernels.attention.protocol import Kernels
from prefixtree.kernels.backend import Backend


def _flash() -> Kernels:
    from prefixtree.kernels.attention.flash import launch

    return launch


def _triton() -> Kernels:
    from prefixtree.kernels.attention.triton import launch

    return launch


def _sdpa() -> Kernels:
    from prefixtree.kernels.attention import sdpa

    return sdpa


def _reference() -> Kernels:
    from prefixtree.kernels.attention import reference

    return reference


FLASH = Backend("flash", _flash)
TRITON = Backend("triton", _triton, package="triton")
SDPA = Backend("sdpa", _sdpa)
REFERENCE = Backend("reference", _reference)
# "auto" prefers the earlier ones, if they serve and were measured to be faster
BACKENDS: tuple[Backend[Kernels], ...] = (FLASH, TRITON, SDPA, REFERENCE)
