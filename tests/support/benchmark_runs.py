"""Runs of the benchmarks: results read back, tools/gpu_check.sh without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def result(path: Path) -> dict[str, Any]:
    """A strict reader: NaN and infinity are no JSON."""

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} in {path}")

    return json.loads(path.read_text(), parse_constant=refuse)


def gpu_check(
    folder: Path, *steps: str, python: str = f'exec {sys.executable} "$@"', **words: str
) -> subprocess.CompletedProcess[str]:
    """Runs it with this Python, or other shell text, and a GPU that is only a name."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    for name, text in (
        ("python3", python),
        ("nvidia-smi", "echo imaginary GPU"),
    ):
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    path = f"{tools}:{os.environ['PATH']}"
    # nothing that is being prepared in this checkout, or was run on this machine
    folders = {"OUT": "out", "GPU_FILES": "files", "UNPACKED": "unpacked"}
    words = {name: str(folder / x) for name, x in folders.items()} | words
    words |= {"OMP_NUM_THREADS": "1", "PATH": path}
    return subprocess.run(
        ["bash", str(ROOT / "tools" / "gpu_check.sh"), *steps],
        env=os.environ | words,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
