"""Code that runs right after the import of a module of others, such as our registration with
transformers.

It imports nothing that is not Python's: `import prefixtree` runs it, and waits for transformers
without loading it. The adapter, which registers attn_implementation="prefixtree", is imported right
after `transformers.modeling_utils`, which every model needs, whichever import comes first.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MODELS = "transformers.modeling_utils"
_ADAPTER = "prefixtree.integrations.transformers"


def register_when_imported() -> None:
    """Imports the adapter now if transformers' models are there already, else when they are."""
    when_imported(_MODELS, lambda models: _register())


def when_imported(name: str, use: Callable[[ModuleType], None]) -> None:
    """Calls a function with a module: now if it is imported already, else after its import."""
    if name in sys.modules:
        use(sys.modules[name])
    else:
        sys.meta_path.insert(0, _AfterImport(name, use))


class _AfterImport(MetaPathFinder):
    """Finds one module as Python does, and calls a function after its import."""

    def __init__(self, name: str, use: Callable[[ModuleType], None]) -> None:
        self._name, self._use = name, use

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self not in sys.meta_path:
            return None
        # later ones may wait for the same module
        later = sys.meta_path[sys.meta_path.index(self) + 1 :]
        # Python skips those that have no find_spec, too
        found = (getattr(finder, "find_spec", None) for finder in later)
        specs = (find(fullname, path, target) for find in found if find is not None)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_use(module: ModuleType) -> None:
            execute(module)
            self._use(module)
            # not before: an import that fails may be tried again
            if self in sys.meta_path:
                sys.meta_path.remove(self)

        loader.exec_module = execute_and_use
        return spec


def _register() -> None:
    try:
        importlib.import_module(_ADAPTER)
    except Exception as problem:  # of whatever is installed: others use transformers too
        found = ", ".join(
            f"{name} {getattr(sys.modules.get(name), '__version__', '(unknown)')}"
            for name in ("torch", "transformers")
        )
        warnings.warn(
            'prefixtree: attn_implementation="prefixtree" could not be registered, because of '
            f"{type(problem).__name__}: {problem}. Expected are torch >= 2.11 and "
            f"transformers >= 5.5, < 6; found are {found}",
            stacklevel=2,
        )
