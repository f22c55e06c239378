"""Which configuration of each Triton kernel is fastest, and is it the one in configs.py?

    python -m benchmarks tune --rollouts ROLLOUTS.jsonl.gz --out tune.json       # on a GPU

On workloads of long, middling and short nodes, every candidate's result is held against the frozen
configuration's before it is timed (red: no time); a candidate that does not compile or fit says so.
Medians by CUDA events. The last table has, for each kernel and workload, the frozen configuration
and the five fastest.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.environment import environment
from benchmarks.lib.runs import described, write
from benchmarks.lib.tables import Column, Parts, Table, machine, show
from benchmarks.lib.timing import median_ms
from benchmarks.lib.workloads import AIRLINE, scaled, workload
from prefixtree import pack
from prefixtree.kernels.attention.protocol import AttentionCall
from prefixtree.kernels.attention.triton import configs, launch
from prefixtree.kernels.attention.triton.configs import Config, KernelConfigs

WORKLOADS = ("4K then 4-2-2-1 x 1K", "caterpillar 24", "prompt 256 x 1024 x 256", AIRLINE)
KERNELS = ("forward", "keys", "queries")


@dataclass(frozen=True)
class Candidate:
    """A configuration of one kernel, the way rows are made of heads, and how long pieces may be.

    Attributes:
        config: of the kernel that is timed.
        heads: query heads of a tile; None for the table's.
        tma: descriptors or pointers; None for the table's.
        pieces: factor on `configs.piece_tiles`.
        piece: columns of the pieces of q and k; None for the table's.
    """

    config: Config
    heads: int | None = None
    tma: bool | None = None
    pieces: float = 1.0
    piece: int | None = None

    def __str__(self) -> str:
        c = self.config
        words = [f"{c.rows}x{c.keys} w{c.warps} s{c.stages}"]
        words += [f"r{c.registers}"] if c.registers else []
        words += [] if c.cut else ["grid"]
        words += [f"shared {c.shared}"] if c.shared else []
        words += [] if self.heads is None else [f"heads {self.heads}"]
        words += [] if self.tma is None else ["descriptors" if self.tma else "pointers"]
        words += [] if self.pieces == 1 else [f"pieces x{self.pieces:g}"]
        words += (
            [] if self.piece is None else [f"pieces of {self.piece}" if self.piece else "whole"]
        )
        return " ".join(words)


def candidates(kernel: str, frozen: Config, choice: KernelConfigs) -> list[Candidate]:
    """The frozen configuration first."""
    found = [Candidate(frozen), Candidate(replace(frozen, cut=not frozen.cut))]
    shapes = itertools.product((32, 64, 128, 256), (32, 64, 128), (4, 8), (1, 2, 3))
    for rows, keys, warps, stages in shapes:
        # a warpgroup has 64 rows or keys of accumulators at most without spilling, or 32 at least
        height = keys if kernel == "keys" else rows
        if height * 4 == warps * 64 or height * 8 == warps * 64 or height * 2 == warps * 64:
            found.append(Candidate(Config(rows, keys, warps, stages, cut=frozen.cut)))
    for registers in {0, 128, 168, 200} - {frozen.registers}:
        found.append(Candidate(replace(frozen, registers=registers)))
    group = choice.heads
    found += [Candidate(frozen, heads=h) for h in (1, 2) if h < group]
    found.append(Candidate(frozen, tma=not choice.tma))
    if kernel == "keys":
        found += [Candidate(frozen, pieces=f) for f in (0.25, 0.5, 2.0, 4.0)]
    return list(dict.fromkeys(found))


def explicit(text: str) -> Candidate:
    """A candidate written as for `--shapes`."""
    numbers = [float(word) for word in text.split(",")]
    numbers += [0, 0, 1, 0, -1][len(numbers) - 4 :]
    config = Config(*(int(number) for number in numbers[:5]), shared=int(numbers[7]))
    piece = None if numbers[8] < 0 else int(numbers[8])
    return Candidate(config, int(numbers[5]) or None, pieces=numbers[6], piece=piece)


@contextmanager
def using(kernel: str, candidate: Candidate, base: KernelConfigs) -> Iterator[None]:
    """Lets launches take the candidate for one kernel."""
    choose, pieces = configs.choose, configs.piece_tiles
    tma = base.tma if candidate.tma is None else candidate.tma
    pair = {kernel: (candidate.config, candidate.config)}
    piece = base.piece if candidate.piece is None else candidate.piece
    choice = replace(base, tma=tma, heads=candidate.heads or base.heads, piece=piece, **pair)

    def cut(*arguments: Any) -> int:
        return max(1, int(pieces(*arguments) * candidate.pieces))

    configs.choose, configs.piece_tiles = lambda *a: choice, cut  # type: ignore[assignment]
    try:
        yield
    finally:
        configs.choose, configs.piece_tiles = choose, pieces


class Bench:
    """One workload's tensors, and each kernel as a call."""

    def __init__(
        self, mask: Any, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype
    ) -> None:
        device, tokens = mask.device, mask.num_tokens
        generator = torch.Generator(device).manual_seed(0)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(tokens, *shape, device=device, dtype=dtype, generator=generator)

        (h, hk), (d, dv) = heads, dims
        q, k, v, self.dout = draw(h, d), draw(hk, d), draw(hk, dv), draw(h, dv)
        self.attention = AttentionCall(q, k, v, None, mask.host, d**-0.5)
        self.out, self.lse = launch.forward(self.attention)

    def call(self, kernel: str) -> tuple[Callable[[], None], list[torch.Tensor]]:
        """A launch of the kernel with what `configs` says now, and the tensors that it writes."""
        if kernel == "forward":
            results: list[torch.Tensor] = []

            def forward() -> None:
                results[:] = launch.forward(self.attention)

            return forward, results
        problem = launch.Problem.of(self.attention)
        _, keys, queries = problem.configs
        rows, rows_a_block, _ = launch._prepare(
            problem, self.dout, None, None, self.out, self.lse, keys, queries
        )
        given = (self.dout, rows, rows_a_block)
        if kernel == "queries":
            dq = torch.empty_like(problem.q)
            return lambda: launch._queries_gradient(problem, queries, *given, dq), [dq]
        dk, dv = torch.empty_like(problem.k), torch.empty_like(problem.v)
        return lambda: launch._keys_gradient(problem, keys, *given, dk, dv), [dk, dv]


def measure(
    bench: Bench,
    kernel: str,
    candidate: Candidate,
    base: KernelConfigs,
    want: list[torch.Tensor] | None,
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """A row of the result, and what was computed."""
    row: dict[str, Any] = {"kernel": kernel, "candidate": str(candidate)}
    try:
        with using(kernel, candidate, base):
            run, results = bench.call(kernel)
            run()
            for x, y in zip(results, want or results, strict=True):
                torch.testing.assert_close(x, y, atol=2e-2, rtol=2e-2)
            # the device memory of this table is freed with the mask, not here: it is small
            median, _ = median_ms(run, bench.dout.device, repeats=7, warm_ups=2)
    except Exception as problem:  # what does not compile or fit is a finding
        return row | {"failed": f"{type(problem).__name__}: {str(problem)[:200]}"}, []
    return row | {"ms": median}, results


def tables(*runs: dict[str, Any]) -> Parts:
    """For each kernel and workload the frozen configuration, then the five fastest."""

    def frozen(line: list[dict[str, Any]]) -> str:
        first = line[0]
        return f"{first['ms']:.3f}" if "ms" in first else first["failed"]

    def fastest(line: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return sorted((row for row in line if "ms" in row), key=lambda row: row["ms"])[:5]

    columns = [
        Column("workload", lambda line: line[0]["workload"]),
        Column("kernel", lambda line: line[0]["kernel"]),
        Column("frozen", lambda line: line[0]["candidate"]),
        Column("ms", frozen),
        Column("fastest", lambda line: "; ".join(row["candidate"] for row in fastest(line))),
        Column("ms of each", lambda line: "; ".join(f"{r['ms']:.3f}" for r in fastest(line))),
    ]
    for run in runs:
        lines: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for row in run["rows"]:
            lines.setdefault((row["workload"], row["kernel"]), []).append(row)
        environment = run["environment"]
        yield f"{machine(environment)}; `{run.get('command') or environment['command']}`"
        yield Table(columns, list(lines.values()))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = described(__doc__)
    add = parser.add_argument
    add("--workloads", nargs="+", default=WORKLOADS)
    add("--kernels", nargs="+", default=KERNELS, choices=KERNELS)
    add("--rollouts", type=Path, help="of the airline workload; skipped without")
    add("--heads", type=int, nargs=2, default=(32, 8))
    add("--dim", type=int, default=128)
    add("--value-dim", type=int, help="default: --dim")
    add("--pointers", action="store_true", help="as if descriptors did not serve")
    add("--scale", type=float, default=1.0, help="factor on node lengths")
    add("--device", default="cuda")
    add(
        "--shapes",
        nargs="+",
        help="these instead of the built-in candidates, each as rows,keys,warps,stages[,registers"
        "[,heads[,pieces[,shared[,piece]]]]]; 0 for the table's heads, and for q and k whole",
    )
    add("--most", type=int, default=1000, help="candidates per kernel")
    add("--out", type=Path)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Times every candidate, prints the fastest."""
    chosen = parse(arguments)
    if chosen.pointers:
        with_descriptors = configs.choose
        configs.choose = lambda *a: with_descriptors(*a[:4], False, *a[5:])  # type: ignore[assignment]
    rows: list[dict[str, Any]] = []
    for name in chosen.workloads:
        if name == AIRLINE and chosen.rollouts is None:
            print(f"{name}: skipped, no --rollouts")
            continue
        forest = workload(name, chosen.rollouts) if name == AIRLINE else workload(name)
        if chosen.scale != 1.0:
            forest = scaled(forest, chosen.scale, "heaviest")
        mask = pack(forest).mask.to(chosen.device)
        dtype = torch.bfloat16 if mask.device.type == "cuda" else torch.float16
        dims = (chosen.dim, chosen.value_dim or chosen.dim)
        bench = Bench(mask, tuple(chosen.heads), dims, dtype)
        problem = launch.Problem.of(bench.attention)
        for kernel in chosen.kernels:
            frozen = problem.configs[KERNELS.index(kernel)]
            want = None
            tried = candidates(kernel, frozen, problem.choice)
            if chosen.shapes:
                tried = [tried[0], *(explicit(shape) for shape in chosen.shapes)]
            for candidate in tried[: chosen.most]:
                row, results = measure(bench, kernel, candidate, problem.choice, want)
                if want is None and results:
                    want = [x.clone() for x in results]
                rows.append({"workload": name, **row})
                write(chosen.out, {"environment": environment(), "rows": rows})
    show(tables({"environment": environment(), "rows": rows}))
    return 0
