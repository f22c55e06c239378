"""No autograd.Function ends in a cast that may do nothing.

Compiled by torch 2.11, the backward of one that does gets zeros; of torch 2.13, the gradient.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import prefixtree

ROOT = Path(prefixtree.__file__).parent
CASTS = {"to", "type", "type_as", "contiguous", "float", "double", "half", "bfloat16"}


def returned(function: ast.FunctionDef) -> Iterator[ast.expr]:
    """What it returns; the elements of tuples."""
    left = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
    while left:
        value = left.pop()
        if isinstance(value, ast.Tuple):
            left += value.elts
        elif value is not None:
            yield value


def casts_at_the_end(source: str) -> list[str]:
    """The Functions of a module whose forward, or a function of the module that gives its result,
    ends in a cast that no condition guards."""
    tree = ast.parse(source)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}

    def ends_in_a_cast(function: ast.FunctionDef) -> bool:
        for value in returned(function):
            called = value.func if isinstance(value, ast.Call) else None
            if isinstance(called, ast.Attribute) and called.attr in CASTS:
                return True
            helper = functions.get(called.id) if isinstance(called, ast.Name) else None
            if helper not in (None, function) and ends_in_a_cast(helper):
                return True
        return False

    return [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and "torch.autograd.Function" in map(ast.unparse, node.bases)
        for forward in node.body
        if isinstance(forward, ast.FunctionDef) and forward.name == "forward"
        if ends_in_a_cast(forward)
    ]


GUARDED = """
def summed(x, dtype):
    return x if x.dtype == dtype else x.to(dtype)

class F(torch.autograd.Function):
    def forward(ctx, x, dtype):
        return summed(x, dtype), x.sum(0)
"""


def test_no_function_ends_in_a_cast() -> None:
    modules = {path: path.read_text() for path in sorted(ROOT.rglob("*.py"))}
    assert sum("(torch.autograd.Function)" in source for source in modules.values()) > 10
    found = {str(path.relative_to(ROOT)): casts_at_the_end(s) for path, s in modules.items()}
    assert {path: names for path, names in found.items() if names} == {}


def test_a_cast_is_found() -> None:
    assert casts_at_the_end(GUARDED) == []
    bare = GUARDED.replace("x if x.dtype == dtype else x.to(dtype)", "x.to(dtype)")
    assert casts_at_the_end(bare) == ["F"]
    assert casts_at_the_end(GUARDED.replace("x.sum(0)", "x.contiguous()")) == ["F"]
