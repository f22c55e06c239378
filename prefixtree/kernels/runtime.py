"""`Backend`: kernels by the name that calls give, imported when a call first needs them.

The functions tell which packages and devices there are. On a CPU a device's numbers are those that
Triton's interpreter assumes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, Generic, Protocol, TypeVar

import torch


class _Refuses(Protocol):
    def refusal(self, call: Any) -> str | None:
        """Says why they cannot serve a call, to follow their name; None if they can."""
        ...


K = TypeVar("K", bound=_Refuses)


@dataclass(frozen=True)
class Backend(Generic[K]):
    """One implementation of a room's operators, by the name that calls give. Stateless."""

    name: str
    # imports and returns the module of its kernels, if the package is installed
    load: Callable[[], K]
    package: str | None = None

    @property
    def kernels(self) -> K:
        """The functions of the module, as the room's protocol has them."""
        return self.load()

    def refuses(self, call: Any) -> str | None:
        """Says why this backend cannot serve a call, to follow its name; None if it can."""
        if self.package is not None and not installed(self.package):
            return f"it needs the package {self.package}"
        try:
            kernels = self.kernels
        except (ImportError, AttributeError) as problem:
            return f"its kernels cannot be imported ({problem})"
        return kernels.refusal(call)


@cache
def installed(package: str) -> bool:
    """Whether a package can be found; kept, because a search takes longer than a launch."""
    return find_spec(package) is not None


_NOTHING = contextlib.nullcontext()


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability; (9, 0) on a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


@cache
def processors(device: torch.device) -> int:
    """The number of multiprocessors; 1 on a CPU."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Makes a context in which this device, on which kernels are launched, is the current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)
