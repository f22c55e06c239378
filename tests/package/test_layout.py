"""The tests' own folders: they mirror the package, and what several folders use is in support/."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import prefixtree

TESTS = Path(__file__).parents[1]
PACKAGE = Path(prefixtree.__file__).parent
# what tests something else than one room of the package
BESIDE = {"support", "package", "examples", "benchmarks", "real"}
# half of a room: what needs another environment
APART = {"kernels/attention/flash/fa4", "integrations/ms_swift"}
FILES = {file.relative_to(TESTS).as_posix(): file for file in sorted(TESTS.rglob("*.py"))}
FOLDERS = sorted({Path(name).parent.as_posix() for name in FILES} - {"."})


@cache
def imported_modules(text: str) -> set[str]:
    """Names of the modules of the package `tests` that a file imports, with their full paths."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {m for m in inner if is_module(m)} or {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.split(".")[0] == "tests"}


def is_module(name: str) -> bool:
    return "/".join(name.split(".")[1:]) + ".py" in FILES


def may_import(file: str, module: str) -> bool:
    """From tests.support, from tests.conftest and from the file's own folder."""
    folder, target = file.rpartition("/")[0], "/".join(module.split(".")[1:-1])
    if target == "support" or target == folder:
        return True
    return module == "tests.conftest" and folder != "support"


def test_the_rule() -> None:
    text = (
        "import tests.support.spawn\nfrom tests.support import models\n"
        "def f():\n    from tests.conftest import Poison\n    import torch\n"
    )
    assert imported_modules(text) == {
        "tests.support.spawn",
        "tests.support.models",
        "tests.conftest",
    }
    assert all(may_import("cli/test_verify.py", m) for m in imported_modules(text))
    assert may_import("integrations/verl/rank.py", "tests.integrations.verl.runs")
    assert not may_import("integrations/trl/rank.py", "tests.integrations.verl.runs")
    assert not may_import("cli/test_verify.py", "tests.cli_runs.run")
    assert not may_import("support/models.py", "tests.conftest")
    assert not may_import("support/models.py", "tests.planning.test_planning")


def test_helpers_come_from_support_or_the_same_folder() -> None:
    for file, path in FILES.items():
        for module in imported_modules(path.read_text()):
            assert may_import(file, module), f"tests/{file} imports {module}: move that to support/"


def test_folders_are_those_of_the_package() -> None:
    for folder in FOLDERS:
        # without it two files of one name, and helpers beside a test, would not be found
        assert (TESTS / folder / "__init__.py").exists(), folder
        if folder.split("/")[0] not in BESIDE and folder not in APART:
            room = PACKAGE / folder
            there = room.is_dir() or room.with_suffix(".py").exists()
            assert there, f"there is no prefixtree/{folder}"


def test_support_holds_no_tests_and_nothing_unused() -> None:
    support = {name for name in FILES if name.startswith("support/")} - {"support/__init__.py"}
    assert not [name for name in support if Path(name).name.startswith("test_")]
    texts = {name: file.read_text() for name, file in FILES.items()}
    used = {m for name in texts for m in imported_modules(texts[name])}
    named = {name for name in support if f"tests.support.{Path(name).stem}" not in used}
    # those that are started by name
    for name in named:
        module = f'"tests.support.{Path(name).stem}"'
        assert any(module in text for text in texts.values()), f"nobody uses tests/{name}"
