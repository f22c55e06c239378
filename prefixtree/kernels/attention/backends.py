"""The backends as objects. Each imports its kernels when a call first needs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from prefixtree.kernels.attention.protocol import AttentionCall, Backend
from prefixtree.kernels.packages import installed

_Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


class _Kernels(Protocol):
    """The functions that a backend's module has; they do what `Backend` says."""

    def refusal(self, call: AttentionCall) -> str | None: ...

    def forward(self, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]: ...

    def backward(
        self,
        call: AttentionCall,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> _Gradients: ...


@dataclass(frozen=True)
class LazyBackend:
    """A `Backend` whose functions are in a module that `load` imports and returns.

    Attributes:
        name: the backend's name.
        load: imports the module.
        package: a package that must be installed before `load` is called; None for none.
    """

    name: str
    load: Callable[[], _Kernels]
    package: str | None = None

    def refuses(self, call: AttentionCall) -> str | None:
        if self.package is not None and not installed(self.package):
            return f"it needs the package {self.package}"
        try:
            kernels = self.load()
        except (ImportError, AttributeError) as problem:
            return f"its kernels cannot be imported ({problem})"
        return kernels.refusal(call)

    def forward(self, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
        return self.load().forward(call)

    def backward(
        self,
        call: AttentionCall,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> _Gradients:
        return self.load().backward(call, dout, dlse, out, lse)


def _flash() -> _Kernels:
    from prefixtree.kernels.attention.flash import launch

    return launch


def _triton() -> _Kernels:
    from prefixtree.kernels.attention.triton import launch

    return launch


def _sdpa() -> _Kernels:
    from prefixtree.kernels.attention import sdpa

    return sdpa


def _reference() -> _Kernels:
    from prefixtree.kernels.attention import reference

    return reference


FLASH = LazyBackend("flash", _flash)
TRITON = LazyBackend("triton", _triton, package="triton")
SDPA = LazyBackend("sdpa", _sdpa)
REFERENCE = LazyBackend("reference", _reference)
# "auto" prefers the earlier ones, if they serve and were measured to be faster
BACKENDS: tuple[Backend, ...] = (FLASH, TRITON, SDPA, REFERENCE)
