"""How does planning on the CPU grow from 10K to 10M tokens, beside what else there is?

    OMP_NUM_THREADS=1 python -m benchmarks planning --wait 120 \
        --out benchmarks/results/cpu/planning.json --plot docs/images/planning.png

Two kinds of rollouts: one sample per turn of agents' conversations (7 to 8 copies of a token) and
prompts of 512 tokens with 16 responses of 1,024 each. Steps: `PrefixForest.from_sequences`, `pack`,
and the tables of two tile shapes. Beside them a dict trie, and FlexAttention's `create_block_mask`,
which looks at T x T pairs and stops where those no longer fit. Before any time: every sequence is
found again in the packed tokens, the trie counts as many nodes as the forest has tokens, and
FlexAttention's mask visits as many tiles as ours.

Medians after a warm-up, wall time and CPU time: on a machine that others use too, the second says
what a quiet one would take (everything here runs in one thread). The load is in the JSON.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.lib.environment import environment
from benchmarks.lib.plots import figure, name, save
from benchmarks.lib.runs import described, write
from benchmarks.lib.shapes import TILES
from benchmarks.lib.tables import Column, Parts, Table, show
from benchmarks.lib.timing import host_ms
from prefixtree import PrefixForest, TreeMask, pack

SIZES = (10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000)
CHOSEN = ("grid 128x128", "cut 16x64")
PEERS = ("dict trie", "flex mask")
STEPS = ("forest", "pack", *(f"tables {tile}" for tile in CHOSEN), *PEERS)
COLOURS = ("#225ea8", "#41b6c4", "#1a9850", "#a6d96a", "#d7301f", "#fdae61")
# T x T booleans that FlexAttention's mask may hold, and Python objects of a trie, in bytes
FLEX_BYTES, TRIE_TOKENS = 2**30, 12_000_000
Row = dict[str, Any]


# ---- inputs --------------------------------------------------------------------------------------


def agents(total: int) -> list[np.ndarray]:
    """A sample per turn: conversations of 12 or 13 turns below one system prompt."""
    rng = np.random.default_rng(0)
    system = rng.integers(0, 150_000, min(400, total // 25))
    sequences: list[np.ndarray] = []
    tokens = 0
    while tokens < total:
        turns = 12 + len(sequences) % 2
        scale = min(1.0, total / 40_000)
        lengths = np.maximum(1, (rng.integers(150, 628, turns) * scale).astype(int))
        whole = np.concatenate([system, rng.integers(0, 150_000, lengths.sum())])
        for end in np.cumsum(lengths):
            sequences.append(whole[: len(system) + end].copy())
            tokens += len(sequences[-1])
    return sequences


def groups(total: int) -> list[np.ndarray]:
    """GRPO's: prompts of 512 tokens, 16 responses of 1,024; shorter ones for small totals."""
    rng = np.random.default_rng(0)
    prompt, response = (512, 1024) if total >= 24_576 else (128, 256)
    sequences = []
    for _ in range(max(1, round(total / (16 * (prompt + response))))):
        shared = rng.integers(0, 150_000, prompt)
        for _ in range(16):
            sequences.append(np.concatenate([shared, rng.integers(0, 150_000, response)]))
    return sequences


WORKLOADS: dict[str, Callable[[int], list[np.ndarray]]] = {
    "agents, a sample per turn": agents,
    "prompts of 512, 16 x 1,024": groups,
}


# ---- what else there is --------------------------------------------------------------------------


def dict_trie(sequences: list[np.ndarray]) -> dict[int, Any]:
    """The textbook trie: one dict per node, by token."""
    root: dict[int, Any] = {}
    for sequence in sequences:
        node = root
        for token in sequence.tolist():
            below = node.get(token)
            if below is None:
                below = node[token] = {}
            node = below
    return root


def count_nodes(trie: dict[int, Any]) -> int:
    """Tokens in a trie."""
    count, pending = 0, [trie]
    while pending:
        node = pending.pop()
        count += len(node)
        pending.extend(node.values())
    return count


def flex_mask(subtree_end: torch.Tensor) -> Any:
    """FlexAttention's mask of the same forest, as its users make it."""
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(b: Any, h: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (q >= k) & (q < subtree_end[k])

    n = len(subtree_end)
    return create_block_mask(visible, None, None, n, n, device="cpu")


# ---- measurements --------------------------------------------------------------------------------


def times(run: Callable[[], object], repeats: int) -> Row:
    """Median milliseconds by the clock and of this process's CPU."""
    cpu: list[float] = []

    def once() -> None:
        start = time.process_time()
        # given back after the clock was read
        _ = run()
        cpu.append(1e3 * (time.process_time() - start))

    wall = host_ms(once, repeats)
    # the first one warmed up
    return {"ms": wall, "cpu_ms": statistics.median(cpu[1:])}


def check(sequences: list[np.ndarray], forest: PrefixForest, ends: np.ndarray) -> list[str]:
    """Lists what is wrong, before anything is timed."""
    red = []
    packed = pack(forest)
    ids = packed.input_ids
    assert ids is not None
    found = packed.unpack(ids)
    if not all(np.array_equal(a.numpy(), b) for a, b in zip(found, sequences, strict=True)):
        red.append("sequences")
    if forest.num_replicated_tokens <= TRIE_TOKENS and (
        count_nodes(dict_trie(sequences)) != forest.num_tokens
    ):
        red.append("distinct tokens")
    if forest.num_tokens**2 <= FLEX_BYTES:
        flex = flex_mask(torch.from_numpy(ends))
        theirs = int(flex.kv_num_blocks.sum() + flex.full_kv_num_blocks.sum())
        if theirs != TreeMask(ends).stats(TILES["grid 128x128"]).tile_pairs:
            red.append("tiles")
    return red


def measure(name: str, total: int, repeats: int) -> Row:
    """One size of one kind."""
    sequences = WORKLOADS[name](total)
    forest = PrefixForest.from_sequences(sequences)
    ends = np.repeat(forest.node_subtree_end, forest.node_length)
    row: Row = {
        "workload": name,
        "replicated": forest.num_replicated_tokens,
        "distinct": forest.num_tokens,
        "sequences": forest.num_sequences,
        "load_before": os.getloadavg()[0],
        "red": check(sequences, forest, ends),
    }
    if row["red"]:
        return row

    def tables(label: str) -> Callable[[], object]:
        # tables are kept on the mask: a new one each time
        fresh = iter([TreeMask(ends) for _ in range(repeats + 1)])
        return lambda: next(fresh).tables(TILES[label])

    steps: dict[str, Callable[[], object]] = {
        "forest": lambda: PrefixForest.from_sequences(sequences),
        "pack": lambda: pack(forest),
        **{f"tables {label}": tables(label) for label in CHOSEN},
    }
    if forest.num_replicated_tokens <= TRIE_TOKENS:
        steps["dict trie"] = lambda: dict_trie(sequences)
    if forest.num_tokens**2 <= FLEX_BYTES:
        steps["flex mask"] = lambda: flex_mask(torch.from_numpy(ends))
    row["steps"] = {
        step: times(run, min(3, repeats) if step in PEERS else repeats)
        for step, run in steps.items()
    }
    row["load_after"] = os.getloadavg()[0]
    return row


def quiet(below: float, seconds: float) -> float:
    """Waits until the machine's load is low, or no longer; the load then."""
    end = time.monotonic() + seconds
    while os.getloadavg()[0] > below and time.monotonic() < end:
        time.sleep(2)
    return os.getloadavg()[0]


# ---- output --------------------------------------------------------------------------------------


def tables(data: Row) -> Parts:
    """CPU milliseconds; wall time is in the JSON."""

    def of_step(step: str) -> Column:
        def cell(row: Row) -> str:
            got = row.get("steps", {}).get(step)
            return "" if got is None else f"{got['cpu_ms']:,.2f}"

        return Column(step, cell)

    yield "CPU ms, median"
    yield Table(
        [
            Column("rollouts", lambda row: row["workload"]),
            Column("tokens", lambda row: f"{row['replicated']:,}"),
            Column("distinct", lambda row: f"{row['distinct']:,}"),
            *(of_step(step) for step in STEPS),
            Column("", lambda row: f"RED: {', '.join(row['red'])}" if row["red"] else ""),
        ],
        data["rows"],
    )


def plot(rows: list[Row], path: Path) -> None:
    """A panel a kind of rollouts, CPU time over tokens, both in powers of ten."""
    fig, axes = figure(len(WORKLOADS), "planning on one CPU thread")
    for axis, workload in zip(axes, WORKLOADS, strict=True):
        some = [row for row in rows if row["workload"] == workload and not row["red"]]
        for step, colour in zip(STEPS, COLOURS, strict=True):
            got = [
                (r["replicated"], r["steps"][step]["cpu_ms"]) for r in some if step in r["steps"]
            ]
            if got:
                style = "o--" if step in PEERS else "o-"
                axis.plot(*zip(*got, strict=True), style, ms=4, color=colour, label=step)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_ylim(0.2, 10_000)
        name(axis, "tokens of all sequences", "ms", workload, legend=False)
    fig.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=8
    )
    save(fig, path)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every check was green."""
    parser = described(__doc__)
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--wait", type=float, default=0, help="at most so many s for a low load")
    parser.add_argument("--out", type=Path, help="JSON")
    parser.add_argument("--plot", type=Path, help="PNG")
    options = parser.parse_args(arguments)
    rows = []
    waited = quiet(0.5, options.wait)
    for workload in WORKLOADS:
        for size in options.sizes:
            rows.append(measure(workload, size, options.repeats))
            here = environment() | {"load_at_start": waited}
            write(options.out, {"environment": here, "rows": rows})
    show(tables({"rows": rows}))
    if options.plot is not None:
        plot(rows, options.plot)
    red = [row for row in rows if row["red"]]
    print(f"{len(rows) - len(red)} green, {len(red)} red")
    return 1 if red else 0
