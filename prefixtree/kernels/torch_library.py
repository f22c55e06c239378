"""Common to the registered torch operators: their libraries, their registration, autocast.

Registered by hand: what `torch.library.custom_op` does in every call takes longer than all here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

_NAMESPACE: Any = torch.ops.prefixtree
_NOTHING = contextlib.nullcontext()

# Keeps Dynamo out of a function. The public one loads Dynamo at once, which takes seconds
uncompiled: Any = getattr(torch, "_disable_dynamo", torch.compiler.disable)


def new_library(name: str) -> torch.library.Library:
    """A library of the namespace "prefixtree"; one of this name that is there already goes.

    It is kept where a second import (importlib.reload) finds it: torch takes no operator twice.
    """
    if (earlier := getattr(_NAMESPACE, name, None)) is not None:
        earlier._destroy()
    library = torch.library.Library("prefixtree", "FRAGMENT")
    setattr(_NAMESPACE, name, library)
    return library


def register(
    library: torch.library.Library,
    name: str,
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
) -> Callable[..., Any]:
    """-> the operator: `kernel` on every device, `fake` where only shapes are asked for."""
    library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"prefixtree::{name}", fake, lib=library)
    operator: Callable[..., Any] = getattr(_NAMESPACE, name).default
    return operator


def as_given(x: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Autocast would reach into an operator and turn its float32 products into half precision."""
    device = x.device.type
    # entered only where it is on: entering costs more than all checks
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else _NOTHING
