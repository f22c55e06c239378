"""The part of `prefixtree report` that `--ranks` asks for."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

_MIB = 2**20


def show_ranks(facts: dict[str, Any], console: Console) -> None:
    """Prints what `predict_ranks` found."""
    whose = facts["model_type"] or "a model like Qwen3-8B"
    table = Table(
        "per rank and update, predicted",
        "most",
        "mean",
        "most / mean",
        title=f"\none forest on {facts['ranks']:,} ranks, {whose}: chunks per "
        f"rank: {facts['chunks_per_rank']}",
        title_justify="left",
    )
    rows = [
        ("tokens", "own_tokens", 1, ",.0f"),
        ("TFLOP", "flops", 1e12, ",.4g"),
        ("seconds of computation", "seconds", 1, ",.4g"),
        ("rows borrowed, per layer", "received_rows", 1, ",.0f"),
        ("rows lent, per layer", "sent_rows", 1, ",.0f"),
        ("MiB received and returned", "received_bytes", _MIB, ",.1f"),
    ]
    for name, key, unit, form in rows:
        values = [value / unit for value in facts[key]]
        most, mean = max(values), sum(values) / len(values)
        ratio = f"{most / mean:.3f}" if mean else "-"
        table.add_row(name, f"{most:{form}}", f"{mean:{form}}", ratio)
    for column in table.columns[1:]:
        column.justify = "right"
    console.print(table)
    rates = facts["assumed"]
    console.print(
        f"predicted efficiency [bold]{facts['efficiency']:.3f}[/] of {facts['ranks']:,} GPUs with "
        f"{rates['linear_flops'] / 1e12:,.0f} TFLOP/s in linear layers, "
        f"{rates['attention_flops'] / 1e12:,.0f} in attention and {rates['bytes'] / 1e9:,.0f} GB/s "
        "between them (about an H100 or H200 with NVLink), "
        f"{facts['exchange_seconds']:.4g} s of exchanges not overlapped; a rank receives at most "
        f"{facts['received_share']:.1%} of what an all-gather of keys and values would bring. "
        "This is a prediction; sequence_logprobs(group=) divides a forest like this"
    )
