"""The errors prefixtree raises: each says what was expected, what came and how to mend it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


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
