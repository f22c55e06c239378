"""Starts ranks of a gloo group that run trainers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.support.spawn import run_ranks


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
