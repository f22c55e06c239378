"""Registers attn_implementation="prefixtree" as soon as transformers' models can be made.

`import prefixtree` must not import transformers, which takes seconds. So the adapter is imported
right behind `transformers.modeling_utils`, which every model needs, whichever import comes first.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_MODELS = "transformers.modeling_utils"
_ADAPTER = "prefixtree.integrations.transformers"


def register_when_imported() -> None:
    """Imports the adapter now if transformers' models are there already, else when they are."""
    if _MODELS in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _AfterModels())


class _AfterModels(MetaPathFinder):
    """Finds one module on the path, as Python does, and imports the adapter behind it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == _MODELS else None
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            # not before: an import that fails may be tried again
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            _register()

        loader.exec_module = execute_and_register
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
