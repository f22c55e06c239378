"""Writes the tables of README.md, of results.md here, of docs/verl.md and of docs/megatron.md from
the JSON under results/.

python -m benchmarks.write_tables
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.cases import verl_update
from benchmarks.lib.tables import Column, Parts, Table, machine, markdown
from benchmarks.lib.update_tables import cases_by_side

HERE = Path(__file__).parent
PAGE = HERE / "results.md"
README = HERE.parent / "README.md"
VERL = HERE.parent / "docs" / "verl.md"
MEGATRON = HERE.parent / "docs" / "megatron.md"
# what stands between the markers of a name: the function of a case, and its files under results/
TABLES = {
    "packing": ("packing.tables", "cpu/packing.json"),
    "sdpa_cpu": ("sdpa_cpu.tables", "cpu/sdpa_cpu.json"),
    "backends": ("attention.backends", "h200/backends.json"),
    "peers": ("peers.tables", "h200/peers.json"),
    "documents": ("peers.tables", "h200/documents.json"),
    "depth": ("depth.tables", "h200/depth.json"),
    "layer": ("layer.tables", "h200/layer.json"),
    "model": ("model.tables", "h200/model.json", "h200/model_*_layers.json"),
    "recomputed": ("model.recomputed", "h200/recompute*.json"),
    "update_best": ("model.best", "h200/update*_default.json", "h200/update*_best.json"),
    "experts": ("model.experts", "h200/experts*.json"),
    "layers_by": ("model.layers_by", "h200/layers_by.json"),
    "recurrence": ("recurrence.tables", "h200/recurrence.json", "h200/recurrence_*.json"),
    "hybrids": ("model.hybrids", "h200/model_qwen*.json"),
    "hybrids_best": ("model.recomputed", "h200/hybrid_best_*.json"),
    "head": ("head.tables", "h200/head.json"),
    "sparse": ("sparse.tables", "h200/sparse.json"),
    "sparse_chains": ("sparse.tables", "h200/sparse_chains.json"),
    "distill": ("distill.tables", "h200/distill.json"),
    "distill_models": ("distill_models.tables", "h200/distill_models.json"),
    "low": ("model.low_precision", "h200/low_*.json"),
    "pictures": ("pictures.tables", "h*/pictures*.json"),
    "update": ("update.tables", "h200/update.json", "h200/update_2gpu.json"),
    "update_settings": ("update.settings", "h200/settings_*.json"),
    "verl_update": ("verl_update.tables", "h200/verl*.json"),
    "first_step": ("first_step.tables", "h*/first_step.json"),
    "first_step_trl": ("first_step.tables", "h200/first_step_trl.json"),
    "run": ("run.tables", "h200/run.json", "h200/run_*.json", "h100/run_*.json"),
    "learn": ("learn.tables", "h200/learn_*.json"),
    "compiled": ("compiled.chosen", "cpu/compiled.json"),
    "micro_batches": ("micro_batches.tables", "cpu/micro_batches.json"),
    "verl_balance": ("verl_balance.tables", "cpu/verl_balance.json"),
    "parallel": (
        "parallel.tables",
        "h200/parallel_2gpu.json",
        "h200/parallel_2gpu_*.json",
        "h*/parallel_[48]gpu*.json",
    ),
    "parallel_hybrids": (
        "parallel.tables",
        "h100/parallel_2gpu_hybrids.json",
        "h200/hybrids_2gpu.json",
        "h200/hybrids_2gpu_32k.json",
    ),
    "parallel_call": ("parallel.tables", "h200/call_2gpu.json"),
    "steps": ("parallel.tables", "h200/steps*.json"),
    "trunks": ("parallel.tables", "h*/trunks*.json"),
    "steps_hybrids": ("parallel.tables", "h*/hybrid_steps*.json"),
    "decode": ("decode.tables", "h200/decode.json"),
    "decode_steps": ("decode.tables", "h200/decode_steps*.json"),
    "generate": (
        "decode_peers.tables",
        # the last that has a side counts
        "h200/decode_peers_others.json",
        "h200/decode_peers.json",
        "h200/decode_peers_latest.json",
    ),
    "replaced_class": ("decode_peers.tables", "h200/replaced_class.json"),
    "replaced_class_padded": ("decode_peers.tables", "h200/replaced_class_padded.json"),
    "generate_256": ("decode_peers.tables", "h200/decode_peers_256*.json"),
    "generate_hybrids": ("decode_peers.tables", "h200/decode_hybrid.json"),
    "histories": ("decode_peers.tables", "h200/histories.json"),
    "head_shapes": ("attention.head_shapes", "h200/shapes_*.json"),
    "pack_gqa": ("pack_gqa.tables", "h200/pack_gqa.json"),
}


def read(*patterns: str) -> list[dict[str, Any]]:
    """The JSON of files under results/, in the order of the patterns, then of names."""
    files = [file for pattern in patterns for file in sorted((HERE / "results").glob(pattern))]
    return [json.loads(file.read_text()) for file in files]


def tables(name: str) -> Parts:
    """The tables between the markers of that name in results.md."""
    function, *patterns = TABLES[name]
    case, part = function.split(".")
    module = importlib.import_module(f"benchmarks.cases.{case}")
    return getattr(module, part)(*read(*patterns))


def speed() -> Parts:
    """README's table, three rows of the policy updates: agent rollouts on the whole model, a GRPO
    group, nothing shared."""
    updates = {}
    for sides in cases_by_side(*read("h200/model.json", "h200/model_*_layers.json")):
        packed = sides["packed"]
        updates[packed["case"], packed["layers"]] = [
            sides[side]["seconds"] for side in ("fa2", "fa4", "packed")
        ]

    def update_of(case: str, layers: int) -> list[float]:
        (found,) = (x for (name, n), x in updates.items() if name.startswith(case) and n == layers)
        return found

    def gain(at: int) -> Callable[[Any], str]:
        def cell(line: Any) -> str:
            ratio = line[at] / line[3]
            # a loss of 1 % is not to be rounded away
            return f"{ratio:.2f}x" if ratio < 2 else f"{ratio:.1f}x"

        return cell

    yield Table(
        [
            Column("policy update on one H200, bf16", lambda line: line[0]),
            Column("prefixtree", lambda line: f"{line[3]:#.3g} s"),
            Column("FA2", lambda line: f"{line[1]:#.3g} s"),
            Column("gain", gain(1)),
            Column("flash-attn-4", lambda line: f"{line[2]:#.3g} s"),
            Column("gain", gain(2)),
        ],
        [
            ("agent rollouts, all 36 layers", *update_of("airline", 36)),
            (
                "a prompt of 8K with 32 responses, in micro-batches of 8, 12 layers",
                *update_of("8K, 32 x 131-2048, micro-batch 8", 12),
            ),
            ("nothing shared, 12 layers", *update_of("nothing shared", 12)),
        ],
    )


def megatron() -> Parts:
    """The tables of the page on Megatron-Core: errors on two GPUs, and times."""
    # the last is absent until measured
    data, context, *states = read(
        "h200/megatron_2gpu.json",
        "h200/megatron_2gpu_context.json",
        "h200/megatron_2gpu_states.json",
    )
    runs: dict[str, list[dict[str, Any]]] = {}
    for row in [row for found in (data, context, *states) for row in found["rows"]]:
        runs.setdefault(row["run"], []).append(row)

    def worst(some: list[dict[str, Any]], key: str) -> str:
        found = [case[key] for case in some if key in case]
        return f"{max(found):.1e}" if found else ""

    def cases(run: str, chosen: Callable[[str], bool]) -> list[dict[str, Any]]:
        return [
            case
            for rank in runs[run]
            for name, case in rank.items()
            if isinstance(case, dict) and chosen(name)
        ]

    def is_wide(name: str) -> bool:
        return "float32" not in name and "expert" not in name and "EP" not in name

    def has_experts(name: str) -> bool:
        return "expert" in name or "EP" in name

    def is_divided(name: str) -> bool:
        # the others are mistakes, which must be seen
        return name.startswith("CP ")

    errors = [
        ("tensor parallel 2, float64", cases("tensor", is_wide)),
        ("the same, float32", cases("tensor", lambda name: "float32" in name)),
        ("experts, also expert parallel 2, float64", cases("tensor", has_experts)),
        ("pipeline parallel 2, float64", cases("pipeline", lambda name: True)),
        ("context parallel 2, also expert parallel 2, float64", cases("context", is_divided)),
    ]
    half = {
        "megatron": "tensor parallel 2, bfloat16, each sequence alone through Megatron's attention",
        "triton": "tensor parallel 2, bfloat16, scored edges, backend triton",
        "flash": "the same, backend flash",
        "pack_batches": "the same, `pack_batches`",
    }
    errors += [(text, cases("half", name.__eq__)) for name, text in half.items()]
    yield f"{machine(data['environment'], 'triton', 'megatron-core')}; two GPUs, NCCL"
    yield Table(
        [
            Column("against float64", lambda line: line[0]),
            Column(
                "log p, loss", lambda line: worst(line[1], "logprobs") or worst(line[1], "loss")
            ),
            Column("entropy", lambda line: worst(line[1], "entropy")),
            Column(
                "gradients", lambda line: worst(line[1], "gradients") or worst(line[1], "worst")
            ),
        ],
        errors,
    )
    sides = {
        "chains": "nothing shared (a forest of chains)",
        "pack_batches": "`pack_batches`",
        "scored edges": "`tree_logprobs`",
    }
    slowest = {name: max((rank[name] for rank in runs["times"]), key=_ms) for name in sides}
    first = runs["times"][0]
    yield (
        "Forward and backward of 4 layers of Qwen3-8B's shape with its head, tensor parallel 2 "
        f"with sequence parallelism, bfloat16; {first['tokens']:,} tokens, {first['distinct']:,} "
        "distinct:"
    )
    yield Table(
        [
            Column("", lambda name: sides[name]),
            Column("ms", lambda name: f"{slowest[name]['ms']:.0f}"),
            Column("speed-up", lambda name: f"{_ms(slowest['chains']) / _ms(slowest[name]):.1f}x"),
            Column("GiB per GPU", lambda name: f"{slowest[name]['GiB']:.1f}"),
        ],
        list(sides),
    )
    if states:
        yield from _layers_with_states(runs["state_times"], states[0])
    divided = runs["context_times"]
    sizes = [int(name.split()[0]) for name in divided[0] if name.endswith("CP 1")]

    def of(size: int, ranks: int) -> Any:
        return max((rank[f"{size} tokens, CP {ranks}"] for rank in divided), key=_ms)

    yield f"One tree under context parallelism ({context['environment']['commit']}):"
    yield Table(
        [
            Column("packed tokens", lambda size: f"{size:,}"),
            Column("one GPU, ms", lambda size: f"{of(size, 1)['ms']:,.0f}"),
            Column("two, ms", lambda size: f"{of(size, 2)['ms']:,.0f}"),
            Column("speed-up", lambda size: f"{_ms(of(size, 1)) / _ms(of(size, 2)):.2f}x"),
            Column(
                "GiB per GPU", lambda size: f"{of(size, 1)['GiB']:.1f}, {of(size, 2)['GiB']:.1f}"
            ),
        ],
        sizes,
    )


def _layers_with_states(layers: list[dict[str, Any]], data: dict[str, Any]) -> Parts:
    """The table of layers with a state under tensor parallelism."""

    def slower(name: str, side: str, key: str = "ms") -> str:
        found = [rank[name][side][key] for rank in layers if side in rank[name]]
        return f"{max(found):.{0 if key == 'ms' else 1}f}" if found else ""

    names = [name for name, row in layers[0].items() if isinstance(row, dict)]
    sizes = {layers[0][n]["tokens"]: layers[0][n]["distinct"] for n in names}
    counts = "; ".join(f"{a:,} tokens, {b:,} distinct" for a, b in sizes.items())
    yield (
        "Four layers with a state, of Qwen3-Next's shape (dense MLPs) and of Nemotron-H 8B's (two "
        f"are MLPs); {counts} ({data['environment']['commit']}):"
    )
    yield Table(
        [
            Column("", str),
            Column("Megatron's own, ms", lambda name: slower(name, "megatron")),
            Column("a forest of chains", lambda name: slower(name, "chains")),
            Column("`pack_batches`", lambda name: slower(name, "pack_batches")),
            Column("`tree_logprobs`", lambda name: slower(name, "tree_logprobs")),
            Column("GiB per GPU", lambda name: slower(name, "tree_logprobs", "GiB")),
        ],
        names,
    )


def _ms(row: dict[str, Any]) -> float:
    return float(row["ms"])


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
    """Replaces what stands between the markers of the pages."""
    page = PAGE.read_text()
    for name in TABLES:
        page = replaced(page, name, markdown(tables(name)))
    PAGE.write_text(page)
    headline = verl_update.headline(*read(*TABLES["verl_update"][1:]))
    VERL.write_text(replaced(VERL.read_text(), "verl_update", markdown(headline)))
    MEGATRON.write_text(replaced(MEGATRON.read_text(), "megatron", markdown(megatron())))
    README.write_text(replaced(README.read_text(), "speed", markdown(speed())))


if __name__ == "__main__":
    main()
