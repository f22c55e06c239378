"""How many tokens do packed verl engines compute, balanced by verl and balanced by us?

    VERL_PLATFORM=nvidia .venvs/verl-0.9.1/bin/python -m benchmarks verl_balance ROLLOUTS.jsonl.gz \
        --out benchmarks/results/cpu/verl_balance.json

A training sample per assistant turn, as many on every rank, micro-batches planned by the engine.
Needs verl (`make test-verl` makes that environment); no GPU.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.lib.environment import environment
from benchmarks.lib.runs import described, write
from benchmarks.lib.tables import Column, Parts, Table, made, show
from prefixtree import PrefixForest, plan_micro_batches
from prefixtree.rollouts import expand_turns, read_rollouts

Row = dict[str, Any]


def workload(lengths: Any) -> np.ndarray:
    """verl's cost of sequences of these lengths."""
    from verl.utils.seqlen_balancing import calculate_workload

    return calculate_workload(torch.as_tensor(np.asarray(lengths, np.int64))).numpy()


def tables(data: Row) -> Parts:
    """veRL's balancing and ours."""

    def micro_batches(row: Row) -> str:
        return f"{min(row['micro_batches'])} to {max(row['micro_batches'])}"

    yield (
        f"{made(data['environment'])}; {data['sequences']} samples, "
        f"{data['replicated_tokens']:,} tokens, {data['ranks']} ranks"
    )
    yield Table(
        [
            Column("budget", lambda row: f"{row['max_tokens']:,}"),
            Column("balancing", lambda row: row["balancing"]),
            Column("tokens", lambda row: f"{row['tokens']:,}"),
            Column("replicated / computed", lambda row: f"{row['ratio']:.2f}x"),
            Column("micro-batches per rank", micro_batches),
            Column("heaviest / mean rank", lambda row: f"{row['heaviest_over_mean']:.2f}"),
        ],
        data["rows"],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints tokens, steps and balance of both, and writes them."""
    parser = described(__doc__)
    parser.add_argument("rollouts", type=Path, help="JSONL, with the turns' ends")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument(
        "--max-tokens", nargs="+", type=int, default=[16384, 32768], help="distinct tokens"
    )
    parser.add_argument("--out", type=Path, help="JSON")
    options = parser.parse_args(arguments)
    # where verl is not installed, the tables can be written still
    from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

    from prefixtree.integrations.verl.balance import GroupCosts, balance

    ranks = options.ranks
    rollouts = expand_turns(read_rollouts(str(options.rollouts)))
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
    rows = []
    for budget in options.max_tokens:
        for name, ranked in parts.items():
            tokens, steps = 0, []
            for part in ranked:
                forest = PrefixForest.from_sequences([sequences[i] for i in part])
                plan = plan_micro_batches(forest, budget)
                steps.append(plan.num_micro_batches)
                tokens += plan.stats.packed_tokens
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
    record = {
        "environment": environment(),
        "ranks": ranks,
        "sequences": len(sequences),
        "replicated_tokens": replicated,
        "seconds": seconds,
        "rows": rows,
    }
    show(tables(record))
    write(options.out, record)
    return 0
