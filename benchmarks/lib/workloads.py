"""The eleven forests every benchmark of this project uses, by name.

Ten are synthetic and need nothing; "airline per turn" reads a JSONL file of rollouts.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from prefixtree import PrefixForest

AIRLINE = "airline per turn"
RAGGED = "documents 32 x 256-8192"

# a tree is (tokens, [children])
Tree = tuple[int, list[Any]]


def single(prompt: int, responses: int, response: int) -> list[Tree]:
    """One prompt with equal responses: DualKV's case."""
    return [(prompt, [(response, []) for _ in range(responses)])]


def full(lengths: list[int], branching: list[int]) -> list[Tree]:
    """A tree in which every node of level k has `branching[k]` children."""

    def level(k: int) -> Tree:
        last = k + 1 == len(lengths)
        return lengths[k], [] if last else [level(k + 1) for _ in range(branching[k])]

    return [level(0)]


def caterpillar(turns: int, spine: int, leaf: int, root: int, trials: int) -> list[Tree]:
    """Agent histories whose thinking is stripped: every turn leaves a leaf and goes on along the
    spine. Lengths vary by half, from a fixed seed.
    """
    rng = np.random.default_rng(0)

    def about(tokens: int) -> int:
        return max(1, int(tokens * (1 + 0.5 * (rng.random() * 2 - 1))))

    def turn(left: int) -> list[Tree]:
        if left == 0:
            return [(about(leaf), [])]
        return [(about(leaf), []), (about(spine), turn(left - 1))]

    return [(root, [(about(spine), turn(turns)) for _ in range(trials)])]


def code_agents(order: str = "heaviest") -> PrefixForest:
    """A code agent whose observations are elided behind its next turn, and 12 sub-agents.

    The agent's trunk, a system prompt of 7,321 tokens and 57 turns of what stays, has a branch at
    every turn: the whole observation and the reply to it, which are trained on. Sub-agents share a
    system prompt; most of their turns go on from the one before, and at 3 or 4 each branches. A
    sequence ends at every turn, and 6 of the sub-agents' last turns were drawn twice. In all 233
    sequences of 1.32M tokens, 147K of them distinct, in 285 nodes of 3 to 7,321 tokens (median
    427), 58 levels, 101 branching nodes; the longest sequence has 13.7K.
    """
    rng = np.random.default_rng(0)
    parents, lengths, ends = [-1], [7321], list[int]()

    def add(parent: int, median: float, spread: float) -> int:
        parents.append(parent)
        lengths.append(max(1, round(median * float(np.exp(spread * rng.standard_normal())))))
        return len(parents) - 1

    spine = 0
    for _ in range(57):
        ends.append(add(spine, _BRANCH, 0.4))
        spine = add(spine, _SPINE, 1.2)
    ends.append(spine)
    prompt = len(parents)
    parents.append(-1)
    lengths.append(_SUB_PROMPT)
    for agent in range(12):
        turn, branches, nodes = prompt, 4 if agent < 7 else 3, 15 if agent == 0 else 14
        for number in range(nodes - branches):
            turn = add(turn, _TURN, 0.45)
            ends.append(turn)
            if number < branches:
                ends.append(add(turn, _TURN, 0.45))
        if agent % 2:
            ends.append(turn)
    return PrefixForest.from_parents(parents, lengths, sequence_ends=ends, order=order)


# median lengths of its nodes
_BRANCH, _SPINE, _SUB_PROMPT, _TURN = 830, 44, 1300, 448


def ragged(count: int, low: int, high: int) -> list[Tree]:
    """Sequences that share nothing, of lengths from a fixed seed, both ends included."""
    return [(int(n), []) for n in np.random.default_rng(0).integers(low, high + 1, count)]


TREES: dict[str, Callable[[], list[Tree]]] = {
    "prompt 8K x 16 x 2K": lambda: single(8192, 16, 2048),
    "prompt 32K x 16 x 2K": lambda: single(32768, 16, 2048),
    "4K then 4-2-2-1 x 1K": lambda: full([4096, 1024, 1024, 1024, 1024], [4, 2, 2, 1]),
    "prompt 512 x 64 x 1K": lambda: single(512, 64, 1024),
    "8 x (2K, 8 x 512, 2 x 512)": lambda: [
        tree for _ in range(8) for tree in full([2048, 512, 512], [8, 2])
    ],
    "caterpillar 12": lambda: caterpillar(12, 250, 800, 1300, 8),
    "caterpillar 24": lambda: caterpillar(24, 120, 120, 1300, 16),
    "prompt 256 x 1024 x 256": lambda: single(256, 1024, 256),
    "documents 32 x 4K": lambda: [(4096, []) for _ in range(32)],
    RAGGED: lambda: ragged(32, 256, 8192),
}
NAMES = [*TREES, AIRLINE]


def forest_of(trees: list[Tree], order: str = "heaviest") -> PrefixForest:
    """Nested trees as a forest without token ids; siblings first-come as listed."""
    parents: list[int] = []
    lengths: list[int] = []
    pending = [(tree, -1) for tree in reversed(trees)]
    while pending:
        (length, children), parent = pending.pop()
        node = len(parents)
        parents.append(parent)
        lengths.append(length)
        pending += [(child, node) for child in reversed(children)]
    return PrefixForest.from_parents(parents, lengths, order=order)


def airline_sequences(rollouts: Path, tasks: int = 8) -> list[np.ndarray]:
    """A sequence per assistant turn of the first `tasks` groups."""
    sequences: list[np.ndarray] = []
    groups: set[str] = set()
    with gzip.open(rollouts, "rt") as lines:
        for line in lines:
            row = json.loads(line)
            if row["group"] not in groups and len(groups) == tasks:
                continue
            groups.add(row["group"])
            tokens = np.array(row["token_ids"])
            sequences += [tokens[:end] for end in row["turn_ends"]]
    return sequences


def workload(
    name: str, rollouts: Path | None = None, order: str = "heaviest", tasks: int = 8
) -> PrefixForest:
    """A forest by name.

    Args:
        name: one of NAMES.
        rollouts: the JSONL.gz file that "airline per turn" reads (`group`, `token_ids`,
            `turn_ends` per line).
        order: of siblings, as in `PrefixForest`.
        tasks: of "airline per turn", the first so many groups; the benchmark is all 8.
    """
    if name != AIRLINE:
        return forest_of(TREES[name](), order)
    if rollouts is None:
        raise ValueError(f"{AIRLINE!r} reads a file of rollouts: give its path")
    return PrefixForest.from_sequences(airline_sequences(rollouts, tasks), order=order)


def skip_airline(options: argparse.Namespace) -> None:
    """Without a file of rollouts the workload that reads it goes to those skipped, said so."""
    if AIRLINE in options.workloads and options.rollouts is None:
        options.workloads = [name for name in options.workloads if name != AIRLINE]
        options.skipped.append(AIRLINE)
        print(f"{AIRLINE!r} was skipped: give --rollouts")


def scaled(forest: PrefixForest, scale: float, order: str) -> PrefixForest:
    """The same tree with every node `scale` as long, one token at least."""
    if scale == 1:
        return forest
    lengths = np.maximum(1, (forest.node_length * scale).astype(np.int64))
    return PrefixForest.from_parents(
        forest.node_parent, lengths, sequence_ends=forest.sequence_node, order=order
    )
