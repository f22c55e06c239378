"""`prefixtree report`: what a file of rollouts shares."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from prefixtree.forest import PrefixForest


def measure(forest: PrefixForest) -> dict[str, Any]:
    """The figures of a forest as plain numbers, ready for JSON."""
    parent, length = forest.node_parent, forest.node_length.astype(np.int64)
    children = np.bincount(parent[parent >= 0], minlength=forest.num_nodes)
    branching = children[children > 1]
    sequence_lengths = forest.sequence_lengths
    # a token attends to its position + 1 keys; summed over a node that is a trapezoid
    packed_pairs = int((length * forest.node_depth + length * (length + 1) // 2).sum())
    replicated_pairs = int((sequence_lengths * (sequence_lengths + 1) // 2).sum())
    return {
        "sequences": forest.num_sequences,
        "tokens": {
            "replicated": forest.num_replicated_tokens,
            "distinct": forest.num_tokens,
            "ratio": forest.replication_ratio,
        },
        "attention": {
            "replicated_pairs": replicated_pairs,
            "packed_pairs": packed_pairs,
            "flop_ratio": replicated_pairs / packed_pairs,
        },
        "sequence_length": _spread(sequence_lengths),
        "nodes": forest.num_nodes,
        "trees": int((parent < 0).sum()),
        "leaves": int((children == 0).sum()),
        "depth": forest.depth,
        "branching": {
            "nodes": len(branching),
            "mean_children": float(branching.mean()) if len(branching) else 0.0,
            "max_children": int(branching.max(initial=0)),
        },
        "node_length": _spread(length),
    }


def show(facts: dict[str, Any], console: Console, title: str) -> None:
    """Prints what `measure` found."""
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
    table.add_row(
        "attention FLOP ratio",
        f"{attention['flop_ratio']:.2f}x",
        f"{attention['replicated_pairs']:.3g} / {attention['packed_pairs']:.3g} query-key pairs",
    )
    table.add_section()
    table.add_row("trees", f"{facts['trees']:,}", "")
    table.add_row("nodes", f"{facts['nodes']:,}", f"{facts['leaves']:,} of them leaves")
    table.add_row("depth", f"{facts['depth']:,}", "nodes on the longest path")
    table.add_row(
        "children",
        f"{branching['mean_children']:.2f}",
        f"mean of {branching['nodes']:,} branching nodes, most {branching['max_children']:,}",
    )
    table.add_row("node lengths", *_spread_cells(facts["node_length"]))
    console.print(table)


def _spread(lengths: np.ndarray) -> dict[str, Any]:
    return {
        "min": int(lengths.min()),
        "median": float(np.median(lengths)),
        "mean": float(lengths.mean()),
        "max": int(lengths.max()),
    }


def _spread_cells(spread: dict[str, Any]) -> tuple[str, str]:
    return (
        f"{spread['mean']:,.0f}",
        f"mean; {spread['min']:,} to {spread['max']:,}, median {spread['median']:,.0f}",
    )
