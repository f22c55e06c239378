"""How much does attention over a tree gain over replication as the tree deepens? And its bound.

    python -m benchmarks depth --out depth.json --plot depth.png           # on a GPU
    python -m benchmarks depth --device cpu --scale 0.02 --repeats 1       # every code path

Attention forward and backward, 32 query heads, 8 kv heads, head dim 128, bf16. Two sweeps:

    depth      128 sequences of 4,096 tokens, whatever the depth: one tree of 1 to 8 levels of
               equally long nodes; 1 shares nothing
    branching  2, 4 or 8 children per node (so 7, 4 or 3 levels above 64 leaves) with nodes of 64 to
               2,048 tokens, in as many trees as give about 524,288 replicated tokens

Checks, sides and the FLOP bound are those of `lib/against.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.lib.against import compare, settle, sided
from benchmarks.lib.plots import COLOURS, LABELS, figure, line, name, save, ticks
from benchmarks.lib.runs import Report, Row, parse, parser
from benchmarks.lib.tables import (
    GIB,
    Column,
    Parts,
    Table,
    machine,
    number,
    times_cell,
    verdict,
    verdict_column,
)
from benchmarks.lib.workloads import forest_of, full
from prefixtree import PrefixForest

PATH, TOKENS = 4096, 524_288
# children per node, level by level: always 128 leaves, in an order in which the bound grows
FORKS = {
    1: [],
    2: [128],
    3: [16, 8],
    4: [8, 4, 4],
    5: [4, 2, 8, 2],
    6: [4, 4, 2, 2, 2],
    7: [4, 2, 2, 2, 2, 2],
    8: [2] * 7,
}
BRANCHINGS = {2: 6, 4: 3, 8: 2}
NODES = (64, 128, 256, 512, 1024, 2048)


def depth_forest(depth: int, scale: float) -> PrefixForest:
    """128 leaves below `depth` levels; paths are equally long up to rounding."""
    if depth == 1:
        return forest_of([(max(1, round(PATH * scale)), [])] * 128)
    length = max(1, round(PATH * scale / depth))
    return forest_of(full([length] * depth, FORKS[depth]))


def branching_forest(branching: int, node: int, scale: float) -> PrefixForest:
    """Full trees of 64 leaves."""
    forks = BRANCHINGS[branching]
    levels = forks + 1
    count = max(1, round(TOKENS / (branching**forks * levels * node)))
    length = max(1, round(node * scale))
    count = count if scale >= 0.5 else min(count, 2)
    tree = full([length] * levels, [branching] * forks)
    return forest_of(tree * count)


# ---- output --------------------------------------------------------------------------------------


def memory(row: Row, side: str) -> float:
    """GiB at the peak, inputs counted."""
    times = row["times"][side]
    return ((times["peak_bytes"] or 0) + times.get("held_bytes", row["held_bytes"])) / GIB


def tables(data: Row) -> Parts:
    """Attention over forests of every depth against the replicated batch."""
    sides = data["sides"]
    short = {"fa2": "FA2", "fa4": "flash-attn-4", "own": "own backend"}

    def ms(side: str) -> Column:
        name = short.get(side, side)
        return Column(
            f"{name} ms", lambda row: number(row.get("times", {}).get(side, {}), "ms", ".1f")
        )

    def over(side: str) -> Column:
        name = "own" if side == "own" else short.get(side, side)
        return Column(f"over {name}", lambda row: times_cell(row.get("speedup", {}).get(side)))

    def peak(side: str) -> Column:
        head = f"{short.get(side, side)} GiB"
        return Column(head, lambda row: memory_cell(row, side), is_detail=True)

    columns = [
        Column("forest", lambda row: row["case"]),
        Column("replicated", lambda row: number(row, "replicated", ",d")),
        Column("distinct", lambda row: number(row, "distinct", ",d")),
        *(ms(side) for side in (*sides, "packed")),
        *(over(side) for side in sides),
        Column("FLOPs alone", lambda row: times_cell(row.get("bound"))),
        Column("of the bound", lambda row: number(row.get("efficiency", {}), "own", ".2f")),
        *(peak(side) for side in (sides[0], "packed")),
        verdict_column(),
    ]
    yield f"{machine(data['environment'])}; forward + backward"
    yield Table(columns, data["rows"])


def memory_cell(row: Row, side: str) -> str:
    """GiB at the peak, or an empty cell."""
    return f"{memory(row, side):.1f}" if side in row.get("times", {}) else ""


def plot(report: Report, sides: Sequence[str]) -> None:
    """Speed-up and memory against depth, speed-up and efficiency against node length."""
    rows = [row for row in report.rows if sides[0] in row.get("times", {})]
    fig, axes = figure(2, f"attention forward + backward over a forest, {report.where}", rows=2)
    deep = [row for row in rows if row["sweep"] == "depth"]
    x = [row["depth"] for row in deep]
    line(axes[0], "bound", x, [row["bound"] for row in deep])
    for side in sides:
        label = f"over {LABELS[side]}"
        line(axes[0], side, x, [row["speedup"].get(side) for row in deep], label=label)
    name(axes[0], "levels of the tree", "speed-up", "same replicated batch, deeper trees")
    line(axes[1], "packed", x, [memory(row, "packed") for row in deep])
    line(axes[1], sides[0], x, [memory(row, sides[0]) for row in deep])
    name(axes[1], "levels of the tree", "peak memory, GiB", "inputs, results and gradients")
    shades = {2: "#a1dab4", 4: "#41b6c4", 8: "#225ea8"}
    for axis, key in ((axes[2], "speedup"), (axes[3], "efficiency")):
        for branching, colour in shades.items():
            some = [row for row in rows if row.get("branching") == branching]
            y = [row[key][sides[0]] for row in some]
            x = [row["node"] for row in some]
            line(axis, f"{branching} children", x, y, color=colour)
            if key == "speedup":
                bound = [row["bound"] for row in some]
                axis.plot(x, bound, linestyle="--", color=colour, linewidth=1)
        axis.set_xscale("log", base=2)
        ticks(axis, NODES)
    axes[3].axhline(1, color=COLOURS["bound"], linewidth=1, linestyle="--")
    title = f"speed-up over {LABELS[sides[0]]}; dashed: FLOP bound"
    name(axes[2], "tokens per node", "speed-up", title)
    title = f"efficiency over {LABELS[sides[0]]}"
    name(axes[3], "tokens per node", "speed-up / FLOP bound", title, legend=False)
    for axis in axes:
        axis.set_ylim(bottom=0)
    save(fig, report.options.plot)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every case was green."""
    what = parser(__doc__)
    sided(what, ("fa2", "fa4", "own"))
    what.add_argument("--depths", nargs="*", type=int, default=list(FORKS), choices=list(FORKS))
    what.add_argument("--nodes", nargs="*", type=int, default=list(NODES))
    options = parse(what, arguments)
    if options.read is not None:
        return finish(Report.read(options))
    settle(options)
    report, known = Report(options, sides=options.sides), {}
    cases = [
        ({"case": f"depth {d}", "sweep": "depth", "depth": d}, depth_forest(d, options.scale))
        for d in options.depths
    ]
    for branching, forks in BRANCHINGS.items():
        for node in options.nodes:
            case = {"case": f"{branching} children x {node}", "sweep": "branching"}
            case |= {"branching": branching, "node": node, "depth": forks + 1}
            cases.append((case, branching_forest(branching, node, options.scale)))
    for case, forest in cases:
        row = report.attempt(case, lambda forest=forest: compare(forest, options, known))
        side = options.sides[0]
        if side in row.get("times", {}):
            reached = f"{row['speedup'][side]:.2f}x over {side}, bound {row['bound']:.2f}x"
            print(f"{row['case']}: {reached}", flush=True)
        else:
            print(f"{row['case']}: {verdict(row)}", flush=True)
    return finish(report)


def finish(report: Report) -> int:
    """Draws, prints; the exit code."""
    sides = report.facts["sides"]
    if report.options.plot is not None and any(
        sides[0] in row.get("times", {}) for row in report.rows
    ):
        plot(report, sides)
    # geometric mean, for one number to watch
    found = [row.get("efficiency", {}).get(sides[0]) for row in report.rows]
    done = [value for value in found if value is not None]
    if done:
        report.facts["mean_efficiency"] = math.exp(sum(map(math.log, done)) / len(done))
    return report.finish(tables)
