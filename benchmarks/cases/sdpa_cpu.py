"""How much faster is the sdpa backend on a forest than SDPA on every sequence alone?

    python -m benchmarks sdpa_cpu ROLLOUTS.jsonl.gz [--tasks 2] [--out OUT.json]

CPU, fp32, 8 heads of 64, one sequence per assistant turn, forward and backward. The packed result
is compared with the replicated one first, out and gradients; red prints no time. Median of 3 after
one warm-up; the two sides in turn.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import prefixtree as pt
from benchmarks.lib.environment import environment
from benchmarks.lib.replicated import pairs, replicated_pairs
from benchmarks.lib.runs import described, write
from benchmarks.lib.tables import Parts, made, show
from prefixtree.rollouts import expand_turns, read_rollouts

HEADS, HEAD_DIM = 8, 64


def tables(data: dict[str, Any]) -> Parts:
    """The sdpa backend against sequences one by one."""
    yield made(data["environment"])
    yield (
        f"fp32, 8 heads of 64, {data['sequences']} sequences, {data['packed_tokens']:,} distinct "
        f"of {data['replicated_tokens']:,} tokens, forward and backward: "
        f"**{data['packed_s']:.2f} s packed, {data['replicated_s']:.1f} s** for every sequence "
        f"alone through torch's SDPA, **{data['speed_up']:.1f}x**. Fewer attention FLOPs alone "
        f"give {data['attention_flop_ratio']:.1f}x; the replicated side also adds up the gradients "
        "of the copies. The largest relative difference of results is "
        f"{max(data['relative_difference'].values()):.1e}."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Times packed against replicated attention on the CPU; 1 where their results differ."""
    parser = described(__doc__)
    parser.add_argument("rollouts", type=Path, help="JSONL, with the turns' ends")
    parser.add_argument("--tasks", type=int, default=2, help="the first of the file")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON")
    options = parser.parse_args(arguments)
    rollouts = read_rollouts(str(options.rollouts), strict=True)
    data = expand_turns(rollouts.first_groups(options.tasks))
    forest = pt.PrefixForest.from_sequences(data.sequences)
    packed = pt.pack(forest)
    generator = torch.Generator().manual_seed(0)
    q, k, v, weight = (
        torch.randn(packed.num_tokens, HEADS, HEAD_DIM, generator=generator) for _ in range(4)
    )
    rows = packed.unpack(torch.arange(packed.num_tokens))

    def run_packed() -> list[torch.Tensor]:
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        result = pt.tree_attention(*inputs, packed.mask)
        # every copy of a token gets the same upstream gradient
        grad = weight * packed.multiplicity[:, None, None]
        return [result.detach(), *torch.autograd.grad(result, inputs, grad)]

    def run_replicated() -> list[torch.Tensor]:
        total = [torch.zeros_like(q) for _ in range(4)]
        for row in rows:
            inputs = [x[row].transpose(0, 1)[None].requires_grad_() for x in (q, k, v)]
            result = F.scaled_dot_product_attention(*inputs, is_causal=True)
            grads = torch.autograd.grad(result, inputs, weight[row].transpose(0, 1)[None])
            total[0][row] = result[0].detach().transpose(0, 1)
            for sum_, grad in zip(total[1:], grads, strict=True):
                sum_.index_add_(0, row, grad[0].transpose(0, 1))
        return total

    errors = {
        name: float((a - b).norm() / b.norm())
        for name, a, b in zip(
            ("out", "dq", "dk", "dv"), run_packed(), run_replicated(), strict=True
        )
    }
    if not max(errors.values()) < 1e-5:
        print(f"red, no times: relative differences {errors}")
        return 1
    times: dict[str, list[float]] = {"packed_s": [], "replicated_s": []}
    for _ in range(options.repeats):
        for name, run in (("packed_s", run_packed), ("replicated_s", run_replicated)):
            times[name].append(_seconds(run))
    median = {name: statistics.median(values) for name, values in times.items()}
    result = {
        "environment": environment(),
        "sequences": forest.num_sequences,
        "packed_tokens": forest.num_tokens,
        "replicated_tokens": forest.num_replicated_tokens,
        "relative_difference": errors,
        "times": times,
        **median,
        "speed_up": median["replicated_s"] / median["packed_s"],
        "attention_flop_ratio": replicated_pairs(forest) / pairs(forest),
    }
    show(tables(result))
    write(options.out, result)
    return 0


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
