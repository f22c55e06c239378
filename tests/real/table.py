"""Writes the table of docs/exactness.md from the results of `make test-real`.

python -m tests.real.table RESULTS.xml ...
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

PAGE = Path(__file__).parents[2] / "docs/exactness.md"
_MARKED = re.compile("(?<=<!-- real -->\n).*(?=<!-- /real -->)", re.DOTALL)
_HEAD = """| packed/replicated | log p, entropy | worst parameter | whole gradient |
|---|---|---|---|
"""
_UPDATES = """
Two GRPO updates move parameters as TRL's trainer does to {trl:.0e}, as verl's to {verl:.0e}.
"""


def name_of(way: str, trained: str, dtype: str) -> str:
    """A row's first cell: what is not usual."""
    usual = ("all weights", "values", "float32")
    return ", ".join([way, *(x for x in (trained, dtype) if x not in usual)])


def properties(paths: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name of each test that passed, and what it recorded."""
    for path in paths:
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            if not {"failure", "error", "skipped"} & {child.tag for child in case}:
                found = {p.get("name", ""): p.get("value", "") for p in case.iter("property")}
                yield case.get("name", ""), {k: json.loads(v) for k, v in found.items()}


def table(results: dict[str, dict[str, Any]]) -> str:
    """What stands between the markers of the page."""
    rows, updates = "", {}
    # workers end in any order
    for test, found in sorted(results.items()):
        if case := re.search(r"\[(.+)-(.+)-(.+)\]", test):
            pairs = zip(found["packed"][:3], found["replicated"][:3], strict=True)
            figures = " | ".join(f"{a:.1e}/{b:.1e}" for a, b in pairs)
            rows += f"| {name_of(*case.groups())} | {figures} |\n"
        elif "updates" in found:
            updates[test.rpartition("_")[2].removesuffix("s")] = found["updates"]["parameters"]
    return (_HEAD + rows + _UPDATES.format(**updates)).replace("e-0", "e-")


if __name__ == "__main__":
    PAGE.write_text(_MARKED.sub(table(dict(properties(sys.argv[1:]))), PAGE.read_text()))
