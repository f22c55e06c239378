"""Stand-ins for packages that are not installed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

import pytest

from benchmarks.lib.absent import stand_in


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    finders, modules = list(sys.meta_path), set(sys.modules)
    yield
    sys.meta_path[:] = finders
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def test_what_is_installed_stays() -> None:
    assert stand_in(("json", "numpy")) == []
    assert not hasattr(importlib.import_module("json"), "remote")


def test_what_is_taken_can_be_named_and_does_nothing() -> None:
    assert stand_in(("json", "imaginary_package")) == ["imaginary_package"]
    package = importlib.import_module("imaginary_package")
    inner = importlib.import_module("imaginary_package.util.scheduling")
    assert package.util.scheduling is inner

    def function() -> int:
        return 1

    assert package.remote(function) is function
    assert package.remote(num_cpus=1)(function) is function
    assert not package.is_initialized()
    assert not isinstance(function, package.ObjectRef)
    assert isinstance(package.Field(default=1), package.Field)
    assert package.ObjectRef is package.ObjectRef and package.actor.Handle is not inner.Handle
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("another_imaginary_package")
