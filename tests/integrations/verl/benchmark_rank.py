"""A rank of the benchmark `verl_update` on a CPU, which verl has no platform for."""

from __future__ import annotations

from pathlib import Path

from benchmarks.cases import verl_update
from tests.integrations.verl.cpu_platform import register_engines


def on_rank(rank: int, folder: Path, arguments: list[str]) -> int:
    """The benchmark's exit code."""
    register_engines()
    return verl_update.main(arguments)
