"""What tests of the benchmarks share: small options, results read back, tools/gpu_check.sh."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from prefixtree import TreeMask, tree_attention

ROOT = Path(__file__).parents[2]
TINY = ["--device", "cpu", "--scale", "0.02", "--repeats", "1"]
TINY_ATTENTION = "--device cpu --scale 0.002 --heads 4 2 --head-dim 32 --repeats 1 --warm-ups 0"
SMALL_ATTENTION = [*TINY_ATTENTION.split(), "--backend", "sdpa", "--scale", "0.01"]


def case_named(name: str) -> ModuleType:
    """A benchmark by its name."""
    return importlib.import_module(f"benchmarks.cases.{name}")


def result(path: Path) -> dict[str, Any]:
    """A strict reader: NaN and infinity are no JSON."""

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} in {path}")

    return json.loads(path.read_text(), parse_constant=refuse)


def causal(q: Any, k: Any, v: Any, mask: TreeMask, **options: Any) -> Any:
    """Attention that sees every earlier token: what packing without a tree mask computes."""
    if mask.subtree_end.unique().numel() > 1:
        mask = TreeMask(np.full(mask.num_tokens, mask.num_tokens))
    return tree_attention(q, k, v, mask, **options)


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
