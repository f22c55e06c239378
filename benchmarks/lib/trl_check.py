"""The check of `run`: the same samples trained on by TRL's trainer and by ours, in float32 and in
bf16, compared with TRL's in float32; with --fsdp all four on the same ranks."""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from benchmarks.lib.policy import Ranks
from benchmarks.lib.runs import Row
from benchmarks.lib.trl_steps import (
    Side,
    Work,
    fixed_rollouts,
    fresh,
    logged,
    make_trainer,
    model_of,
)

# what may differ in float32; of the parameters, as a share of the way they went
EXACT, EXACT_WAY = 1e-3, 5e-3
# our error over that of TRL's trainer in bf16: of parameters, and of the few numbers of METRICS
FACTOR, FEW = 2.0, 3.0
METRICS = ("loss", "grad_norm", "entropy")
# generations, each trained on twice: the second time the ratio is not 1
GENERATIONS, ITERATIONS = 2, 2
EPSILON = 100.0
# groups of a rank, each a micro-batch
PROMPTS = 2


def outcome(
    side: Side, work: Work, options: argparse.Namespace, is_half: bool, folder: Path
) -> tuple[dict[str, list[float]], list[torch.Tensor], list[torch.Tensor]]:
    """The numbers of every update, and the parameters before and after, on the CPU."""
    with fresh():
        model = model_of(side, options, "float32", None)
        trainer = make_trainer(
            side,
            work,
            options,
            model,
            GENERATIONS * ITERATIONS,
            folder,
            fixed_rollouts(work),
            num_iterations=ITERATIONS,
            optim="sgd",
            learning_rate=options.check_lr,
            # no rounding decides what is clipped
            epsilon=EPSILON,
            bf16=is_half,
        )
        start = parameters(trainer)
        trainer.train()
        end = parameters(trainer)
        return {name: logged(trainer, name) for name in METRICS}, start, end


def parameters(trainer: Any) -> list[torch.Tensor]:
    """Whole, on the CPU; of sharded ones all ranks ask."""
    return [
        (p.full_tensor() if isinstance(p, DTensor) else p).detach().cpu().clone()
        for p in trainer.model.parameters()
    ]


def errors(
    found: dict[str, list[float]],
    exact: dict[str, list[float]],
    end: list[torch.Tensor],
    start: list[torch.Tensor],
    exact_end: list[torch.Tensor],
) -> dict[str, float]:
    """Metrics: the updates' differences over the updates' sizes. Parameters: how far apart they
    end over how far they went."""
    out = {}
    for name in METRICS:
        if len(found[name]) != GENERATIONS * ITERATIONS or len(exact[name]) != len(found[name]):
            out[name] = 1e9
            continue
        gap, size = (
            float(np.linalg.norm(x))
            for x in (np.subtract(found[name], exact[name]), np.asarray(exact[name]))
        )
        out[name] = gap / size
    apart, way = (
        sum(float((a - b).double().square().sum()) for a, b in zip(end_of, others, strict=True))
        for end_of, others in ((end, exact_end), (start, exact_end))
    )
    out["parameters"] = math.sqrt(apart / way)
    return {name: error if math.isfinite(error) else 1e9 for name, error in out.items()}


def check(work: Work, options: argparse.Namespace, folder: Path, ranks: Ranks) -> Row:
    """Four updates on the same samples by both trainers in both precisions; prints as it goes.

    Returns:
        for the report: errors by run, the first run's metrics, and what is red.
    """
    few = work.few(PROMPTS * ranks.count)
    stock, ours = Side.of("trl"), Side.of("prefixtree")
    exact, start, exact_end = outcome(stock, few, options, False, folder)
    say = print if ranks.rank == 0 else lambda *_, **__: None
    say(f"check: TRL's trainer in float32: {exact}", flush=True)
    found = {}
    for side, is_half in ((ours, False), (stock, True), (ours, True)):
        began = time.perf_counter()
        numbers, _, end = outcome(side, few, options, is_half, folder)
        name = f"{side.name}, {'bf16' if is_half else 'float32'}"
        found[name] = errors(numbers, exact, end, start, exact_end)
        say(f"check: {name}, {time.perf_counter() - began:.0f} s: {found[name]}", flush=True)
    # a rank that logs nothing has no errors
    found = ranks.agree(found)
    return {
        "work": str(few),
        "updates": GENERATIONS * ITERATIONS,
        "optimizer": f"SGD, learning rate {options.check_lr}",
        "metrics": exact,
        "errors": found,
        "limits": {"float32": EXACT, "float32, way": EXACT_WAY, "bf16": FACTOR, "metrics": FEW},
        "red": judged(found),
    }


def judged(found: dict[str, dict[str, float]]) -> list[str]:
    """The errors that are too large; NaN is."""
    red = []
    for name, error in found["prefixtree, float32"].items():
        if not error <= (EXACT_WAY if name == "parameters" else EXACT):
            red.append(f"float32 {name} {error:.2g}")
    base, ours = found["trl, bf16"], found["prefixtree, bf16"]
    if not ours["parameters"] <= FACTOR * base["parameters"]:
        red.append(f"bf16 parameters {ours['parameters']:.2g}, TRL's {base['parameters']:.2g}")
    few, most = (math.hypot(*(one[name] for name in METRICS)) for one in (ours, base))
    if not few <= FEW * most:
        red.append(f"bf16 metrics {few:.2g}, TRL's {most:.2g}")
    return red
