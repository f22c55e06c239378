"""The facts of `prefixtree report` and their output: what a file of rollouts shares and fails to
share, and with `--ranks` how it divides.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from prefixtree.cli.console import status, steps
from prefixtree.forest import PrefixForest
from prefixtree.rollouts import ChatTokenizer, Rollouts
from prefixtree.sharing import estimate, measure
from prefixtree.sharing.near_misses import find_near_misses, near_miss_facts

_GIB = 2**30
_KINDS = {
    "sampled": "sampled by the policy",
    "mixed": "others' words, and then the policy's own",
    "given": "not sampled by the policy",
    "rewritten": "the same rollout, written differently in a later turn",
    "re-tokenised": "the same text in other tokens",
    "thinking": "thinking that one of them lacks",
    "question": "another question, after which the same instruction follows",
    "unknown": "no loss mask tells who wrote it",
}


def gather(
    forest: PrefixForest,
    whole: Rollouts,
    rollouts: Rollouts,
    chat: ChatTokenizer | None,
    *,
    near_misses: int,
    model: str | None,
    ranks: int | None,
    checkpointing: bool,
) -> dict[str, Any]:
    """Collects the facts of a report, ready for JSON; None for those that were not asked for.

    Args:
        whole: the rollouts as they were read. rollouts: these, or their turns.
        chat: decodes what is quoted.
    """
    with status("sharing"):
        facts = measure.measure(forest)
        facts["turns"] = measure.measure_turns(whole)
        if rollouts.images:
            facts["images"] = measure.measure_images(forest, rollouts)
        facts["routes"] = measure.measure_routes(rollouts)
    facts |= dict.fromkeys(("groups", "near_misses", "estimate", "ranks"))
    if rollouts.groups is not None:
        with status("groups"):
            facts["groups"] = measure.measure_groups(forest, rollouts, chat)
    if near_misses:
        misses = find_near_misses(forest, rollouts, tokenizer=chat, most=near_misses, watch=steps)
        facts["near_misses"] = near_miss_facts(misses, rollouts)
    cost = None
    if model is not None:
        with status("estimate"):
            cost, memory = estimate.read_cost(model), estimate.read_memory(model)
            facts["estimate"] = estimate.estimate(
                forest, rollouts, cost, memory, checkpointing=checkpointing
            )
    if ranks is not None:
        with status("ranks"):
            facts["ranks"] = estimate.predict_ranks(
                forest, rollouts, ranks, cost, checkpointing=checkpointing
            )
    return facts


def show(facts: dict[str, Any], console: Console, source: str, per_turn: bool) -> None:
    """Prints what `gather` found; `per_turn` tells of what."""
    unit = "one sequence per assistant turn" if per_turn else "one sequence per rollout"
    show_measured(facts, console, f"{source}, {unit}", per_turn)
    if facts["groups"] is not None:
        show_groups(facts["groups"], facts["tokens"]["distinct"], console)
    if facts["near_misses"] is not None:
        show_near_misses(facts["near_misses"], console)
    if facts["estimate"] is not None:
        show_estimate(facts["estimate"], console, facts.get("images"))
    if facts["ranks"] is not None:
        show_ranks(facts["ranks"], console)


def show_measured(facts: dict[str, Any], console: Console, title: str, per_turn: bool) -> None:
    """Prints what `measure` and `measure_turns` found; `per_turn` is the unit of the first."""
    tokens, attention, branching = facts["tokens"], facts["attention"], facts["branching"]
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    table.add_row("sequences", f"{facts['sequences']:,}", "")
    table.add_row("sequence lengths", *_spread_cells(facts["sequence_length"]))
    table.add_row("replicated tokens", f"{tokens['replicated']:,}", "computed without sharing")
    table.add_row("distinct tokens", f"{tokens['distinct']:,}", "computed by prefixtree")
    table.add_row("token ratio", f"{tokens['ratio']:.2f}x", "replicated / distinct")
    if (turns := facts["turns"]) is not None:
        other = "rollout" if per_turn else "turn"
        figures = turns[f"per_{other}"]
        how = "without --per-turn" if per_turn else "--per-turn"
        table.add_row(
            f"token ratio per {other}",
            f"{figures['tokens']['ratio']:.2f}x",
            f"{figures['tokens']['replicated']:,} / {figures['tokens']['distinct']:,} tokens of "
            f"{figures['sequences']:,} sequences ({how})",
        )
    if (routes := facts["routes"]) is not None:
        lost = routes["distinct"] - routes["distinct_without_routes"]
        whose = "" if routes["sequences"] == facts["sequences"] else f" of {routes['sequences']:,}"
        table.add_row(
            "with recorded routes",
            f"{routes['ratio']:.2f}x",
            f"{routes['distinct']:,} distinct tokens{whose}: {lost:,} are shared no more, where "
            "other experts ran",
        )
    table.add_row(
        "attention FLOP ratio",
        f"{attention['flop_ratio']:.2f}x",
        f"{attention['replicated_pairs']:.3g} / {attention['packed_pairs']:.3g} query-key pairs",
    )
    if images := facts.get("images"):
        _add_images(table, images)
    table.add_section()
    table.add_row("trees", f"{facts['trees']:,}", "")
    table.add_row("nodes", f"{facts['nodes']:,}", f"{facts['leaves']:,} of them leaves")
    table.add_row("levels", f"{facts['levels']:,}", "nodes on the path that has most")
    table.add_row(
        "children",
        f"{branching['mean_children']:.2f}",
        f"mean of {branching['nodes']:,} branching nodes, most {branching['max_children']:,}",
    )
    table.add_row("node lengths", *_spread_cells(facts["node_length"]))
    console.print(table)


def _add_images(table: Table, facts: dict[str, Any]) -> None:
    images, tokens, patches = facts["images"], facts["tokens"], facts["patches"]
    table.add_section()
    table.add_row(
        "images",
        f"{images['replicated']:,}",
        f"{patches['replicated']:,} patches to encode without sharing",
    )
    table.add_row(
        "distinct images",
        f"{images['distinct']:,}",
        f"{patches['distinct']:,} patches; they stand in {images['packed']:,} places of the forest",
    )
    table.add_row("image ratio", f"{facts['ratio']:.2f}x", "patches, without sharing / distinct")
    table.add_row(
        "tokens of images",
        f"{tokens['replicated']:,}",
        f"of the replicated tokens, {tokens['packed']:,} of the distinct ones",
    )


def show_groups(groups: dict[str, Any], distinct: int, console: Console) -> None:
    """Prints what `measure_groups` found; `distinct` are the forest's tokens."""
    ratio = groups["ratio"]
    console.print(
        f"\n[bold]{groups['groups']:,} groups[/]: token ratio {ratio['mean']:.2f}x in the mean, "
        f"{ratio['min']:.2f}x to {ratio['max']:.2f}x, median {ratio['median']:.2f}x; sharing "
        f"across groups saves another {groups['across']:,} tokens "
        f"({groups['across'] / (groups['across'] + distinct):.0%})"
    )
    if groups["first_forks"]:
        parts = ", ".join(
            f"{_KINDS.get(name, f'{name} message')} ({n:,})"
            for name, n in groups["first_forks"].items()
        )
        console.print(f"what parts the rollouts of a group first: {escape(parts)}")
    table = Table("group", "sequences", "tokens", "distinct", "ratio", "first fork at token")
    for column in table.columns[1:5]:
        column.justify = "right"
    for entries in (groups["best"], groups["worst"]):
        for entry in entries:
            fork = entry["first_fork"]
            table.add_row(
                escape(str(entry["group"])),
                f"{entry['sequences']:,}",
                f"{entry['replicated']:,}",
                f"{entry['distinct']:,}",
                f"{entry['ratio']:.2f}x",
                "never" if fork is None else f"{fork['position']:,}, {_place(fork)}",
            )
        table.add_section()
    console.print(table)


def show_near_misses(facts: dict[str, Any], console: Console) -> None:
    """Prints `near_miss_facts`."""
    if not facts["forks"]:
        console.print(
            "\n[bold]near misses[/]: none; no tokens that could be shared run again after a fork"
        )
        return
    whose = "at differences that the policy did not sample"
    if not facts["policy_tokens_known"]:
        whose = "without the differences (an upper bound: no loss mask tells what was sampled)"
    if sampled := facts["tokens_to_win_at_sampled_forks"]:
        whose += f", and {sampled:,} at forks where the policy's own tokens differ too"
    console.print(
        f"\n[bold]near misses[/]: after {facts['forks']:,} forks the same tokens run again; "
        f"{facts['tokens_to_win']:,} tokens to win {whose}"
    )
    if moved := facts["tokens_of_instructions_behind_questions"]:
        console.print(
            f"instructions after questions: {moved:,} tokens, shared if they stood before"
        )
    for number, miss in enumerate(facts["largest"], 1):
        place = "" if miss["role"] is None else f", {_place(miss)}"
        console.print(
            f"\n{number:2}. {_gain(miss)} at token {miss['position']:,}{place}: {_who(miss)}"
        )
        unit = "" if miss["is_text"] else " ids"
        lengths = miss["lengths"]
        ours, theirs = (_quoted(text) for text in miss["texts"])
        console.print(f"    [dim]before{unit}[/] {_quoted(miss['before'])}", soft_wrap=True)
        console.print(f"    [red]one[/]    {ours} [dim]{lengths[0]:,} tokens[/]", soft_wrap=True)
        console.print(
            f"    [green]other[/]  {theirs} [dim]{lengths[1]:,} tokens[/]", soft_wrap=True
        )
        console.print(f"    [dim]after{unit}[/]  {_quoted(miss['after'])}", soft_wrap=True)
        if miss["remedy"] is not None:
            console.print(f"    [bold]do[/]     {miss['remedy']}", soft_wrap=True)


def show_estimate(
    facts: dict[str, Any], console: Console, images: dict[str, Any] | None = None
) -> None:
    """Prints what `estimate` found; `images` is what `measure_images` found."""
    short = "with" if facts["gradient_checkpointing"] else "without"
    table = Table(
        "one update, estimated",
        "replicated",
        "packed",
        "ratio",
        title=f"\n{facts['model_type']}, {facts['parameters']:,} parameters of "
        f"{facts['element_bytes']} bytes, {short} gradient checkpointing",
        title_justify="left",
    )
    sides = facts["replicated"], facts["packed"]
    rows = [
        ("linear layers, PFLOP", "linear_flops", 1e15),
        ("attention, PFLOP", "attention_flops", 1e15),
        ("recurrences, PFLOP", "state_flops", 1e15),
        ("lm_head, PFLOP", "head_flops", 1e15),
        ("together, PFLOP", "flops", 1e15),
        ("activations of all tokens at once, GiB", "activation_bytes", _GIB),
    ]
    if not facts["replicated"]["state_flops"]:
        rows = [row for row in rows if row[1] != "state_flops"]
    if sides[0]["activation_bytes"] is None:
        rows.pop()
    for name, key, unit in rows:
        replicated, packed = (side[key] / unit for side in sides)
        ratio = f"{replicated / packed:.2f}x" if packed else "-"
        table.add_row(name, f"{replicated:,.4g}", f"{packed:,.4g}", ratio)
    for column in table.columns[1:]:
        column.justify = "right"
    console.print(table)
    console.print(
        f"estimated speed-up [bold]{facts['speedup']:.2f}x[/]; weights and gradients take "
        f"{facts['fixed_bytes'] / _GIB:,.2f} GiB on both sides"
    )
    if images is not None:
        console.print(
            "the estimate leaves out the vision encoder, whose patches get "
            f"{images['ratio']:.2f}x fewer"
        )
    for fit in facts["fits"]:
        console.print(
            f"distinct tokens of a micro-batch that fit beside them into {fit['gpu']}: "
            f"{fit['nothing']:,} with nothing recomputed, {fit['all']:,} with every layer"
        )


def _place(difference: dict[str, Any]) -> str:
    if difference["role"] is None:
        return _KINDS[difference["kind"]]
    return escape(f"message {difference['message']} ({difference['role']})")


def _gain(miss: dict[str, Any]) -> str:
    if miss["kind"] == "question":
        return f"[bold]{miss['tokens_to_win']:,} tokens of an instruction run again[/]"
    if not miss["can_be_won"]:
        return f"[bold]{miss['tokens_to_win']:,} tokens run again[/], which cannot be won,"
    return (
        f"[bold]{miss['tokens_to_win']:,} tokens to win[/] "
        f"({miss['by_this_difference_alone']:,} by this difference alone)"
    )


def _who(miss: dict[str, Any]) -> str:
    return f"{_KINDS[miss['kind']]}; {escape(' and '.join(miss['rollouts']))}"


def _quoted(text: str) -> str:
    return escape(repr(text))


def _spread_cells(spread: dict[str, Any]) -> tuple[str, str]:
    return (
        f"{spread['mean']:,.0f}",
        f"mean; {spread['min']:,} to {spread['max']:,}, median {spread['median']:,.0f}",
    )


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
        ("rows imported, per layer", "received_rows", 1, ",.0f"),
        ("rows exported, per layer", "sent_rows", 1, ",.0f"),
        ("MiB received and returned", "received_bytes", _MIB, ",.1f"),
    ]
    for name, key, unit, form in rows:
        values = [value / unit for value in facts[key]]
        largest, mean = max(values), sum(values) / len(values)
        ratio = f"{largest / mean:.3f}" if mean else "-"
        table.add_row(name, f"{largest:{form}}", f"{mean:{form}}", ratio)
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
