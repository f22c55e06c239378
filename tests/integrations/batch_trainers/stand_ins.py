"""Stand-ins for packages that the trainers import and that cannot be installed here."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# the one module of ms-swift that is its own
_SWIFT = "swift.rlhf_trainers.grpo_trainer"


class _Unused:
    """May be imported and written into annotations, not called."""

    def __class_getitem__(cls, item: Any) -> Any:
        return cls

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("a stand-in was called")


def _at_import(*args: Any, **kwargs: Any) -> Any:
    """What ms-swift calls while it is imported: decorators, loggers."""
    return args[0] if args and callable(args[0]) else None


class _StandIn(ModuleType):
    """A module in which every name is unused."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self.__name__.startswith("swift") and name[0].islower():
            return _at_import
        # a class of its own, as classes have several of them as bases
        return type(name, (_Unused,), {})


class Finder:
    """Finds modules of packages that are not installed.

    Args:
        names: packages that may be missing; those that are installed are left alone.
    """

    def __init__(self, *names: str) -> None:
        self._missing = {name for name in names if importlib.util.find_spec(name) is None}
        # before the path, where the other modules of ms-swift are
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.startswith("swift.") and not f"{_SWIFT}.".startswith(f"{name}."):
            return ModuleSpec(name, self, is_package=True)
        # SkyRL has another product where flash-attn's operators are missing
        if name.partition(".")[0] in self._missing and not name.startswith("flash_attn.ops"):
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []
