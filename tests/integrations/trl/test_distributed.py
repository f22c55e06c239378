"""Two processes: DDP through TRL, groups on one rank each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def launch(folder: Path) -> dict[str, Any]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "ACCELERATE_USE_CPU": "true",
    }
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *("-m", "tests.integrations.trl.rank", str(folder)),
        ],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (line,) = (ln for ln in done.stdout.splitlines() if ln.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


def test_two_ranks_train_as_trls_do(folder: Path) -> None:
    result = launch(folder)
    print(result)
    assert result["moved"] > 1e-3
    assert result["metrics"] < 1e-5
    assert result["parameters"] < 1e-5
    # 4 completions of one prompt, never of two
    assert min(result["ratio"]) > 1.8
