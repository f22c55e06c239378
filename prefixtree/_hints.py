"""A keyword that a function does not have gets the nearest that it has."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


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
