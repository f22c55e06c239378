"""An adapter without its trainer says what to install."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import sys

import pytest

from prefixtree.integrations import requirements


@pytest.mark.parametrize(
    ("adapter", "package", "install"),
    [
        ("trl", "trl", "prefixtree-attention[trl]"),
        ("verl", "verl", "prefixtree-attention[verl]"),
        ("megatron", "megatron-core", "megatron-core==0.19.2"),
    ],
)
def test_a_missing_package_is_named(
    adapter: str, package: str, install: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    version_of = importlib.metadata.version

    def version(name: str) -> str:
        if name in ("verl", "megatron-core"):
            raise importlib.metadata.PackageNotFoundError(name)
        return version_of(name)

    # as where none of them is installed
    monkeypatch.setattr(requirements, "installed", lambda name: False)
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setitem(sys.modules, "megatron", None)
    module = f"prefixtree.integrations.{adapter}"
    for name in [name for name in sys.modules if name.startswith(module)]:
        monkeypatch.delitem(sys.modules, name)
    message = f"{module} needs {package}, which is not installed: pip install '{install}'"
    with pytest.raises(ModuleNotFoundError, match=f"^{re.escape(message)}$") as error:
        importlib.import_module(module)
    assert error.value.name == package
