"""How long does sampling take, several samples per prompt, by `TreeSampler` and by `generate`?

    python -m benchmarks decode_peers --prompt 2048 --new 1024 --out peers.json   # on a GPU
    python -m benchmarks decode_peers --rollouts ROLLOUTS --out histories.json    # on a GPU
    python -m benchmarks decode_peers --shape qwen3.5-9b --new 256 --sides tree tree-compiled
    python -m benchmarks decode_peers --device cpu --scale 0.01                   # every code path

The shape of --shape with random weights: Qwen3-0.6B's, or that of a hybrid (Qwen3.5, Qwen3-Next),
whose rows carry states. Prompts are equally long, so that no side pays for padding,
and `generate` gets every prompt as many times as it has samples, as TRL gives it. No sequence stops
early. With --rollouts the prompts are all histories of the agent rollouts (579), each with 4
samples of 256 new tokens; then the sides are tree and rows.

    tree         `TreeSampler`; tree-compiled: with compiled layers; tree-eager: without CUDA
                 graphs; rows: with them, and every row reads all of its keys; rows-compiled
    dynamic      the cache that `generate` takes by itself
    static       cache_implementation="static", whose forward `generate` compiles
    static-eager the same, not compiled
    +prefixtree  a side with attn_implementation="prefixtree" for "sdpa": how a trainer generates if
                 its class alone is replaced. In float32, with two layers, its greedy tokens have to
                 be those of "sdpa"
    +gqa         a side with TRANSFORMERS_SDPA_FORCE_GQA=1, as dynamic+gqa or static+gqa: attention
                 reads the kv heads as they are and never repeats them for a group. Versions of
                 transformers that do not read the variable skip these sides

With --padding every second prompt has as many tokens of padding before it.

"GB/step" is what a step of `TreeSampler` must at least read and write: weights, every row's states
twice, keys once for all rows that share them (at the middle of the generation). "x bound" is the
median step over the time of so many bytes at --bandwidth.

"prefill ms" lasts until the logits of the first new token are there; "ms/step" is the mean over all
later tokens. "compile s" is what the first calls took beyond the time of as many steps, and
is in none of the other columns. Peak memory holds weights, cache and activations; "reserved" also
holds the pools of CUDA graphs.

The sides of `TreeSampler` are checked first, in float32 with two layers: greedy tokens beside
`generate`, log-probabilities beside `sequence_logprobs`.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch._dynamo.utils import counters
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import CompileConfig
from transformers.integrations import sdpa_attention
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

from benchmarks.lib import sampling
from benchmarks.lib.layers import HYBRIDS
from benchmarks.lib.layers import config as layers_config
from benchmarks.lib.policy import SHAPES, config
from benchmarks.lib.runs import Report, Row, parse, parser
from benchmarks.lib.sampling import SIDES as OURS
from benchmarks.lib.sampling import Clock, sampled, sampler_of, wrong
from benchmarks.lib.sampling import model_of as random_model
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
from benchmarks.lib.timing import profiled
from benchmarks.lib.workloads import airline_sequences
from prefixtree import PrefixForest
from prefixtree.sampling import TreeSampler

SIDES = ("tree", "tree-compiled", "dynamic", "static", "static+gqa")
# of a hybrid: every fourth layer attends
HYBRID_LAYERS, HYBRID_CHECKED = 32, 4
# of the rollouts, where `generate` would copy every history
HISTORY_SIDES, HISTORY_SAMPLES, HISTORY_NEW = ("tree", "rows"), 4, 256
GQA = "TRANSFORMERS_SDPA_FORCE_GQA"
# new tokens of a call that only compiles, and how many such calls: the second records CUDA graphs
WARM_STEPS, WARM_CALLS = 12, 2


class Marks(Clock):
    """A clock as a logits processor: notes when the device has each new token's logits."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.mark()
        return scores


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


def model_of(options: argparse.Namespace, attention: str, layers: int | None, dtype: str) -> Any:
    """The shape with an attention."""
    if options.shape in HYBRIDS:
        most = HYBRID_CHECKED if options.is_tiny else HYBRID_LAYERS
        settings = layers_config(most, options.is_tiny, shape=options.shape)
        layers = layers and max(layers, HYBRID_CHECKED)
    else:
        settings = config(options.is_tiny)
    settings._attn_implementation = attention
    return random_model(settings, layers, dtype, options.device)


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
    clock = Marks(options.device)
    if clock.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    clock.mark()
    out = model.generate(
        input_ids=prompts,
        attention_mask=attention_mask_of(prompts, options),
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


def attention_mask_of(prompts: torch.Tensor, options: argparse.Namespace) -> torch.Tensor:
    """[rows, prompt], 0 where every second prompt has padding."""
    mask = torch.ones_like(prompts)
    second = torch.arange(len(prompts), device=mask.device) // options.samples % 2 == 1
    mask[second, : options.padding] = 0
    return mask


def differs_from_sdpa(prompts: torch.Tensor, options: argparse.Namespace) -> bool:
    """Whether greedy tokens behind a few prompts are others than those of "sdpa", in float32."""
    model = model_of(options, "sdpa", 2, "float32")
    given, found = prompts[:: options.samples], []
    mask = attention_mask_of(prompts, options)[:: options.samples]
    for attention in ("sdpa", "prefixtree"):
        model.set_attn_implementation(attention)
        how: dict[str, Any] = {"max_new_tokens": WARM_STEPS, "do_sample": False}
        found.append(model.generate(input_ids=given, attention_mask=mask, **how))
    return not torch.equal(*found)


@contextmanager
def taking_fla(model: Any) -> Iterator[None]:
    """A hybrid's functions as transformers finds them where fla is installed: they were imported
    without it, for the check."""
    module = sys.modules[type(model).__module__]
    rules = {"chunk": "chunk_gated_delta_rule", "recurrent": "fused_recurrent_gated_delta_rule"}
    found = {}
    for kind, name in rules.items():
        ours = f"torch_{kind}_gated_delta_rule"
        if hasattr(module, ours):
            take = use_kernel_func_from_hub_with_fallback(name, "fla")
            found[ours] = take(inspect.unwrap(getattr(module, ours)))
    with patch.dict(vars(module), found):
        yield


def slow_recurrences(model: Any) -> list[str]:
    """The recurrences that transformers computes by its reference, many times as slow as fla's."""
    found = vars(sys.modules[type(model).__module__]).items()
    rules = [(name, f) for name, f in found if name.endswith("delta_rule") and callable(f)]
    return [
        f"{name} is the reference"
        for name, rule in rules
        if inspect.getclosurevars(rule).nonlocals.get("is_new_implementation") is False
    ]


def compare(side: str, options: argparse.Namespace) -> Row:
    """One side's whole generation."""
    cache, *more = side.split("+")
    with side_environment(is_gqa="gqa" in more), torch.no_grad():
        attention = "prefixtree" if "prefixtree" in more else "sdpa"
        model = model_of(options, attention, options.layers, options.dtype)
        given = torch.from_numpy(np.stack(prompts_of(options, model.config.vocab_size)))
        prompts = given.to(options.device).repeat_interleave(options.samples, 0)
        warm = 0.0
        with taking_fla(model):
            for _ in range(WARM_CALLS):
                steps = min(WARM_STEPS, options.new)
                warm += generate(model, prompts, options, side, steps)[0]
            is_compiled = counters["stats"]["unique_graphs"] > 0
            gc.collect()
            if options.device != "cpu":
                torch.cuda.reset_peak_memory_stats()
            found = [generate(model, prompts, options, side, None) for _ in range(options.repeats)]
            seconds, ms, out = sorted(found, key=lambda run: run[0])[len(found) // 2]
            red = slow_recurrences(model) if options.device != "cpu" else []
        if out.shape != (len(prompts), options.prompt + options.new):
            red.append(f"shape {tuple(out.shape)}")
        if not torch.equal(out[:, : options.prompt], prompts):
            red.append("prompts")
        if is_compiled != (cache == "static"):
            red.append(f"compiled: {is_compiled}")
        if attention != "sdpa" and differs_from_sdpa(prompts, options):
            red.append("tokens are not those of sdpa")
        if red:
            return {"side": side, "red": red}
        expected = WARM_CALLS * 1e-3 * (ms[0] + statistics.mean(ms[1:]) * (steps - 1))
        compiling = max(0.0, warm - expected) if is_compiled else 0.0
        return times_of(
            side, [run[0] for run in found], seconds, ms, len(prompts), compiling, options
        )


def compare_ours(side: str, options: argparse.Namespace) -> Row:
    """The whole of one side of `TreeSampler`, after its check."""
    if red := wrong(side, model_of(options, "prefixtree", 2, "float32")):
        return {"side": side, "red": red}
    gc.collect()
    model = model_of(options, "prefixtree", options.layers, options.dtype)
    prompts = prompts_of(options, model.config.vocab_size)
    rows = len(prompts) * options.samples
    keys = PrefixForest.from_sequences(prompts).num_tokens + rows * options.new
    sampler = sampler_of(side, model, keys, rows)
    how = side, sampler, prompts, options.samples, options.new, options.device
    # compiles, and captures the steps of this many tokens
    warm = sampled(*how)[0]
    if options.device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    found = [sampled(*how) for _ in range(options.repeats)]
    seconds, ms, samples = sorted(found, key=lambda run: run[0])[len(found) // 2]
    if {int(mask.sum()) for mask in samples.loss_masks} != {options.new} or len(ms) != options.new:
        return {"side": side, "red": [f"{len(ms)} steps"]}
    every = [run[0] for run in found]
    row = times_of(side, every, seconds, ms, rows, max(0.0, warm - seconds), options)
    if options.profile:
        print(f"{side}, {options.new} steps\n{profiled(lambda: sampled(*how))}", flush=True)
    gb = step_bytes(model, sampler, keys - rows * options.new // 2, rows) / 1e9
    return row | {"step_gb": gb, "over_bound": row["median_step_ms"] * options.bandwidth / gb}


def step_bytes(model: Any, sampler: TreeSampler, keys: int, rows: int) -> int:
    """What a step moves at least: weights, keys read once, and states read and written."""
    weights = {id(p): p.nbytes for p in model.parameters()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head.weight is not embedding.weight:
        # a row of it per token
        weights.pop(id(embedding.weight))
    cache = sampler._forward.cache
    of_key = sum(pool[0].nbytes for pools in cache._pools for pool in pools)
    return sum(weights.values()) + keys * of_key + 2 * rows * cache.states.slot_bytes


def prompts_of(options: argparse.Namespace, vocabulary: int) -> list[np.ndarray]:
    """Random prompts, or the histories of the rollouts."""
    if options.rollouts is not None:
        found = [x % vocabulary for x in airline_sequences(options.rollouts, 1 << 30)]
        if options.is_tiny:
            found = [x[: max(1, round(len(x) * options.scale))] for x in found[:6]]
        return found
    size = options.prompts, options.prompt
    return list(np.random.default_rng(1).integers(0, vocabulary, size))


def times_of(
    side: str,
    every: list[float],
    seconds: float,
    ms: list[float],
    rows: int,
    compiling: float,
    options: argparse.Namespace,
) -> Row:
    """A side's row.

    Args:
        every: seconds of all runs. seconds, ms: of the median one.
    """
    step_ms = statistics.mean(ms[1:])
    return {
        "side": side,
        "red": [],
        "seconds": seconds,
        "all_seconds": every,
        "prefill_ms": ms[0],
        "step_ms": step_ms,
        "median_step_ms": statistics.median(ms[1:]),
        "tokens_per_second": rows * options.new / seconds,
        "decode_tokens_per_second": 1e3 * rows / step_ms,
        "compile_seconds": compiling,
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


def tables(*runs: Row) -> Parts:
    """Times of whole generations, side by side. Of a side that several runs have, the last one's
    stand."""
    columns = [
        Column("side", lambda row: row["side"]),
        Column("prefill ms", lambda row: number(row, "prefill_ms", ".1f")),
        Column("ms/step", lambda row: number(row, "step_ms", ".2f")),
        Column("median ms/step", lambda row: number(row, "median_step_ms", ".2f"), is_detail=True),
        Column("GB/step", lambda row: number(row, "step_gb", ".2f"), is_detail=True),
        Column("x bound", lambda row: number(row, "over_bound", ".2f"), is_detail=True),
        Column("whole s", lambda row: number(row, "seconds", ".2f")),
        Column("tokens/s", lambda row: number(row, "tokens_per_second", ",.0f")),
        Column("of the steps", lambda row: number(row, "decode_tokens_per_second", ",.0f")),
        Column("compile s", lambda row: number(row, "compile_seconds", ".1f")),
        Column("peak GiB", lambda row: gib(row.get("peak_bytes"))),
        Column("reserved GiB", lambda row: gib(row.get("reserved_bytes"))),
        verdict_column(),
    ]
    found = {row["side"]: (data, row) for data in runs for row in data["rows"]}
    sides: dict[str, list[str]] = {}
    for side, (data, _) in found.items():
        sides.setdefault(machine(data["environment"], "transformers"), []).append(side)
    where = [f"{at} ({', '.join(some)})" if len(sides) > 1 else at for at, some in sides.items()]
    yield f"{runs[0]['workload']}; {'; '.join(where)}"
    yield Table(columns, [row for _, row in found.values()])


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every side generated what it should."""
    what = parser(__doc__)
    known = [
        f"{side}{more}"
        for side in ("dynamic", "static", "static-eager")
        for more in ("", "+gqa", "+prefixtree")
    ]
    known += OURS
    what.add_argument("--sides", nargs="+", choices=known, metavar="SIDE")
    what.add_argument("--prompts", type=int, default=8)
    what.add_argument("--samples", type=int, help="per prompt; default: 16, of histories 4")
    what.add_argument("--prompt", type=int, default=2048, help="tokens per prompt")
    what.add_argument("--padding", type=int, default=0, help="tokens before every second prompt")
    what.add_argument("--new", type=int, help="new tokens per sample; default: 1024, or 256")
    what.add_argument("--rollouts", help="JSONL.gz, whose histories are the prompts")
    what.add_argument("--layers", type=int, help="default: 28, of a hybrid 32")
    what.add_argument("--shape", choices=(SHAPES[0], *HYBRIDS), default=SHAPES[0])
    what.add_argument("--bandwidth", type=float, default=4.0, help="TB/s; default: 4, an H200's")
    what.add_argument(
        "--inductor", nargs="+", default=[], help="options of compiled layers, as combo_kernels=1"
    )
    what.add_argument("--profile", action="store_true", help="print the kernels of a generation")
    what.add_argument("--compile-backend", default="inductor", help="on a CPU")
    what.set_defaults(repeats=1)
    options = parse(what, arguments)
    if options.read is not None:
        return Report.read(options).finish(tables)
    words = (word.split("=") for word in options.inductor)
    sampling.INDUCTOR.update((key, bool(int(value))) for key, value in words)
    by_history = options.rollouts is not None
    options.sides = options.sides or list(HISTORY_SIDES if by_history else SIDES)
    if by_history and (others := set(options.sides) - set(OURS)):
        what.error(f"{sorted(others)} take prompts of one length: leave out --rollouts")
    options.samples = options.samples or (HISTORY_SAMPLES if by_history else 16)
    options.new = options.new or (HISTORY_NEW if by_history else 1024)
    if options.is_tiny:
        options.prompts, options.samples = min(options.prompts, 2), min(options.samples, 2)
        options.prompt = max(2, round(options.prompt * options.scale))
        options.padding = min(options.padding, options.prompt // 2)
        options.new = max(3, round(options.new * options.scale))
    if not knows_gqa():
        options.skipped = [side for side in options.sides if side.endswith("+gqa")]
        options.sides = [side for side in options.sides if side not in options.skipped]
        print(f"skipped: {options.skipped} (transformers does not read {GQA})")
    prompts = "histories" if by_history else f"{options.prompts} prompts of {options.prompt} tokens"
    workload = f"{prompts} x {options.samples} samples of {options.new} new tokens, {options.dtype}"
    if options.shape in HYBRIDS:
        workload = f"{options.shape}, {workload}"
    if options.padding:
        workload += f", {options.padding} tokens of padding before every second prompt"
    report = Report(options, workload=workload)
    for side in options.sides:
        run = compare_ours if side in OURS else compare
        row = report.attempt({"side": side}, partial(run, side, options))
        step = f"{row['step_ms']:.2f} ms per step" if "step_ms" in row else verdict(row)
        print(f"{side}: {step}", flush=True)
    return report.finish(tables)
