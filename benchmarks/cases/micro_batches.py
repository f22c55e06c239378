"""How near are planned micro-batches to a lower bound of tokens, and to other plans?

    python -m benchmarks micro_batches --rollouts FILE.jsonl.gz --out OUT.json

Workloads, on 8 ranks with budgets of 16K and 32K distinct tokens: the rollouts, one sample per turn
(without --rollouts they are left out), as they are and with their tasks kept together, and 512
prompts x 16 ragged responses. Time: 100,000 sequences of 50M tokens. Costs are those of the default
`CostModel`. Times are medians after a warm-up, on this machine, with the threads it has.

**The lower bound** (`lower_bound`). A micro-batch that holds a sequence holds every token of its
path, once. Below the last token of a node at depth d it has room for max_tokens - d tokens. So if
the children of a node need at least B tokens, copies included, the node is held by at least
ceil(B / (max_tokens - d)) micro-batches, by at least as many as any of its children, and by one; it
adds its length times that number, and so on up to the roots ("for the budget"). A root is held by
every micro-batch that holds any of its tree. So with K micro-batches the roots have K copies at
least, and those beyond the ones above cost at least the shortest root each. K follows from the
ranks: of a total cost of C, no rank has more than 1.05 C / ranks, and no micro-batch more than c,
the cost of the costliest max_tokens tokens that hold their ancestors. j micro-batches on a rank
hold at most min(j c, 1.05 C / ranks), and these sums must reach C. C grows with K, so this is
repeated until nothing changes ("for the budget and the ranks"). No plan whose heaviest rank is
within 1.05 of the mean computes fewer tokens, whatever its number of steps.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.environment import environment
from benchmarks.lib.runs import described, write
from benchmarks.lib.tables import Column, Parts, Table, made, show
from benchmarks.lib.timing import host_ms
from benchmarks.lib.verl import verl_micro_batches
from benchmarks.lib.workloads import AIRLINE
from prefixtree import PrefixForest, plan_micro_batches
from prefixtree.planning.costs import CostModel
from prefixtree.rollouts import expand_turns, read_rollouts

RANKS, BUDGETS = 8, (16384, 32768)
BALANCE = 1.05
Row = dict[str, Any]


# ---- inputs --------------------------------------------------------------------------------------


def ragged_groups() -> tuple[list[np.ndarray], list[int]]:
    """512 prompts of 256 to 1,023 tokens, 16 responses each of about 970 tokens, 50 to 8,000."""
    rng = np.random.default_rng(0)
    sequences, groups = [], []
    for group in range(512):
        prompt = rng.integers(0, 150_000, rng.integers(256, 1024))
        for length in np.clip(rng.lognormal(6.7, 0.6, 16), 50, 8000).astype(int):
            sequences.append(np.concatenate([prompt, rng.integers(0, 150_000, length)]))
            groups.append(group)
    return sequences, groups


def many_sequences(count: int = 100_000) -> list[np.ndarray]:
    """500 tokens each: a system prompt, tasks of 8 rollouts, which part after some shared turns."""
    rng = np.random.default_rng(0)
    system = rng.integers(0, 150_000, 60)
    sequences = []
    for _ in range(count // 8):
        task = rng.integers(0, 150_000, 90)
        trunk = rng.integers(0, 150_000, 350)
        for member in range(8):
            kept = 50 * (member % 7)
            own = rng.integers(0, 150_000, 350 - kept)
            sequences.append(np.concatenate([system, task, trunk[:kept], own]))
    return sequences


# ---- the bound -----------------------------------------------------------------------------------


def lower_bound(
    forest: PrefixForest, max_tokens: int, num_ranks: int, model: CostModel
) -> tuple[int, int, int]:
    """Tokens that any plan computes: for the budget, for the budget and the ranks, and the number
    of micro-batches behind the second. The module says why."""
    n = forest.num_nodes
    copies, below = np.ones(n, np.int64), np.zeros(n, np.int64)
    room = max_tokens - forest.node_position - forest.node_length
    for node in range(n - 1, -1, -1):
        if below[node]:
            copies[node] = max(copies[node], -(-below[node] // room[node]))
        if (parent := forest.node_parent[node]) >= 0:
            below[parent] += below[node] + copies[node] * forest.node_length[node]
            copies[parent] = max(copies[parent], copies[node])
    budget_tokens = int((copies * forest.node_length).sum())
    roots = np.flatnonzero(forest.node_parent < 0)
    root_copies = int(copies[roots].sum())
    # the least that one more copy of a root adds
    root_tokens = int(forest.node_length[roots].min())

    node_cost = model.cost(
        forest.node_position.astype(np.int64), forest.node_length.astype(np.int64)
    )
    root_cost = float(node_cost[roots].min())
    largest = costliest_micro_batch(forest, node_cost, max_tokens)
    bins = -(-budget_tokens // max_tokens)
    while True:
        extra = max(0, bins - root_copies)
        total = float((copies * node_cost).sum()) + extra * root_cost
        most = BALANCE * total / num_ranks
        full = int(most // largest)
        if num_ranks * full * largest >= total:
            needed = int(np.ceil(total / largest))
        else:
            rest = (total - num_ranks * full * largest) / (most - full * largest)
            needed = num_ranks * full + int(np.ceil(rest - 1e-9))
        if needed <= bins:
            return budget_tokens, budget_tokens + extra * root_tokens, bins
        bins = needed


def costliest_micro_batch(forest: PrefixForest, node_cost: np.ndarray, max_tokens: int) -> float:
    """Least known upper bound of the cost of `max_tokens` tokens that hold their ancestors.

    From the leaves up, a node takes in the densest block below it (cost per token) while that is
    denser than the node: who wants the one pays for the other. Blocks then get no denser downwards,
    and the densest max_tokens tokens, the last block taken in part, are the best of the linear
    relaxation (Sidney's decomposition of a tree).
    """
    # per node the blocks of its subtree: (-density, tokens, cost), densest first
    pending: list[list[tuple[float, int, float]]] = [[] for _ in range(forest.num_nodes + 1)]
    for node in range(forest.num_nodes - 1, -1, -1):
        blocks, pending[node] = pending[node], []
        tokens, cost = int(forest.node_length[node]), float(node_cost[node])
        while blocks and -blocks[0][0] > cost / tokens:
            _, more_tokens, more_cost = heapq.heappop(blocks)
            tokens, cost = tokens + more_tokens, cost + more_cost
        heapq.heappush(blocks, (-cost / tokens, tokens, cost))
        # the smaller heap into the larger one; a root's go behind all nodes
        mine, theirs = sorted((blocks, pending[forest.node_parent[node]]), key=len)
        for block in mine:
            heapq.heappush(theirs, block)
        pending[forest.node_parent[node]] = theirs
    total, left = 0.0, max_tokens
    for density, tokens, _ in sorted(pending[-1]):
        taken = min(left, tokens)
        total, left = total - density * taken, left - taken
    return total


# ---- measurements --------------------------------------------------------------------------------


def distinct_tokens(sequences: list[np.ndarray], members: list[int]) -> int:
    return PrefixForest.from_sequences([sequences[i] for i in members]).num_tokens


def measure_plans(rollouts: Path | None) -> list[Row]:
    """A row for each workload and budget."""
    workloads: list[tuple[str, list[np.ndarray], list[Any] | None]] = []
    if rollouts is not None:
        turns = expand_turns(read_rollouts(rollouts))
        workloads.append((AIRLINE, turns.sequences, None))
        workloads.append((f"{AIRLINE}, tasks together", turns.sequences, turns.groups))
    ragged, groups = ragged_groups()
    workloads.append(("512 x 16 ragged", ragged, None))
    workloads.append(("512 x 16 ragged, groups", ragged, groups))
    rows = []
    known: dict[tuple[int, int], list[list[list[int]]]] = {}
    for name, sequences, together in workloads:
        lengths = np.array([len(sequence) for sequence in sequences])
        for budget in BUDGETS:
            plan = plan_micro_batches(sequences, budget, RANKS, together)
            stats, model = plan.stats, CostModel()
            for_budget, for_ranks, bins = lower_bound(plan.forest, budget, RANKS, model)
            # the second holds for even ranks alone, which groups may not allow
            bound = for_ranks if stats.balance <= BALANCE else for_budget
            # it does not know of groups: one answer for both
            if (key := (id(sequences), budget)) not in known:
                known[key] = verl_micro_batches(lengths, budget, RANKS)
            verl = known[key]
            batches = [batch for rank in verl for batch in rank if batch]
            verl_packed = sum(distinct_tokens(sequences, batch) for batch in batches)
            rows.append(
                {
                    "workload": name,
                    "budget": budget,
                    "ranks": RANKS,
                    "sequences": len(sequences),
                    "steps": stats.steps,
                    "empty_steps": stats.empty_steps,
                    "tokens": stats.packed_tokens,
                    "distinct": stats.distinct_tokens,
                    "replicated": stats.replicated_tokens,
                    "bound_budget": for_budget,
                    "bound_budget_and_ranks": for_ranks,
                    "bound_micro_batches": bins,
                    "bound": bound,
                    "over_bound": stats.packed_tokens / bound,
                    "balance": stats.balance,
                    "lockstep_balance": stats.lockstep_balance,
                    "naive_tokens": stats.naive_tokens,
                    "naive_over_plan": stats.naive_tokens / stats.packed_tokens,
                    "verl_steps": len(verl[0]),
                    "verl_largest": max(int(lengths[batch].sum()) for batch in batches),
                    "verl_replicated_over_plan": stats.replicated_tokens / stats.packed_tokens,
                    "verl_packed_tokens": verl_packed,
                    "verl_packed_over_plan": verl_packed / stats.packed_tokens,
                    "ms": host_ms(
                        lambda s=sequences, b=budget, g=together: plan_micro_batches(s, b, RANKS, g)
                    ),
                }
            )
    return rows


def measure_time() -> Row:
    """100,000 sequences: the whole plan, the forest's part of it, and what a rank packs then."""
    sequences = many_sequences()
    forest = PrefixForest.from_sequences(sequences)
    plan = plan_micro_batches(forest, 16384, RANKS)

    def pack_rank() -> None:
        for batch in plan_micro_batches(forest, 16384, RANKS)[0]:
            _ = batch.packed

    alone = host_ms(lambda: plan_micro_batches(forest, 16384, RANKS), 5)
    return {
        "sequences": len(sequences),
        "replicated": plan.stats.replicated_tokens,
        "distinct": plan.stats.distinct_tokens,
        "tokens": plan.stats.packed_tokens,
        "balance": plan.stats.balance,
        "budget": 16384,
        "ranks": RANKS,
        "steps": plan.num_micro_batches,
        "forest_ms": host_ms(lambda: PrefixForest.from_sequences(sequences), 5),
        "plan_of_forest_ms": alone,
        "plan_of_sequences_ms": host_ms(lambda: plan_micro_batches(sequences, 16384, RANKS), 5),
        "pack_a_micro_batch_ms": (host_ms(pack_rank, 3) - alone) / plan.num_micro_batches,
    }


# ---- output --------------------------------------------------------------------------------------


def tables(data: Row) -> Parts:
    """Plans, their bound, and what others would compute."""
    yield f"{made(data['environment'])}; {data['plans'][0]['ranks']} ranks"
    yield Table(
        [
            Column("workload", lambda row: row["workload"]),
            Column("budget", lambda row: f"{row['budget']:,}"),
            Column("steps", lambda row: str(row["steps"])),
            Column("tokens", lambda row: f"{row['tokens']:,}"),
            Column("bound", lambda row: f"{row['bound']:,}"),
            Column("tokens / bound", lambda row: f"{row['over_bound']:.3f}"),
            Column("heaviest / mean", lambda row: f"{row['balance']:.3f}"),
            Column("in lockstep", lambda row: f"{row['lockstep_balance']:.3f}", is_detail=True),
            Column("filled in order", lambda row: f"{row['naive_over_plan']:.2f}x"),
            Column("verl's plan", lambda row: f"{row['verl_replicated_over_plan']:.2f}x"),
            Column("verl's plan, packed", lambda row: f"{row['verl_packed_over_plan']:.2f}x"),
            Column("ms", lambda row: f"{row['ms']:.0f}", is_detail=True),
        ],
        data["plans"],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = described(__doc__)
    parser.add_argument("--rollouts", type=Path, help=f"JSONL.gz file for {AIRLINE!r}")
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    options = parser.parse_args(arguments)
    figures = {
        "environment": environment(),
        "plans": measure_plans(options.rollouts),
        "time": measure_time(),
    }
    show(tables(figures))
    time = figures["time"]
    print(
        f"{time['sequences']:,} sequences, {time['replicated']:,} tokens: "
        f"forest {time['forest_ms']:.0f} ms, with the plan {time['plan_of_sequences_ms']:.0f} ms, "
        f"then {time['pack_a_micro_batch_ms']:.2f} ms to pack a micro-batch"
    )
    write(options.out, figures)
    return 0
