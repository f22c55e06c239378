"""Starts ranks of a gloo group that run both trainers, and returns what they found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
MARK = "RESULT "


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
    """Results by case: what `report` printed on rank 0.

    Args:
        module: what every rank runs, with the folder and the cases as its arguments.
        folder: models, and where results of training go.
        cases: their names. processes: the number of ranks. environment: more variables.
    """
    torchrun = ("torch.distributed.run", "--standalone", f"--nproc-per-node={processes}")
    printed = start([*torchrun, "-m", module, str(folder), *cases], **environment)
    lines = [line for line in printed if line.startswith(MARK)]
    results = [json.loads(line.removeprefix(MARK)) for line in lines]
    return {result.pop("case"): result for result in results}


def report(case: str, result: dict[str, Any]) -> None:
    """A line of JSON, on rank 0."""
    if os.environ["RANK"] == "0":
        print(MARK + json.dumps({"case": case, **result}), flush=True)
