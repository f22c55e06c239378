"""Processes of one gloo group: `run_ranks("module", folder)` calls the module's
`on_rank(rank, folder)` on each rank, two by default, and returns what they returned.

As a script, `python -m tests.support.spawn MODULE RANK RANKS FOLDER`, this file is one of the
ranks. They meet in a file; a rank that waits for another in vain fails after half a minute.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
WORLD_SIZE = 2
LIMIT = 240  # seconds


def run_ranks(module: str, folder: Path, ranks: int = WORLD_SIZE) -> list[Any]:
    """The result of each rank; all of them have ended."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", __name__, module, str(rank), str(ranks), str(folder)],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(ranks)
    ]
    try:
        messages = [process.communicate(timeout=LIMIT)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), "\n".join(messages)
    return [torch.load(file) for file in result_files(folder, ranks)]


def result_files(folder: Path, ranks: int = WORLD_SIZE) -> list[Path]:
    """One file per rank, there as soon as its result is whole."""
    return [folder / f"rank{rank}.pt" for rank in range(ranks)]


def _main(module: str, rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=30)
    )
    result = importlib.import_module(module).on_rank(rank, folder)
    # in one go: others wait for the name
    part = folder / f"rank{rank}.part"
    torch.save(result, part)
    part.rename(result_files(folder, ranks)[rank])
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
