"""Which assertions ran, how often, and what tests cost: to see that a faster suite lost nothing.

    ASSERTIONS=before python -m pytest -p tools.assertions tests/packing    # at one commit
    ASSERTIONS=after  python -m pytest -p tools.assertions tests/packing    # at another
    python -m tools.assertions before after

As a plugin it writes one file per process into the folder ASSERTIONS: each `assert`,
`pytest.raises` and `torch.testing.assert_close` by test function and text, with the number of times
that it ran, and the processor seconds of each test. As a script it lists assertions of the first
folder that never ran in the second, and those that ran less often.
"""

from __future__ import annotations

import ast
import builtins
import functools
import json
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_ran: Counter[str] = Counter()
_seconds: dict[str, float] = {}
_function = "collection"


def _note(text: str) -> None:
    _ran[f"{_function}: {text}"] += 1


def _noted(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(call)
    def noted(*args: Any, **kwargs: Any) -> Any:
        what = getattr(args[0], "__name__", "") if name == "raises" and args else ""
        _note(f"{name} {what} {kwargs.get('match', '')}".strip())
        return call(*args, **kwargs)

    return noted


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Before the first module of tests is imported."""
    import torch
    from _pytest.assertion.rewrite import AssertionRewriter

    visit = AssertionRewriter.visit_Assert

    def visit_and_note(self: Any, node: ast.Assert) -> list[ast.stmt]:
        call = ast.parse(f"_assertion_ran({ast.unparse(node.test)!r})").body[0]
        for part in ast.walk(call):
            ast.copy_location(part, node)
        return [call, *visit(self, node)]

    vars(builtins)["_assertion_ran"] = _note
    AssertionRewriter.visit_Assert = visit_and_note
    # modules rewritten by others are cached beside the sources
    sys.pycache_prefix = str(Path(os.environ["ASSERTIONS"]).absolute() / "pycache")
    pytest.register_assert_rewrite("tests")
    pytest.raises = _noted(pytest.raises, "raises")
    torch.testing.assert_close = _noted(torch.testing.assert_close, "assert_close")


def _processor_seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    global _function
    _function = item.nodeid.partition("[")[0]
    start = _processor_seconds()
    result = yield
    _seconds[item.nodeid] = round(_processor_seconds() - start, 3)
    return result


def pytest_sessionfinish() -> None:
    folder = Path(os.environ["ASSERTIONS"])
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"ran": _ran, "seconds": _seconds})
    (folder / f"{os.getpid()}.json").write_text(text)


def _read(folder: str) -> tuple[Counter[str], Counter[str], int]:
    """Assertions, seconds per file, and the number of tests."""
    ran: Counter[str] = Counter()
    seconds: dict[str, float] = {}
    for file in Path(folder).glob("*.json"):
        found = json.loads(file.read_text())
        ran.update(found["ran"])
        seconds |= found["seconds"]
    files: Counter[str] = Counter()
    for name, value in seconds.items():
        files[name.partition("::")[0]] += value
    return ran, files, len(seconds)


def main(before: str, after: str) -> int:
    (old, old_files, old_tests), (new, new_files, new_tests) = _read(before), _read(after)
    print(f"tests {old_tests} -> {new_tests}, assertions {len(old)} -> {len(new)}, ")
    print(f"ran {old.total()} -> {new.total()}, seconds {old_files.total():.0f} -> ", end="")
    print(f"{new_files.total():.0f}")
    for name, value in old_files.most_common(10):
        print(f"{value:8.1f} -> {new_files[name]:8.1f} {name}")
    lost = sorted(old.keys() - new.keys())
    for text in lost:
        print("never now:", text)
    for text in sorted(old.keys() & new.keys()):
        if new[text] < old[text]:
            print(f"less often ({old[text]} -> {new[text]}):", text)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
