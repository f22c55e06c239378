"""How long does `generate` of transformers take for several samples per prompt?

    python -m benchmarks decode_peers --prompt 2048 --new 1024 --out peers.json   # on a GPU
    python -m benchmarks decode_peers --device cpu --scale 0.01                   # every code path

Qwen3-0.6B's shape with random weights. Prompts are equally long, so that no side pays for padding,
and every prompt is given as many times as it has samples, as TRL gives it. No sequence stops early.

    dynamic      the cache that `generate` takes by itself
    static       cache_implementation="static", whose forward `generate` compiles
    static-eager the same, not compiled
    +gqa         a side with TRANSFORMERS_SDPA_FORCE_GQA=1, as dynamic+gqa or static+gqa: attention
                 reads the kv heads as they are and never repeats them for a group. Versions of
                 transformers that do not read the variable skip these sides

"prefill ms" lasts until the logits of the first new token are there; "ms/step" is the mean over all
later tokens. "compile s" is what the first calls took beyond the time of as many steps, and
is in none of the other columns. Peak memory holds weights, cache and activations; "reserved" also
holds the pools of CUDA graphs.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import CompileConfig
from transformers.integrations import sdpa_attention

from benchmarks.lib.policy import config
from benchmarks.lib.runs import Report, Row, parse, parser
from benchmarks.lib.tables import (
    Column,
    Parts,
    Table,
    gib,
    machine,
    number,
    verdict,
    verdict_column,
)

SIDES = ("dynamic", "static", "static+gqa")
GQA = "TRANSFORMERS_SDPA_FORCE_GQA"
# new tokens of a call that only compiles, and how many such calls: the second records CUDA graphs
WARM_STEPS, WARM_CALLS = 12, 2


class Clock:
    """A logits processor: notes when the device has each new token's logits, without waiting."""

    def __init__(self, device: str) -> None:
        self.is_cuda = torch.device(device).type == "cuda"
        self.marks: list[Any] = []

    def mark(self) -> None:
        """Now, in the device's queue."""
        if self.is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.mark()
        return scores

    def ms(self) -> list[float]:
        """Milliseconds between marks."""
        pairs = zip(self.marks, self.marks[1:], strict=False)
        if self.is_cuda:
            torch.cuda.synchronize()
            return [first.elapsed_time(second) for first, second in pairs]
        return [1e3 * (second - first) for first, second in pairs]


class StopAfter:
    """A stopping criterion: a short call whose static cache is as large as that of a long one."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        is_done = input_ids.shape[1] >= self.length
        return torch.full(input_ids.shape[:1], is_done, device=input_ids.device)


@contextmanager
def side_environment(is_gqa: bool) -> Iterator[None]:
    """The variable set or not set, and nothing left of what an earlier side compiled."""
    before = os.environ.pop(GQA, None)
    if is_gqa:
        os.environ[GQA] = "1"
    torch._dynamo.reset()
    counters.clear()
    try:
        yield
    finally:
        os.environ.pop(GQA, None)
        if before is not None:
            os.environ[GQA] = before
        torch._dynamo.reset()


def knows_gqa() -> bool:
    """Does this version of transformers read the variable?"""
    return GQA in Path(sdpa_attention.__file__).read_text()


def model_of(options: argparse.Namespace) -> Any:
    """Random weights, the same for every side."""
    torch.manual_seed(0)
    settings = config(options.is_tiny)
    settings._attn_implementation = "sdpa"
    if options.layers is not None:
        settings.num_hidden_layers = options.layers
        settings.layer_types = settings.layer_types[: options.layers]
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(settings, dtype=getattr(torch, options.dtype))
    # nothing stops early
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def generate(
    model: Any, prompts: torch.Tensor, options: argparse.Namespace, side: str, most: int | None
) -> tuple[float, list[float], torch.Tensor]:
    """Seconds, milliseconds of the prefill and of each step, and the tokens.

    most: new tokens of a call that is not timed.
    """
    how: dict[str, Any] = {}
    if side.startswith("static"):
        how["cache_implementation"] = "static"
        how["disable_compile"] = side.startswith("static-eager")
        if torch.device(options.device).type == "cpu" and not how["disable_compile"]:
            # `generate` compiles on accelerators only, unless told
            how["compile_config"] = CompileConfig(backend=options.compile_backend)
            how["compile_config"]._compile_all_devices = True
    if most is not None:
        stop = StopAfter(prompts.shape[1] + most)
        how["stopping_criteria"] = StoppingCriteriaList([stop])
    clock = Clock(options.device)
    if clock.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    clock.mark()
    out = model.generate(
        input_ids=prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=options.new,
        do_sample=True,
        # transformers' default would look for the 50 likeliest of all logits
        top_k=0,
        logits_processor=LogitsProcessorList([clock]),
        **how,
    )
    if clock.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start, clock.ms(), out


def compare(side: str, options: argparse.Namespace) -> Row:
    """One side's whole generation."""
    cache, _, gqa = side.partition("+")
    with side_environment(is_gqa=bool(gqa)), torch.no_grad():
        model = model_of(options)
        generator = torch.Generator(options.device).manual_seed(1)
        size = (options.prompts, options.prompt)
        prompts = torch.randint(
            model.config.vocab_size, size, generator=generator, device=options.device
        ).repeat_interleave(options.samples, 0)
        warm = 0.0
        for _ in range(WARM_CALLS):
            steps = min(WARM_STEPS, options.new)
            warm += generate(model, prompts, options, side, steps)[0]
        is_compiled = counters["stats"]["unique_graphs"] > 0
        gc.collect()
        if options.device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        found = [generate(model, prompts, options, side, None) for _ in range(options.repeats)]
        seconds, ms, out = sorted(found, key=lambda run: run[0])[len(found) // 2]
        red = []
        if out.shape != (len(prompts), options.prompt + options.new):
            red.append(f"shape {tuple(out.shape)}")
        if not torch.equal(out[:, : options.prompt], prompts):
            red.append("prompts")
        if is_compiled != (cache == "static"):
            red.append(f"compiled: {is_compiled}")
        if red:
            return {"side": side, "red": red}
        step_ms = statistics.mean(ms[1:])
        rows = len(prompts)
        expected = WARM_CALLS * 1e-3 * (ms[0] + step_ms * (steps - 1))
        return {
            "side": side,
            "red": [],
            "seconds": seconds,
            "all_seconds": [run[0] for run in found],
            "prefill_ms": ms[0],
            "step_ms": step_ms,
            "median_step_ms": statistics.median(ms[1:]),
            "tokens_per_second": rows * options.new / seconds,
            "decode_tokens_per_second": 1e3 * rows / step_ms,
            "compile_seconds": max(0.0, warm - expected) if is_compiled else 0.0,
            **peak(options.device),
        }


def peak(device: str) -> Row:
    """Bytes at the peak, on a GPU."""
    if torch.device(device).type != "cuda":
        return {"peak_bytes": None, "reserved_bytes": None}
    return {
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def tables(data: Row) -> Parts:
    """Times of `generate`, side by side."""
    columns = [
        Column("generate", lambda row: row["side"]),
        Column("prefill ms", lambda row: number(row, "prefill_ms", ".1f")),
        Column("ms/step", lambda row: number(row, "step_ms", ".2f")),
        Column("median ms/step", lambda row: number(row, "median_step_ms", ".2f"), is_detail=True),
        Column("whole s", lambda row: number(row, "seconds", ".2f")),
        Column("tokens/s", lambda row: number(row, "tokens_per_second", ",.0f")),
        Column("of the steps", lambda row: number(row, "decode_tokens_per_second", ",.0f")),
        Column("compile s", lambda row: number(row, "compile_seconds", ".1f")),
        Column("peak GiB", lambda row: gib(row.get("peak_bytes"))),
        Column("reserved GiB", lambda row: gib(row.get("reserved_bytes"))),
        verdict_column(),
    ]
    yield f"{machine(data['environment'], 'transformers')}; {data['workload']}"
    yield Table(columns, data["rows"])


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every side generated what it should."""
    what = parser(__doc__)
    known = [
        f"{side}{gqa}" for side in ("dynamic", "static", "static-eager") for gqa in ("", "+gqa")
    ]
    what.add_argument("--sides", nargs="+", default=list(SIDES), choices=known, metavar="SIDE")
    what.add_argument("--prompts", type=int, default=8)
    what.add_argument("--samples", type=int, default=16, help="per prompt")
    what.add_argument("--prompt", type=int, default=2048, help="tokens per prompt")
    what.add_argument("--new", type=int, default=1024, help="new tokens per sample")
    what.add_argument("--layers", type=int, help="default: 28")
    what.add_argument("--compile-backend", default="inductor", help="on a CPU")
    what.set_defaults(repeats=1)
    options = parse(what, arguments)
    if options.read is not None:
        return Report.read(options).finish(tables)
    if options.is_tiny:
        options.prompts, options.samples = min(options.prompts, 2), min(options.samples, 2)
        options.prompt = max(2, round(options.prompt * options.scale))
        options.new = max(3, round(options.new * options.scale))
    if not knows_gqa():
        options.skipped = [side for side in options.sides if side.endswith("+gqa")]
        options.sides = [side for side in options.sides if side not in options.skipped]
        print(f"skipped: {options.skipped} (transformers does not read {GQA})")
    workload = (
        f"{options.prompts} prompts of {options.prompt} tokens x {options.samples} samples of "
        f"{options.new} new tokens, {options.dtype}"
    )
    report = Report(options, workload=workload)
    for side in options.sides:
        row = report.attempt({"side": side}, partial(compare, side, options))
        step = f"{row['step_ms']:.2f} ms per step" if "step_ms" in row else verdict(row)
        print(f"{side}: {step}", flush=True)
    return report.finish(tables)
