"""The errors prefixtree raises: each says what was expected, what came and how to mend it; rows of
refusals; packages that are missing; and hints of messages: the name that is nearest to an unknown
one, and the type of a wrong value."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple, ParamSpec, TypeVar


class ForestError(ValueError):
    """The sequences, masks or trees do not describe a prefix forest, or do not belong to it."""


class UnsupportedError(NotImplementedError):
    """This build, device or model cannot serve a request exactly; the message says why."""


class InputError(ValueError):
    """A file, a name or a setting cannot be used; the message says which one and why."""


class Refusal(NamedTuple):
    """One reason to refuse what a room is given: a row of its table.

    Attributes:
        name: of what is refused, a setting's where there is one; unique within a table.
        applies: from what is given, whether it is refused; a dict fills fields of the message.
        message: what is refused, why, and what to do instead, with fields as `str.format` has
            them. {name} is the name; {value} the attribute of this name of what is given.
        only_training: whether evaluation is unaffected.
    """

    name: str
    applies: Callable[[Any], Any]
    message: str
    only_training: bool = False


def refuse(
    rows: Iterable[Refusal], given: Any, before: str = "", *, training: bool = True, **words: Any
) -> None:
    """Raises the first row that applies.

    Args:
        rows: a table.
        given: what the conditions take.
        before: the beginning of the message, with fields too.
        training: whether rows of training alone are looked at. Default: True.
        words: further fields.

    Raises:
        UnsupportedError: with the message of the row.
    """
    for row in rows:
        if (training or not row.only_training) and (found := row.applies(given)):
            fields = {"name": row.name, "value": getattr(given, row.name, None), **words}
            fields |= found if isinstance(found, dict) else {}
            raise UnsupportedError((before + row.message).format_map(fields))


def is_set(name: str, *fine: Any) -> Callable[[Any], bool]:
    """A condition: this attribute is there, and none of `fine` (default: it is true)."""
    if fine:
        return lambda given: getattr(given, name, None) not in fine
    return lambda given: bool(getattr(given, name, None))


# ---- packages that are missing -----------------------------------------------------------------

#: the extra that brings what models need and a report does not, and what it brings
TRAIN = "prefixtree-attention[train]"
OF_TRAIN = ("torch", "transformers", "networkx")


def missing(what: str, package: str, install: str) -> ModuleNotFoundError:
    """The error for a package that is not installed."""
    return ModuleNotFoundError(
        f"{what} needs {package}, which is not installed: pip install '{install}'", name=package
    )


def need_training(what: str) -> None:
    """Raises `ModuleNotFoundError`, with what to install, if torch or transformers is missing."""
    for package in OF_TRAIN[:2]:
        if find_spec(package) is None:
            raise missing(what, package, TRAIN)


def with_command(what: str, problem: ModuleNotFoundError) -> ModuleNotFoundError:
    """The error itself, or, of a package of `OF_TRAIN`, one that says what to install."""
    package = (problem.name or "").split(".")[0]
    if package not in OF_TRAIN or "pip install" in str(problem):
        return problem
    return missing(what, package, TRAIN)


# ---- hints of messages -------------------------------------------------------------------------

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
