"""Tables of policy updates, from the rows of the case `model`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.lib.kinds import KINDS
from benchmarks.lib.runs import Row
from benchmarks.lib.tables import (
    Column,
    Parts,
    Table,
    by_key,
    gib,
    machine,
    machines,
    number,
    times_cell,
    verdict,
)


def tables(*runs: Row) -> Parts:
    """A line per case and number of layers, with every side's seconds and memory."""
    names = {
        "fa2": "FA2 s / GiB",
        "fa4": "flash-attn-4",
        "own": "own backend",
        "packed": "packed",
    }
    if any(row["side"] == "fla" for run in runs for row in run["rows"]):
        names["fla"] = "transformers with fla"

    def time(side: str) -> Column:
        def cell(line: dict[str, Row]) -> str:
            row = line.get(side, {})
            if "seconds" not in row:
                return verdict(row)[:40]
            return " / ".join(
                filter(None, (f"{row['seconds']:.2f}", gib(row["peak_bytes"], ".0f")))
            )

        return Column(names[side], cell)

    def packed(line: dict[str, Row], text: Callable[[Row], str]) -> str:
        row = line.get("packed", {})
        return text(row) if "seconds" in row else ""

    def of_packed(head: str, text: Callable[[Row], str]) -> Column:
        return Column(head, lambda line: packed(line, text))

    def rates(row: Row) -> str:
        return f"{row['tokens_per_s']:,.0f} / {row['distinct_per_s']:,.0f}"

    lines = cases_by_side(*runs)
    recomputed = [
        Column("recomputed", lambda line: next(iter(line.values()))["recompute"]),
        of_packed("GiB predicted", lambda row: gib(row["predicted_bytes"], ".1f")),
    ]
    chosen = any("predicted_bytes" in row for run in runs for row in run["rows"])
    columns = [
        Column("case", lambda line: next(iter(line.values()))["case"]),
        Column("layers", lambda line: str(next(iter(line.values()))["layers"])),
        *(recomputed if chosen else ()),
        *(time(side) for side in names),
        of_packed("over FA2", lambda row: times_cell(row.get("speedup", {}).get("fa2"))),
        of_packed("over flash-attn-4", lambda row: times_cell(row.get("speedup", {}).get("fa4"))),
        of_packed("FLOP ratio", lambda row: times_cell(row.get("flop_ratio"))),
        of_packed("of the bound", lambda row: number(row, "of_bound", ".2f")),
        of_packed("tokens/s, replicated / distinct", rates),
        of_packed("MFU", lambda row: f"{row['mfu']:.1%}"),
    ]
    yield machines(runs, "transformers")
    yield Table(columns, lines)


def hybrids(*runs: Row) -> Parts:
    """A line per case of models whose layers carry a state, through the same kernels."""

    def seconds(side: str) -> Callable[[dict[str, Row]], str]:
        return lambda line: number(line.get(side, {}), "seconds", ".2f")

    def memory(side: str) -> Callable[[dict[str, Row]], str]:
        return lambda line: gib(line[side].get("peak_bytes"), ".0f")

    for run in runs:
        yield f"{run['shape']}: {machine(run['environment'], 'transformers', 'fla-core')}"
        yield Table(
            [
                Column("case", lambda line: line["packed"]["case"]),
                Column("layers", lambda line: str(line["packed"]["layers"])),
                Column("transformers with fla, s", seconds("fla")),
                Column("replicated, s", seconds("own")),
                Column("packed, s", seconds("packed")),
                Column(
                    "over fla",
                    lambda line: times_cell(line["packed"].get("speedup", {}).get("fla")),
                ),
                Column(
                    "speed-up",
                    lambda line: times_cell(line["packed"].get("speedup", {}).get("own")),
                ),
                Column("FLOP ratio", lambda line: times_cell(line["packed"].get("flop_ratio"))),
                Column("of the bound", lambda line: number(line["packed"], "of_bound", ".2f")),
                Column("MFU", lambda line: f"{line['packed']['mfu']:.1%}"),
                Column("GiB: replicated", memory("own")),
                Column("packed", memory("packed")),
            ],
            cases_by_side(run),
        )


def cases_by_side(*runs: Row) -> list[dict[str, Row]]:
    """Rows by side, a dict per case, number of layers and what is recomputed."""
    rows = (row for run in runs for row in run["rows"])
    return list(by_key(rows, case_of, "side").values())


def case_of(row: Row) -> tuple[Any, ...]:
    # runs before there was a choice recomputed every layer
    return row["case"], row["layers"], row.get("recompute", "all")


def layers_by(data: Row) -> Parts:
    """The update with layers made faster by others; a later run of a kind replaces its rows."""
    found: dict[str, dict[str, Row]] = {}
    for run in data["runs"]:
        sides = found.setdefault(run["layers_by"], {})
        sides |= {row["side"]: row for row in run["rows"]}

    def seconds(side: str) -> Callable[[Any], str]:
        return lambda line: f"{line[1][side]['seconds']:.2f}"

    def gain(line: Any) -> str:
        return f"{line[1]['own']['seconds'] / line[1]['packed']['seconds']:.2f}x"

    yield machine(data["runs"][0]["environment"], "transformers", "liger-kernel")
    yield Table(
        [
            Column("layers by", lambda line: line[0]),
            Column("own backend, replicated, s", seconds("own")),
            Column("packed, s", seconds("packed")),
            Column("packed is", gain),
            Column("MFU", lambda line: f"{line[1]['packed']['mfu']:.1%}"),
        ],
        list(found.items()),
    )


def experts(*runs: Row) -> Parts:
    """Updates of a model with experts, and the share of each kind of work in one micro-batch."""
    if not runs:
        yield "Not measured yet."
        return
    yield from tables(*runs)
    timed = [(row["side"], row, run) for run in runs for row in run["rows"] if "kinds_ms" in row]
    if not timed:
        return

    def share(kind: str) -> Column:
        def cell(line: Any) -> str:
            each = line[1]["kinds_ms"]
            return f"{each[kind] / sum(each.values()):.0%}" if kind in each else ""

        return Column(kind, cell)

    yield "Where the time of one micro-batch goes (old log-probabilities, forward and backward):"
    yield Table(
        [
            Column("side", lambda line: line[0]),
            Column("layers", lambda line: f"{line[1]['layers']}, {line[2]['layers_by']}"),
            Column("recomputed", lambda line: line[1]["recompute"].replace("_", " ")),
            Column("ms", lambda line: f"{sum(line[1]['kinds_ms'].values()):.0f}"),
            *map(share, KINDS),
        ],
        timed,
    )


def low_precision(*runs: Row) -> Parts:
    """A line per run, layers and case: seconds and memory of every side, then how far log p (nats)
    and gradients are from float32: without the precision, of the stock forward in it, packed."""
    names = {"fa2": "FA2 s / GiB", "own": "own backend", "packed": "packed"}
    lines = [
        (run, sides) for run in runs for sides in by_key(run["rows"], case_of, "side").values()
    ]

    def time(side: str) -> Column:
        def cell(line: Any) -> str:
            row = line[1].get(side, {})
            if "seconds" not in row:
                return verdict(row)[:60]
            return f"{row['seconds']:.2f} / {gib(row['peak_bytes'])}"

        return Column(names[side], cell)

    def gain(line: Any) -> str:
        found = line[1].get("packed", {}).get("speedup", {})
        return times_cell(found.get("fa2", found.get("own")))

    def far(key: str) -> Callable[[Any], str]:
        def cell(line: Any) -> str:
            found = line[0]["checks"].get("packed", {}).get("distances", {})
            each = [values[key] for name, values in found.items() if name != "side to stock"]
            return " / ".join(f"{value:.1e}" for value in each)

        return cell

    yield machines(runs, "transformers", "torchao", "peft", "bitsandbytes")
    yield Table(
        [
            Column("precision", lambda line: line[0]["precision"]),
            Column("layers by", lambda line: line[0]["layers_by"]),
            Column("case", lambda line: next(iter(line[1].values()))["case"]),
            Column("layers", lambda line: str(next(iter(line[1].values()))["layers"])),
            *(time(side) for side in names),
            Column("packed is", gain),
            Column("log p from float32: bf16 / stock / packed", far("logprobs")),
            Column("gradient", far("gradient")),
        ],
        lines,
    )


def recomputed(*runs: Row) -> Parts:
    """The packed update by what is recomputed, and the peak memory that was predicted for it."""
    yield machines(runs, "transformers")
    yield Table(
        [
            Column("layers by", lambda line: line[0]),
            Column("layers", lambda line: str(line[1]["layers"])),
            Column("recomputed", lambda line: line[1]["recompute"].replace("_", " ")),
            Column("packed, s", lambda line: f"{line[1]['seconds']:.3f}"),
            Column("MFU", lambda line: f"{line[1]['mfu']:.1%}"),
            Column("GiB", lambda line: gib(line[1]["peak_bytes"])),
            Column("predicted", lambda line: gib(line[1]["predicted_bytes"])),
        ],
        [(run["layers_by"], row) for run in runs for row in run["rows"] if "seconds" in row],
    )


def best(*runs: Row) -> Parts:
    """Every side with its defaults and in its best setting: compiled layers, as little recomputed
    as fits. A line per case, number of layers and side; packed over the side in either setting."""
    if not runs:
        yield "Not measured yet."
        return
    names = {
        "fa2": "replicated, FA2",
        "fa4": "replicated, flash-attn-4",
        "own": "replicated, our backend",
        "packed": "packed",
    }
    # default or best, by (case, layers), then by side
    found: dict[tuple[Any, ...], dict[str, dict[bool, Row]]] = {}
    for run in runs:
        is_best = run["layers_by"] != "transformers"
        for row in run["rows"]:
            sides = found.setdefault((row["case"], row["layers"]), {})
            sides.setdefault(row["side"], {})[is_best] = row
    lines = [
        (case, side, settings, sides.get("packed", {}))
        for case, sides in found.items()
        for side, settings in sides.items()
    ]

    def seconds(is_best: bool) -> Callable[[Any], str]:
        def cell(line: Any) -> str:
            row = line[2].get(is_best, {})
            return f"{row['seconds']:.3f}" if "seconds" in row else verdict(row)[:40]

        return cell

    def memory(is_best: bool) -> Callable[[Any], str]:
        def cell(line: Any) -> str:
            row = line[2].get(is_best, {})
            found, predicted = row.get("peak_bytes"), row.get("predicted_bytes")
            return f"{gib(found)} ({gib(predicted)})" if found else gib(predicted)

        return cell

    def gain(is_best: bool) -> Callable[[Any], str]:
        def cell(line: Any) -> str:
            row, packed = line[2].get(is_best, {}), line[3].get(is_best, {})
            if line[1] == "packed" or "seconds" not in row or "seconds" not in packed:
                return ""
            return times_cell(row["seconds"] / packed["seconds"])

        return cell

    def modes(line: Any) -> str:
        counts = line[2].get(True, {}).get("modes", {})
        return ", ".join(f"{n} {mode.replace('_', ' ')}" for mode, n in counts.items() if n)

    yield machines(runs, "transformers")
    yield Table(
        [
            Column("case", lambda line: line[0][0]),
            Column("layers", lambda line: str(line[0][1])),
            Column("side", lambda line: names[line[1]]),
            Column("default, s", seconds(False)),
            Column("GiB (predicted)", memory(False)),
            Column("best, s", seconds(True)),
            Column("GiB (predicted)", memory(True)),
            Column("layers recompute", modes),
            Column("packed is, default", gain(False)),
            Column("packed is, best", gain(True)),
        ],
        lines,
    )
