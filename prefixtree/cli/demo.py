"""`prefixtree demo`: one policy-gradient update on embedded rollouts, replicated and packed."""

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from prefixtree import PackedForest, PrefixForest, pack
from prefixtree.cli.compare import (
    Objective,
    Run,
    gradient_differences,
    run_packed,
    run_replicated,
    scored_tokens,
    worst_difference,
)
from prefixtree.cli.console import status, steps
from prefixtree.cli.desk import VOCABULARY, decode
from prefixtree.cli.report import measure

_REPEATS = 3
_LIMIT = 1e-4
_ENTROPY_BONUS = 0.01
_SNIPPET = 44


class Batch:
    """The update's training sequences: one per assistant turn, scored on that turn's tokens.

    Attributes:
        sequences: token ids of each turn's history and the turn itself.
        loss_masks: true on the turn's own tokens.
        objective: policy gradient with advantages normalised within each task, GRPO's way, and a
            small entropy bonus, averaged over the scored tokens.
    """

    def __init__(self, rollouts: list[dict[str, Any]]) -> None:
        rewards = np.array([row["reward"] for row in rollouts])
        groups = np.array([row["group"] for row in rollouts])
        self.sequences: list[np.ndarray] = []
        self.loss_masks: list[np.ndarray] = []
        advantages = []
        for row, reward in zip(rollouts, rewards, strict=True):
            peers = rewards[groups == row["group"]]
            tokens, mask = np.array(row["token_ids"]), np.array(row["loss_mask"], bool)
            for begin, end in zip([0, *row["turn_ends"]], row["turn_ends"], strict=False):
                self.sequences.append(tokens[:end])
                self.loss_masks.append(mask[:end] & (np.arange(end) >= begin))
                advantages.append((reward - peers.mean()) / (peers.std() + 1e-6))
        scored = scored_tokens(self.sequences, self.loss_masks)
        total = sum(int(s.sum()) for s in scored)
        self.objective = Objective(
            scored,
            [s * float(-a / total) for s, a in zip(scored, advantages, strict=True)],
            [s * (-_ENTROPY_BONUS / total) for s in scored],
        )


def update(rollouts: list[dict[str, Any]], seed: int) -> dict[str, Any]:
    """Runs the update both ways, `_REPEATS` times each after a warm-up; ready for JSON."""
    batch = Batch(rollouts)
    forest = PrefixForest.from_sequences(batch.sequences)
    with status("packing"):
        models = {name: _model(name, seed) for name in ("sdpa", "prefixtree")}
        packed_forest = pack(forest)
        _packed(models["prefixtree"], packed_forest, batch)
        run_replicated(models["sdpa"], batch.sequences[:1], batch.objective.take(0))
    replicated, packed = [], []
    for _ in steps(range(_REPEATS), "replicated, then packed", _REPEATS):
        replicated.append(run_replicated(models["sdpa"], batch.sequences, batch.objective))
        packed.append(_packed(models["prefixtree"], packed_forest, batch))
    a, b = replicated[-1], packed[-1]
    gradients = gradient_differences(b.gradients, a.gradients)
    differences = {
        "loss": abs(a.loss - b.loss) / abs(a.loss),
        "logprobs": worst_difference(b.logprobs, a.logprobs),
        "entropy": worst_difference(b.entropy, a.entropy),
        "gradients": max(gradients.values()),
    }
    seconds = {
        name: statistics.median(run.seconds for run in runs)
        for name, runs in (("replicated", replicated), ("packed", packed))
    }
    # max() and <= let no infinity through; a not-a-number loss is caught here
    passed = all(math.isfinite(d) and d <= _LIMIT for d in differences.values())
    return {
        "passed": passed,
        "seed": seed,
        "parameters": sum(p.numel() for p in models["sdpa"].parameters()),
        "tasks": len({row["group"] for row in rollouts}),
        "rollouts": len(rollouts),
        "mean_reward": statistics.mean(row["reward"] for row in rollouts),
        "scored_tokens": sum(int(s.sum()) for s in batch.objective.scored),
        "forest": measure(forest),
        "loss": {"replicated": a.loss, "packed": b.loss},
        "gradient_norm": {"replicated": _norm(a), "packed": _norm(b)},
        "differences": {n: d if math.isfinite(d) else None for n, d in differences.items()},
        "limit": _LIMIT,
        "seconds": seconds,
        "repeats": _REPEATS,
        # a speed-up of a wrong result is none
        "speedup": seconds["replicated"] / seconds["packed"] if passed else None,
    }


def picture(rollouts: list[dict[str, Any]]) -> Tree:
    """The first task's rollouts as a tree: where its trials part, how each branch begins."""
    rows = [row for row in rollouts if row["group"] == rollouts[0]["group"]]
    forest = PrefixForest.from_sequences([row["token_ids"] for row in rows])
    assert forest.tokens is not None
    nodes: list[Tree] = []
    top = Tree(f"[bold]{rows[0]['group']}[/]: {len(rows)} trials", guide_style="dim")
    for n in range(forest.num_nodes):
        start, length = int(forest.node_start[n]), int(forest.node_length[n])
        text = decode(forest.tokens[start : start + length].tolist())
        ending = [rows[s] for s in np.flatnonzero(forest.sequence_node == n)]
        label = Text.assemble(
            (f"{length:,} tokens", "cyan"),
            *((f", reward {row['reward']:g}", _colour(row["reward"])) for row in ending),
            (f"  {_snippet(text)}", "dim"),
            no_wrap=True,
            overflow="ellipsis",
        )
        parent = int(forest.node_parent[n])
        nodes.append((top if parent < 0 else nodes[parent]).add(label))
    return top


def show(facts: dict[str, Any], rollouts: list[dict[str, Any]], console: Console) -> None:
    """Prints the first task's tree, what is shared, and the two updates side by side."""
    forest = facts["forest"]
    console.print(
        f"A refund desk with tools: {facts['tasks']} tasks, {facts['rollouts']} rollouts, "
        f"mean reward {facts['mean_reward']:.2f}. One training sequence per assistant "
        f"turn makes {forest['sequences']} sequences of {forest['tokens']['replicated']:,} tokens; "
        f"only {forest['tokens']['distinct']:,} of them are distinct.\n"
    )
    console.print(picture(rollouts))
    table = Table(
        "one policy-gradient update",
        "replicated",
        "packed",
        "",
        title=f"\nA Qwen3 of {facts['parameters']:,} random weights, float32, this CPU",
        title_justify="left",
    )
    for column in table.columns[1:]:
        column.justify = "right"
    seconds, tokens, attention = facts["seconds"], forest["tokens"], forest["attention"]
    sides = ("replicated", "packed")
    for name, key in (("loss", "loss"), ("gradient norm", "gradient_norm")):
        table.add_row(name, *(f"{facts[key][side]:.9f}" for side in sides), "")
    for name, difference in facts["differences"].items():
        shown = "not finite" if difference is None else f"{difference:.1e}"
        kind = "relative" if name in ("loss", "gradients") else "absolute"
        table.add_row(f"worst difference, {name}", "", shown, f"[dim]{kind}[/]")
    table.add_section()
    table.add_row(
        "tokens computed",
        f"{tokens['replicated']:,}",
        f"{tokens['distinct']:,}",
        f"[bold]{tokens['ratio']:.1f}x fewer[/]",
    )
    table.add_row(
        "query-key pairs",
        *(f"{attention[side + '_pairs']:,}" for side in sides),
        f"[bold]{attention['flop_ratio']:.1f}x fewer[/]",
    )
    table.add_row(
        f"seconds, median of {facts['repeats']}",
        *(f"{seconds[side]:.2f}" for side in sides),
        f"[bold]{facts['speedup']:.1f}x faster[/]" if facts["speedup"] else "",
    )
    console.print(table)
    console.print(
        f"[bold green]The same update[/], to float32 rounding (limit {facts['limit']:g})."
        if facts["passed"]
        else f"[bold red]The updates differ[/] by more than {facts['limit']:g}."
    )


def _model(attention: str, seed: int) -> Any:
    from transformers import AutoModelForCausalLM, Qwen3Config

    import prefixtree.integrations.transformers  # noqa: F401  registers "prefixtree"

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        # lively enough that a wrong mask would show in every figure
        initializer_range=0.1,
    )
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def _packed(model: Any, packed: PackedForest, batch: Batch) -> Run:
    return run_packed(model, packed, batch.objective, batch.loss_masks)


def _norm(run: Run) -> float:
    return math.hypot(*(float(g.norm()) for g in run.gradients.values() if g is not None))


def _snippet(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _SNIPPET else f"{text[: _SNIPPET - 1]}…"


def _colour(reward: float) -> str:
    return "bold green" if reward > 0 else "bold red"
