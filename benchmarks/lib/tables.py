"""A table's columns, declared once: printed on a terminal by rich, or as markdown for the pages.

A case has `tables(*runs)`: of the JSON of one run, or of several that stand in one table, the
paragraphs and tables that show it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import rich.table
from rich.console import Console
from rich.text import Text

Row = dict[str, Any]
GIB = 2**30
#: What pages say while there is no file of results.
MISSING = "Not measured yet."
# checks that a verdict names
MOST_NAMED = 4


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        head: its heading.
        cell: text of a line; an empty one where the line has nothing there.
        is_detail: left out of pages.
    """

    head: str
    cell: Callable[[Any], str]
    is_detail: bool = False


@dataclass(frozen=True)
class Table:
    """Columns, and the lines that their cells are of: anything that the columns understand."""

    columns: Sequence[Column]
    lines: Sequence[Any]


# paragraphs and tables, in order
Parts = Iterable[str | Table]


def markdown(parts: Parts) -> str:
    """For a page, a blank line between the parts; paragraphs are wrapped at 100 columns. Columns
    without any text are left out."""
    return "\n\n".join(_wrap(part) if isinstance(part, str) else _markdown(part) for part in parts)


def _wrap(paragraph: str) -> str:
    return textwrap.fill(paragraph, 100, break_long_words=False, break_on_hyphens=False)


def _markdown(table: Table) -> str:
    columns = []
    for column in table.columns:
        cells = [column.cell(line) for line in table.lines]
        if any(cells) and not column.is_detail:
            columns.append([column.head, "---", *cells])
    lines = zip(*columns, strict=True)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def show(parts: Parts, width: int = 160) -> None:
    """On the terminal; columns without any text are left out."""
    console = Console(width=width)
    for part in parts:
        if isinstance(part, str):
            console.print(part, markup=False, highlight=False)
            continue
        out = rich.table.Table(box=None, pad_edge=False)
        columns = []
        for column in part.columns:
            cells = [column.cell(line) for line in part.lines]
            if any(cells):
                columns.append(cells)
                is_first = len(columns) == 1
                out.add_column(
                    column.head, justify="left" if is_first else "right", no_wrap=is_first
                )
        for cells in zip(*columns, strict=True):
            out.add_row(*(Text(cell) for cell in cells))
        console.print(out)


# ---- cells ---------------------------------------------------------------------------------------


def number(row: Row, key: str, form: str) -> str:
    """The number, or an empty cell."""
    value = row.get(key)
    return "" if value is None else format(value, form)


def times_cell(ratio: float | None) -> str:
    """How many times, or an empty cell."""
    return "" if ratio is None else f"{ratio:.2f}x"


def gib(count: float | None, form: str = ".1f") -> str:
    """Bytes in GiB, or an empty cell."""
    return "" if count is None else format(count / GIB, form)


def verdict(row: Row) -> str:
    """Why a row has no times, or an empty string."""
    if row.get("red"):
        more = len(row["red"]) - MOST_NAMED
        return f"red: {', '.join(row['red'][:MOST_NAMED])}" + (f" and {more} more" * (more > 0))
    if "failed" in row:
        return f"failed: {row['failed'][:200]}"
    return "out of memory" if "out_of_memory" in row else ""


def verdict_column(most: int = 60) -> Column:
    """Why a row has no times; on pages every row has them."""
    return Column("", lambda row: verdict(row)[:most], is_detail=True)


# ---- where a table's numbers are from ------------------------------------------------------------


def made(environment: Row) -> str:
    """The command, the commit and the machine, for what runs on a CPU."""
    return (
        f"`{environment['command']}` at {environment['commit']}, {environment['processor']}, "
        f"{environment['cores']} cores, torch {environment['torch']}"
    )


def machine(environment: Row, *packages: str) -> str:
    """The GPU (or the CPU of a trial), torch and other versions, and the commit."""
    versions = [f"{x} {environment[x]}" for x in ("torch", *packages) if environment.get(x)]
    where = environment.get("gpu") or environment.get("processor", "")
    return ", ".join([where, *versions, environment["commit"] or "no commit"])


def machines(runs: Sequence[Row], *packages: str) -> str:
    """`machine` of the first of several runs, with the commits of all."""
    commits = dict.fromkeys(run["environment"]["commit"] or "no commit" for run in runs)
    return machine(runs[0]["environment"] | {"commit": ", ".join(commits)}, *packages)


def by_key(rows: Iterable[Row], key: Callable[[Row], Any], side: str) -> dict[Any, dict[str, Row]]:
    """Rows that stand in one line: by `key`, then by what they have at `side`."""
    out: dict[Any, dict[str, Row]] = {}
    for row in rows:
        out.setdefault(key(row), {})[row[side]] = row
    return out
