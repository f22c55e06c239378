"""How fast is a decoding step over a forest, beside one in which every row reads all its keys?

    python -m benchmarks decode --rollouts ROLLOUTS --out decode.json       # on a GPU
    python -m benchmarks decode --device cpu --scale 0.02                   # every code path

Level 0 is the attention of one layer, the writing of the new keys included. Its cases: 8 prompts
of 256 to 32K tokens x 16 rows, tails of 512 written keys with room for 1,024; and "airline", every
history of the agent rollouts (579) x 4 rows, tails of 128. Sides are those of `lib/decoding.py`.

A time on a GPU is that of a CUDA graph of many calls, divided by their number. They go round over
as many copies of the pools as make the L2 cache useless, as the layers of a model do. "of copy" is
the bytes of the keys and values that the side reads (its own reading of "each once", or "each per
row") per second, over those that a copy of 1 GiB reads and writes.

A side is green if its results are as far from float64 as rounding allows, on up to 32 rows.

    python -m benchmarks decode --level 1 --out steps.json                   # on a GPU

Level 1 is a whole step of `TreeSampler` with random weights: 12 layers of Qwen3-8B's shape, and
Qwen3-0.6B's whole, 8 prompts of 2K tokens x 16 rows that hold 512 tokens each. Sides: "tree",
"tree-eager" and "rows" of `lib/sampling.py`, after its check. "over bound" is the median time of a
step over that of its bytes at 0.8 of a copy's rate: the weights, and the keys and values that the
tree has, each once.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.lib import layers, policy, sampling
from benchmarks.lib.decoding import SIDES, Attend, Inputs, Step, attend, exact
from benchmarks.lib.replicated import missing
from benchmarks.lib.runs import Report, Row, measure, parse, parser
from benchmarks.lib.shapes import Shape
from benchmarks.lib.tables import (
    GIB,
    Column,
    Parts,
    Table,
    by_key,
    gib,
    machine,
    machines,
    number,
    times_cell,
    verdict,
    verdict_column,
)
from benchmarks.lib.timing import median_ms, profiled
from benchmarks.lib.workloads import airline_sequences, forest_of
from prefixtree import PrefixForest
from prefixtree.kernels.attention.triton.configs import Config
from prefixtree.kernels.decoding import work as decode_work
from prefixtree.sampling import Draws

# of level 1: layers of a model (none: all), its prompts and new tokens, and steps that are timed
MODELS: dict[str, int | None] = {"qwen3-8b": 12, "qwen3-0.6b": None}
STEP_PROMPT, STEPS, TIMED = 2048, 64, 40
PROMPTS, SAMPLES, TAIL = (256, 512, 2048, 8192, 32768), 16, 512
AIRLINE, AIRLINE_ROWS, AIRLINE_TAIL = "airline", 4, 128
# rows that are checked; bytes of pools, beyond any L2 cache; most calls in a graph
CHECKED, ROTATED, CALLS = 32, 256 << 20, 24
# all tasks of the file
EVERY = 1 << 30


def prompts_step(prompt: int, options: argparse.Namespace) -> Step:
    """8 prompts, each with 16 rows below it."""
    length, tail = (max(1, round(x * options.scale)) for x in (prompt, options.tail))
    return Step.of(forest_of([(length, [])] * options.trees), SAMPLES, tail)


def airline_step(options: argparse.Namespace) -> Step:
    """Every history of the rollouts, with 4 rows below it."""
    sequences = airline_sequences(options.rollouts, EVERY)
    if options.is_tiny:
        sequences = [x[: max(1, round(len(x) * options.scale))] for x in sequences[:40]]
    tail = max(1, round(AIRLINE_TAIL * options.scale))
    return Step.of(PrefixForest.from_sequences(sequences), AIRLINE_ROWS, tail)


def copy_rate(device: str) -> float:
    """Bytes per second that a copy reads and writes."""
    size = GIB if device != "cpu" else 1 << 24
    a = torch.empty(size, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    ms, _ = median_ms(lambda: b.copy_(a), torch.device(device), 5, 2)
    return 2e3 * size / ms


def timed(calls: list[Attend], options: argparse.Namespace) -> Row:
    """Milliseconds of one call, in a graph of all of them on a GPU."""

    def every() -> None:
        for call in calls:
            call()

    run: Callable[[], object] = every
    if torch.device(options.device).type == "cuda":
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            every()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            every()
        run = graph.replay
    found = measure(run, options)
    return {"ms": found["ms"] / len(calls), "all_ms": [x / len(calls) for x in found["all_ms"]]}


def measure_side(
    side: str, step: Step, shape: Shape, options: argparse.Namespace, rate: float
) -> Row:
    """A side's check and times."""
    dtype = getattr(torch, options.dtype)
    per_key = shape.kv_heads * (shape.head_dim + shape.dim_of_v) * dtype.itemsize
    keys = step.distinct if side == "cascade" else step.replicated
    pools = step.num_keys if side in ("cascade", "row") else step.replicated
    count, rounds = 1, 1
    if torch.device(options.device).type == "cuda":
        count = min(CALLS, math.ceil(ROTATED / (pools * per_key)))
        rounds = math.ceil(CALLS / count)
    draws = [Inputs.draw(step, shape, dtype, options.device, seed) for seed in range(count)]
    attends = [attend(side, step, inputs, shape, options.backend) for inputs in draws]
    rows = np.unique(np.linspace(0, len(step.tails) - 1, CHECKED).astype(int))
    want = exact(step, draws[0], rows)
    error = float((attends[0]()[torch.as_tensor(rows)].double() - want).abs().max())
    # probabilities and results are rounded
    limit = 2 * torch.finfo(dtype).eps * float(want.abs().max()) + 1e-6
    out: Row = {"error": error, "limit": limit, "keys": keys, "bytes": keys * per_key, "red": []}
    if not error <= limit:
        return out | {"red": [f"error {error:.1e} > {limit:.1e}"]}
    if side in ("cascade", "row"):
        out["capacity"] = step.work(side, shape, options.device).capacity._asdict()
    out |= timed(attends * rounds, options)
    if options.profile:
        print(f"{shape}, {side}\n{profiled(attends[0], 6)}")
    return out | {"of_copy": 1e3 * out["bytes"] / out["ms"] / rate}


def level_0(options: argparse.Namespace) -> Report:
    """Attention of one layer."""
    rate = copy_rate(options.device)
    report = Report(options, level=0, sides=options.sides, copy_bytes_per_second=rate)
    print(f"a copy reads and writes {rate / 1e12:.2f} TB/s", flush=True)
    steps = {
        f"8 x {prompt:,d}": partial(prompts_step, prompt, options) for prompt in options.prompts
    }
    if options.rollouts is not None:
        steps[AIRLINE] = partial(airline_step, options)
    else:
        options.skipped.append(AIRLINE)
    for name, make in steps.items():
        step = make()
        for words in options.heads:
            shape = Shape(*map(int, words.split("x")))
            for side in options.sides:
                # torch takes rows of one length
                if side == "sdpa" and name == AIRLINE:
                    continue
                case = {"case": name, "heads": str(shape), "side": side, "rows": len(step.tails)}
                run = partial(measure_side, side, step, shape, options, rate)
                row = report.attempt(case, run)
                said = f"{1e3 * row['ms']:.1f} us" if "ms" in row else verdict(row)
                print(f"{name}, {shape}, {side}: {said}", flush=True)
    return report


# ---- a whole step --------------------------------------------------------------------------------


def model_of(name: str, count: int | None, dtype: str, options: argparse.Namespace) -> Any:
    """A shape's first layers."""
    if name == "qwen3-8b":
        settings = layers.config(count or 36, options.is_tiny)
    else:
        settings = policy.config(options.is_tiny)
    return sampling.model_of(settings, count, dtype, options.device)


def bytes_of_step(model: Any, keys: int) -> int:
    """Weights that a step reads, and so many keys and values of every layer, each once."""
    embedding = model.get_input_embeddings().weight
    read = {p for p in model.parameters() if p is not embedding or p is model.lm_head.weight}
    c = model.config
    per_key = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim
    size = embedding.element_size()
    return sum(p.numel() for p in read) * size + keys * per_key * size


def measure_step(
    name: str, count: int | None, side: str, options: argparse.Namespace, rate: float
) -> Row:
    """A side's check and the median time of a step, far behind the first."""
    if red := sampling.wrong(side, model_of(name, 2, "float32", options)):
        return {"red": red}
    model = model_of(name, count, options.dtype, options)
    prompt, tail = (max(2, round(x * options.scale)) for x in (STEP_PROMPT, options.tail))
    rng, rows_per = np.random.default_rng(0), 2 if options.is_tiny else SAMPLES
    prompts = list(rng.integers(0, model.config.vocab_size, (options.trees, prompt)))
    number = options.trees * rows_per
    max_keys = options.trees * prompt + number * (tail + STEPS)
    sampler = sampling.sampler_of(side, model, max_keys, number)
    rows = sampler.start(PrefixForest.from_sequences(prompts))
    rows.branch(rows_per)
    rows.append({r: rng.integers(0, model.config.vocab_size, tail) for r in range(number)})
    clock = sampling.Clock(options.device)
    with sampling.sharing(side), sampling.marked_steps(clock):
        rows.generate(STEPS, Draws(seed=1))
    ms = clock.ms()[-TIMED:]
    keys = options.trees * prompt + number * (tail + STEPS - TIMED // 2)
    moved = bytes_of_step(model, keys)
    bound = 1e3 * moved / (0.8 * rate)
    found = {"red": [], "rows": number, "ms": statistics.median(ms), "all_ms": ms, "keys": keys}
    return found | {"bytes": moved, "bound_ms": bound, "over_bound": found["ms"] / bound}


def level_1(options: argparse.Namespace) -> Report:
    """A whole step."""
    rate = copy_rate(options.device)
    report = Report(options, level=1, sides=options.sides, copy_bytes_per_second=rate)
    for name, count in MODELS.items():
        for side in options.sides:
            row = report.attempt(
                {"model": name, "layers": count, "side": side},
                partial(measure_step, name, count, side, options, rate),
            )
            said = f"{row['ms']:.2f} ms" if "ms" in row else verdict(row)
            print(f"{name}, {side}: {said}", flush=True)
    return report


def step_tables(*runs: Row) -> Parts:
    """Milliseconds per step, and over the time of its bytes. Of a side that several runs have, the
    last one's."""
    columns = [
        Column("model", lambda row: row["model"]),
        Column("layers", lambda row: str(row["layers"] or "all")),
        Column("side", lambda row: row["side"]),
        Column("rows", lambda row: number(row, "rows", "d")),
        Column("ms/step", lambda row: number(row, "ms", ".2f")),
        Column("GiB", lambda row: gib(row.get("bytes"), ".2f")),
        Column("bound ms", lambda row: number(row, "bound_ms", ".2f")),
        Column("over bound", lambda row: number(row, "over_bound", ".2f")),
        verdict_column(),
    ]
    rate = runs[-1]["copy_bytes_per_second"] / 1e12
    where = machines(runs, "transformers", "triton")
    yield f"{where}; a whole step of TreeSampler; a copy {rate:.2f} TB/s"
    rows = {(row["model"], row["side"]): row for data in runs for row in data["rows"]}
    yield Table(columns, sorted(rows.values(), key=lambda row: row["model"], reverse=True))


# ---- output --------------------------------------------------------------------------------------


def tables(*runs: Row) -> Parts:
    """Microseconds by side, and what sharing gains; of level 1 milliseconds."""
    data = runs[-1]
    if data["level"] == 1:
        yield from step_tables(*runs)
        return
    sides = data["sides"]

    def us(side: str) -> Column:
        def cell(line: dict[str, Row]) -> str:
            row = line.get(side, {})
            return f"{1e3 * row['ms']:.1f}" if "ms" in row else verdict(row)

        return Column(f"{side} us", cell)

    def over(side: str) -> Column:
        def cell(line: dict[str, Row]) -> str:
            ms = [line.get(name, {}).get("ms") for name in (side, "cascade")]
            return times_cell(None if None in ms else ms[0] / ms[1])

        return Column(f"over {side}", cell)

    def of(side: str, key: str, form: str) -> Callable[[dict[str, Row]], str]:
        return lambda line: number(line.get(side, {}), key, form)

    def any_of(key: str) -> Callable[[dict[str, Row]], str]:
        return lambda line: str(next(iter(line.values()))[key])

    columns = [
        Column("prompts", any_of("case")),
        Column("heads", any_of("heads")),
        Column("rows", any_of("rows")),
        Column("keys read", of("cascade", "keys", ",d")),
        Column("by rows", of("row", "keys", ",d")),
        *(us(side) for side in sides),
        *(over(side) for side in sides if side != "cascade"),
        Column("of copy", of("cascade", "of_copy", ".2f")),
        Column("row of copy", of("row", "of_copy", ".2f")),
        Column("GiB read", lambda line: gib(line.get("cascade", {}).get("bytes"), ".2f")),
    ]
    rate = data["copy_bytes_per_second"] / 1e12
    where = machine(data["environment"], "triton", "flash-attn-4")
    yield f"{where}; attention of one layer; a copy {rate:.2f} TB/s"
    lines = by_key(data["rows"], lambda row: (row["case"], row["heads"]), "side")
    yield Table(columns, list(lines.values()))


def config_of(rows: int, words: str) -> Config:
    """KEYS,WARPS,STAGES or KEYS,WARPS,STAGES,REGISTERS."""
    keys, warps, stages, *registers = map(int, words.split(","))
    return Config(rows, keys, warps, stages, *registers)


def changed(options: argparse.Namespace) -> Iterator[patch]:
    """Constants and tiles in place of those that are shipped, to try them out."""
    if options.programs is not None:
        yield patch.object(decode_work, "PROGRAMS", options.programs)
    if options.share_from is not None:
        yield patch.object(decode_work, "SHARE_FROM", options.share_from)
    if options.wide or options.narrow:
        from prefixtree.kernels.attention.triton import configs

        shipped = configs.choose_decode

        def choose(*arguments: int) -> tuple[Config, Config]:
            wide, narrow = shipped(*arguments)
            if options.wide:
                wide = config_of(wide.rows, options.wide)
            return wide, config_of(narrow.rows, options.narrow) if options.narrow else narrow

        yield patch.object(configs, "choose_decode", choose)


LEVELS: dict[int, Callable[[argparse.Namespace], Report]] = {0: level_0, 1: level_1}


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every side was green."""
    what = parser(__doc__)
    add = what.add_argument
    add("--level", type=int, default=0, choices=list(LEVELS), help="0: attention; 1: a whole step")
    every = {0: SIDES, 1: sampling.SIDES}
    add("--sides", nargs="+", choices=sorted({*SIDES, *sampling.SIDES}), metavar="SIDE")
    add("--prompts", nargs="*", type=int, default=list(PROMPTS), help="tokens of the prompts")
    add("--trees", type=int, default=8, help="prompts, each with 16 rows")
    add("--tail", type=int, default=TAIL, help="written keys of a row")
    add("--heads", nargs="+", default=["32x8x128", "16x8x128"], help="query x kv heads x head dim")
    add("--rollouts", help="JSONL.gz, for the case airline")
    add("--programs", type=int, help="per multiprocessor, in place of PROGRAMS")
    add("--share-from", type=int, help="in place of SHARE_FROM")
    add("--wide", help="KEYS,WARPS,STAGES[,REGISTERS] of wide items")
    add("--narrow", help="the same of narrow ones")
    add("--profile", action="store_true", help="print the kernels of a call")
    options = parse(what, arguments)
    if options.read is not None:
        return Report.read(options).finish(tables)
    options.sides = options.sides or list(every[options.level])
    if others := set(options.sides) - set(every[options.level]):
        what.error(f"no sides of level {options.level}: {', '.join(sorted(others))}")
    gone = [side for side in options.sides if missing(side, options.device)]
    options.skipped += gone
    options.sides = [side for side in options.sides if side not in gone]
    with ExitStack() as stack:
        for change in changed(options):
            stack.enter_context(change)
        return LEVELS[options.level](options).finish(tables)
