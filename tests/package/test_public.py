"""The public names: every type that a public function takes, returns or raises has an API page."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import prefixtree

ROOT = Path(prefixtree.__file__).parent
PAGES = ROOT.parent / "docs/api"
# adapters import their trainers, which this environment does not have
ELSEWHERE = ("prefixtree.integrations.trl", "prefixtree.integrations.verl")


def on_pages() -> dict[str, Any]:
    """The objects that the pages name, by their dotted names."""
    found: dict[str, Any] = {}
    pattern = re.compile(r"^::: (\S+)\n((?: +.*\n?)*)", re.MULTILINE)
    for page in sorted(PAGES.glob("*.md")):
        for dotted, options in pattern.findall(page.read_text()):
            if dotted.startswith(ELSEWHERE):
                continue
            members = re.search(r"members: \[(.*)\]", options)
            names = [f"{dotted}.{m}" for m in members[1].split(", ")] if members else [dotted]
            for name in names:
                module, _, attribute = name.rpartition(".")
                found[name] = getattr(importlib.import_module(module), attribute)
    return found


PUBLIC = on_pages()


@cache
def classes() -> set[str]:
    """Every class of the package: annotations are text, and some imported for types alone."""
    return {
        node.name
        for file in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    }


def annotations(thing: Any) -> Iterator[str]:
    """The text of every annotation a user of `thing` meets, and of what it raises."""
    docstring = inspect.getdoc(thing) or ""
    raised = re.search(r"Raises:\n((?:    .*\n?)*)", docstring)
    yield from re.findall(r"\w+Error\b", raised[1] if raised else "")
    # "stats: PlanStats.", of attributes set in the constructor
    yield from re.findall(r"^ +\w+: (?:the |The )?([A-Z]\w+)[.,]", docstring, re.MULTILINE)
    if inspect.isclass(thing):
        for base in thing.__mro__:
            if base.__module__.startswith("prefixtree"):
                yield from map(str, inspect.get_annotations(base).values())
        for name, member in vars(thing).items():
            if not name.startswith("_") or name in ("__init__", "__call__"):
                yield from annotations(getattr(member, "__func__", member))
    elif isinstance(thing, property):
        yield from annotations(thing.fget)
    elif hasattr(thing, "func"):  # a cached property
        yield from annotations(thing.func)
    elif callable(thing):
        yield from map(str, inspect.get_annotations(inspect.unwrap(thing)).values())


def named(thing: Any) -> set[str]:
    """The classes of the package that `thing` names."""
    return {word for text in annotations(thing) for word in re.findall(r"\w+", text)} & classes()


def test_the_search_finds_types() -> None:
    # the rule below would hold of anything if this found nothing
    assert {"MicroBatch", "PlanStats", "PrefixForest", "ForestError"} <= named(
        prefixtree.MicroBatchPlan
    )
    assert {"CostModel", "PrefixForest"} <= named(prefixtree.plan_micro_batches)
    assert "PrefixForest" in named(prefixtree.PrefixForest.from_padded)
    assert {"TileShape", "MaskStats", "BlockTables"} <= named(prefixtree.TreeMask)
    assert "UnsupportedError" in named(prefixtree.tree_attention)
    assert len(PUBLIC) > 25


@pytest.mark.parametrize("name", PUBLIC)
def test_types_of_public_things_are_public(name: str) -> None:
    """In `prefixtree.__all__`, or in that of the module the thing is imported from."""
    home = importlib.import_module(name.rpartition(".")[0])
    exported = {*prefixtree.__all__, *getattr(home, "__all__", ())}
    missing = named(PUBLIC[name]) - exported
    assert not missing, f"{name} names {missing}, which are in no __all__"


def test_what_is_exported_has_a_page() -> None:
    for module in (prefixtree, importlib.import_module("prefixtree.rollouts")):
        for name in module.__all__:
            assert f"{module.__name__}.{name}" in PUBLIC, f"{name} is on no page of docs/api"
            assert getattr(module, name) is PUBLIC[f"{module.__name__}.{name}"]


def test_names_that_are_imported_later_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every module with a `__getattr__` for public names, before any of them was used."""
    lazy = [
        ".".join(file.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
        for file in ROOT.rglob("*.py")
        if {"__all__", "__getattr__"} <= _defined(file)
    ]
    assert {"prefixtree", "prefixtree.loops"} <= set(lazy)
    # importing prefixtree once more puts its finder there once more
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    for name in lazy:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        fresh = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(fresh)
        except ModuleNotFoundError:
            # an adapter says at its import which trainer is missing; `make test-trl` has it
            assert name.startswith("prefixtree.integrations."), name
            continue
        assert not set(fresh.__all__) <= set(vars(fresh)), f"{name} imports all at once"
        missing = set(fresh.__all__) - set(dir(fresh))
        assert not missing, f"dir({name}) lacks {missing}"


def _defined(file: Path) -> set[str]:
    """The names that a module defines at its top: functions, and names that are assigned to."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        for target in node.targets if isinstance(node, ast.Assign) else ():
            found |= {name.id for name in ast.walk(target) if isinstance(name, ast.Name)}
    return found


@pytest.mark.parametrize("name", PUBLIC)
def test_public_things_say_what_they_are(name: str) -> None:
    assert inspect.getdoc(PUBLIC[name])
    for member, value in vars(PUBLIC[name]).items() if inspect.isclass(PUBLIC[name]) else ():
        if member.startswith("_") or not callable(getattr(value, "__func__", value)):
            continue
        assert inspect.getdoc(value), f"{name}.{member} has no docstring"


# ---- words ---------------------------------------------------------------------------------------


def docstrings(text: str) -> Iterator[str]:
    """Those of a module, its classes and its functions."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ""


# a docstring begins with a verb or a noun phrase
_BEGINNINGS = (
    "What|Of|Those|These|Behind|Where|While|As|In|By|For|From|Per|All|Some|Each|Every|On|At|To|With|"
    "Without|Around|Inside|Beside|And|Then|So|This|That|It|Nothing|Out"
)


def without_a_subject(text: str) -> list[str]:
    """Finds docstrings that begin with none, against CONTRIBUTING.md's rules for prose."""
    return [said for said in docstrings(text) if re.match(rf"({_BEGINNINGS})\b", said.lstrip())]


def test_docstrings_name_their_subject() -> None:
    wrong = (
        '"""What is here."""\nclass A:\n    """What it is."""\n    def f(self):\n'
        '        """\n        What f does."""\nasync def g():\n    """Whatever g finds."""\n'
    )
    assert len(without_a_subject(wrong)) == 3
    found = {
        str(file.relative_to(ROOT)): said
        for file in sorted(ROOT.rglob("*.py"))
        if (said := without_a_subject(file.read_text()))
    }
    assert found == {}, "name the subject: CONTRIBUTING.md, Prose"
