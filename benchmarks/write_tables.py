"""Writes the tables of docs/results.md and README.md from the JSON under results/.

python -m benchmarks.write_tables
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.cases.depth import memory
from benchmarks.lib.plots import LABELS
from benchmarks.lib.shapes import SHAPES, Shape
from prefixtree.kernels.choice import most_work, with_tail
from prefixtree.kernels.flash.launch import packs_heads

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "results.md"
README = HERE.parent / "README.md"
RESULTS = HERE / "results" / "h200"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _made(environment: dict[str, Any]) -> str:
    return (
        f"`{environment['command']}` at {environment['commit']}, {environment['processor']}, "
        f"{environment['cores']} cores, torch {environment['torch']}"
    )


def _machine(environment: dict[str, Any], *packages: str) -> str:
    """The GPU, torch and other versions, and the commit."""
    versions = [f"{name} {environment[name]}" for name in ("torch", *packages)]
    return ", ".join([environment["gpu"], *versions, environment["commit"]])


def packing(data: dict[str, Any]) -> str:
    """Forest, packing and tables."""
    forests = [
        [
            row["case"],
            f"{row['replicated']:,}",
            f"{row['distinct']:,}",
            f"{row['ms']:.1f}",
            f"{row['ns_a_token']:.1f}",
            f"{row['memory_over_input']:.2f}x" if row.get("memory_over_input") else "",
        ]
        for row in data["forest"]
    ]
    shapes = list(dict.fromkeys(row["tiles"] for row in data["tables"]))
    cells: dict[str, dict[str, str]] = {}
    for row in data["tables"]:
        name = f"{row['workload']} ({row['tokens']:,} tokens)"
        share = f"{row['ms']:.1f} ms, {row['useful_share']:.3f}, {row['partial_share']:.0%}"
        cells.setdefault(name, {})[row["tiles"]] = share
    return "\n\n".join(
        [
            _made(data["environment"]),
            _table(
                ["`from_sequences`", "tokens", "distinct", "ms", "ns per token", "extra / input"],
                forests,
            ),
            _table(
                ["packed forest of the first row", "ms"],
                [[row["step"], f"{row['ms']:.1f}"] for row in data["packed"]],
            ),
            "Block tables: build time, useful share (visible pairs over the pairs that the tiles "
            "compute), share of partial tiles:",
            _table(
                ["workload", *shapes],
                [[name, *(found[s] for s in shapes)] for name, found in cells.items()],
            ),
        ]
    )


def sdpa_cpu(data: dict[str, Any]) -> str:
    """The sdpa backend against sequences one by one."""
    return (
        f"{_made(data['environment'])}\n\n"
        f"fp32, 8 heads of 64, {data['sequences']} sequences, {data['packed_tokens']:,} distinct "
        f"of {data['replicated_tokens']:,} tokens, forward and backward: "
        f"**{data['packed_s']:.2f} s packed, {data['replicated_s']:.1f} s** for every sequence "
        f"alone through torch's SDPA, **{data['speed_up']:.1f}x**; attention FLOPs alone bound it "
        f"at {data['attention_flop_ratio']:.1f}x (the replicated side also adds up the copies' "
        f"gradients). Largest relative difference {max(data['relative_difference'].values()):.1e}."
    )


def compiled(data: dict[str, Any]) -> str:
    """What the machine code of the Triton kernels says."""
    rows = []
    for row in data["rows"]:
        # of what was not chosen, the main head dim tells enough
        if not row["chosen"] and row["dims"] != "128x128":
            continue
        c, loops = row["config"], row["loops"]
        limit = f", {c['registers']} registers at most" if c["registers"] else ""
        shape = f"{c['rows']} x {c['keys']}, {c['warps']} warps, {c['stages']} stages{limit}"
        steps = [f"{x['issued']} / {x['tensor']}, {x['spills']}" for x in loops]
        rows.append(
            [
                f"**{row['kernel']}**" if row["chosen"] else row["kernel"],
                row["dims"].replace("x", " / "),
                shape,
                str(row["registers"]),
                f"{row['shared'] / 1024:.0f}",
                str(row["programs"]),
                *steps,
            ]
        )
    head = ["kernel", "D / Dv", "rows x keys", "registers", "shared KiB", "programs"]
    return (
        f"sm_{data['capability']}, triton {data['triton']}, {data['dtype']}, "
        f"{data['heads'][0]} / {data['heads'][1]} heads\n\n"
        + _table([*head, "full tile", "partial tile"], rows)
    )


def attention(data: dict[str, Any]) -> str:
    """The Triton kernels on a GPU, beside what was timed around them."""
    peers: dict[tuple[str, str], float] = {}
    for file in sorted((HERE / "results" / "h200").glob("peers_*.json")):
        for row in json.loads(file.read_text())["rows"]:
            peers[row["workload"], row["peer"]] = row["forward_ms"] + row["backward_ms"]
    rows = []
    for row in data["rows"]:
        shape = f"{row['heads']} / {row['kv_heads']} x {row['head_dim']}"
        both = row["forward_ms"] + row["backward_ms"]
        ratios = []
        for peer in ("prototype", "flex", "fa4tree", "fa2", "fa4"):
            known = peers.get((row["workload"], peer)) if shape == "32 / 8 x 128" else None
            ratios.append(f"{both / known:.2f}" if known else "")
        worst = max(max(x["worst"], x["mean"]) for x in row["check"].values())
        rows.append(
            [
                row["workload"],
                shape,
                f"{row['forward_ms']:.2f}",
                f"{row['backward_ms']:.2f}",
                f"{row['forward_tflops']:.0f} / {row['backward_tflops']:.0f}",
                f"{worst:.2f}",
                *ratios,
            ]
        )
    head = ["workload", "heads", "forward ms", "backward ms", "TF", "error / limit", "prototype"]
    head += ["FlexAttention", "flash-attn-4 tree", "torch FA2", "flash-attn-4 varlen"]
    line = _machine(data["environment"], "triton")
    return f"{line}\n\n{_table(head, rows)}"


def automatic(row: dict[str, Any]) -> str:
    """What `backend="auto"` takes for the case of a row of attention.py, by the rule of now, with
    the 132 multiprocessors of an H200."""
    work = with_tail(row["flash_work"], row["longest_share"], row["heads"], 132)
    return "flash" if work <= most_work(row["head_dim"]) else "triton"


def head_dims(row: dict[str, Any]) -> tuple[int, int]:
    """Of q and of v; rows of earlier files have one for both."""
    return row["head_dim"], row.get("v_head_dim") or row["head_dim"]


def head_shapes(rows: list[dict[str, Any]]) -> str:
    """The two backends with the heads of models; what `auto` takes is in bold."""
    known = {shape: name for name, shape in SHAPES.items()}
    shapes: dict[Shape, dict[str, dict[str, dict[str, Any]]]] = {}
    for row in rows:
        shape = Shape(row["heads"], row["kv_heads"], row["head_dim"], row.get("v_head_dim"))
        shapes.setdefault(shape, {}).setdefault(row["workload"], {})[row["backend"]] = row
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    lines = []
    for shape, cases in sorted(
        shapes.items(), key=lambda item: list(SHAPES.values()).index(item[0])
    ):
        dims = "/".join(map(str, dict.fromkeys((shape.head_dim, shape.dim_of_v))))
        cells = [known[shape], f"{shape.heads} / {shape.kv_heads} x {dims}"]
        worst = 0.0
        for workload in workloads:
            sides = cases[workload]
            times = {name: row["forward_ms"] + row["backward_ms"] for name, row in sides.items()}
            taken = automatic(sides["triton"])
            worst = max(worst, times[taken] / min(times.values()))
            parts = [
                f"{sides[name]['forward_ms']:.1f} + {sides[name]['backward_ms']:.1f}"
                for name in ("triton", "flash")
            ]
            parts = [
                f"**{part}**" if name == taken else part
                for name, part in zip(("triton", "flash"), parts, strict=True)
            ]
            cells.append("; ".join(parts))
        lines.append([*cells, f"{worst:.2f}"])
    tokens = {row["workload"]: row["tokens"] for row in rows}
    head = ["heads of", "q / kv x D", *(f"{name} ({tokens[name]:,})" for name in workloads)]
    return _table([*head, "auto / best, at most"], lines)


def pack_gqa(data: dict[str, Any]) -> str:
    """The forward of flash with the heads of a group in one tile, and a head a tile."""
    cells: dict[int, dict[int, str]] = {}
    for row in data["rows"]:
        times = {name: f"{row[f'{name}_ms']:.2f}" for name in ("packed", "apart")}
        taken = "packed" if packs_heads(row["group"], row["head_dim"]) else "apart"
        times[taken] = f"**{times[taken]}**"
        cells.setdefault(row["head_dim"], {})[row["group"]] = (
            f"{times['packed']} / {times['apart']}"
        )
    groups = sorted({row["group"] for row in data["rows"]})
    lines = [[str(dim), *(cells[dim].get(group, "") for group in groups)] for dim in sorted(cells)]
    first = data["rows"][0]
    about = f"{first['workload']}, {first['tokens']:,} tokens, {first['kv_heads']} kv heads"
    head = ["D", *(f"group of {group}" for group in groups)]
    line = _machine(data["environment"], "triton")
    return f"{line}; {about}; forward ms, packed / apart\n\n{_table(head, lines)}"


def backends(data: dict[str, Any]) -> str:
    """The two GPU backends beside one another, and what `auto` takes."""
    cases: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in data["rows"]:
        shape = f"{row['heads']} / {row['kv_heads']} x {row['head_dim']}"
        cases.setdefault((row["workload"], shape), {})[row["backend"]] = row
    rows = []
    for (workload, shape), sides in cases.items():
        times = {name: row["forward_ms"] + row["backward_ms"] for name, row in sides.items()}
        taken = automatic(sides["triton"])
        cells = [workload, shape]
        for name in ("triton", "flash"):
            row = sides[name]
            cells += [f"{row['forward_ms']:.2f} + {row['backward_ms']:.2f}"]
            cells += [f"{row['forward_tflops']:.0f} / {row['backward_tflops']:.0f}"]
            cells += [f"{row['peak_bytes'] / 2**30:.2f}"]
        ratio = times["triton"] / times["flash"]
        rows.append([*cells, f"{ratio:.2f}", taken, f"{times[taken] / min(times.values()):.2f}"])
    head = ["workload", "heads", "triton ms", "TF", "GiB", "flash ms", "TF", "GiB"]
    head += ["triton / flash", "auto", "auto / best"]
    line = _machine(data["environment"], "triton")
    return f"{line}; forward + backward\n\n{_table(head, rows)}"


def update(data: dict[str, Any]) -> str:
    """A policy update on one GPU and, where that was run, under FSDP2 on two."""
    more = HERE / "results" / "h200" / "update_2gpu.json"
    runs = [data, json.loads(more.read_text())] if more.exists() else [data]
    names = {
        "fa2": "replicated, FA2, verl's micro-batches",
        "verl": "packed, verl's micro-batches",
        "packed": "packed, `plan_micro_batches`",
    }
    rows = []
    for run in runs:
        base = run["check"]["replicated_errors"]
        for row in run["rows"]:
            cells = [f"{run['ranks']}, FSDP2" if run["fsdp"] else "1", names[row["side"]]]
            if "seconds" in row:
                cells += [str(row["micro_batches"]), f"{row['computed']:,}"]
                cells += [f"{row['seconds']:.2f}", f"{row['speedup']:.2f}x"]
                cells += [f"{row['tokens_per_s']:,.0f}", f"{row['distinct_per_s']:,.0f}"]
                cells.append(f"{row['peak_bytes'] / 2**30:.1f}" if row["peak_bytes"] else "")
            else:
                reason = "red" if row.get("red") else "failed"
                cells += ["out of memory" if "out_of_memory" in row else reason, *[""] * 6]
            for error in ("log-probabilities", "gradient"):
                found = row.get("errors", {}).get(error)
                cells.append("" if found is None else f"{found:.3g} ({found / base[error]:.2f}x)")
            rows.append([*cells, f"{row['loss']:.6f}" if "loss" in row else ""])
    check = data["check"]
    head = ["GPUs", "side", "micro-batches", "tokens computed", "s", "speed-up", "tokens/s"]
    head += ["distinct tokens/s", "GiB", "log p error", "gradient error", "loss"]
    return (
        f"{_machine(data['environment'], 'triton')}; "
        f"{data['sequences']} samples of {data['tasks']} tasks, micro-batches of at most "
        f"{data['max_tokens']:,} tokens. Errors and losses are those of {check['sequences']} "
        f"samples against float32 (loss {check['loss']:.6f}), in brackets over those of the "
        f"replicated run on one GPU.\n\n{_table(head, rows)}"
    )


def _models(data: dict[str, Any]) -> list[dict[str, dict[str, Any]]]:
    """Rows of model.py by side, a dict a case, those of more layers last."""
    runs = [data]
    for file in sorted((HERE / "results" / "h200").glob("model_*_layers.json")):
        runs.append(json.loads(file.read_text()))
    cases: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for row in (row for run in runs for row in run["rows"]):
        if "seconds" in row:
            cases.setdefault((row["case"], row["layers"]), {})[row["side"]] = row
    return [sides for sides in cases.values() if "packed" in sides]


def model(data: dict[str, Any]) -> str:
    """A policy update of a Qwen3-8B-shaped model."""
    rows = []
    for sides in _models(data):
        packed = sides["packed"]
        cells = [packed["case"], str(packed["layers"])]
        for side in ("fa2", "fa4", "own", "packed"):
            row = sides.get(side)
            cells.append(f"{row['seconds']:.2f} / {row['peak_bytes'] / 2**30:.0f}" if row else "")
        gains = packed["speedup"]
        cells += [f"{gains[side]:.2f}x" if side in gains else "" for side in ("fa2", "fa4")]
        cells += [f"{packed['flop_ratio']:.2f}x", f"{packed['of_bound']:.2f}"]
        rate = f"{packed['tokens_per_s']:,.0f} / {packed['distinct_per_s']:,.0f}"
        rows.append([*cells, rate, f"{packed['mfu']:.1%}"])
    head = ["case", "layers", "FA2 s / GiB", "flash-attn-4", "own backend", "packed", "over FA2"]
    head += ["over flash-attn-4", "FLOP ratio", "of the bound", "tokens/s, replicated / distinct"]
    line = _machine(data["environment"], "transformers")
    return f"{line}\n\n{_table([*head, 'MFU'], rows)}"


def layers_by(data: dict[str, Any]) -> str:
    """The update with layers made faster by others; a later run of a kind replaces its rows."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for run in data["runs"]:
        sides = found.setdefault(run["layers_by"], {})
        sides |= {row["side"]: row for row in run["rows"]}
    rows = []
    for kind, sides in found.items():
        times = [f"{sides[side]['seconds']:.2f}" for side in ("own", "packed")]
        gain = sides["own"]["seconds"] / sides["packed"]["seconds"]
        mfu = f"{sides['packed']['mfu']:.1%}"
        rows.append([kind, *times, f"{gain:.2f}x", mfu])
    head = ["layers by", "own backend, replicated, s", "packed, s", "packed is", "MFU"]
    line = _machine(data["runs"][0]["environment"], "transformers", "liger-kernel")
    return f"{line}\n\n{_table(head, rows)}"


def head(data: dict[str, Any]) -> str:
    """The head alone: time and memory beside all logits at once."""
    rows = []
    for row in data["rows"]:
        cells = [row["head"], row["side"], f"{row['forward_ms']:.1f}", f"{row['ms']:.1f}"]
        rows.append([*cells, f"{row['peak_bytes'] / 2**30:.1f}"])
    names = ["head, 8,192 rows", "by", "forward ms", "with backward", "GiB"]
    return f"{_machine(data['environment'])}\n\n{_table(names, rows)}"


def peers(data: dict[str, Any]) -> str:
    """Every workload against what attends to the same batch today, and what dense kernels reach."""
    sides, rows, ceilings = data["sides"], [], []
    for row in data["rows"]:
        if "side" in row:
            rates = [row.get(f"{key}_tflops") for key in ("forward", "backward")]
            cells = ["" if rate is None else f"{rate:.0f}" for rate in rates]
            ceilings.append([row["case"], row["side"], *cells])
            continue
        times, gains = row["times"], row["speedup"]
        cells = [row["case"], f"{row['distinct']:,}", f"{row['bound']:.2f}x"]
        cells.append(f"{times['packed']['ms']:.1f}")
        for side in sides:
            known = side in gains
            cells.append(f"{times[side]['ms']:.1f}, {gains[side]:.2f}x" if known else "")
        rows.append(cells)
    head = ["workload", "distinct", "FLOPs alone", "packed ms", *(LABELS[side] for side in sides)]
    table = _table(head, rows)
    dense = _table(["ceiling", "by", "forward TF", "backward TF"], ceilings)
    return f"{_machine(data['environment'], 'triton')}; forward + backward\n\n{table}\n\n{dense}"


def depth(data: dict[str, Any]) -> str:
    """Attention over forests of every depth against the replicated batch."""
    rows, sides = [], ("fa2", "fa4", "own")
    for row in data["rows"]:
        times = row["times"]
        cells = [row["case"], f"{row['replicated']:,}", f"{row['distinct']:,}"]
        cells += [f"{times[side]['ms']:.1f}" for side in (*sides, "packed")]
        cells += [f"{row['speedup'][side]:.2f}x" for side in sides]
        cells += [f"{row['bound']:.2f}x", f"{row['efficiency']['own']:.2f}"]
        peaks = [memory(row, side) for side in ("fa2", "packed")]
        rows.append([*cells, *(f"{peak:.1f}" for peak in peaks)])
    head = ["forest", "replicated", "distinct", "FA2 ms", "flash-attn-4 ms", "own backend ms"]
    head += ["packed ms", "over FA2", "over flash-attn-4", "over own", "FLOPs alone"]
    head += ["of the bound", "FA2 GiB", "packed GiB"]
    line = _machine(data["environment"])
    return f"{line}; forward + backward\n\n{_table(head, rows)}"


def layer(data: dict[str, Any]) -> str:
    """One decoder layer, forward and backward."""
    cases: dict[tuple[int, int], dict[str, dict[str, Any]]] = {}
    for row in data["rows"]:
        cases.setdefault((row["prompt"], row["micro_batch"]), {})[row["side"]] = row
    rows = []
    for (prompt, count), sides in cases.items():
        cells = [f"{prompt:,} x {count}"]
        for side in ("fa2", "fa4", "own", "grouper", "packed"):
            row = sides[side]
            if "ms" in row:
                cells.append(f"{row['ms']:.1f} / {row['peak_with_held_bytes'] / 2**30:.1f}")
            else:
                cells.append("out of memory")
        gains, bound = sides["packed"]["speedup"], sides["packed"].get("of_bound")
        cells += [
            f"{gains[side]:.2f}x" if side in gains else "" for side in ("fa2", "fa4", "grouper")
        ]
        rows.append([*cells, "" if bound is None else f"{bound:.2f}"])
    head = ["prompt x responses", "FA2 ms / GiB", "flash-attn-4", "own backend", "prefix-grouper"]
    head += ["packed", "over FA2", "over flash-attn-4", "over prefix-grouper", "of the bound"]
    return f"{_machine(data['environment'])}\n\n{_table(head, rows)}"


def speed() -> str:
    """README's table, four rows of the tables above: agent rollouts on the whole model, a GRPO
    group, an update with the optimizer, and a batch that shares nothing."""

    def read(name: str) -> dict[str, Any]:
        return json.loads((RESULTS / f"{name}.json").read_text())  # type: ignore[no-any-return]

    def line(what: str, fa2: float, fa4: float | None, packed: float) -> list[str]:
        times = [f"{x:#.3g} s" if x else "not measured" for x in (fa2, fa4, packed)]
        # a loss of 1 % is not to be rounded away
        gains = [x / packed if x else None for x in (fa2, fa4)]
        cells = ["" if x is None else f"{x:.2f}x" if x < 2 else f"{x:.1f}x" for x in gains]
        return [what, *times, *cells]

    updates = {}
    for sides in _models(read("model")):
        packed = sides["packed"]
        updates[packed["case"], packed["layers"]] = [
            sides[side]["seconds"] for side in ("fa2", "fa4", "packed")
        ]

    def update_of(case: str, layers: int) -> list[float]:
        (found,) = (x for (name, n), x in updates.items() if name.startswith(case) and n == layers)
        return found

    whole = read("update")
    seconds = {row["side"]: row["seconds"] for row in whole["rows"]}
    agents = f"agent rollouts, {whole['sequences']} samples of {whole['tasks']} tasks"
    rows = [
        line(f"Qwen3-8B shape, all 36 layers: {agents}", *update_of("airline", 36)),
        line(
            "12 such layers: a prompt of 8K with 32 responses, micro-batches of 8",
            *update_of("8K, 32 x 131-2048, micro-batch 8", 12),
        ),
        line("12 such layers: nothing shared", *update_of("nothing shared", 12)),
        line(
            f"Qwen3-0.6B shape, all {whole['layers']} layers, with AdamW: the same agent rollouts",
            seconds["fa2"],
            None,
            seconds["packed"],
        ),
    ]
    head = ["policy update on one H200, bf16", "FA2, replicated", "flash-attn-4, replicated"]
    return _table([*head, "prefixtree", "over FA2", "over flash-attn-4"], rows)


def micro_batches(data: dict[str, Any]) -> str:
    """Plans, their bound and what others would compute."""
    rows = [
        [
            row["workload"],
            f"{row['budget']:,}",
            str(row["steps"]),
            f"{row['tokens']:,}",
            f"{row['bound']:,}",
            f"{row['over_bound']:.3f}",
            f"{row['balance']:.3f}",
            f"{row['naive_over_plan']:.2f}x",
            f"{row['verl_replicated_over_plan']:.2f}x",
            f"{row['verl_packed_over_plan']:.2f}x",
        ]
        for row in data["plans"]
    ]
    head = ["workload", "budget", "steps", "tokens", "bound", "tokens / bound", "heaviest / mean"]
    head += ["filled in order", "verl's plan", "verl's plan, packed"]
    return (
        f"{_made(data['environment'])}; {data['plans'][0]['ranks']} ranks\n\n{_table(head, rows)}"
    )


def verl_balance(data: dict[str, Any]) -> str:
    """veRL's balancing and ours."""
    rows = [
        [
            f"{row['max_tokens']:,}",
            row["balancing"],
            f"{row['tokens']:,}",
            f"{row['ratio']:.2f}x",
            f"{min(row['micro_batches'])} to {max(row['micro_batches'])}",
            f"{row['heaviest_over_mean']:.2f}",
        ]
        for row in data["rows"]
    ]
    head = ["budget", "balancing", "tokens", "replicated / computed", "micro-batches per rank"]
    return (
        f"{_made(data['environment'])}; {data['sequences']} samples, "
        f"{data['replicated_tokens']:,} tokens, {data['ranks']} ranks\n\n"
        + _table([*head, "heaviest / mean rank"], rows)
    )


def replaced(page: str, name: str, text: str) -> str:
    """The page with `text` between the markers of that name."""
    page, count = re.subn(
        rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)",
        lambda found: f"{found[1]}{text}\n{found[2]}",
        page,
        flags=re.DOTALL,
    )
    assert count == 1, f"no markers for {name}"
    return page


def main() -> None:
    """Replaces what stands between the markers of docs/results.md and README.md."""
    page = PAGE.read_text()
    on_gpu = (attention, backends, peers, depth, layer, model, layers_by, head, update)
    for write in (packing, sdpa_cpu, *on_gpu, compiled, micro_batches, verl_balance):
        name = write.__name__
        folder = "h200/" if write in on_gpu else "cpu/"
        data = json.loads((HERE / "results" / f"{folder}{name}.json").read_text())
        page = replaced(page, name, write(data))
    shaped = [json.loads(file.read_text()) for file in sorted(RESULTS.glob("shapes_*.json"))]
    if shaped:
        line = _machine(shaped[0]["environment"], "triton")
        text = head_shapes([row for data in shaped for row in data["rows"]])
        page = replaced(page, "head_shapes", f"{line}; ms, triton; flash\n\n{text}")
    if (file := RESULTS / "pack_gqa.json").exists():
        page = replaced(page, "pack_gqa", pack_gqa(json.loads(file.read_text())))
    PAGE.write_text(page)
    README.write_text(replaced(README.read_text(), "speed", speed()))


if __name__ == "__main__":
    main()
