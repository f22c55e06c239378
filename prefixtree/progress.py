"""Progress of long work: two callables that the library calls, and that show nothing by default.

The command line passes progress bars (`watch=`) and spinners (`status=`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

# wraps the items of a loop; gets a description and the number of items
Watch = Callable[[Iterable[Any], str, int], Iterable[Any]]
# a context around a piece of work of unknown length; gets a description
Status = Callable[[str], AbstractContextManager[Any]]


def unwatched(items: Iterable[Any], description: str, total: int) -> Iterable[Any]:
    """Shows nothing: a `Watch` that gives the items themselves."""
    return items


def unannounced(description: str) -> AbstractContextManager[Any]:
    """Shows nothing: a `Status`."""
    return nullcontext()
