"""How much faster the sdpa backend is on a packed forest than torch's SDPA on every sequence alone.

    python -m benchmarks sdpa_cpu ROLLOUTS.jsonl.gz [--tasks 2] [--out OUT.json]

CPU, fp32, 8 heads of 64, a sequence per assistant turn, forward and backward. The packed result is
compared with the replicated one first, out and gradients; red prints no time. Median of 3 after one
warm-up; the two sides in turn.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
import typer

import prefixtree as pt
from benchmarks.lib.environment import environment
from prefixtree.rollouts import expand_turns, read_rollouts

HEADS, HEAD_DIM = 8, 64


def main(rollouts: Path, tasks: int = 2, repeats: int = 3, out: Path | None = None) -> None:
    """Times packed against replicated attention on the CPU."""
    data = expand_turns(read_rollouts(str(rollouts), strict=True).first_groups(tasks))
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
        sys.exit(f"red, no times: relative differences {errors}")
    times: dict[str, list[float]] = {"packed_s": [], "replicated_s": []}
    for _ in range(repeats):
        for name, run in (("packed_s", run_packed), ("replicated_s", run_replicated)):
            times[name].append(_seconds(run))
    median = {name: statistics.median(values) for name, values in times.items()}
    lengths = forest.sequence_lengths.astype(float)
    result = {
        "environment": environment(),
        "sequences": forest.num_sequences,
        "packed_tokens": forest.num_tokens,
        "replicated_tokens": forest.num_replicated_tokens,
        "relative_difference": errors,
        "times": times,
        **median,
        "speed_up": median["replicated_s"] / median["packed_s"],
        "attention_flop_ratio": float(
            (lengths * (lengths + 1) / 2).sum() / (packed.position_ids + 1).sum()
        ),
    }
    print(json.dumps(result, indent=1))
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    typer.run(main)
