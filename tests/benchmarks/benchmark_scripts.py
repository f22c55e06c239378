"""The scripts of benchmarks/ as modules, and gpu_check.sh without a GPU."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


@contextmanager
def scripts(*names: str) -> Iterator[dict[str, ModuleType]]:
    """Modules of benchmarks/ by their last names."""

    def found(name: str) -> ModuleType:
        rooms = ("cases", "lib", "")
        (file,) = (f for room in rooms if (f := ROOT / "benchmarks" / room / f"{name}.py").exists())
        parts = file.relative_to(ROOT).with_suffix("").parts
        return importlib.import_module(".".join(parts))

    yield {name: found(name) for name in names}


def gpu_check(folder: Path, *steps: str, **words: str) -> subprocess.CompletedProcess[str]:
    """Runs it with this Python and a GPU that is only a name."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    for name, text in (
        ("python3", f'exec {sys.executable} "$@"'),
        ("nvidia-smi", "echo imaginary GPU"),
    ):
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    path = f"{tools}:{os.environ['PATH']}"
    # nothing of a lease that is being prepared in this checkout, or was run on this machine
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
