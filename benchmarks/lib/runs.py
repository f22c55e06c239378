"""The common part of cases with one row per measurement: options, rows, files, exit codes.

A row is a dict: its case, then what was measured, or `red` (the checks that failed: no times), or
`failed` (an error), or `out_of_memory`: that is a result, and does not fail the run.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.environment import about, packages
from benchmarks.lib.tables import Parts, show, verdict
from benchmarks.lib.timing import median_ms
from prefixtree.testing.compare import Meter

Row = dict[str, Any]
# above this many milliseconds a run is repeated three times and no more
LONG_MS = 500.0


def parser(doc: str | None) -> argparse.ArgumentParser:
    """With the options that every benchmark of the suite has."""
    out = described(doc)
    add = out.add_argument
    has_gpu = torch.cuda.is_available()
    add("--device", default="cuda" if has_gpu else "cpu")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    add("--scale", type=float, default=1.0, help="on lengths; below 0.5 layers are tiny too")
    add("--backend", default="auto", help="of tree_attention")
    add("--repeats", type=int, default=5, help="at most; runs beyond half a second take 3")
    add("--commit", help="in place of what git says, on a machine with a copy")
    add("--out", type=Path, help="JSON, written after every row")
    add("--plot", type=Path, help="PNG")
    add("--read", type=Path, help="JSON of an earlier run: run nothing, draw and print that")
    return out


def parse(arguments: argparse.ArgumentParser, given: Sequence[str] | None) -> argparse.Namespace:
    """Options with what depends on the device filled in."""
    options = arguments.parse_args(given)
    options.skipped = []
    options.is_tiny = options.scale < 0.5
    # the float32 references are float32
    torch.set_float32_matmul_precision("highest")
    return options


class Report:
    """The rows of a run."""

    def __init__(self, options: argparse.Namespace, **facts: Any) -> None:
        self.options = options
        self.facts = facts
        self.rows: list[Row] = []
        self.here: Row = {}
        self.where = options.device
        if torch.cuda.is_available() and options.device != "cpu":
            self.where = torch.cuda.get_device_name()

    @classmethod
    def read(cls, options: argparse.Namespace) -> Report:
        """An earlier run's."""
        data = json.loads(options.read.read_text())
        here, rows = data.pop("environment"), data.pop("rows")
        out = cls(options, **data)
        out.rows, out.here, out.where = rows, here, here["gpu"] or here["device"]
        return out

    def values(self, key: str) -> list[Any]:
        """The values that rows have for a key, each once, in the order of the rows."""
        return list(dict.fromkeys(row[key] for row in self.rows if key in row))

    def attempt(self, case: Row, measure: Callable[[], Row]) -> Row:
        """Adds a row: the case with what `measure` returns or why it did not."""
        row = dict(case)
        try:
            row |= measure()
        except torch.OutOfMemoryError as problem:
            row["out_of_memory"] = str(problem).splitlines()[0][:300]
        except Exception as problem:
            row["failed"] = f"{type(problem).__name__}: {problem}"[:1000]
        # the error's frames held the tensors
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.rows.append(row)
        self.write()
        return row

    def write(self) -> None:
        """So that a run cut short leaves what it has."""
        if self.options.read is None:
            write(self.options.out, self.result())

    def result(self) -> Row:
        """Ready for JSON."""
        here = self.here or about(self.options) | packages()
        return {"environment": here, **self.facts, "rows": self.rows}

    def finish(self, tables: Callable[[Row], Parts]) -> int:
        """Prints the case's tables of the run and what went wrong; the exit code."""
        self.write()
        show(tables(self.result()))
        bad = [row for row in self.rows if row.get("red") or "failed" in row]
        full = sum("out_of_memory" in row for row in self.rows)
        for row in bad:
            print(f"{'RED' if row.get('red') else 'FAILED'}: {verdict(row)}")
        green = len(self.rows) - len(bad) - full
        print(f"{green} green, {full} out of memory, {len(bad)} red or failed")
        return 1 if bad else 0


def measure(run: Callable[[], object], options: argparse.Namespace) -> Row:
    """Median milliseconds of `run`, and its peak memory beyond what was held, and in all.

    The first run warms up, and its peak is the one that is taken.
    """
    device = torch.device(options.device)
    held = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    with Meter(device) as meter:
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
    # compiling makes a short run's first one long: one more before those that count, if it is for
    # the figures
    is_long = 1e3 * meter.seconds > LONG_MS
    repeats = min(3, options.repeats) if is_long else options.repeats
    ms, every = median_ms(run, device, repeats, 0 if is_long or repeats == 1 else 1)
    peak = meter.peak_bytes
    return {
        "ms": ms,
        "all_ms": every,
        "peak_bytes": peak,
        "peak_with_held_bytes": None if peak is None else peak + held,
    }


def write(path: Path | None, result: Row) -> None:
    """The JSON of a run, where there is a path for it."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


def described(doc: str | None) -> argparse.ArgumentParser:
    """A parser that says what the benchmark asks."""
    return argparse.ArgumentParser(description=(doc or "").splitlines()[0])
