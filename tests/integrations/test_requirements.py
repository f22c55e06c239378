"""An adapter without its trainer, or with another transformers, says what to install."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
import sys
import tomllib
from pathlib import Path

import pytest

from prefixtree import UnsupportedError
from prefixtree.integrations import common
from prefixtree.registration import when_imported

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


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
    monkeypatch.setattr(common, "installed", lambda name: False)
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setitem(sys.modules, "megatron", None)
    module = f"prefixtree.integrations.{adapter}"
    for name in [name for name in sys.modules if name.startswith(module)]:
        monkeypatch.delitem(sys.modules, name)
    message = f"{module} needs {package}, which is not installed: pip install '{install}'"
    with pytest.raises(ModuleNotFoundError, match=f"^{re.escape(message)}$") as error:
        importlib.import_module(module)
    assert error.value.name == package


def test_another_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others import as well, and call the attention's mask function with other arguments."""
    import transformers

    import prefixtree.integrations.transformers as adapter

    (needed,) = (
        d for d in PROJECT["optional-dependencies"]["train"] if d.startswith("transformers")
    )
    bounds = f">={common.TRANSFORMERS[0]},<{common.TRANSFORMERS[1]}"
    assert needed == f"transformers{bounds}"
    for version in ("5.5.0", "5.5.0.dev0", "5.23.0", "5.100.1"):
        common.check_transformers(version)
    for version in ("4.57.1", "5.4.0", "6.0.0", "6.0.0.dev0"):
        with pytest.raises(UnsupportedError, match=f"^transformers {version} is not served: .*5.5"):
            common.check_transformers(version)

    # the adapter asks before it registers anything
    monkeypatch.setattr(transformers, "__version__", "4.57.1")
    spec = importlib.util.spec_from_file_location("again", adapter.__file__)
    assert spec is not None and spec.loader is not None
    registered = transformers.AttentionInterface._global_mapping["prefixtree"]
    with pytest.raises(UnsupportedError, match=r"transformers 4\.57\.1 is not served"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert transformers.AttentionInterface._global_mapping["prefixtree"] is registered


def test_a_module_that_is_waited_for_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", sys.meta_path.copy())
    when_imported("not_there", lambda module: None)
    with pytest.raises(ModuleNotFoundError, match="No module named 'not_there'"):
        importlib.import_module("not_there")
