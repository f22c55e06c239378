"""Runs a benchmark: python -m benchmarks NAME [OPTIONS]. Without a name it lists them."""

from __future__ import annotations

import ast
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

CASES = Path(__file__).parent / "cases"


def questions() -> dict[str, str]:
    """What each benchmark asks, by name: its docstring's first line, read without importing."""
    files = sorted(file for file in CASES.glob("*.py") if file.stem != "__init__")
    docs = {file.stem: ast.get_docstring(ast.parse(file.read_text())) or "" for file in files}
    return {name: doc.splitlines()[0] for name, doc in docs.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """The benchmark's exit code: 0 if every case was green; 2 without a name that exists."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    known = questions()
    if given and given[0] in known:
        sys.argv = [sys.argv[0], *given[1:]]
        runpy.run_module(f"benchmarks.cases.{given[0]}", run_name="__main__")
        return 0
    if given and given[0] not in ("-h", "--help"):
        print(f"no benchmark {given[0]!r}; there are:", file=sys.stderr)
    for name, question in known.items():
        print(f"{name:15} {question}")
    print("\npython -m benchmarks NAME --help says its options; benchmarks/README.md says more.")
    return 2


if __name__ == "__main__":
    sys.exit(main())
