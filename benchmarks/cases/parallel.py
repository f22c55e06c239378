"""How does a forest run on several GPUs, and a tree larger than one forward?

    torchrun --standalone --nproc-per-node 2 -m benchmarks parallel --rollouts FILE
    python -m benchmarks parallel --sides whole cut steps steps-kept trunks --max-tokens 32768
    torchrun --standalone --nproc-per-node 2 -m benchmarks parallel --device cpu --scale 0.01
    python -m benchmarks parallel --read 8.json --beside 2.json 4.json --plot efficiency.png

Forward and backward of a model of a few layers with random weights, every layer recomputed in the
backward, over one forest: the loss is a weighted sum of its log-probabilities. The vocabulary is
small, so that layers take the time.

Sides: whole, the forest in one forward on one GPU; parts and heads, the ranks of a group compute it
together (`sequence_logprobs(group=, group_mode=)`); gather, the same with an all-gather of all keys
and values in every layer, as torch's context parallelism has it, over two chunks per rank (zigzag);
cut, micro-batches of at most --max-tokens tokens on one GPU, which repeat the path above a cut;
steps, `sequence_logprobs(max_step_tokens=)` on one GPU, and parts-steps, on the ranks of a group;
steps-kept, the same where layers recompute nothing, as steps run their forward twice anyway;
trunks, the micro-batches of a plan with `trunks=True` on one GPU (`kept_trunks`), and trunks-auto,
the same with `recompute="auto"`. With --fsdp the weights are sharded by FSDP2 where ranks work
together, and their gradients reduced. The time is that of the slowest rank. Efficiency: seconds of
whole over ranks x seconds.

Ranks that work together are timed once more with exchanges that move nothing: `alone_seconds` is
the slowest rank's then, `imbalance` that over the mean of the ranks, and `exposed_seconds` what the
exchange takes, waiting included.

Before a side is timed, it computes a small forest in float32, log-probabilities and all gradients,
against whole; and its log-probabilities of the timed forest are held against those of whole. Red
has no time.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.lib import plots
from benchmarks.lib.groups import gathering, wire
from benchmarks.lib.layers import HYBRIDS, checkpointed, config, faster_layers, model_of
from benchmarks.lib.policy import Ranks, sharded
from benchmarks.lib.runs import Report, Row, parse, parser
from benchmarks.lib.tables import Column, Parts, Table, gib, machines, verdict
from benchmarks.lib.timing import median_ms, note_profile
from benchmarks.lib.workloads import (
    AIRLINE,
    Tree,
    caterpillar,
    code_agents,
    forest_of,
    scaled,
    single,
    workload,
)
from prefixtree import (
    PackedForest,
    PrefixForest,
    SequenceScores,
    kept_trunks,
    pack,
    plan_micro_batches,
    sequence_logprobs,
)
from prefixtree.planning.costs import cost_model_of, import_cost_of
from prefixtree.planning.model_cost import model_cost
from prefixtree.planning.split import split_stats, split_tokens
from prefixtree.planning.steps import plan_any_steps
from prefixtree.scoring.in_steps import memory_of, step_cost_of
from prefixtree.testing.compare import Meter

WORKLOADS: dict[str, Callable[[], PrefixForest]] = {
    "prompt 32K x 48 x 2K": lambda: forest_of(single(32_768, 48, 2048)),
    "chain 128K": lambda: forest_of([(131_072, [])]),
    "chain 1M": lambda: forest_of([(1_048_576, [])]),
    "prompt 24K x 128 x 8K": lambda: forest_of(single(24_576, 128, 8192)),
    "agents 16 x 40 turns": lambda: forest_of(caterpillar(40, 600, 600, 1300, 16)),
    "code agents": code_agents,
    "chain 128K, 100 branches": lambda: forest_of(comb(131_072, 100, 512)),
}
TRUNKS = ("trunks", "trunks-auto")
GROUPED = ("parts", "parts-steps", "heads", "gather")
ALONE = ("whole", "cut", "steps", "steps-kept", *TRUNKS)
STEPPED = ("steps", "steps-kept")
SHAPES = ("qwen3-8b", "qwen3-32b", "qwen3.5-9b")
VOCABULARY = 512
# of log-probabilities and of gradients in float32, relative; of log-probabilities in bf16, nats
FLOAT32, DRIFT = 1e-3, 0.05


def comb(trunk: int, branches: int, branch: int) -> list[Tree]:
    """A long trunk that a branch leaves at every hundredth of it."""
    step, below = trunk // branches, [(branch, [])]
    for _ in range(branches - 1):
        below = [(step, below), (branch, [])]
    return [(trunk - (branches - 1) * step, below)]


def with_tokens(forest: PrefixForest) -> PrefixForest:
    """The same tree, with seeded random token ids."""
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, forest.num_tokens)
    return PrefixForest.from_parents(
        forest.node_parent,
        forest.node_length,
        tokens,
        sequence_ends=forest.sequence_node,
        order="input",
    )


def forest_named(case: str, options: argparse.Namespace) -> PrefixForest:
    """A workload, scaled."""
    if case == AIRLINE:
        found = workload(case, options.rollouts, tasks=options.tasks)
    else:
        found = WORKLOADS[case]()
    return with_tokens(scaled(found, options.scale, "input"))


def fewest(shape: str) -> int:
    """Layers that show all kinds: the fourth layer of a hybrid attends."""
    return 4 if shape in HYBRIDS else 2


class Work:
    """One side's forward and backward over a forest.

    Args:
        side: of ALONE or GROUPED.
        model: the model, sharded or not.
        forest: with token ids.
        max_tokens: of a micro-batch or step.
        options: the benchmark's; those that say where and how attention runs.
    """

    def __init__(
        self,
        side: str,
        model: Any,
        forest: PrefixForest,
        max_tokens: int,
        options: argparse.Namespace,
    ) -> None:
        def moved(packed: PackedForest) -> PackedForest:
            return packed.with_options(options.backend).to(options.device)

        self.model, self.options = model, {}
        self.batches: list[tuple[PackedForest, list[int]]] = []
        if side == "cut":
            plan = plan_micro_batches(forest, max_tokens=max_tokens)
            self.batches = [
                (moved(batch.packed), batch.sequence_indices.tolist()) for batch in plan[0]
            ]
        elif side not in TRUNKS:
            self.batches = [(moved(pack(forest)), list(range(forest.num_sequences)))]
        self.trunks: Any = None
        self.divided: Callable[[], AbstractContextManager[None]] = nullcontext
        if side in GROUPED:
            mode = "ulysses" if side == "heads" else "parts"
            self.options = {"group": dist.group.WORLD, "group_mode": mode}
        if side == "parts-steps":
            self.options["max_step_tokens"] = max_tokens
        if side == "gather":
            self.divided = gathering
        self.recompute: Any = "auto" if side == "trunks-auto" else "all"
        if side in TRUNKS:
            cost = step_cost_of(model, model, torch.device("cpu"), "all")
            self.trunks = plan_micro_batches(forest, max_tokens, trunks=True, import_cost=cost)
        if side in STEPPED:
            recompute = "nothing" if side == "steps-kept" else "all"
            self.options = {"max_step_tokens": max_tokens, "recompute": recompute}

    def __call__(self) -> list[torch.Tensor]:
        """Log-probabilities by sequence; gradients are in the parameters."""
        found: dict[int, torch.Tensor] = {}
        for indices, scores in self.scored():
            # another weight per sequence, whichever batch it is in; one sum, since hundreds of
            # small kernels would be on every rank
            lengths = [len(x) for x in scores.logprobs]
            weights = torch.from_numpy(np.repeat(np.cos(indices), lengths)).float()
            flat = torch.cat(scores.logprobs)
            (flat * weights.to(flat.device)).sum().backward()
            found |= dict(zip(indices, (x.detach() for x in scores.logprobs), strict=True))
        return [found[i] for i in sorted(found)]

    def scored(self) -> Iterator[tuple[list[int], SequenceScores]]:
        """The sequences of each micro-batch, with their scores."""
        if self.trunks is not None:
            with kept_trunks(self.model, self.trunks[0], recompute=self.recompute) as scored:
                for batch, scores in scored:
                    yield batch.sequence_indices.tolist(), scores
        for packed, indices in self.batches:
            with self.divided():
                scores = sequence_logprobs(self.model, packed, **self.options)
            yield indices, scores

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed."""
        if self.trunks is not None:
            return int(self.trunks.stats.packed_tokens)
        return sum(packed.num_tokens for packed, _ in self.batches)


# ---- the check -----------------------------------------------------------------------------------


def gradients_of(model: Any, ranks: Ranks, averaged: bool) -> dict[str, torch.Tensor]:
    """Gradients by name, averaged over the ranks; the model's are gone."""
    out = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        out[name], parameter.grad = parameter.grad, None
        if averaged:
            dist.all_reduce(out[name])
            out[name] /= ranks.count
    return out


def check(side: str, options: argparse.Namespace, ranks: Ranks) -> Row:
    """Errors of a side in float32 over a small forest, against whole; `red` if one is too large."""
    layers = min(options.layers, fewest(options.shape))
    shape = config(layers, options.is_tiny, vocabulary=VOCABULARY, shape=options.shape)
    model = checkpointed(model_of(shape, options.device, "float32"))
    forest = with_tokens(forest_of(single(700, 5, 90)))
    whole = Work("whole", model, forest, 0, options)
    want = whole()
    exact = gradients_of(model, ranks, False)
    # several steps; a micro-batch holds the longest sequence
    mine = Work(side, model, forest, 800 if side in ("cut", *TRUNKS) else 400, options)
    got = mine()
    found = gradients_of(model, ranks, side in GROUPED)
    gap = max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(got, want, strict=True))
    gradient = max(float((found[n] - x).norm() / x.norm()) for n, x in exact.items())
    errors = {"logprobs": gap, "gradient": gradient}
    worst = ranks.most(*errors.values())
    red = [n for n, x in zip(errors, worst, strict=True) if not x <= FLOAT32]
    return {"errors": dict(zip(errors, worst, strict=True)), "red": red}


# ---- what is timed -------------------------------------------------------------------------------


def run_side(
    side: str,
    case: str,
    model: Any,
    known: dict[str, Any],
    options: argparse.Namespace,
    ranks: Ranks,
) -> Row:
    """Times one side over one workload; `known` keeps what whole found."""
    row = check(side, options, ranks) if side != "whole" else {"red": []}
    if row["red"]:
        return row
    forest = forest_named(case, options)
    work = Work(side, model, forest, options.max_tokens, options)
    device = torch.device(options.device)
    # what numba compiled in the check keeps its frames, and so its model, until a collection
    gc.collect()
    held = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    with Meter(device) as meter, wire() as arrived:
        logprobs = torch.cat(work())
        if device.type == "cuda":
            torch.cuda.synchronize()
    whole = known.setdefault(case, {"logprobs": logprobs}) if side == "whole" else known.get(case)
    if whole is not None:
        row["drift"] = ranks.most(float((logprobs - whole["logprobs"]).abs().mean()))[0]
        if not row["drift"] <= DRIFT:
            return row | {"red": [f"log-probabilities differ by {row['drift']:.3f} from whole's"]}
    every = []
    for _ in range(options.repeats):
        # all begin together, and the last one counts
        ranks.most(0.0)
        every += ranks.most(median_ms(work, device, 1, 0)[1][0] / 1e3)
    seconds = float(np.median(every))
    if options.profile is not None:
        # all ranks run it, and the first one writes
        path = options.profile if ranks.rank == 0 else Path(os.devnull)
        note_profile(work, path, f"{case}, {side}")
    if side == "whole":
        known[case]["seconds"] = seconds
    peak = None if meter.peak_bytes is None else ranks.most(meter.peak_bytes + held)[0]
    row |= {
        "tokens": forest.num_tokens,
        "computed": work.num_tokens,
        "seconds": seconds,
        "all_seconds": every,
        "peak_bytes": peak,
    }
    if whole is not None and "seconds" in whole:
        row["of_whole"] = whole["seconds"] / seconds
        if side in GROUPED:
            row["efficiency"] = row["of_whole"] / ranks.count
    if side in GROUPED:
        row |= exposed(work, seconds, options, ranks)
        row["received_bytes"] = ranks.most(sum(arrived))[0]
    if side in STEPPED:
        row["predicted_peak_bytes"] = predicted_peak(model, work)
    if side in TRUNKS:
        row["trunks"] = str(work.trunks.stats.trunks)
    if side == "parts":
        # divided as `sequence_logprobs` does it, and predicted with the layers recomputed
        cost, packed = model_cost(model.config), work.batches[0][0]
        import_cost = import_cost_of(cost)
        split = split_tokens(
            packed, ranks.count, cost_model_of(cost), packed.edges(), import_cost=import_cost
        )
        recomputed = cost_model_of(cost, gradient_checkpointing=True)
        stats = split_stats(split, recomputed, import_cost=import_cost)
        row |= {
            "work_balance": stats.work_balance,
            "received_share": stats.received_share,
            "most_received_rows": max(stats.received_rows),
            "predicted_efficiency": stats.efficiency,
        }
    return row


def predicted_peak(model: Any, work: Work) -> int:
    """Bytes of the largest step's activations, and of what it borrows and lends, beside weights and
    their gradients."""
    (packed, _), limit, recompute = work.batches[0], *work.options.values()
    device = torch.device("cpu")
    cost = step_cost_of(model, model, device, recompute)
    stats = plan_any_steps(packed, limit, import_cost=cost).stats
    modes = (recompute,) * model.config.num_hidden_layers
    own = memory_of(model, model, device).peak(max(stats.own_tokens), modes)
    return own + stats.held_bytes(cost)


def exposed(work: Work, seconds: float, options: argparse.Namespace, ranks: Ranks) -> Row:
    """The time of exchanges, from the ranks' seconds without them."""
    times = []
    with wire(cut=True):
        for _ in range(options.repeats):
            ranks.most(0.0)
            times.append(median_ms(work, torch.device(options.device), 1, 0)[1][0] / 1e3)
    # what should have arrived was anything
    work.model.zero_grad(set_to_none=True)
    mine = float(np.median(times))
    longest, total = ranks.most(mine)[0], ranks.total(mine)[0]
    return {
        "alone_seconds": longest,
        "imbalance": longest * ranks.count / total,
        "exposed_seconds": seconds - longest,
    }


def run(options: argparse.Namespace, ranks: Ranks) -> int:
    """The exit code."""
    shape = config(options.layers, options.is_tiny, vocabulary=VOCABULARY, shape=options.shape)
    model = checkpointed(model_of(shape, options.device, options.dtype))
    faster_layers(model, options.layers_by)
    if ranks.rank > 0:
        options.out = None
    report = Report(
        options,
        shape=options.shape,
        layers=shape.num_hidden_layers,
        layers_by=options.layers_by,
        ranks=ranks.count,
        fsdp=options.fsdp,
        max_tokens=options.max_tokens,
        tasks=options.tasks,
    )
    known: dict[str, Any] = {}
    # weights are sharded once, behind the sides of one GPU
    for sides in (ALONE, GROUPED):
        chosen = [side for side in options.sides if side in sides]
        if chosen and sides is GROUPED and options.fsdp:
            model = sharded(model, options, ranks)
        for case in options.workloads:
            for side in chosen:
                model.zero_grad(set_to_none=True)
                one = partial(run_side, side, case, model, known, options, ranks)
                row = report.attempt({"workload": case, "side": side, "ranks": ranks.count}, one)
                got = verdict(row) or f"{row['seconds']:.3f} s"
                if ranks.rank == 0 or "failed" in row:
                    print(f"{case}, {side}, rank {ranks.rank}: {got}", flush=True)
                if side in GROUPED and ("failed" in row or "out_of_memory" in row):
                    # the others wait in a collective: torchrun ends them
                    os._exit(1)
                gc.collect()
    return report.finish(tables) if ranks.rank == 0 else 0


def percent(row: Row, key: str) -> str:
    """Of the row's seconds."""
    return f"{row[key] / row['seconds']:.1%}" if key in row else ""


def tables(*runs: Row) -> Parts:
    """A line per workload and side, beside the whole forest on one GPU."""

    def of_row(head: str, text: Callable[[Row], str]) -> Column:
        return Column(head, lambda line: text(line[1]) if "seconds" in line[1] else "")

    def share(name: str) -> Callable[[Row], str]:
        return lambda row: f"{row[name]:.3f}" if name in row else ""

    def gigabytes(row: Row) -> str:
        return f"{row['received_bytes'] / 1e9:.2f}" if "received_bytes" in row else ""

    def repeated(row: Row) -> str:
        return f"{row['computed']:,}" if row["computed"] != row["tokens"] else ""

    def model(line: tuple[Row, Row, Row | None]) -> str:
        data = line[0]
        layers_by = "" if data["layers_by"] == "transformers" else f" by {data['layers_by']}"
        return f"{data['shape']}, {data['layers']}{layers_by}{', FSDP2' * data['fsdp']}"

    def seconds(row: Row) -> str:
        return verdict(row)[:60] or f"{row['seconds']:.3f}"

    def peak(row: Row) -> str:
        return gib(row.get("peak_bytes") or None)

    def of_whole(head: str, text: Callable[[Row], str]) -> Column:
        return Column(head, lambda line: text(whole) if (whole := line[2]) else "")

    def beside(data: Row) -> list[tuple[Row, Row, Row | None]]:
        wholes = {row["workload"]: row for row in data["rows"] if row["side"] == "whole"}
        sides = [row for row in data["rows"] if row["side"] != "whole"]
        alone = [row for name, row in wholes.items() if name not in {r["workload"] for r in sides}]
        return [(data, row, wholes.get(row["workload"])) for row in sides] + [
            (data, row, None) for row in alone
        ]

    if not runs:
        yield "Not measured yet."
        return
    yield machines(runs, "triton", "flash-attn-4")
    yield Table(
        [
            Column("shape, layers", model),
            Column("GPUs", lambda line: str(line[0]["ranks"])),
            Column("workload", lambda line: line[1]["workload"]),
            Column("side", lambda line: line[1]["side"]),
            of_row("tokens", lambda row: f"{row['tokens']:,}"),
            of_row("computed", repeated),
            of_whole("whole s", seconds),
            Column("s", lambda line: seconds(line[1])),
            of_row("over whole", share("of_whole")),
            of_row("efficiency", share("efficiency")),
            of_row("predicted", share("predicted_efficiency")),
            of_row("exposed", lambda row: percent(row, "exposed_seconds")),
            Column("slowest rank", lambda line: share("imbalance")(line[1]), is_detail=True),
            of_row("GB received", gigabytes),
            of_whole("whole GiB", peak),
            of_row("GiB", peak),
            of_row("GiB predicted", lambda row: gib(row.get("predicted_peak_bytes"))),
        ],
        [line for data in runs for line in beside(data)],
    )
    yield from per_layer(runs)


def per_layer(runs: Sequence[Row]) -> Parts:
    """The time of a layer, where runs differ in their layers alone: the difference of their times,
    which holds nothing of what a call does once."""
    found: dict[tuple[Any, ...], dict[int, Row]] = {}
    for data in runs:
        for row in data["rows"]:
            if "seconds" in row:
                # another commit may differ in what a call does once
                of_run = data["shape"], data["ranks"], data["fsdp"], data["environment"]["commit"]
                key = *of_run, row["workload"], row["side"]
                found.setdefault(key, {})[data["layers"]] = row
    ms = {
        key: 1e3 * (by[max(by)]["seconds"] - by[min(by)]["seconds"]) / (max(by) - min(by))
        for key, by in found.items()
        if len(by) > 1
    }

    def efficiency(key: tuple[Any, ...]) -> str:
        whole = ms.get((*key[:-1], "whole"))
        return f"{whole / (key[1] * ms[key]):.3f}" if whole and key[-1] in GROUPED else ""

    if ms:
        yield "A layer, by the difference between runs of few layers and of many:"
        yield Table(
            [
                Column("GPUs", lambda key: f"{key[1]}{', FSDP2' * key[2]}"),
                Column("shape", lambda key: key[0]),
                Column("workload", lambda key: key[-2]),
                Column("side", lambda key: key[-1]),
                Column("layers", lambda key: f"{min(found[key])} and {max(found[key])}"),
                Column("ms per layer", lambda key: f"{ms[key]:.1f}"),
                Column("efficiency", efficiency),
            ],
            list(ms),
        )


def plot(runs: Sequence[Row], path: Path) -> None:
    """Efficiency by the number of GPUs, a panel per shape and workload, a line per side; dashed
    what is predicted of parts. A run of one model counts as one GPU's."""
    found: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for data in runs:
        for row in data["rows"]:
            if "efficiency" not in row:
                continue
            sides = found.setdefault((data["shape"], row["workload"]), {})
            side = f"{row['side']}, FSDP2" if data["fsdp"] else row["side"]
            sides.setdefault(side, {1: 1.0})[data["ranks"]] = row["efficiency"]
            if "predicted_efficiency" in row:
                predicted = sides.setdefault("bound", {1: 1.0})
                predicted[data["ranks"]] = row["predicted_efficiency"]
    fig, axes = plots.figure(max(1, len(found)), "One forest on several GPUs")
    for axis, ((shape, workload_name), sides) in zip(axes, found.items(), strict=False):
        counts = sorted({count for values in sides.values() for count in values})
        for side, values in sides.items():
            more = {"label": "predicted, parts"} if side == "bound" else {}
            plots.line(axis, side, sorted(values), [values[n] for n in sorted(values)], **more)
        axis.set_xscale("log", base=2)
        plots.ticks(axis, counts)
        plots.name(axis, "GPUs", "efficiency", f"{workload_name}, {shape}")
    plots.save(fig, path)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every side was green."""
    what = parser(__doc__)
    what.set_defaults(repeats=3)
    add = what.add_argument
    names = [AIRLINE, *WORKLOADS]
    add("--rollouts", type=Path, help=f"JSONL.gz, for {AIRLINE!r}")
    add("--tasks", type=int, default=8, help=f"of {AIRLINE!r}")
    add("--workloads", nargs="+", choices=names, default=names[:3])
    add("--sides", nargs="+", choices=[*ALONE, *GROUPED], help="default: all that run here")
    add("--shape", choices=SHAPES, default=SHAPES[0])
    add("--layers", type=int, default=4)
    add("--layers-by", choices=("transformers", "compile", "liger"), default="transformers")
    add("--max-tokens", type=int, default=32_768, help="of cut and of steps")
    add("--profile", type=Path, help="top kernels of rank 0, a text file")
    add("--fsdp", action="store_true", help="shard the weights where ranks work together")
    add("--beside", type=Path, nargs="+", default=[], help="with --read and --plot: JSON of others")
    options = parse(what, arguments)
    if options.read is not None:
        report = Report.read(options)
        others = [json.loads(path.read_text()) for path in options.beside]
        if options.plot is not None:
            plot([*others, report.result()], options.plot)
        return report.finish(tables)
    if options.plot is not None or options.beside:
        what.error("--plot and --beside draw what was measured: give them with --read")
    if options.rollouts is None and AIRLINE in options.workloads:
        options.skipped.append(AIRLINE)
        options.workloads = [name for name in options.workloads if name != AIRLINE]
    is_spread = "WORLD_SIZE" in os.environ and int(os.environ["WORLD_SIZE"]) > 1
    if options.sides is None:
        options.sides = ["whole", *(GROUPED if is_spread else ALONE[1:])]
    if not is_spread and (wrong := [side for side in options.sides if side in GROUPED]):
        what.error(f"{', '.join(wrong)}: run it by torchrun, with two processes or more")
    if options.is_tiny:
        options.layers = min(fewest(options.shape), options.layers)
        longest = max(
            int(forest_named(name, options).sequence_lengths.max()) for name in options.workloads
        )
        options.max_tokens = max(2 * longest, 64)
    ranks = Ranks.of_torchrun(options) if is_spread else Ranks(options.device)
    code = run(options, ranks)
    if is_spread:
        dist.destroy_process_group()
    return code
