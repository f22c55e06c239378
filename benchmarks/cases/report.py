"""How long does `prefixtree report` take on 100,000 sequences of 50M tokens?

    python -m benchmarks report --out OUT.json    # about 2 minutes, 1 GB of temporary files
    python -m benchmarks report --small           # a hundredth of it

Each figure is a median of runs of the command as a user starts it: in a new process, imports
included, with a progress bar on a terminal of that process. cpu_seconds tell how much of the time
went to other work of the machine. The stages are timed once, in this process.
"""

from __future__ import annotations

import json
import os
import platform
import pty
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.lib.runs import described, write
from benchmarks.lib.tables import Column, Parts, Table, show
from prefixtree.forest import PrefixForest
from prefixtree.rollouts import read_rollouts
from prefixtree.sharing.measure import measure, measure_groups
from prefixtree.sharing.near_misses import find_near_misses

SEQUENCES, MEMBERS, VOCABULARY = 100_000, 8, 150_000
SYSTEM, TASK, STAMP, TURN, TURNS = 60, 90, 4, 50, 7


def make_rows(count: int) -> list[tuple[str, list[np.ndarray]]]:
    """Groups of 8: a shared system prompt, a task, and seven turns; half of each group forks at a
    turn, the others follow the first's turns up to a depth. Every fourth group has another
    timestamp in each of its sequences, before the task: a near miss."""
    rng = np.random.default_rng(0)
    system = rng.integers(0, VOCABULARY, SYSTEM)
    rows = []
    for group in range(count // MEMBERS):
        task = rng.integers(0, VOCABULARY, TASK)
        stamp = rng.integers(0, VOCABULARY, STAMP)
        trunk = rng.integers(0, VOCABULARY, TURN * TURNS)
        for member in range(MEMBERS):
            if group % 4 == 0:
                stamp = rng.integers(0, VOCABULARY, STAMP)
            kept = TURN * (member % TURNS)
            own = rng.integers(0, VOCABULARY, TURN * TURNS - kept)
            rows.append((f"task{group}", [system, stamp, task, trunk[:kept], own]))
    return rows


def write_rollouts(folder: Path, count: int) -> dict[str, Path]:
    """The same rollouts in each format."""
    rows = make_rows(count)
    tokens = [np.concatenate(parts) for _, parts in rows]
    given = SYSTEM + STAMP + TASK
    paths = {"jsonl": folder / "rollouts.jsonl", "parquet": folder / "rollouts.parquet"}
    with paths["jsonl"].open("w") as file:
        for (group, _), ids in zip(rows, tokens, strict=True):
            row = {"group": group, "prompt_ids": ids[:given].tolist()}
            file.write(json.dumps({**row, "response_ids": ids[given:].tolist()}) + "\n")
    table = {
        "group": [group for group, _ in rows],
        "prompt_ids": [ids[:given].astype(np.int32) for ids in tokens],
        "response_ids": [ids[given:].astype(np.int32) for ids in tokens],
    }
    pq.write_table(pa.table(table), paths["parquet"])
    return paths


def run(path: Path) -> tuple[float, float]:
    """Seconds, and seconds of CPU, of one `prefixtree report` with its progress bar drawn."""
    controller, terminal = pty.openpty()
    drained = threading.Thread(target=_drain, args=(controller,), daemon=True)
    drained.start()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "prefixtree", "report", str(path), "--json"],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=terminal,
    )
    seconds = time.perf_counter() - begin
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    os.close(terminal)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, used


def _drain(controller: int) -> None:
    try:
        while os.read(controller, 65536):
            pass
    except OSError:
        pass


def stages(path: Path) -> dict[str, float]:
    """Seconds of each part."""
    marks = [time.perf_counter()]
    rollouts = read_rollouts(path)
    marks.append(time.perf_counter())
    forest = PrefixForest.from_sequences(rollouts.sequences)
    measure(forest)
    marks.append(time.perf_counter())
    measure_groups(forest, rollouts)
    marks.append(time.perf_counter())
    find_near_misses(forest, rollouts)
    marks.append(time.perf_counter())
    names = ("read", "forest", "groups", "near_misses")
    return dict(zip(names, np.diff(marks).round(2).tolist(), strict=True))


def tables(data: dict[str, Any]) -> Parts:
    """Seconds from each format, and of its stages."""
    stages = ("read", "forest", "groups", "near_misses")

    def of_stage(stage: str) -> Column:
        return Column(f"{stage} s", lambda line: f"{line[1]['stages'][stage]:.2f}")

    yield (
        f"{data['sequences']:,} sequences, {data['replicated_tokens']:,} tokens, "
        f"{data['distinct_tokens']:,} distinct; {data['cores']} cores"
    )
    yield Table(
        [
            Column("format", lambda line: line[0]),
            Column("MB", lambda line: f"{line[1]['file_bytes'] / 1e6:.0f}"),
            Column("s", lambda line: f"{line[1]['seconds']:.2f}"),
            Column("CPU s", lambda line: f"{line[1]['cpu_seconds']:.2f}"),
            *(of_stage(stage) for stage in stages),
        ],
        list(data["results"].items()),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the seconds, and keeps them where the sizes are the whole ones."""
    parser = described(__doc__)
    parser.add_argument("--small", action="store_true", help="a hundredth")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON")
    options = parser.parse_args(arguments)
    count = SEQUENCES // 100 if options.small else SEQUENCES
    results, load = {}, os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        for name, path in write_rollouts(Path(folder), count).items():
            run(path)  # numba compiles once and keeps it
            seconds, used = zip(*(run(path) for _ in range(options.runs)), strict=True)
            results[name] = {
                "seconds": round(statistics.median(seconds), 2),
                "cpu_seconds": round(statistics.median(used), 2),
                "all_seconds": [round(s, 2) for s in seconds],
                "stages": stages(path),
                "file_bytes": path.stat().st_size,
            }
            print(name, json.dumps(results[name]), flush=True)
        rollouts = read_rollouts(path)
        forest = PrefixForest.from_sequences(rollouts.sequences)
    facts = {
        "sequences": forest.num_sequences,
        "replicated_tokens": forest.num_replicated_tokens,
        "distinct_tokens": forest.num_tokens,
        "cores": os.cpu_count(),
        "load_before": round(load, 1),
        "python": platform.python_version(),
        "results": results,
    }
    show(tables(facts))
    write(options.out, facts)
    return 0
