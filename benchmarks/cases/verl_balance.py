"""What packed verl engines compute under verl's balancing of samples over ranks, and under ours.

    VERL_PLATFORM=nvidia .venvs/verl-0.9.1/bin/python -m benchmarks verl_balance ROLLOUTS.jsonl.gz \
        --out benchmarks/results/cpu/verl_balance.json

A training sample per assistant turn, as many on every rank, micro-batches planned by the engine.
Needs verl (`make test-verl` makes that environment); no GPU.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

from benchmarks.lib.environment import environment
from prefixtree import PrefixForest
from prefixtree.integrations.verl.balance import GroupCosts, balance
from prefixtree.integrations.verl.batches import plan_bins
from prefixtree.rollouts import expand_turns, read_rollouts


def workload(lengths: Any) -> np.ndarray:
    """verl's cost of sequences of these lengths."""
    return calculate_workload(torch.as_tensor(np.asarray(lengths, np.int64))).numpy()


def main(
    file: Path,
    ranks: int = 8,
    max_tokens: Annotated[list[int] | None, typer.Option(help="Budgets, distinct tokens.")] = None,
    out: Path | None = None,
) -> None:
    """Prints tokens, steps and balance of both, and writes them."""
    rollouts = expand_turns(read_rollouts(str(file)))
    sequences = [np.asarray(s, np.int64) for s in rollouts.sequences]
    groups = list(rollouts.groups)
    # verl fills up to a number that the ranks divide
    missing = -len(sequences) % ranks
    sequences += [np.ones(128, np.int64)] * missing
    groups += [f"filled up {i}" for i in range(missing)]
    size = len(sequences) // ranks
    start = time.perf_counter()
    order = balance(sequences, groups, ranks, 1, workload).order
    seconds = time.perf_counter() - start
    of_length = torch.as_tensor(workload([len(s) for s in sequences]))
    parts = {
        "verl's": get_seqlen_balanced_partitions(of_length, ranks, equal_size=True),
        "prefixtree_sync": [order[i : i + size] for i in range(0, len(order), size)],
    }
    costs = GroupCosts(sequences, workload)
    replicated = sum(map(len, sequences))
    table = Table("budget", "balancing", "tokens", "ratio", "micro-batches", "heaviest / mean")
    rows = []
    for budget in max_tokens or [16384, 32768]:
        for name, ranked in parts.items():
            tokens, steps = 0, []
            for part in ranked:
                bins = plan_bins([sequences[i] for i in part], budget)
                steps.append(len(bins))
                for chosen in bins:
                    held = [sequences[part[i]] for i in chosen]
                    tokens += PrefixForest.from_sequences(held).num_tokens
            rank_costs = [costs.cost(part) for part in ranked]
            row = {
                "max_tokens": budget,
                "balancing": name,
                "tokens": tokens,
                "ratio": replicated / tokens,
                "micro_batches": steps,
                "heaviest_over_mean": float(max(rank_costs) / np.mean(rank_costs)),
            }
            rows.append(row)
            table.add_row(
                f"{budget:,}",
                name,
                f"{tokens:,}",
                f"{row['ratio']:.2f}",
                f"{min(steps)} to {max(steps)}",
                f"{row['heaviest_over_mean']:.3f}",
            )
    Console().print(table)
    if out:
        record = {
            "environment": environment(),
            "ranks": ranks,
            "sequences": len(sequences),
            "replicated_tokens": replicated,
            "seconds": seconds,
            "rows": rows,
        }
        out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
