"""How long does it take from `python train.py` to the first optimizer step, and which compiler?

    python -m benchmarks first_step --out first_step.json             # on a GPU
    python -m benchmarks first_step --device cpu --scale 0.02 --no-compiled
    python -m benchmarks first_step --trainer trl --out first_step_trl.json

A process imports, makes a model of random weights, packs a forest, and takes two steps with AdamW:
compiled layers, nothing recomputed. It runs twice: cold, with empty folders for everything that
compilers keep (inductor, Triton, flash-attn-4, tilelang, numba), and warm, with the folders that
the first one filled. Columns: seconds on the host of imports and the model; of torch.compile
(Dynamo and inductor, with the Triton kernels that it makes); of the first call of each of our
operators, by backend (`prefixtree.kernels.operators`: CuTe, Triton or tilelang compile there); of
the whole first step and of the second; and from the process's start to the first step's end.

The first step's loss is compared: cold and warm may differ by a thousandth, and both have to be
finite. Red has no times.

With --trainer trl the steps are GRPO's in TRL: Qwen3-0.6B's shape, 8 prompts of 2K, 16 samples of
each; `--sides` as `benchmarks run` has them, ours at its best and TRL's trainer. Compilers' seconds
are within those of generation and update. Log p of the first micro-batch is compared with float32:
in bf16 our error may be twice that of transformers' rounded logits. TRL's trainer takes fewer steps
(`--stock-steps`), as they are long: all fits into ten minutes of an H200. `--sides` splits it.
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
from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from benchmarks.lib.runs import Report, Row, parse, parser
from benchmarks.lib.tables import MISSING, Column, Parts, Table, machine, number, verdict_column

# models by name, and their layers
MODELS = {"qwen3-0.6b": 28, "qwen3-8b": 4, "qwen3.5-9b": 4}
# where compilers keep what they made; CUDA's driver keeps what it makes of PTX
FOLDERS = (
    *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"),
    *("TILELANG_CACHE_DIR", "CUDA_CACHE_PATH", "NUMBA_CACHE_DIR"),
)
# of --trainer trl: ours at its best, and TRL's
SIDES = ("prefixtree+tree+auto+compiled", "trl")
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


def run_cold_and_warm(command: Callable[[float], list[str]]) -> list[Row]:
    """Both processes; `command` makes Python's arguments of the time at which it starts."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        kept = {variable: str(Path(folder) / variable.lower()) for variable in FOLDERS}
        for state in ("cold", "warm"):
            began = time.time()
            # what it waits for is seen at once, also of a run that is cut off
            done = subprocess.run(
                [sys.executable, *command(began)],
                env=os.environ | kept,
                stdout=subprocess.PIPE,
                text=True,
            )
            if done.returncode:
                raise RuntimeError(f"the {state} process ended with {done.returncode}; see stderr")
            rows.append({"caches": state, **json.loads(done.stdout.splitlines()[-1])})
    return rows


def of_model(name: str, options: argparse.Namespace, began: float) -> list[str]:
    """The command of `child`."""
    command = ["-m", "benchmarks", "first_step", "--models", name, "--began", repr(began)]
    command += ["--device", options.device, "--dtype", options.dtype]
    command += ["--scale", str(options.scale)]
    return command + ([] if options.compiled else ["--no-compiled"])


def of_side(side: str, options: argparse.Namespace, began: float) -> list[str]:
    """The command of a side under TRL."""
    is_stock = side.startswith("trl")
    given: Row = {
        "began": began,
        "side": side,
        "sizes": options.sizes,
        "steps": options.stock_steps if is_stock else options.steps,
        "options": {
            "device": options.device,
            "dtype": options.dtype,
            "is_tiny": options.is_tiny,
            "layers": None,
            "lr": 3e-4,
            "compile_options": {},
            "fsdp": False,
        },
    }
    return ["-m", "benchmarks.lib.trl_first_step", json.dumps(given)]


def red(rows: Sequence[Row]) -> list[str]:
    """What is wrong with the losses."""
    cold, warm = (row["losses"][0] for row in rows)
    if not (math.isfinite(cold) and abs(cold - warm) <= SAME * abs(cold)):
        return [f"losses {cold} cold and {warm} warm"]
    return []


def tables(*runs: Row) -> Parts:
    """A line per model, or side under TRL, and state of the caches."""
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

    def of_first(part: str) -> Callable[[Row], str]:
        return lambda row: number(row.get("first", {}), part, ".1f")

    begin = [
        Column("caches", lambda row: row.get("caches", "")),
        Column("imports, s", lambda row: number(row, "import", ".1f")),
        Column("model, s", lambda row: number(row, "model", ".1f")),
        Column("torch.compile, s", lambda row: number(row, "torch_compile", ".1f")),
        Column("our operators, s", operators),
    ]
    end = [
        Column("from the start to the first step's end, s", lambda r: number(r, "total", ".1f")),
        verdict_column(),
    ]
    of_models, of_sides = (
        [row for run in runs for row in run["rows"] if key in row] for key in ("model_name", "side")
    )
    model = Column("model", lambda row: f"{row['model_name']}, {row.get('layers', '')} layers")
    steps = [
        Column("first step, s", lambda row: number(row, "first", ".1f")),
        Column("second", lambda row: number(row, "second", ".2f")),
    ]
    if of_models:
        yield Table([model, *begin, *steps, *end], of_models)
    steps = [
        Column("our loops, s", lambda row: number(row, "loops", ".1f")),
        Column("first step, s", of_first("seconds")),
        Column("generation in it", of_first("generate")),
        Column("update in it", of_first("update")),
        Column("second step, s", lambda row: number(row, "second", ".2f")),
        Column("later ones", lambda row: number(row, "later", ".2f")),
    ]
    if of_sides:
        yield Table([Column("trainer", lambda row: row["side"]), *begin, *steps, *end], of_sides)


def under_trl(options: argparse.Namespace) -> Row:
    """Adds the sizes of a step to the options; what the report says of it."""
    from benchmarks.lib.environment import installed
    from benchmarks.lib.policy import config
    from benchmarks.lib.trl_steps import Side, Work

    if options.is_tiny:
        options.prompts, options.samples, options.rows = 4, 4, 8
    prompt, new = (max(least, round(options.scale * n)) for least, n in ((4, 2048), (8, 256)))
    groups, rows = (options.prompts, options.samples), options.rows
    accumulation = options.prompts * options.samples // rows
    work = Work(*groups, prompt, new, rows, accumulation, 0, config(options.is_tiny).vocab_size)
    for side in options.sides:
        Side.of(side)
    options.sizes = list(astuple(work))
    return {"work": str(work), "trl": installed("trl")}


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every model or side was green."""
    what = parser(__doc__)
    add = what.add_argument
    add("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    add("--no-compiled", dest="compiled", action="store_false", help="layers as they are")
    add("--trainer", choices=["trl"], help="whose steps; default: two of a loop of ours")
    add("--sides", nargs="+", default=list(SIDES), metavar="SIDE", help="under TRL")
    add("--steps", type=int, default=10, help="of prefixtree under TRL")
    add("--stock-steps", type=int, default=3, help="of TRL's trainer")
    add("--prompts", type=int, default=8, help="per step under TRL")
    add("--samples", type=int, default=16, help="per prompt")
    add("--rows", type=int, default=32, help="per_device_train_batch_size")
    add("--began", type=float, help=argparse.SUPPRESS)
    options = parse(what, arguments)
    if options.began is not None:
        return child(options, options.began)
    if options.read is not None:
        return Report.read(options).finish(tables)
    if options.backend != "auto" or options.plot is not None:
        what.error("this benchmark takes the backend that auto takes, and draws nothing")
    if options.trainer == "trl":
        if find_spec("trl") is None:
            what.error("TRL is not installed: pip install trl, or bash tools/gpu_check.sh run")
        try:
            facts, key = under_trl(options), "side"
        except ValueError as problem:
            what.error(str(problem))
        commands = {side: partial(of_side, side, options) for side in options.sides}
    else:
        facts, key = {"compiled": options.compiled}, "model_name"
        commands = {name: partial(of_model, name, options) for name in options.models}
    report = Report(options, **facts)
    for name, command in commands.items():
        pair: list[Row] = []

        def measure(
            at: int, of: Callable[[float], list[str]] = command, pair: list[Row] = pair
        ) -> Row:
            if at == 0:
                pair += run_cold_and_warm(of)
            if not pair:
                raise RuntimeError("the cold process failed")
            if key == "model_name" and (wrong := red(pair)):
                return {"red": wrong}
            return {"red": [], **pair[at]}

        for at in range(2):
            row = report.attempt({key: name}, partial(measure, at))
            print(name, row.get("caches"), number(row, "total", ".1f"), flush=True)
    return report.finish(tables)
