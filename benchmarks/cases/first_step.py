"""How long does it take from `python train.py` to the first optimizer step, and which compiler?

    python -m benchmarks first_step --out first_step.json             # on a GPU
    python -m benchmarks first_step --device cpu --scale 0.02 --no-compiled

A process imports, makes a model of random weights, packs a forest, and takes two steps with AdamW:
compiled layers, nothing recomputed. It runs twice: cold, with empty folders for everything that
compilers keep (inductor, Triton, flash-attn-4, tilelang), and warm, with the folders that the first
one filled. Columns: seconds on the host of imports and the model; of torch.compile (Dynamo and
inductor, with the Triton kernels that it makes); of the first call of each of our operators, by
backend (`prefixtree.kernels.operators`: CuTe, Triton or tilelang compile there); of the whole
first step and of the second; and from the process's start to the first step's end.

The first step's loss is compared: cold and warm may differ by a thousandth, and both have to be
finite. Red has no times.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.lib.runs import Report, Row, parse, parser
from benchmarks.lib.tables import MISSING, Column, Parts, Table, machine, number, verdict_column

# models by name, and their layers
MODELS = {"qwen3-0.6b": 28, "qwen3-8b": 4, "qwen3.5-9b": 4}
# where compilers keep what they made; CUDA's driver keeps what it makes of PTX
FOLDERS = (
    *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"),
    *("TILELANG_CACHE_DIR", "CUDA_CACHE_PATH"),
)
CHILD = "FIRST_STEP_BEGAN"
SAME = 1e-3


# ---- the process that is timed -------------------------------------------------------------------


def child(options: argparse.Namespace, began: float) -> int:
    """Two steps; prints what they took as JSON, on the last line."""
    import numpy as np
    import torch
    from torch._dynamo.utils import calculate_time_spent

    from benchmarks.lib import layers, policy
    from prefixtree import PrefixForest, compile_layers, pack, sequence_logprobs
    from prefixtree.kernels.operators import first_calls

    (name,) = options.models
    imported = time.time()
    count = min(MODELS[name], 2) if options.is_tiny else MODELS[name]
    shape = policy.config(options.is_tiny) if name == "qwen3-0.6b" else None
    if shape is None:
        shape = layers.config(count, options.is_tiny, shape=name)
    model = layers.model_of(shape, options.device, options.dtype)
    if options.compiled:
        compile_layers(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def wait() -> float:
        if torch.device(options.device).type == "cuda":
            torch.cuda.synchronize()
        return time.time()

    rng = np.random.default_rng(0)
    size = (lambda n: max(4, round(n * options.scale))) if options.is_tiny else int
    prompts = rng.integers(0, shape.vocab_size, (4, size(512)))
    answers = rng.integers(0, shape.vocab_size, (32, size(128)))
    rows = [np.concatenate([prompts[i // 8], answer]) for i, answer in enumerate(answers)]
    made = wait()
    losses, ends = [], [made]
    for _ in range(2):
        packed = pack(PrefixForest.from_sequences(rows)).to(options.device)
        scores = sequence_logprobs(model, packed)
        loss = -torch.stack([x.mean() for x in scores.logprobs]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        ends.append(wait())
    found = {
        "import": imported - began,
        "model": made - imported,
        "first": ends[1] - ends[0],
        "second": ends[2] - ends[1],
        "total": ends[1] - began,
        "torch_compile": calculate_time_spent().get("total_wall_time", 0.0),
        "operators": first_calls(),
        "layers": count,
        "losses": losses,
    }
    print(json.dumps(found))
    return 0


# ---- cold and warm -------------------------------------------------------------------------------


def run_cold_and_warm(name: str, options: argparse.Namespace) -> list[Row]:
    """Both processes of a model."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        kept = {variable: str(Path(folder) / variable.lower()) for variable in FOLDERS}
        command = [sys.executable, "-m", "benchmarks", "first_step", "--models", name]
        command += ["--device", options.device, "--dtype", options.dtype]
        command += ["--scale", str(options.scale)]
        command += [] if options.compiled else ["--no-compiled"]
        for state in ("cold", "warm"):
            environment = os.environ | kept | {CHILD: repr(time.time())}
            # what it waits for is seen at once, also of a run that is cut off
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                raise RuntimeError(f"the {state} process ended with {done.returncode}; see stderr")
            rows.append({"caches": state, **json.loads(done.stdout.splitlines()[-1])})
    return rows


def red(rows: Sequence[Row]) -> list[str]:
    """What is wrong with the losses."""
    cold, warm = (row["losses"][0] for row in rows)
    if not (math.isfinite(cold) and abs(cold - warm) <= SAME * abs(cold)):
        return [f"losses {cold} cold and {warm} warm"]
    return []


def tables(*runs: Row) -> Parts:
    """A line per model and state of the caches."""
    if not runs:
        yield MISSING
        return
    yield machine(
        runs[0]["environment"], "triton", "transformers", "flash-attn-4", "fla-core", "flash-qla"
    )

    def operators(row: Row) -> str:
        """The sum per backend, the slowest first."""
        sums: dict[str, float] = {}
        for what, seconds in row.get("operators", {}).items():
            # one without a backend was waited for within another
            if named := re.search(r"backend '(\w+)'", what):
                sums[named[1]] = sums.get(named[1], 0.0) + seconds
        order = sorted(sums, key=lambda backend: -sums[backend])
        return ", ".join(f"{backend} {sums[backend]:.1f}" for backend in order)

    yield Table(
        [
            Column("model", lambda row: f"{row['model_name']}, {row.get('layers', '')} layers"),
            Column("caches", lambda row: row.get("caches", "")),
            Column("imports, s", lambda row: number(row, "import", ".1f")),
            Column("model, s", lambda row: number(row, "model", ".1f")),
            Column("torch.compile, s", lambda row: number(row, "torch_compile", ".1f")),
            Column("our operators, s", operators),
            Column("first step, s", lambda row: number(row, "first", ".1f")),
            Column("second", lambda row: number(row, "second", ".2f")),
            Column(
                "from the start to the first step's end, s", lambda r: number(r, "total", ".1f")
            ),
            verdict_column(),
        ],
        [row for run in runs for row in run["rows"]],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every model was green."""
    what = parser(__doc__)
    add = what.add_argument
    add("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    add("--no-compiled", dest="compiled", action="store_false", help="layers as they are")
    options = parse(what, arguments)
    if CHILD in os.environ:
        return child(options, float(os.environ.pop(CHILD)))
    if options.read is not None:
        return Report.read(options).finish(tables)
    if options.backend != "auto" or options.plot is not None:
        what.error("this benchmark takes the backend that auto takes, and draws nothing")
    report = Report(options, compiled=options.compiled)
    for name in options.models:
        pair: list[Row] = []

        def measure(at: int, of: str = name, pair: list[Row] = pair) -> Row:
            if at == 0:
                pair += run_cold_and_warm(of, options)
            if not pair:
                raise RuntimeError("the cold process failed")
            if wrong := red(pair):
                return {"red": wrong}
            return {"red": [], **pair[at]}

        for at in range(2):
            row = report.attempt({"model_name": name}, partial(measure, at))
            print(name, row.get("caches"), number(row, "total", ".1f"), flush=True)
    return report.finish(tables)
