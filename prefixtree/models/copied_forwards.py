"""Copies of a family's forward, in which some global names mean something else.

The family's own code runs, and no class or module of transformers is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import CellType, FunctionType
from typing import Any

from prefixtree.errors import UnsupportedError


def with_globals(forward: Any, meanings: Mapping[str, Callable[[Any], Any]]) -> Any:
    """The same code, in which global names mean something else; decorators around it are kept.

    Args:
        forward: a function. meanings: by name, gives what it means from what it meant.

    Raises:
        UnsupportedError: a decorator that does not call what it decorates.
    """
    wrapped = getattr(forward, "__wrapped__", None)
    closure, scope = forward.__closure__, forward.__globals__
    if wrapped is None:
        scope = dict(scope)
        # torch.compile looks for the globals of a function that has it in that module instead
        scope.pop("__name__", None)
        for name, meaning in meanings.items():
            scope[name] = meaning(scope[name])
    else:
        inner = with_globals(wrapped, meanings)
        closure = tuple(CellType(inner) if c.cell_contents is wrapped else c for c in closure)
        if closure == forward.__closure__:
            raise UnsupportedError(
                f"{forward.__qualname__} stands in a decorator that does not call it: not verified"
            )
    copy = FunctionType(
        forward.__code__.replace(), scope, forward.__name__, forward.__defaults__, closure
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    copy.__dict__.update(forward.__dict__)
    if wrapped is not None:
        copy.__wrapped__ = inner  # type: ignore[attr-defined]
    return copy
