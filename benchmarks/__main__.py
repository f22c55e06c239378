"""Runs a benchmark, or shows what earlier runs wrote; without a name it lists the benchmarks.

python -m benchmarks NAME [OPTIONS]
python -m benchmarks show NAME FILE.json [FILE.json ..] [--markdown]
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lib.tables import markdown, show

CASES = Path(__file__).parent / "cases"


def questions() -> dict[str, str]:
    """The question of each benchmark, by name: its docstring's first line, without importing it."""
    files = sorted(file for file in CASES.glob("*.py") if file.stem != "__init__")
    docs = {file.stem: ast.get_docstring(ast.parse(file.read_text())) or "" for file in files}
    return {name: doc.splitlines()[0] for name, doc in docs.items()}


def show_files(arguments: Sequence[str]) -> int:
    """Prints the tables of a benchmark's JSON files, for a terminal or a page."""
    parser = argparse.ArgumentParser("python -m benchmarks show")
    parser.add_argument("name", choices=list(questions()), metavar="NAME")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    parser.add_argument("--table", default="tables", help="of a benchmark with several: its name")
    parser.add_argument("--markdown", action="store_true", help="as benchmarks/results.md has them")
    options = parser.parse_args(arguments)
    module = importlib.import_module(f"benchmarks.cases.{options.name}")
    runs = []
    for file in options.files:
        data = json.loads(file.read_text())
        # a file may hold several runs
        runs += data if isinstance(data, list) else [data]
    if not hasattr(module, options.table):
        parser.error(f"the benchmark {options.name!r} has no tables {options.table!r}")
    parts = getattr(module, options.table)(*runs)
    if options.markdown:
        print(markdown(parts))
    else:
        show(parts)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The benchmark's exit code: 0 if every case was green; 2 without a name that exists."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    known = questions()
    if given and given[0] == "show":
        return show_files(given[1:])
    if given and given[0] in known:
        return importlib.import_module(f"benchmarks.cases.{given[0]}").main(given[1:])
    if given and given[0] not in ("-h", "--help"):
        print(f"no benchmark {given[0]!r}; there are:", file=sys.stderr)
    for name, question in known.items():
        print(f"{name:15} {question}")
    print("\npython -m benchmarks NAME --help says its options; benchmarks/README.md says more.")
    return 2


if __name__ == "__main__":
    sys.exit(main())
