"""Families whose layers are the same code but for names: what compiles or plans layers sees nothing
new in them.

A layer is made of modules, and of the code of each. Code is the text of the methods and of the
functions of its file that they call, as the installed transformers has it, with the family's names
numbered, together with what it may ask of the module: switches, and what is None. A test of all
families needs no family of which others run every code. Of every family it is proven elsewhere that
it is exact (tests/models/test_families.py).
"""

from __future__ import annotations

import ast
import inspect
import pickle
import re
import sys
from collections.abc import Collection
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
        pytest.skip(f"every code of the layers of {model_type} is in families that run")


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


class _Reader:
    """Reads the code of families; files and classes are read once."""

    def __init__(self) -> None:
        self._files: dict[str, dict[str, bytes]] = {}
        self._texts: dict[type, tuple[str, dict[str, str]]] = {}

    def codes_of(self, model_type: str) -> set[str]:
        """The codes of a family's layers."""
        config = AutoConfig.for_model(model_type, **tiny_config(model_type))
        with torch.device("meta"):
            model = auto_class(config).from_config(config, attn_implementation="prefixtree")
        modules = {module for layer in layers_of(model) for module in layer.modules()}
        return set(map(self._code_of, modules))

    def _code_of(self, module: nn.Module) -> str:
        text, names = self._text_of(type(module))
        asked = {number: getattr(module, name, None) for name, number in names.items()}
        config = getattr(module, "config", None)
        of_config = {} if config is None else vars(config)
        asked |= {name: of_config.get(name) for name in re.findall(r"config\.(\w+)", text)}
        switches = {k: x for k, x in asked.items() if x is None or isinstance(x, bool | str)}
        return f"{text}\n{switches}"

    def _text_of(self, kind: type) -> tuple[str, dict[str, str]]:
        """Of a class of modules, but how it is made; and the numbers of its names."""
        if not kind.__module__.startswith("transformers.models."):
            return kind.__qualname__, {}
        if kind not in self._texts:
            found: dict[int, str] = {}
            names: dict[str, str] = {}
            self._add(kind, found, names)
            self._texts[kind] = "\n".join(found.values()), names
        return self._texts[kind]

    def _add(self, thing: Any, found: dict[int, str], names: dict[str, str]) -> None:
        """Adds its text, that of its bases and of what it calls, each once."""
        module = getattr(thing, "__module__", "") or ""
        if id(thing) in found or not module.startswith("transformers.models."):
            return
        node = pickle.loads(self._definitions(module)[thing.__name__])
        if isinstance(node, ast.ClassDef):
            node.body = [part for part in node.body if getattr(part, "name", "") not in _MADE]
        called = [part.id for part in ast.walk(node) if isinstance(part, ast.Name)]
        found[id(thing)] = ast.unparse(_Numbered(names).visit(node))
        for base in thing.__mro__[1:] if isinstance(thing, type) else ():
            self._add(base, found, names)
        for name in called:
            one = getattr(sys.modules[module], name, None)
            if (inspect.isfunction(one) or inspect.isclass(one)) and name not in _NOT_RUN:
                self._add(inspect.unwrap(one), found, names)

    def _definitions(self, module: str) -> dict[str, bytes]:
        """The classes and functions of a file, pickled: a copy of each use is changed."""
        if module not in self._files:
            tree = ast.parse(inspect.getsource(sys.modules[module]))
            kinds = ast.ClassDef, ast.FunctionDef
            self._files[module] = {
                n.name: pickle.dumps(n) for n in tree.body if isinstance(n, kinds)
            }
        return self._files[module]


class _Numbered(ast.NodeTransformer):
    """Takes docstrings and types away, and numbers the names that a family gives: of the class,
    and of what `self` has."""

    def __init__(self, names: dict[str, str]) -> None:
        self.names = names

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        node.name, node.decorator_list, node.bases = "C", [], []
        return self._without_docstring(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        node.returns, node.decorator_list, node.args.defaults = None, [], []
        return self._without_docstring(node)

    def visit_arg(self, node: ast.arg) -> Any:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        if node.value is None:
            return None
        return self.visit(ast.Assign([node.target], node.value, lineno=node.lineno))

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        if ast.unparse(node.value) == "self" and node.attr != "config":
            node.attr = self.names.setdefault(node.attr, f"a{len(self.names)}")
        return self.generic_visit(node)

    def _without_docstring(self, node: Any) -> Any:
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return self.generic_visit(node)
