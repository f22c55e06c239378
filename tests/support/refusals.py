"""Rows of refusals, and the errors that they make."""

from __future__ import annotations

import re
from collections.abc import Iterable
from string import Formatter
from types import ModuleType

from prefixtree.errors import Refusal


def rows_of(*modules: ModuleType) -> dict[str, Refusal]:
    """ "TABLE: name" -> row, of every table that stands in the modules; each row once."""
    found: dict[str, Refusal] = {}
    for module in modules:
        for table, value in vars(module).items():
            is_table = isinstance(value, tuple) and not isinstance(value, Refusal)
            for row in value if is_table else (value,):
                if isinstance(row, Refusal) and all(row is not known for known in found.values()):
                    found[f"{table}: {row.name}"] = row
    return found


def check_cases(rows: dict[str, Refusal], cases: Iterable[str]) -> None:
    """Asserts that every row has a case, and every case a row."""
    assert rows.keys() == set(cases), rows.keys() ^ set(cases)


def pattern(row: Refusal) -> str:
    """A regular expression of the errors that a row makes."""
    parts = Formatter().parse(row.message)
    return "".join(re.escape(text) + "(?s:.*)" * bool(field) for text, field, *_ in parts) + "$"
