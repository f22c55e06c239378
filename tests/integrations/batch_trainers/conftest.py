"""The trainers' own modules, with stand-ins for what their forwards import and do not call."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch

# what cannot be installed without a GPU, or brings a server
_STAND_INS = ("deepspeed", "flash_attn", "jaxtyping", "loguru")
# whose __init__ imports what no forward needs
_PACKAGES = (
    "openrlhf.models",
    "skyrl.backends.skyrl_train.workers",
    "skyrl.backends.skyrl_train.utils",
    "swift.rlhf_trainers",
)
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


class _Finder:
    """Finds modules of packages that are not installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.startswith("swift.") and not f"{_SWIFT}.".startswith(f"{name}."):
            return ModuleSpec(name, self, is_package=True)
        # SkyRL has another product where flash-attn's operators are missing
        if name.partition(".")[0] in _STAND_INS and not name.startswith("flash_attn.ops"):
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []


@pytest.fixture(autouse=True, scope="session")
def stand_ins() -> Iterator[None]:
    missing = tuple(name for name in _STAND_INS if importlib.util.find_spec(name) is None)
    globals()["_STAND_INS"] = missing
    finder = _Finder()
    # before the path, where the other modules of ms-swift are
    sys.meta_path.insert(0, finder)
    for dotted in _PACKAGES:
        names = dotted.split(".")
        top = importlib.util.find_spec(names[0])
        assert top is not None and top.submodule_search_locations is not None
        where = list(top.submodule_search_locations)
        for depth in range(1, len(names) + 1):
            package = ModuleType(".".join(names[:depth]))
            package.__path__ = ["/".join([folder, *names[1:depth]]) for folder in where]
            sys.modules.setdefault(package.__name__, package)
            # found again as the folder of the next one
            if depth == 1:
                package.__spec__ = top
    # OpenRLHF compiles its entropy, for one size per batch
    with torch._dynamo.config.patch(disable=True):
        yield
    sys.meta_path.remove(finder)
