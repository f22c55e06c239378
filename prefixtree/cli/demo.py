"""Output of `prefixtree demo`: the first task's tree, the updates both ways, what was learnt."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from prefixtree.demo import depot
from prefixtree.demo.training import BRANCHING, EPOCHS, Turn


def picture(turns: list[Turn]) -> Tree:
    """One task's turns as a tree: what was said, and the mean reward of what came of it."""
    prompt = turns[0].tokens[: turns[0].begin]
    top = Tree(f"[bold]task 1[/] [dim]{len(prompt)} words: … {depot.decode(prompt[-12:])}[/]")
    _grow(top, turns)
    return top


def _grow(above: Tree, turns: list[Turn]) -> None:
    for turn in turns:
        reward = float(np.mean(turn.rewards))
        colour = "bold green" if reward > 0.5 else "yellow" if reward > 0.25 else "red"
        label = Text.assemble(
            (f"{reward:.2f}  ", colour), turn.words, no_wrap=True, overflow="ellipsis"
        )
        _grow(above.add(label), turn.children)


def show(
    facts: dict[str, Any], tree: list[Turn], console: Console, saved: Path | None = None
) -> None:
    """Prints the first task's tree, every update both ways, and what was learnt (`train`)."""
    forest = facts["forest"]
    tokens = forest["tokens"]
    console.print(
        f"A parcel depot with tools: {facts['tasks']} tasks, a turn continued "
        f"{' x '.join(str(b) for b in BRANCHING)} times, {facts['rollouts']} rollouts. One "
        f"training sequence per turn makes {forest['sequences']} sequences of "
        f"{tokens['replicated']:,} tokens; only {tokens['distinct']:,} of them are distinct "
        f"([bold]{tokens['ratio']:.1f}x[/]).\n"
    )
    console.print(picture(tree))
    console.print(_updates_table(facts))
    if not facts["passed"]:
        console.print(f"[bold red]The updates differ[/] by more than {facts['limit']:g}.")
        return
    console.print(
        f"[bold green]The same training, {facts['speedup']:.1f}x faster[/] "
        f"({facts['seconds']['replicated']:.1f} s → {facts['seconds']['packed']:.1f} s): after "
        f"{len(facts['updates'])} updates the two models' weights differ by "
        f"{facts['weights_difference']:.1e}."
    )
    if facts["pictures"]:
        console.print(f"Pictures of the first forest: {', '.join(facts['pictures'])}.")
    _show_learnt(facts["learnt"], console)
    _show_next(saved, console)


def _updates_table(facts: dict[str, Any]) -> Table:
    # not the loss: GRPO's is 0 in the first update of a batch, whatever its gradient
    table = Table(
        "update",
        "reward",
        "|gradient|, replicated",
        "|gradient|, packed",
        "gradients differ",
        "seconds",
        "packed",
        title=f"\nGRPO on a Qwen3 of {facts['parameters']:,} random weights, float32, this CPU",
        title_justify="left",
    )
    for column in table.columns:
        column.justify = "right"
    for number, update in enumerate(facts["updates"], 1):
        gap = update["differences"]["gradients"]
        table.add_row(
            str(number),
            f"{update['mean_reward']:.3f}",
            *(f"{update['gradient_norm'][side]:.6f}" for side in ("replicated", "packed")),
            f"{gap:.1e}" if math.isfinite(gap) else "not finite",
            *(f"{update['seconds'][side]:.2f}" for side in ("replicated", "packed")),
            end_section=number % EPOCHS == 0,
        )
    return table


def _show_learnt(learnt: dict[str, Any], console: Console) -> None:
    parcels, best = learnt["parcels_taken"], learnt["best"]
    console.print(
        f"\nThe packed model then went on alone for {learnt['seconds_alone']:.1f} s. Mean reward "
        f"per batch: {_course(learnt['mean_rewards'], '.2f')}. It is paid first for turns that "
        f"call a tool: {_course(learnt['tool_calls'], '.0%')} of them. In all, {sum(parcels):,} of "
        f"{len(parcels) * learnt['rollouts_per_batch']:,} rollouts took their parcel."
    )
    outcome = "took its parcel" if best["taken"] else "came nearest"
    console.print(
        f"\nA rollout of batch {best['batch']} that {outcome} (task {best['task']}, reward "
        f"{best['reward']:.2f}):"
    )
    console.print(f"  [dim]{best['customer']}[/]")
    for turn in best["turns"]:
        console.print(f"  [bold]agent :[/] {turn['agent']}")
        console.print(f"  depot : {turn['depot']}")


def _course(values: list[float], form: str) -> str:
    """The values from the first batch to the last."""
    first, *between, last = (f"{value:{form}}" for value in values)
    return " → ".join([f"[bold]{first}[/]", *between, f"[bold]{last}[/]"])


def _show_next(saved: Path | None, console: Console) -> None:
    """Commands to go on with; never wrapped, to be copied."""
    file = "rollouts.jsonl" if saved is None else str(saved)
    lines = [
        (f"prefixtree report {file} --per-turn", "what rollouts share, and what they fail to"),
        (f"prefixtree verify --model MODEL {file} --limit 16", "packing is exact for a model"),
    ]
    if saved is None:
        lines.insert(0, (f"prefixtree demo --save {file}", "these rollouts, or yours"))
    width = max(len(command) for command, _ in lines)
    console.print("\nNext:")
    for command, purpose in lines:
        console.print(Text(f"  {command:<{width}}  # {purpose}"), soft_wrap=True)
