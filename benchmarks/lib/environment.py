"""Where and how a result was made: every JSON under results/ carries this."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


def environment() -> dict[str, Any]:
    """Command, commit, machine and versions, ready for JSON."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "command": " ".join(["python", *sys.argv]),
        "commit": _commit(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "numpy", "numba")},
    }


def _commit() -> str | None:
    """The checkout's commit, marked where it has uncommitted changes to the library."""
    here = Path(__file__).parents[2]

    def git(*arguments: str) -> str:
        run = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True)
        return run.stdout.strip()

    commit = git("rev-parse", "--short", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", "prefixtree")
    return f"{commit}+changes" if commit and changed else commit or None


def _processor() -> str:
    """The CPU's name where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
