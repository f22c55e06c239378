"""The output of `prefixtree verify`: the verdict and the cost, as tables."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

_GIB = 2**30


def show(facts: dict[str, Any], console: Console) -> None:
    """Prints what `verify` found."""
    tokens = facts["tokens"]
    console.print(
        f"[bold]{facts['model_type']}[/] in {facts['dtype']} on {facts['device']}: "
        f"{facts['sequences']:,} sequences, {tokens['scored']:,} scored of "
        f"{tokens['replicated']:,} tokens, {tokens['distinct']:,} distinct"
    )
    table = Table("packed against replicated", "worst difference", "limit", "")
    for name, check in facts["checks"].items():
        difference = "not finite" if check["difference"] is None else f"{check['difference']:.2e}"
        limit = "not finite" if check["limit"] is None else f"{check['limit']:.2e}"
        where = f"\n[dim]{check['parameter']}[/]" if "parameter" in check else ""
        verdict = "[green]ok[/]" if check["passed"] else "[bold red]differs[/]"
        table.add_row(name + where, difference, limit, verdict)
    console.print(table)
    if facts.get("reference") == "float64":
        console.print(
            "the two differed by more than the limit, so both were compared with float64: packed "
            "may be twice as far from it as replicated is"
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
    if (pictures := facts.get("pictures")) is not None:
        patches = pictures["patches"]
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
