"""How long does the host take before a model runs: forest, packing, block tables?

    python -m benchmarks packing --rollouts FILE.jsonl.gz --out OUT.json

Every figure is a median after a warm-up, on this machine, with the threads it has.
"""

from __future__ import annotations

import gc
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.lib.environment import environment
from benchmarks.lib.runs import described, write
from benchmarks.lib.shapes import TILES
from benchmarks.lib.tables import Column, Parts, Table, by_key, made, show
from benchmarks.lib.timing import REPEATS, host_ms
from benchmarks.lib.workloads import AIRLINE, NAMES, workload
from prefixtree import PrefixForest, TreeMask, pack

Row = dict[str, Any]


# ---- inputs --------------------------------------------------------------------------------------


def per_turn(dtype: type = np.int64) -> list[np.ndarray]:
    """2,500 sequences of 7.6M tokens: a sample per turn of 200 conversations on one prompt."""
    rng = np.random.default_rng(0)
    system = rng.integers(0, 150_000, 400)
    sequences = []
    for conversation in range(200):
        turns = 12 + conversation % 2
        lengths = rng.integers(150, 628, turns)
        whole = np.concatenate([system, rng.integers(0, 150_000, lengths.sum())]).astype(dtype)
        # copies, as a data loader hands them over, not views of one array
        sequences += [whole[: 400 + end].copy() for end in np.cumsum(lengths)]
    return sequences


def short_groups() -> list[np.ndarray]:
    """100,000 sequences of 76 tokens: 1,000 prompts of 26 tokens, 100 answers each."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 150_000, (1000, 26)).repeat(100, axis=0)
    rows = np.concatenate([prompts, rng.integers(0, 150_000, (100_000, 50))], axis=1)
    return [row.copy() for row in rows[rng.permutation(len(rows))]]


def short_random() -> list[np.ndarray]:
    """100,000 sequences of 76 tokens over 50 ids: prefixes part after three or four tokens."""
    rng = np.random.default_rng(0)
    return [row.copy() for row in rng.integers(0, 50, (100_000, 76))]


# ---- memory --------------------------------------------------------------------------------------


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def peak_memory(dtype: type) -> float:
    """Greatest resident memory while a forest is built, beyond the input's, over the input's.

    tracemalloc does not see what numba allocates. So this is the operating system's count, in a new
    process, whose allocator has no freed memory to hide in.
    """
    PrefixForest.from_sequences([np.array([1, 2], dtype), np.array([1, 3], dtype)])
    sequences = per_turn(dtype)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = _status("VmRSS")
    forest = PrefixForest.from_sequences(sequences)
    peak = _status("VmHWM") - before
    assert forest.num_sequences == len(sequences)
    return peak / sum(array.nbytes for array in sequences)


def in_new_process(function: Callable[..., Any], *args: Any) -> Any:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


# ---- measurements --------------------------------------------------------------------------------


def measure_forests() -> list[Row]:
    """Building a forest from arrays, from lists, and from many short sequences."""
    rows: list[Row] = []

    def add(name: str, sequences: list[Any], **more: Any) -> None:
        forest = PrefixForest.from_sequences(sequences)
        ms = host_ms(lambda: PrefixForest.from_sequences(sequences))
        replicated = forest.num_replicated_tokens
        rows.append(
            {
                "case": name,
                "sequences": forest.num_sequences,
                "replicated": replicated,
                "distinct": forest.num_tokens,
                "ms": ms,
                "ns_a_token": 1e6 * ms / replicated,
                **more,
            }
        )

    linux = Path("/proc/self/clear_refs").exists()
    for dtype in (np.int64, np.int32):
        memory = in_new_process(peak_memory, dtype) if linux else None
        add(f"per turn, {dtype.__name__} arrays", per_turn(dtype), memory_over_input=memory)
    lists = [array.tolist() for array in per_turn()]
    conversion = host_ms(lambda: [np.asarray(one) for one in lists])
    add("per turn, lists", lists, conversion_ms=conversion)
    add("100,000 short, in groups", short_groups())
    add("100,000 short, random", short_random())
    return rows


def measure_packed() -> list[Row]:
    """Times the operations on a packed forest of the per-turn sequences, on the CPU."""
    sequences = per_turn()
    forest = PrefixForest.from_sequences(sequences)
    packed = pack(forest)
    rng = np.random.default_rng(1)
    masks = [rng.random(len(s)) < 0.1 for s in sequences]
    values = torch.randn(packed.num_tokens, requires_grad=True)
    grad = torch.randn(forest.num_replicated_tokens)

    def backward() -> float:
        """The backward alone, plan included: the forward is not timed."""
        times = []
        for _ in range(REPEATS + 1):
            out = torch.cat(packed.unpack(values))
            start = time.perf_counter()
            torch.autograd.grad(out, values, grad)
            times.append(time.perf_counter() - start)
        return 1e3 * statistics.median(times[1:])

    detached = values.detach()
    per_sequence = packed.unpack(detached)
    figures = {
        "pack": host_ms(lambda: pack(forest)),
        "edges": host_ms(packed.edges),
        "edges, loss mask 10 %": host_ms(lambda: packed.edges(masks)),
        "unpack": host_ms(lambda: packed.unpack(detached)),
        "unpack backward": backward(),
        "unpack, loss mask 10 %": host_ms(lambda: packed.unpack(detached, loss_mask=masks)),
        "unpack_padded": host_ms(lambda: packed.unpack_padded(detached)),
        "pack_values": host_ms(lambda: packed.pack_values(per_sequence)),
    }
    return [{"step": name, "ms": ms} for name, ms in figures.items()]


def measure_tables(names: list[str], rollouts: Path | None) -> list[Row]:
    """Building block tables, and how well the tiles fit, per workload and shape."""
    rows = []
    for name in names:
        forest = workload(name, rollouts)
        ends = np.repeat(forest.node_subtree_end, forest.node_length)
        for label, shape in TILES.items():
            # tables are kept on the mask: a new one each time
            masks = [TreeMask(ends) for _ in range(REPEATS + 1)]
            fresh = iter(masks)
            ms = host_ms(lambda fresh=fresh, shape=shape: next(fresh).tables(shape))
            stats = masks[0].stats(shape)
            rows.append(
                {
                    "workload": name,
                    "tokens": forest.num_tokens,
                    "replicated": forest.num_replicated_tokens,
                    "tiles": label,
                    "ms": ms,
                    "useful_share": stats.useful_share,
                    "partial_share": stats.partial_tiles / stats.tile_pairs,
                    "key_tiles": stats.key_tiles,
                }
            )
    return rows


# ---- output --------------------------------------------------------------------------------------


def tables(data: Row) -> Parts:
    """Forest, packing and block tables."""

    def extra(row: Row) -> str:
        memory = row.get("memory_over_input")
        return f"{memory:.2f}x" if memory else ""

    def conversion(row: Row) -> str:
        return f"{row['conversion_ms']:.1f}" if "conversion_ms" in row else ""

    def fit(lines: dict[str, Row], label: str) -> str:
        row = lines[label]
        return f"{row['ms']:.1f} ms, {row['useful_share']:.3f}, {row['partial_share']:.0%}"

    yield made(data["environment"])
    yield Table(
        [
            Column("`from_sequences`", lambda row: row["case"]),
            Column("tokens", lambda row: f"{row['replicated']:,}"),
            Column("distinct", lambda row: f"{row['distinct']:,}"),
            Column("ms", lambda row: f"{row['ms']:.1f}"),
            Column("ns per token", lambda row: f"{row['ns_a_token']:.1f}"),
            Column("extra / input", extra),
            Column("ms of it conversion", conversion, is_detail=True),
        ],
        data["forest"],
    )
    yield Table(
        [
            Column("packed forest of the first row", lambda row: row["step"]),
            Column("ms", lambda row: f"{row['ms']:.1f}"),
        ],
        data["packed"],
    )
    yield (
        "Block tables: build time, useful share (visible pairs over the pairs that the tiles "
        "compute), share of partial tiles:"
    )
    lines = by_key(data["tables"], lambda row: (row["workload"], row["tokens"]), "tiles")
    columns = [Column("workload", lambda line: f"{line[0][0]} ({line[0][1]:,} tokens)")]
    columns += [
        Column(label, lambda line, label=label: fit(line[1], label))
        for label in dict.fromkeys(row["tiles"] for row in data["tables"])
    ]
    yield Table(columns, list(lines.items()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables."""
    parser = described(__doc__)
    parser.add_argument("--rollouts", type=Path, help=f"JSONL.gz file for {AIRLINE!r}")
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    options = parser.parse_args(arguments)
    names = [name for name in NAMES if name != AIRLINE or options.rollouts]
    figures = {
        "environment": environment(),
        "forest": measure_forests(),
        "packed": measure_packed(),
        "tables": measure_tables(names, options.rollouts),
    }
    show(tables(figures))
    write(options.out, figures)
    return 0
