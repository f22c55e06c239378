"""Processes of one gloo group: `run_ranks("module", folder)` calls the module's
`on_rank(rank, folder)` on each rank, two by default, and returns what they returned.

Ranks are forked from one process that has imported torch, transformers and what a suite preloads,
so that a rank does not take seconds to begin. They meet in a file, and know their group from the
variables of torchrun; the others end with one that fails, for which they would wait. Ranks of which
one was ended by glibc or a bad address run once more, with a warning that has its stack: torch's
groups abort now and then. What is native here is numba's alone, and was run with checked bounds.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
WORLD_SIZE = 2
# seconds until ranks count as hanging; a busy machine is slow
LIMIT = 900
# what nearly every rank imports and does first, and starts no thread
_PRELOADED = ["tests.support.first_run"]


def results_of(runs: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Runs each; where one raises, its result is the traceback as "failed"."""
    results: dict[str, Any] = {}
    for name, run in runs.items():
        try:
            results[name] = run()
        except Exception:
            results[name] = {"failed": traceback.format_exc()}
    return results


def run_ranks(
    module: str,
    folder: Path,
    ranks: int = WORLD_SIZE,
    *,
    arguments: Sequence[Any] = (),
    preload: tuple[str, ...] = (),
) -> list[Any]:
    """The result of each rank; all of them have ended.

    Args:
        module, folder, ranks: who runs, where results go, and on how many.
        arguments: more of `on_rank`'s.
        preload: modules that all ranks need, imported once: by the first call of a process of
            tests. They may start no threads.
    """
    meant = (module, ranks, folder, tuple(arguments), preload)
    ends, said = _run(*meant)
    if set(ends) & {-signal.SIGABRT, -signal.SIGSEGV}:
        warnings.warn(f"ranks ended with {ends}; once more\n{said}", stacklevel=2)
        ends, said = _run(*meant)
    assert not any(ends), f"ranks ended with {ends}\n{said}"
    return [torch.load(_result(folder, rank), weights_only=False) for rank in range(ranks)]


def _run(
    module: str, ranks: int, folder: Path, arguments: tuple[Any, ...], preload: tuple[str, ...]
) -> tuple[list[int], str]:
    """The exit code of each rank, and what all of them wrote."""
    # a store that an earlier run left in the folder would tell ranks its ports
    store = folder / f"store{time.monotonic_ns()}"
    forks = _forks(preload)
    processes = [
        forks.Process(
            target=_main, args=(module, rank, ranks, folder, store, dict(os.environ), arguments)
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + LIMIT
    while None in (ends := [process.exitcode for process in processes]) and not any(ends):
        left = [p.sentinel for p, end in zip(processes, ends, strict=True) if end is None]
        if not wait(left, max(deadline - time.monotonic(), 0)):
            break
    late = [] if any(ends) else [rank for rank, end in enumerate(ends) if end is None]
    for process in processes:
        process.kill()
        process.join()
    said = "\n".join(_log(folder, rank).read_text() for rank in range(ranks))
    assert not late, f"ranks {late} did not end within {LIMIT} s\n{said}"
    return [process.exitcode for process in processes], said


def _result(folder: Path, rank: int) -> Path:
    """The rank's file, there as soon as its result is whole."""
    return folder / f"rank{rank}.pt"


@cache
def _forks(preload: tuple[str, ...]) -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOADED, *preload])
    return context


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.log"


def _main(
    module: str,
    rank: int,
    ranks: int,
    folder: Path,
    file: Path,
    environment: dict[str, str],
    arguments: tuple[Any, ...],
) -> None:
    group = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    # not that of the call that forks began with
    os.environ.clear()
    os.environ.update(environment, OMP_NUM_THREADS="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    os.environ.update({name: str(value) for name, value in group.items()})
    # also what C++ says, and the traceback of a rank that fails
    with _log(folder, rank).open("w") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    faulthandler.enable()
    torch.set_num_threads(1)
    store = dist.FileStore(str(file), ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=LIMIT // 2)
    )
    on_rank = importlib.import_module(module).on_rank
    if not module.startswith("tests.integrations."):
        importlib.import_module("tests.support.hooks").probe_each_kind_once()
    # what is imported stays: nothing looks through it, as in tests/conftest.py
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000, 20, 50)
    result = on_rank(rank, folder, *arguments)
    # in one go: others wait for the name
    part = folder / f"rank{rank}.part"
    torch.save(result, part)
    part.rename(_result(folder, rank))
    dist.destroy_process_group()
