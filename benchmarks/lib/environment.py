"""Where and how a result was made: every JSON under results/ carries this."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]


def environment() -> dict[str, Any]:
    """Command, commit, machine and versions, ready for JSON."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "command": command(),
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


def about(options: argparse.Namespace) -> Row:
    """The environment, with what a GPU result needs besides."""
    here = environment()
    # a copy of a checkout may have another git repository, which knows another commit
    here["commit"] = options.commit or here["commit"]
    here["cuda"] = torch.version.cuda
    here["triton"] = installed("triton")
    return here | {"device": options.device, "scale": options.scale, "skipped": options.skipped}


def installed(name: str) -> str | None:
    """The version of a package."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def packages() -> Row:
    """Versions of what the sides are made of."""
    names = (
        *("transformers", "flash-attn", "flash-attn-4", "prefix-grouper", "liger-kernel"),
        *("fla-core", "flash-qla", "tilelang", "torchao", "peft", "bitsandbytes", "trl"),
    )
    return {name: installed(name) for name in names}


def command() -> str:
    """As it was typed: `python -m benchmarks NAME ..`, or a script."""
    first, *rest = sys.argv
    if Path(first).name == "__main__.py":
        rest = ["-m", Path(first).parent.name, *rest]
    else:
        rest = [first, *rest]
    return " ".join(["python", *rest])
