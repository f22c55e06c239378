"""The errors prefixtree raises: each says what was expected, what came and how to mend it; and
hints of messages: the name that is nearest to an unknown one, and the type of a wrong value."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

"""The errors prefixtree raises: each says what was expected, what came and how to mend it."""


class ForestError(ValueError):
    """The sequences, masks or trees do not describe a prefix forest, or do not belong to it."""


class UnsupportedError(NotImplementedError):
    """This build, device or model cannot serve a request exactly; the message says why."""


class InputError(ValueError):
    """A file, a name or a setting cannot be used; the message says which one and why."""


# ---- hints of messages ---------------------------------------------------------------------------

# how Python and Jupyter load a module a second time
_RELOADED = "importlib.reload or %autoreload"
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


def kind_of(value: object, expected: type) -> str:
    """The type of a value that is not what was expected, in words.

    Args:
        value: what came. expected: the class of prefixtree that was asked for.
    """
    kind = type(value)
    if (kind.__module__, kind.__qualname__) == (expected.__module__, expected.__qualname__):
        return (
            f"a {kind.__name__} of before prefixtree was reloaded ({_RELOADED}): restart Python, "
            "or make everything again"
        )
    return f"the class {value.__name__}" if isinstance(value, type) else kind.__name__


def near_name(name: str, known: Sequence[str]) -> str:
    """The end of a message: the known name that is nearest to one that does not exist, if any."""
    return "".join(f"; did you mean {near}?" for near in difflib.get_close_matches(name, known, 1))
