"""Families whose layers are the same code but for names: what compiles or plans layers sees nothing
new in them.

A layer is made of modules, and these of operations: calls with their keywords, operators, indices,
in those statements of the methods, and of the functions of their file that they call, that may run.
They are read from the installed transformers, with the family's names left out, together with the
switches that an operation asks of the module, and what is None there. A test of all families needs
no family of which others run every operation. Of every family it is proven elsewhere that it is
exact (tests/models/test_families.py).
"""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from prefixtree.models.layers import layers_of
from prefixtree.planning.model_cost import auto_class
from tests.support.family_configs import FAMILIES
from tests.support.models import skips_of, tiny_config
from tests.support.variant_configs import CANNOT_CHECKPOINT

# ours stands in its place
_NOT_RUN = {"eager_attention_forward"}
# methods that no forward runs
_MADE = {"__init__", "extra_repr", "reset_parameters"}


def skip_if_repeated(
    model_type: str, every_time: Collection[str], families: Collection[str] = tuple(FAMILIES)
) -> None:
    """Skips a test of a family all of whose code is run by others.

    Args:
        model_type: the family, or what no others are looked at for: a variant, say.
        every_time: the families of the test that run without --full.
        families: all of the test, or more.
    """
    if model_type not in FAMILIES or model_type in CANNOT_CHECKPOINT or model_type in every_time:
        return
    known = tuple(name for name in families if name in FAMILIES)
    if model_type not in needed(frozenset(every_time), known):
        pytest.skip(f"all that the layers of {model_type} do is in families that run")


@cache
def needed(every_time: frozenset[str], families: Collection[str] = tuple(FAMILIES)) -> set[str]:
    """Those of every time, and as few more as run every code; first those that add most."""
    codes = _codes(tuple(families))
    found = {name for name in every_time if name in codes}
    left = set().union(*codes.values()).difference(*(codes[name] for name in found))
    while left:
        best = max(codes, key=lambda name: len(codes[name] & left))
        found.add(best)
        left -= codes[best]
    return found


@cache
def _codes(families: tuple[str, ...]) -> dict[str, set[str]]:
    """Of the families whose layers are checkpointed, the codes."""
    read = _Reader()
    return {
        name: read.codes_of(name)
        for name in families
        if name not in CANNOT_CHECKPOINT and not skips_of(name)
    }


# what a file of transformers has for its layers: its text, and the conditions under which it runs
_Line = tuple[tuple[ast.expr, ...], ast.AST]


class _Reader:
    """Reads the code of families; files and classes are read once."""

    def __init__(self) -> None:
        self._files: dict[str, dict[str, Any]] = {}
        self._lines: dict[type, list[tuple[Any, list[str]]]] = {}

    def codes_of(self, model_type: str) -> set[str]:
        """What a family's layers do."""
        config = AutoConfig.for_model(model_type, **tiny_config(model_type))
        with torch.device("meta"):
            model = auto_class(config).from_config(config, attn_implementation="prefixtree")
        modules = {module for layer in layers_of(model) for module in layer.modules()}
        return {code for module in modules for code in self._codes_of(module)}

    def _codes_of(self, module: nn.Module) -> Iterator[str]:
        if not type(module).__module__.startswith("transformers.models."):
            yield type(module).__qualname__
            return
        for conditions, operations in self._lines_of(type(module)):
            if all(_may_hold(condition, module) for condition in conditions):
                for text, names in operations:
                    asked = (getattr(module, name, None) for name in names)
                    yield f"{text} {[x for x in asked if x is None or isinstance(x, bool | str)]}"

    def _lines_of(self, kind: type) -> list[Any]:
        """The statements of a class of modules, but of how it is made."""
        if kind not in self._lines:
            found: dict[int, Any] = {}
            self._add(kind, found)
            self._lines[kind] = [line for lines in found.values() for line in lines]
        return self._lines[kind]

    def _add(self, thing: Any, found: dict[int, Any]) -> None:
        """Adds its statements, those of its bases and of what it calls, each once."""
        module = getattr(thing, "__module__", "") or ""
        if id(thing) in found or not module.startswith("transformers.models."):
            return
        node = self._definitions(module)[thing.__name__]
        body = [node] if isinstance(node, ast.FunctionDef) else node.body
        functions = [
            part for part in body if isinstance(part, ast.FunctionDef) and part.name not in _MADE
        ]
        known = {"self", *vars(sys.modules[module]), *vars(builtins)}
        found[id(thing)] = [
            ([compile(ast.Expression(x), module, "eval") for x in conditions], operations)
            for part in functions
            for conditions, line in _statements(part.body)
            if (operations := [_operation(x, known) for x in ast.walk(line) if _counts(x)])
        ]
        for base in thing.__mro__[1:] if isinstance(thing, type) else ():
            self._add(base, found)
        called = [x.id for part in functions for x in ast.walk(part) if isinstance(x, ast.Name)]
        for name in called:
            one = getattr(sys.modules[module], name, None)
            if (inspect.isfunction(one) or inspect.isclass(one)) and name not in _NOT_RUN:
                self._add(inspect.unwrap(one), found)

    def _definitions(self, module: str) -> dict[str, Any]:
        """The classes and functions of a file."""
        if module not in self._files:
            tree = ast.parse(inspect.getsource(sys.modules[module]))
            kinds = ast.ClassDef, ast.FunctionDef
            self._files[module] = {n.name: n for n in tree.body if isinstance(n, kinds)}
        return self._files[module]


def _statements(body: Iterable[ast.stmt], conditions: tuple[ast.expr, ...] = ()) -> Iterator[_Line]:
    """Those of a function, each with the conditions under which it runs."""
    for node in body:
        if isinstance(node, ast.If):
            yield conditions, node.test
            yield from _statements(node.body, (*conditions, node.test))
            other = ast.copy_location(ast.UnaryOp(ast.Not(), node.test), node.test)
            yield from _statements(node.orelse, (*conditions, other))
        else:
            within = [x for name in ("body", "orelse") for x in getattr(node, name, [])]
            parts = [x for x in ast.iter_child_nodes(node) if x not in within] if within else [node]
            yield from ((conditions, part) for part in parts)
            yield from _statements(within, conditions)


def _may_hold(condition: Any, module: nn.Module) -> bool:
    """False where the module alone decides that it does not."""
    try:
        known = vars(sys.modules[type(module).__module__])
        return bool(eval(condition, dict(known), {"self": module}))
    except Exception:
        return True


def _counts(node: ast.AST) -> bool:
    kinds = ast.Call, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Subscript, ast.AugAssign
    return isinstance(node, kinds)


def _operation(node: Any, known: Collection[str]) -> tuple[str, list[str]]:
    """Its text, operands left out, and what it asks of `self`."""
    asked = [
        x.attr
        for x in ast.walk(node)
        if isinstance(x, ast.Attribute) and ast.unparse(x.value) == "self"
    ]
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        if called.startswith("self."):
            # a module, which is read itself, or a method of this class
            return "self()", []
        if not re.fullmatch(r"[\w.]+", called) or called.split(".")[0] not in known:
            # a method of a tensor, or what was chosen before
            called = f"x.{node.func.attr}" if isinstance(node.func, ast.Attribute) else "x"
        return f"{called}({sorted(str(x.arg) for x in node.keywords)})", asked
    if isinstance(node, ast.Subscript):
        return "[" + ", ".join(type(x).__name__ for x in ast.walk(node.slice)) + "]", []
    operators = [node.op] if hasattr(node, "op") else node.ops
    return f"{type(node).__name__} {[type(x).__name__ for x in operators]}", []
