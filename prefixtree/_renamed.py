"""Names that are not today's: old ones work for one release and warn, mistyped ones get a hint."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

_GOES = "0.3"
_P = ParamSpec("_P")
_R = TypeVar("_R")


def message(old: str, new: str) -> str:
    """The text of the warning for an old name."""
    return f"{old} is now {new}; the old name will be removed in prefixtree {_GOES}"


def warn(old: str, new: str) -> None:
    """A DeprecationWarning at the line of the caller's caller."""
    warnings.warn(message(old, new), DeprecationWarning, stacklevel=3)


def renamed_arguments(**new_of: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorates a function whose keywords were renamed.

    Args:
        new_of: old keyword -> the new one.

    Returns:
        The decorator. What it returns takes the old keywords too, with a DeprecationWarning, and
        raises a TypeError if one is given together with the new one.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            for old in new_of.keys() & kwargs.keys():
                new = new_of[old]
                if new in kwargs:
                    raise TypeError(
                        f"{function.__qualname__}() got {new}= and its old name {old}=; leave out "
                        f"{old}="
                    )
                warn(f"{function.__qualname__}({old}=)", f"{new}=")
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call

    return decorate


def with_hints(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorates a function: for a keyword that it does not have, its TypeError names the nearest.

    Python 3.13 does so for every function.
    """
    known = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for unknown in kwargs.keys() - set(known):
            for near in difflib.get_close_matches(unknown, known, 1):
                raise TypeError(
                    f"{function.__qualname__}() got an unexpected keyword argument {unknown!r}; "
                    f"did you mean {near}=?"
                )
        return function(*args, **kwargs)

    return call


def renamed_attribute(new: str) -> Any:
    """A property that stands for the attribute `new` of the same object under its old name."""
    return _RenamedAttribute(new)


class _RenamedAttribute:
    def __init__(self, new: str) -> None:
        self.new = new

    def __set_name__(self, owner: type, name: str) -> None:
        self.old = f"{owner.__name__}.{name}"

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        warn(self.old, self.new)
        return getattr(instance, self.new)

    def __set__(self, instance: Any, value: Any) -> None:
        raise AttributeError(f"{self.old} is read-only, and is now {self.new}")


def renamed_names(module: str, new_of: dict[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a module whose names were renamed.

    Args:
        module: its `__name__`.
        new_of: old name -> "module.name" of the new one.
    """

    def get(name: str) -> Any:
        if name not in new_of:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        where, _, new = new_of[name].rpartition(".")
        warn(f"{module}.{name}", new_of[name])
        return getattr(importlib.import_module(where), new)

    return get
