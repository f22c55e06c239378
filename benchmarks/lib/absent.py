"""Stand-ins for packages that a library imports and that a benchmark never calls.

verl's `TrainingWorker` imports ray, fastapi, uvicorn, pydantic and datasets with the code that
controls and serves; a worker in one's own process needs none of them. On a machine without them
`stand_in` makes them importable, in this process alone. What is taken from a stand-in can be named
in annotations and `isinstance`, decorates a function into itself, and does nothing else.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def stand_in(packages: Collection[str]) -> list[str]:
    """Makes those of the packages importable that are not installed; -> their names.

    Import first what asks whether they are installed: it would find the stand-in.
    """
    gone = [name for name in packages if find_spec(name) is None]
    if gone:
        sys.meta_path.append(_Finder(gone))
    return gone


class _Finder(MetaPathFinder, Loader):
    def __init__(self, packages: Collection[str]) -> None:
        self._packages = frozenset(packages)

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in self._packages:
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _StandIn(ModuleType):
    """A module whose attributes are modules, or classes where their names are written so."""

    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value: Any
        if name == "remote":
            value = _undecorated
        elif name == "is_initialized":
            value = _no
        elif name[0].isupper():
            value = type(name, (), {"__module__": self.__name__, "__init__": _takes_anything})
        else:
            return importlib.import_module(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


def _undecorated(*given: Any, **options: Any) -> Any:
    """`ray.remote`, with and without arguments."""
    if given:
        return given[0]
    keep: Callable[[Any], Any] = lambda what: what  # noqa: E731
    return keep


def _takes_anything(self: Any, *given: Any, **options: Any) -> None:
    pass


def _no() -> bool:
    """`ray.is_initialized`: verl then asks the environment where it would ask Ray."""
    return False
