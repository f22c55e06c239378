"""Hypothesis strategies and builders shared by the tests, and the definitions they check against.

A definition here is written pair by pair or token by token, without the arrays it checks.
"""

from __future__ import annotations

from typing import Any

import networkx
import numpy as np
import torch
from hypothesis import strategies as st

from prefixtree import MicroBatch, MicroBatchPlan, PackedForest, PrefixForest, TreeMask, pack
from prefixtree.planning.division import Division
from prefixtree.planning.parts import Parts

Sequences = list[list[int]]
_KINDS = ("scattered", "runs", "one part", "one token", "chunks")


@st.composite
def token_sequences(draw: st.DrawFn, max_sequences: int = 8, max_length: int = 9) -> Sequences:
    """Sequences over three tokens: they branch, repeat, end inside and extend one another."""
    token = st.integers(0, 2)
    sequences: Sequences = []
    for _ in range(draw(st.integers(1, max_sequences))):
        prefix: list[int] = []
        if sequences and draw(st.booleans()):
            model = draw(st.sampled_from(sequences))
            prefix = model[: draw(st.integers(1, len(model)))]
        least = 0 if prefix else 1
        sequences.append(prefix + draw(st.lists(token, min_size=least, max_size=max_length)))
    return sequences


@st.composite
def tree_arguments(
    draw: st.DrawFn, max_nodes: int = 10, max_length: int = 6, with_tokens: bool = True
) -> dict[str, Any]:
    """Keyword arguments for `from_parents`: nodes in any order, sequences that end anywhere."""
    n = draw(st.integers(1, max_nodes))
    parents = [-1, *[draw(st.integers(-1, i - 1)) for i in range(1, n)]]
    name = draw(st.permutations(range(n)))
    shuffled = np.empty(n, np.int64)
    for node, parent in enumerate(parents):
        shuffled[name[node]] = -1 if parent < 0 else name[parent]
    lengths = draw(st.lists(st.integers(1, max_length), min_size=n, max_size=n))
    leaves = sorted(set(range(n)) - set(shuffled.tolist()))
    extra = draw(st.lists(st.integers(0, n - 1), max_size=3))
    out: dict[str, Any] = {
        "parents": shuffled,
        "lengths": np.array(lengths),
        "sequence_ends": draw(st.permutations(leaves + extra)),
        "order": draw(st.sampled_from(["heaviest", "input"])),
    }
    if with_tokens:
        out["tokens"] = np.arange(sum(lengths)) * 7
    return out


@st.composite
def forests(draw: st.DrawFn, max_nodes: int = 10, max_length: int = 6) -> PrefixForest:
    """Forests of any structure in which every token has another id."""
    return PrefixForest.from_parents(**draw(tree_arguments(max_nodes, max_length)))


@st.composite
def query_ranges(draw: st.DrawFn, num_tokens: int, max_ranges: int = 3) -> list[tuple[int, int]]:
    """Ascending, separate, non-empty runs of packed tokens; may be none at all."""
    ranges = []
    for _ in range(draw(st.integers(0, max_ranges))):
        last = ranges[-1][1] if ranges else 0
        if last < num_tokens:
            start = draw(st.integers(last, num_tokens - 1))
            ranges.append((start, draw(st.integers(start + 1, num_tokens))))
    return ranges


def random_forest(rng: np.random.Generator, max_nodes: int, max_length: int) -> PrefixForest:
    """A forest of up to `max_nodes` nodes, some of them further roots."""
    n = int(rng.integers(1, max_nodes + 1))
    parents = [int(rng.integers(-1, i)) if rng.random() < 0.9 else -1 for i in range(n)]
    lengths = rng.integers(1, max_length + 1, n)
    return PrefixForest.from_parents(parents, lengths, order=str(rng.choice(["heaviest", "input"])))


def random_owner(rng: np.random.Generator, num_tokens: int, num_parts: int, kind: str):
    """An owner per token: by token, by runs, all one part's, all but one token, or in chunks."""
    if kind == "scattered":
        return rng.integers(0, num_parts, num_tokens)
    if kind == "runs":
        runs = rng.integers(1, 6, num_tokens)
        return np.repeat(rng.integers(0, num_parts, num_tokens), runs)[:num_tokens]
    owner = np.full(num_tokens, rng.integers(num_parts))
    if kind == "one token":
        owner[rng.integers(num_tokens)] = rng.integers(num_parts)
    if kind == "chunks":
        owner = np.arange(num_tokens) * num_parts // num_tokens
    return owner


@st.composite
def divisions(draw: st.DrawFn) -> Parts:
    """Forests of any structure, padded or not, divided among 1 to 5 parts in any way."""
    packed = pack(draw(forests(max_nodes=8)), draw(st.sampled_from([None, 4])))
    num_parts = draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    owner = random_owner(rng, packed.num_tokens, num_parts, draw(st.sampled_from(_KINDS)))
    return Parts(packed, owner, num_parts)


def drawn_division(draw: st.DrawFn) -> Division:
    """A small forest divided among 1 to 4 slots and 1 to 3 ranks, in any way that keeps the order
    of slots."""
    packed = pack(draw(forests(max_nodes=8)), draw(st.sampled_from([None, 4])))
    ranks, slots = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rank = random_owner(rng, packed.num_tokens, ranks, draw(st.sampled_from(_KINDS)))
    slot = random_owner(rng, packed.num_tokens, slots, draw(st.sampled_from(_KINDS)))
    for token, above in enumerate(packed.mask.host.predictor.tolist()):
        if above >= 0:
            slot[token] = max(slot[token], slot[above])
    return Division(Parts(packed, slot * ranks + rank, slots * ranks), ranks)


def subtree_ends(forest: PrefixForest) -> np.ndarray:
    """subtree_end of every token, int32 [T]."""
    return np.repeat(forest.node_subtree_end, forest.node_length)


def mask_of(forest: PrefixForest) -> TreeMask:
    """The forest's mask alone."""
    return TreeMask(subtree_ends(forest))


def many_trees(seed: int, prompts: int, responses: int) -> list[np.ndarray]:
    """Prompts of 21 to 60 tokens, no two alike, with responses of 5 to 79 tokens."""
    rng = np.random.default_rng(seed)
    sequences = []
    for first in range(prompts):
        prompt = np.append(first, rng.integers(0, 1000, rng.integers(20, 60)))
        for length in rng.integers(5, 80, responses):
            sequences.append(np.concatenate([prompt, rng.integers(0, 1000, length)]))
    return sequences


def batches_of(plan: MicroBatchPlan) -> list[MicroBatch]:
    """All micro-batches that hold something."""
    return [batch for rank in plan for batch in rank if not batch.is_empty]


def indices_of(plan: MicroBatchPlan) -> list[list[list[int]]]:
    """The sequences of every step of every rank."""
    return [[batch.sequence_indices.tolist() for batch in rank] for rank in plan]


# ---- definitions ---------------------------------------------------------------------------------


def packed_path(forest: PrefixForest, sequence: int) -> np.ndarray:
    """Packed index of each token of a sequence, along `forest.path`."""
    runs = [
        np.arange(forest.node_start[n], forest.node_start[n] + forest.node_length[n])
        for n in forest.path(sequence)
    ]
    return np.concatenate(runs)


def sequences_of(forest: PrefixForest) -> Sequences:
    """Every sequence's tokens, along `forest.path`."""
    return [forest.tokens[packed_path(forest, s)].tolist() for s in range(forest.num_sequences)]


def ancestors_or_self(forest: PrefixForest) -> np.ndarray:
    """bool [T, T]: token q's path holds token k, from the sequences' paths."""
    visible = np.zeros((forest.num_tokens, forest.num_tokens), bool)
    for s in range(forest.num_sequences):
        path = packed_path(forest, s)
        for i, q in enumerate(path):
            visible[q, path[: i + 1]] = True
    return visible


def positions_of(forest: PrefixForest) -> np.ndarray:
    """Each packed token's place in its sequences [T]."""
    out = np.full(forest.num_tokens, -1)
    for s in range(forest.num_sequences):
        path = packed_path(forest, s)
        out[path] = np.arange(len(path))
    return out


def predictors_of(forest: PrefixForest) -> np.ndarray:
    """The token before each packed token on its path [T], -1 at the first of a path."""
    out = np.full(forest.num_tokens, -1)
    for s in range(forest.num_sequences):
        path = packed_path(forest, s)
        out[path[1:]] = path[:-1]
    return out


def trie_size(sequences: Sequences) -> int:
    """Nodes of a token trie, by networkx."""
    # less its root and the node behind every end
    return len(networkx.prefix_tree(sequences)) - 2


def summed_over_copies(packed: PackedForest, copies: list[torch.Tensor]) -> torch.Tensor:
    """float64 [T, ...]: per packed token, the sum over its copies in the sequences."""
    out = torch.zeros(packed.num_tokens, *copies[0].shape[1:], dtype=torch.float64)
    for s, copy in enumerate(copies):
        for i, t in enumerate(packed_path(packed.forest, s)):
            out[t] += copy[i].double()
    return out
