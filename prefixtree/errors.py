"""The errors that prefixtree raises, rows of refusals, missing packages, and hints for messages.

A message says what was expected, what came and how to mend it.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple, ParamSpec, TypeVar


class ForestError(ValueError):
    """Sequences, masks or trees do not describe a prefix forest, or do not belong to it."""


class UnsupportedError(NotImplementedError):
    """A build, a device or a model cannot serve a request exactly; the message says why."""


class InputError(ValueError):
    """A file, a name or a setting cannot be used; the message says which one and why."""


class Refusal(NamedTuple):
    """One reason to refuse a request: a row of a room's table.

    Attributes:
        name: of what is refused, a setting's name where there is one; unique within a table.
        applies: says whether an object is refused; a dict means yes and fills fields of `message`.
        message: what is refused, why, and what to do instead, with fields of `str.format`. {name}
            is `name`, and {value} is the object's attribute of that name.
        only_training: whether evaluation is unaffected.
    """

    name: str
    applies: Callable[[Any], Any]
    message: str
    only_training: bool = False


def refuse(
    rows: Iterable[Refusal], given: Any, before: str = "", *, training: bool = True, **words: Any
) -> None:
    """Raises the first row that applies to `given`; `words` fill fields of `before` + message."""
    for row in rows:
        if (training or not row.only_training) and (applied := row.applies(given)):
            fields = {"name": row.name, "value": getattr(given, row.name, None), **words}
            fields |= applied if isinstance(applied, dict) else {}
            raise UnsupportedError((before + row.message).format_map(fields))


def is_set(name: str, *fine: Any) -> Callable[[Any], bool]:
    """Makes a condition: an object's attribute, None if it lacks it, is none of `fine`.

    Without `fine`: it is true."""
    if fine:
        return lambda given: getattr(given, name, None) not in fine
    return lambda given: bool(getattr(given, name, None))


# ---- packages that are missing -------------------------------------------------------------------

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


# ---- hints of messages ---------------------------------------------------------------------------

# how Python and Jupyter load a module a second time
_RELOADED = "importlib.reload or %autoreload"
_P = ParamSpec("_P")
_R = TypeVar("_R")


def with_hints(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Lets the TypeError for an unknown keyword name the nearest one, as Python 3.13 does."""
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
    """Describes the type of a value that is not of the class `expected` of prefixtree."""
    kind = type(value)
    if (kind.__module__, kind.__qualname__) == (expected.__module__, expected.__qualname__):
        return (
            f"a {kind.__name__} of before prefixtree was reloaded ({_RELOADED}): restart Python, "
            "or make everything again"
        )
    return f"the class {value.__name__}" if isinstance(value, type) else kind.__name__


def near_name(name: str, known: Sequence[str]) -> str:
    """Ends a message with the known name that is nearest to an unknown one, if any."""
    return "".join(f"; did you mean {near}?" for near in difflib.get_close_matches(name, known, 1))
