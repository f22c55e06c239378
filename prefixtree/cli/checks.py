"""The output of `prefixtree bench`, `doctor` and `verify`: tables of what was found, and plain
lines to paste into an issue.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from prefixtree.doctor import Health, Package

_MIB = 2**20


def show_bench(facts: dict[str, Any], source: str, console: Console) -> None:
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


_GIB = 2**30


def show_health(health: Health, console: Console) -> None:
    """Prints about 25 plain lines, to be pasted."""

    def line(name: str, text: str) -> None:
        console.print(f"{name:<13} {text}", markup=False, soft_wrap=True)

    line("prefixtree", f"{health.prefixtree} in {health.folder}")
    line("python", f"{health.python}, {health.system}")
    for package in health.packages:
        line(package.wanted.name, _described(package, health.cuda))
    for i, gpu in enumerate(health.gpus):
        memory = f"{gpu.memory / _GIB:.0f} GiB"
        line(f"GPU {i}", f"{gpu.name}, compute capability {gpu.capability}, {memory}")
    if not health.gpus:
        line("GPU", f"none: {health.gpu_problem}" if health.gpu_problem else "none")
    for backend in health.backends:
        line("backend", f"{', '.join(backend.heads)}: {backend.says}")
    for backend in health.recurrences:
        line("recurrence", f"{', '.join(backend.heads)}: {backend.says}")
    for problem in health.broken:
        line("BROKEN", problem)
    if not health.broken:
        line("ok", "nothing that is required is missing or broken")


def _described(package: Package, cuda: str | None) -> str:
    wanted = package.wanted
    if package.version is None:
        purpose = f" (for {wanted.used_for})" if wanted.used_for else ""
        return f"not installed{purpose}: {wanted.install}"
    if wanted.name == "torch":
        version = f"{package.version}, built for {cuda or 'the CPU'}"
    else:
        version = package.version
    return version if package.problem is None else f"{version}, {package.problem}"


def show_verdict(facts: dict[str, Any], console: Console) -> None:
    """Prints what `verify` found."""
    tokens = facts["tokens"]
    console.print(
        f"[bold]{facts['model_type']}[/] in {facts['dtype']} on {facts['device']}: "
        f"{facts['sequences']:,} sequences, {tokens['scored']:,} scored of "
        f"{tokens['replicated']:,} tokens, {tokens['distinct']:,} distinct"
    )
    reference = facts.get("reference", "replicated" if facts["dtype"] == "float32" else "float32")
    columns = {"packed": "difference", "replicated": "replicated", "limit": "limit"}
    if reference == "replicated":
        del columns["replicated"]
    table = Table(f"worst difference from {reference}", *columns, "")
    # the names of parameters are read whole
    table.columns[0].overflow = "fold"
    for name, check in facts["checks"].items():
        numbers = [
            "" if key not in check else "not finite" if check[key] is None else f"{check[key]:.2e}"
            for key in columns.values()
        ]
        where = f"\n[dim]{check['parameter']}[/]" if "parameter" in check else ""
        verdict = "[green]ok[/]" if check["passed"] else "[bold red]differs[/]"
        table.add_row(name + where, *numbers, verdict)
    console.print(table)
    if reference == "float64":
        console.print(
            "the two differed by more than rounding usually makes them, so both were compared with "
            "float64: packed may be twice as far from it as replicated is, and the usual limit"
        )
    if (chosen := facts.get("indexers")) is not None:
        same, others = (
            "not finite" if chosen[name] is None else f"{chosen[name]:.1e}"
            for name in ("logprobs_with_the_same", "logprobs_of_others")
        )
        console.print(
            f"indexers: packed chose other keys than float32 in {chosen['differ']:,} of "
            f"{chosen['choices']:,} choices (queries by layers), which move log p by up to "
            f"{others}; with the same keys, packed's is {same} from float32's"
        )
    attention = facts["replicated"]["attention"]
    table = Table("cost, forward and backward", f"replicated, {attention}", "packed", "ratio")
    sides = facts["replicated"], facts["packed"]
    rows = [("tokens", [tokens["replicated"], tokens["distinct"]], "{:,}")]
    if (images := facts.get("images")) is not None:
        patches = images["patches"]
        rows.append(("patches encoded", [patches["replicated"], patches["distinct"]], "{:,}"))
    rows.append(("seconds", [side["seconds"] for side in sides], "{:.2f}"))
    if None not in (peaks := [side["peak_bytes"] for side in sides]):
        rows.append(("peak memory, GiB", [peak / _GIB for peak in peaks], "{:.2f}"))
    for name, values, form in rows:
        ratio = f"{values[0] / values[1]:.2f}x" if facts["passed"] and values[1] > 0 else "-"
        table.add_row(name, *(form.format(value) for value in values), ratio)
    console.print(table)
    if facts["device"].startswith("cpu"):
        console.print("times on a CPU say little: packing saves a GPU's work (`prefixtree bench`)")
    apart, limit = facts["replicated"]["logprob_difference"], facts["checks"]["logprobs"]["limit"]
    if limit is not None and (apart is None or apart > limit):
        gap = "not finite" if apart is None else f"{apart:.1e}"
        console.print(
            f"transformers' {attention} itself is {gap} away from eager in log p with this "
            "model (it may leave out a softcap, say); packed is compared with eager"
        )
    console.print("[bold green]PASS[/]" if facts["passed"] else "[bold red]FAIL[/]")
