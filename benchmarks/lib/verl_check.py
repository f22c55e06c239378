"""The check of `verl_update`: the same PPO updates by verl's own engine and by ours, in float32 and
in bf16, compared with the first; the case says what is red."""

from __future__ import annotations

import argparse
import gc
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.lib.policy import Ranks
from benchmarks.lib.runs import Row
from benchmarks.lib.verl_worker import (
    Setting,
    Turns,
    dealt,
    make_worker,
    policy_loss,
    scores,
    train,
)

# our error over that of verl's engine in bf16, of METRICS, and what may differ in float32
FACTOR, FEW, EXACT = 2.0, 3.0, 1e-3
# of the parameters, the share of the way they went that may differ in float32
EXACT_WAY = 5e-3
# one number per update: too few to compare their rounding one by one
METRICS = ("loss", "grad_norm", "actor/pg_loss", "actor/entropy_loss", "kl_loss")
# the share of ratios that the loss clips, for which verl takes means of micro-batches
CLIPPED = "actor/pg_clipfrac"
UPDATES, EPOCHS = 2, 2
TEMPERATURE = 0.7


@dataclass(frozen=True)
class Outcome:
    """The outcome of the checked samples on this rank.

    Attributes:
        scores: log_probs and entropy before the updates, [r] per sample.
        metrics: by name, one number per update.
        start, end: this rank's shards of the parameters, on the CPU.
    """

    scores: dict[str, list[torch.Tensor]]
    metrics: dict[str, list[float]]
    start: dict[str, torch.Tensor]
    end: dict[str, torch.Tensor]


def shards(worker: Any) -> dict[str, torch.Tensor]:
    """This rank's part of every parameter, on the CPU."""
    named = worker.engine.module.named_parameters()
    return {name: p.to_local().detach().float().cpu().clone() for name, p in named}


def outcome(
    folder: Path,
    setting: Setting,
    turns: Turns,
    count: int,
    exact: Outcome | None = None,
) -> Outcome:
    """The updates of one worker.

    Args:
        turns: this rank's. count: samples of all ranks.
        exact: the first run, whose log-probabilities the others' are made from.
    """
    worker = make_worker(folder, setting)
    start = shards(worker) if exact is None else exact.start
    worker.set_loss_fn(policy_loss(entropy=0.02, kl=0.1, clip=0.4))
    found = scores(worker, turns, TEMPERATURE)
    known = (found if exact is None else exact.scores)["log_probs"]
    old, reference = turns.beside(known)
    metrics = train(
        worker,
        turns,
        old,
        reference,
        TEMPERATURE,
        count,
        updates=UPDATES,
        epochs=EPOCHS,
        entropy=True,
    )
    numbers = {name: [float(x) for x in metrics[name]] for name in (*METRICS, CLIPPED)}
    out = Outcome(found, numbers, start, shards(worker))
    let_go(worker)
    return out


def errors(found: Outcome, exact: Outcome, turns: Turns, ranks: Ranks) -> dict[str, float]:
    """Of all ranks. Log-probabilities and entropies: root mean square, in nats, of what is scored.
    Metrics: of the updates' differences over the updates' sizes. Parameters: how far apart they
    end over how far they went."""
    out = {}
    masks = [mask.bool() for mask in turns.response_masks]
    for name in ("log_probs", "entropy"):
        pairs = zip(found.scores[name], exact.scores[name], masks, strict=True)
        gap = torch.cat([(a - b)[mask] for a, b, mask in pairs]).double()
        total, count = ranks.total(float(gap.square().sum()), gap.numel())
        out[name] = math.sqrt(total / count)
    for name in METRICS:
        gap, size = (
            np.linalg.norm(x)
            for x in (
                np.subtract(found.metrics[name], exact.metrics[name]),
                exact.metrics[name],
            )
        )
        out[name] = float(gap / size)
    apart = sum(float((found.end[n] - p).double().square().sum()) for n, p in exact.end.items())
    way = sum(float((exact.start[n] - p).double().square().sum()) for n, p in exact.end.items())
    apart, way = ranks.total(apart, way)
    out["parameters"] = math.sqrt(apart / way)
    return {name: error if math.isfinite(error) else 1e9 for name, error in out.items()}


@dataclass(frozen=True)
class Check:
    """The errors of the three runs that are compared with the first, and what is red.

    Attributes:
        facts: for the report. base: errors of verl's own engine in bf16. red: checks that failed.
    """

    facts: Row
    base: dict[str, float]
    red: list[str]


def check(folder: Path, turns: Turns, options: argparse.Namespace, ranks: Ranks) -> Check:
    """Four updates of some samples by both engines in both precisions; prints as it goes."""
    count = min(options.checked, len(turns))
    some = np.linspace(0, len(turns) - 1, count).round().astype(np.int64)
    few = turns.take(some.tolist())
    mine = few.take(dealt(few, "verl", ranks)[ranks.rank])
    longest = int(few.lengths.max())
    exact_setting = Setting(
        engine="verl",
        attention="sdpa",
        dtype="float32",
        # several micro-batches; float32 logits of 8,192 tokens are 5 GB
        max_tokens=max(longest, min(2 * longest, 8192)),
        is_gpu=options.is_gpu,
        remove_padding=False,
        optimizer="SGD",
        lr=options.check_lr,
    )
    settings = {
        "verl, float32": exact_setting,
        "packed, float32": replace(exact_setting, engine="prefixtree", remove_padding=True),
        "verl, bf16": replace(
            exact_setting,
            attention=options.attention["verl"],
            dtype="bfloat16",
            remove_padding=True,
        ),
        "packed, bf16": replace(
            exact_setting, engine="prefixtree", dtype="bfloat16", remove_padding=True
        ),
    }
    exact: Outcome | None = None
    found: dict[str, dict[str, float]] = {}
    metrics = {}
    for name, setting in settings.items():
        started = time.perf_counter()
        one = outcome(folder, setting, mine, count, exact)
        metrics[name] = one.metrics
        if exact is None:
            exact = one
        else:
            found[name] = errors(one, exact, mine, ranks)
        if ranks.rank == 0:
            took = time.perf_counter() - started
            print(f"check: {name}, {took:.0f} s: {found.get(name, one.metrics)}", flush=True)
    red = judged(found)
    facts = {
        "sequences": count,
        "tokens": int(few.lengths.sum()),
        "max_tokens": exact_setting.max_tokens,
        "updates": UPDATES * EPOCHS,
        "optimizer": f"SGD, learning rate {options.check_lr}",
        "errors": found,
        "metrics": metrics,
        "limits": {
            "bf16 over verl's": FACTOR,
            "metrics": FEW,
            "float32": EXACT,
            "float32, way": EXACT_WAY,
        },
        "red": red,
    }
    return Check(facts, found["verl, bf16"], red)


def judged(found: dict[str, dict[str, float]]) -> list[str]:
    """The errors that are too large; NaN is."""
    red = []
    for name, error in found["packed, float32"].items():
        if not error <= (EXACT_WAY if name == "parameters" else EXACT):
            red.append(f"float32 {name} {error:.2g}")
    base, ours = (together(found[name]) for name in ("verl, bf16", "packed, bf16"))
    for name, error in ours.items():
        if not error <= (FEW if name == "metrics" else FACTOR) * base[name]:
            red.append(f"bf16 {name} {error:.2g}, verl's {base[name]:.2g}")
    return red


def together(found: dict[str, float]) -> dict[str, float]:
    """The errors with the root mean square of METRICS in their place."""
    rest = {name: error for name, error in found.items() if name not in METRICS}
    return rest | {"metrics": math.hypot(*(found[name] for name in METRICS)) / len(METRICS) ** 0.5}


def let_go(worker: Any) -> None:
    """Frees what the worker holds, once the caller has dropped it."""
    worker.engine.optimizer = worker.engine.lr_scheduler = worker.engine.module = None
    worker.engine.checkpoint_manager = None
    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
