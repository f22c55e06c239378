"""Configurations of fla's kernels compile side by side before the first of them is timed.

Here Triton interprets, and compiles nothing: `tuning_process` looks from a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[4]
# of two configurations
AHEAD, TIMED = ["ahead", "ahead"], ["timed", "timed"]


@pytest.fixture(scope="module")
def tunings(tmp_path_factory: pytest.TempPathFactory) -> Any:
    cache = str(tmp_path_factory.mktemp("triton"))
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.recurrence.fla.tuning_process"],
        cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": cache},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout.splitlines()[-1]), "log": done.stderr}


def test_all_compile_before_one_is_timed(tunings: Any) -> None:
    found = tunings["as it should be"]
    assert found["said"] == "" and found["events"] == [*AHEAD, *TIMED]


def test_what_is_found_on_disk_compiles_nothing_else(tunings: Any) -> None:
    found = tunings["found on disk"]
    assert found["said"] == "" and found["events"] == ["called"]


def test_one_that_does_not_fit_is_not_taken(tunings: Any) -> None:
    found = tunings["one does not fit"]
    assert found["said"] == "" and found["warps"] == 2
    assert found["events"][:3] == [*AHEAD, "timed"] and found["events"].count("timed") == 2
    assert "too many registers" not in tunings["log"]


def test_an_error_comes_from_the_call_itself(tunings: Any) -> None:
    found = tunings["none compiles"]
    assert found["said"] == "ValueError('no such layout')"
    assert found["events"][:3] == [*AHEAD, "timed"]


def test_tuning_goes_on_where_the_threads_end_in_an_error(tunings: Any) -> None:
    found = tunings["the end fails"]
    assert "one by one: OSError('no space left')" in tunings["log"]
    assert found["said"] == "" and found["events"].count("timed") == 2
    # else all of Triton's later kernels would be left to threads that are gone
    assert not found["mode"]


def test_without_threads_of_triton_they_compile_one_by_one(tunings: Any) -> None:
    found = tunings["an older Triton"]
    assert "one by one: ImportError" in tunings["log"]
    assert found["said"] == "" and found["events"] == ["timed", "called"] * 2
