"""The error of an adapter whose trainer or library is not installed."""

from __future__ import annotations

from prefixtree.kernels.packages import installed


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
