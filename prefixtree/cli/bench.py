"""The output of `prefixtree bench`: whether both sides agree, and their times as a table."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

_MIB = 2**20


def show(facts: dict[str, Any], source: str, console: Console) -> None:
    """Prints what `bench` found."""
    tokens = facts["tokens"]
    console.print(
        f"{source}: {facts['sequences']:,} sequences, {tokens['replicated']:,} tokens, "
        f"{tokens['distinct']:,} distinct",
        markup=False,
        soft_wrap=True,
    )
    console.print(
        f"attention forward and backward on {facts['device']}, {facts['dtype']}, "
        f"{facts['heads']} query and {facts['kv_heads']} kv heads of {facts['head_dim']}, "
        f"backend {facts['backend']}",
        soft_wrap=True,
    )
    checks = facts["checks"].items()
    worst = ", ".join(
        f"{name} {'not finite' if c['difference'] is None else format(c['difference'], '.1e')}"
        for name, c in checks
    )
    verdict = "[green]ok[/]" if facts["passed"] else "[bold red]differs, no times[/]"
    limit = next(c["limit"] for _, c in checks)
    console.print(f"packed against replicated: {worst} (limit {limit:.0e}) {verdict}")
    if not facts["passed"]:
        return
    table = Table(
        "", f"replicated\n{facts['replicated_by']}", f"packed\nbackend {facts['backend']}", "ratio"
    )
    both = facts["replicated"], facts["packed"]
    values = [side["seconds"] for side in both]
    table.add_row("tokens", *(f"{tokens[k]:,}" for k in ("replicated", "distinct")), "")
    table.add_row("ms", *(f"{1e3 * v:.2f}" for v in values), f"{facts['speedup']:.2f}x")
    peaks = [side["peak_bytes"] for side in both]
    if None not in peaks:
        ratio = f"{peaks[0] / peaks[1]:.2f}x" if min(peaks) > 0 else "-"
        table.add_row("peak memory, MiB", *(f"{p / _MIB:,.0f}" for p in peaks), ratio)
    console.print(table)
    console.print(
        f"visible pairs alone would make it {facts['attention_flop_ratio']:.2f}x: "
        f"{facts['efficiency']:.0%} of that",
        highlight=False,
    )
