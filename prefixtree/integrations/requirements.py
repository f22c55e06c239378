"""The errors of an adapter whose trainer or library is not installed, or of another version."""

from __future__ import annotations

import re

from prefixtree.errors import UnsupportedError
from prefixtree.kernels.runtime import installed

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
    """Raises `ModuleNotFoundError`, with what to install, where a package is missing.

    Args:
        adapter: the module that needs it. package: its top-level name.
        install: what pip takes.
    """
    if not installed(package):
        raise missing(adapter, package, install)


def missing(adapter: str, package: str, install: str) -> ModuleNotFoundError:
    """The error for a package that is not installed."""
    return ModuleNotFoundError(
        f"{adapter} needs {package}, which is not installed: pip install '{install}'", name=package
    )
