"""Running the commands in this process, and a small file of rollouts to run them on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from prefixtree.cli import app


def run(*arguments: Any, **options: Any) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], **options)


def run_json(*arguments: Any, exit_code: int = 0) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout)


def estimate_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """`verify` estimates no memory, which takes four fifths of its time for a tiny model."""
    monkeypatch.setattr("prefixtree.testing.verify.read_memory", lambda *_: None)


def write_rollouts(path: Path) -> Path:
    """Two tasks of two trials: a shared system prompt, and branches after the first turn."""
    system, rows = list(range(1, 21)), []
    for task in range(2):
        first = [*system, *range(30 + 10 * task, 38 + 10 * task)]
        for trial in range(2):
            tokens = [*first, *range(100 + 5 * trial, 112 + 5 * trial), *range(200, 206)]
            mask = np.zeros(len(tokens), int)
            mask[24:28] = mask[34:] = 1
            rows.append(
                {
                    "id": f"task{task}-trial{trial}",
                    "group": f"task{task}",
                    "token_ids": tokens,
                    "loss_mask": mask.tolist(),
                    "turn_ends": [28, len(tokens)],
                }
            )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@contextmanager
def one_thread() -> Iterator[None]:
    """Two test processes of two threads each on two cores mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
