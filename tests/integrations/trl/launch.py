"""Starts ranks of a gloo group that run both trainers, or a launcher that does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.support.spawn import ROOT, run_ranks


def start(arguments: list[str], **environment: str) -> list[str]:
    """Runs a launcher's module with its arguments; the lines that all processes printed."""
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, **variables, **environment},
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout.splitlines()


def launch(
    module: str, folder: Path, *cases: str, processes: int = 2, **environment: str
) -> dict[str, dict[str, Any]]:
    """Results by case, those of rank 0.

    Args:
        module: its `on_rank` runs on every rank, with the folder and the cases.
        folder: models, and where results of training go.
        cases: their names. processes: the number of ranks. environment: more variables.
    """
    preload = ("tests.integrations.trl.rank",)
    with patch.dict(os.environ, {"HF_HUB_OFFLINE": "1", **environment}):
        found = run_ranks(module, folder, processes, arguments=[cases], preload=preload)
    return found[0]
