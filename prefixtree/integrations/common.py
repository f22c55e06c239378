"""Common parts of adapters: how transformers' registers itself, the errors where a trainer or a
library is not installed, and the line that trainers log when they start.

`import prefixtree` must not import transformers, which takes seconds. So the adapter, which
registers attn_implementation="prefixtree", is imported right behind `transformers.modeling_utils`,
which every model needs, whichever import comes first.
"""

from __future__ import annotations

import importlib
import logging
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np
import torch

from prefixtree.errors import UnsupportedError
from prefixtree.forest import PrefixForest
from prefixtree.kernels.attention.api import explain
from prefixtree.kernels.runtime import installed
from prefixtree.packing.mask import TreeMask

# ---- code that runs right behind the import of a module of others -------------------------------

_MODELS = "transformers.modeling_utils"
_ADAPTER = "prefixtree.integrations.transformers"


def register_when_imported() -> None:
    """Imports the adapter now if transformers' models are there already, else when they are."""
    when_imported(_MODELS, lambda models: _register())


def when_imported(name: str, use: Callable[[ModuleType], None]) -> None:
    """Calls a function with a module: now if it is imported already, else behind its import."""
    if name in sys.modules:
        use(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Behind(name, use))


class _Behind(MetaPathFinder):
    """Finds one module as Python does, and calls a function behind its import."""

    def __init__(self, name: str, use: Callable[[ModuleType], None]) -> None:
        self._name, self._use = name, use

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self not in sys.meta_path:
            return None
        # those behind may wait for the same module
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]
        # Python skips those that have no find_spec, too
        found = (getattr(finder, "find_spec", None) for finder in behind)
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


# ---- packages that are missing, or of another version ------------------------------------------

#: the transformers that models run on, as pyproject.toml has them: from the first, below the second
TRANSFORMERS = "5.5", "6"


def check_transformers(version: str) -> None:
    """Raises an UnsupportedError if this is the version of a transformers that is not served."""
    first, end = map(_release, TRANSFORMERS)
    if not first <= _release(version) < end:
        raise UnsupportedError(
            f"transformers {version} is not served: prefixtree needs transformers >= "
            f"{TRANSFORMERS[0]}, < {TRANSFORMERS[1]} (pip install "
            f"'transformers>={TRANSFORMERS[0]},<{TRANSFORMERS[1]}')"
        )


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def require(adapter: str, package: str, install: str) -> None:
    """Raises `ModuleNotFoundError`, with what to install, where a package is missing."""
    if not installed(package):
        raise missing(adapter, package, install)


def missing(adapter: str, package: str, install: str) -> ModuleNotFoundError:
    """The error for a package that is not installed."""
    return ModuleNotFoundError(
        f"{adapter} needs {package}, which is not installed: pip install '{install}'", name=package
    )


# ---- the line that trainers log once -----------------------------------------------------------

_log = logging.getLogger("prefixtree")
# a prompt and four answers, as parents and lengths
_FOREST = (-1, 0, 0, 0, 0), (2048, 512, 512, 512, 512)


def announce(config: Any, device: torch.device, dtype: torch.dtype, **settings: Any) -> None:
    """Logs that packing is on, as a warning of the logger "prefixtree", which users see."""
    given = ", ".join(f"{k}={v!r}" for k, v in settings.items() if v is not None)
    _log.warning(
        "packing is on: each distinct token of a micro-batch is computed once%s. Of a prompt with "
        "four answers %s",
        f" ({given})" if given else "",
        _kernel(config.get_text_config(), device, dtype),
    )


def _kernel(config: Any, device: torch.device, dtype: torch.dtype) -> str:
    """The answer of `explain` for a small tree and the heads of a model."""
    heads: int = config.num_attention_heads
    shared = getattr(config, "num_key_value_heads", None) or heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    of_value = getattr(config, "v_head_dim", None) or dim
    if nope := getattr(config, "qk_nope_head_dim", None):
        # latents are expanded
        dim, shared = nope + config.qk_rope_head_dim, heads
    forest = PrefixForest.from_parents(*_FOREST)
    mask = TreeMask(np.repeat(forest.node_subtree_end, forest.node_length)).to(device)
    row = torch.empty(1, 1, 1, dtype=dtype, device=device)
    q = row.expand(mask.num_tokens, heads, dim)
    k, v = (row.expand(mask.num_tokens, shared, d) for d in (dim, of_value))
    return explain(mask, q, k, v)
