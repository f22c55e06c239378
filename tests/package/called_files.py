"""A plugin of pytest: into the file CALLED goes which files of the checkout had functions called in
tests, by file of tests: `CALLED=out.json pytest -p tests.package.called_files ..`"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
_called: dict[str, set[str]] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    seen = _called.setdefault(str(item.path), set())

    def note(frame: FrameType, event: str, given: Any) -> None:
        seen.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        return (yield)
    finally:
        sys.setprofile(None)


def pytest_unconfigure() -> None:
    ours = {
        str(Path(test).relative_to(ROOT)): sorted(
            str(Path(file).relative_to(ROOT)) for file in seen if Path(file).is_relative_to(ROOT)
        )
        for test, seen in _called.items()
    }
    Path(os.environ["CALLED"]).write_text(json.dumps(ours))
