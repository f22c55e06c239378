"""The compiled loops of a first step: what makes numba compile for a second more is not in them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

LOOPS = Path(__file__).parents[2] / "prefixtree" / "loops"
# what packing, sampling and tables run; planning of micro-batches and parts comes later
FIRST = ("block_tables", "realign", "segments", "sequence_copies", "tile_costs", "trie")
# numba compiles a sort in 1 to 4 s, and searches and joins for every combination of types
SLOW = {"argsort", "sort", "searchsorted", "concatenate", "argmax", "cumsum", "max", "unique"}


def slow(source: str) -> list[str]:
    """The lines of compiled functions with a slow function, or that assign a slice or a tuple to a
    row: an error about shapes is compiled then, which formats text."""
    found = []
    for function in ast.parse(source).body:
        if not (isinstance(function, ast.FunctionDef) and function.decorator_list):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                is_slow = node.func.attr in SLOW
            elif isinstance(node, ast.Assign):
                target = node.targets[0]
                is_row = isinstance(target, ast.Subscript) and isinstance(node.value, ast.Tuple)
                is_slow = is_row or (
                    isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Slice)
                )
            else:
                continue
            if is_slow:
                found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize("name", FIRST)
def test_loops_compile_soon(name: str) -> None:
    assert slow((LOOPS / f"{name}.py").read_text()) == []


@pytest.mark.parametrize(
    "line", ["np.argsort(x)", "x[a:b] = y", "x[0] = (1, 2)", "x.max()", "np.searchsorted(x, 1)"]
)
def test_what_is_slow_is_seen(line: str) -> None:
    assert slow(f"@njit(cache=True)\ndef f(x):\n    {line}") == [line]
    assert slow(f"def f(x):\n    {line}") == []
