"""Every way to run a forest x what users combine with it: the axes, and what a pair of levels is.

A case takes one level of every axis. A pair of levels is held by a case of `cases()`, refused by
name, or does not exist; `cell` says which.

How cases are drawn: every pair of levels of two axes that is neither refused nor absent stands in
one case at least. A case begins with the first pair that no case has yet; each further axis takes
the level that brings the most new pairs (the first of equals), and its first level, which goes with
everything, where none brings any. Compiled layers stand with one level at
most that gives them many graphs. `test_ways.py` counts the pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product

# the first level of an axis is the plain one, and goes with every other
AXES: dict[str, tuple[str, ...]] = {
    "way": (
        "one forward",
        "steps",
        "kept trunks",
        "again",
        "groups by parts",
        "groups by heads",
        "steps in groups",
        "steps in groups by heads",
        "values",
        "values in steps",
        "kept values",
    ),
    "layers": (
        "attention",
        "windows, softcap",
        "sinks",
        "latent attention",
        "experts",
        "indexers",
        "blocks that choose",
        "compressed keys",
        "delta rule",
        "Mamba-2",
        "convolutions",
        "images",
    ),
    "trained": (
        "everything",
        "frozen layers",
        "LoRA without the first layer",
        "QLoRA",
        "head alone",
        "embedding alone",
        "two vectors",
        "three of all",
        "no parameter",
    ),
    "recomputed": (
        "nothing asked",
        "checkpointing",
        "reentrant checkpointing",
        "nothing",
        "all_but_attention",
        "all",
        "auto",
        "compiled layers",
    ),
    "returned": (
        "log p",
        "entropies",
        "statistics",
        "entropies and statistics",
        "measure",
        "router loss",
    ),
    "scored": ("all tokens", "loss masks", "temperatures", "routes", "sampling masks"),
    "precision": ("float32", "float64", "bfloat16 autocast"),
    "event": (
        "none",
        "empty batch before",
        "exception in the middle",
        "two calls in flight",
        "no_grad before",
    ),
}


@dataclass(frozen=True)
class Refused:
    """A pair that is refused.

    Attributes:
        words: what the message holds. See docs/refusals.md.
    """

    words: str


@dataclass(frozen=True)
class Absent:
    """A pair that nobody can ask for, with the reason."""

    why: str


VALUES = ("values", "values in steps", "kept values")
STEPS = ("steps", "values in steps", "steps in groups", "steps in groups by heads")
KEPT = ("kept trunks", "again", "kept values")
STEPS_IN_GROUPS = ("steps in groups", "steps in groups by heads")
GROUPS = ("groups by parts", "groups by heads", *STEPS_IN_GROUPS)
#: Ways that share most of their code.
KINDS = {
    "at once": ("one forward", "values"),
    "in parts": ("steps", "values in steps", *KEPT),
    "groups": GROUPS,
}
_NO_DISTRIBUTION = Absent("a value has no distribution over tokens")
_NO_EXPERTS = Absent("no experts")

# by two levels; what is not here is held
CELLS: dict[tuple[str, str], Refused | Absent] = {
    **{(way, "compressed keys"): Refused("compress") for way in ("steps", *KEPT, *GROUPS)},
    **dict.fromkeys(
        product(
            VALUES,
            (
                *("entropies", "statistics", "entropies and statistics", "measure", "router loss"),
                *("loss masks", "temperatures", "routes", "sampling masks"),
            ),
        ),
        _NO_DISTRIBUTION,
    ),
    **dict.fromkeys(
        product(
            (layers for layers in AXES["layers"] if layers != "experts"), ("router loss", "routes")
        ),
        _NO_EXPERTS,
    ),
    **{(way, "two calls in flight"): Absent("micro-batches have turns") for way in KEPT},
    **{
        (way, layers): Absent("transformers has no classifier of them")
        for way, layers in product(
            VALUES,
            (
                *("indexers", "blocks that choose", "compressed keys"),
                *("Mamba-2", "convolutions", "images"),
            ),
        )
    },
    **{
        (way, level): Refused(words)
        for way in STEPS_IN_GROUPS
        for level, words in (
            ("images", "max_step_tokens and group together"),
            ("auto", "not planned"),
        )
    },
    ("router loss", "reentrant checkpointing"): Refused("reentrant checkpointing"),
    ("routes", "compiled layers"): Refused("not verified in compiled models"),
    ("QLoRA", "float64"): Absent("bitsandbytes has no kernels for float64"),
    ("no parameter", "reentrant checkpointing"): Absent("it asks embeddings for a gradient"),
}


def cell(first: str, second: str) -> Refused | Absent | None:
    """What a pair of levels is; None where it is held."""
    return CELLS.get((first, second)) or CELLS.get((second, first))


def goes(case: dict[str, str]) -> bool:
    """Whether all pairs of a case's levels are held."""
    return all(cell(a, b) is None for a, b in combinations(case.values(), 2))


# of compiled layers: levels with which each kind of layer has one graph, or few
_ONE_GRAPH = {
    "way": {"one forward", "values"},
    "layers": {"attention"},
    "trained": {"everything", "embedding alone"},
    "event": {"none", "exception in the middle", "two calls in flight"},
}


def _has_few_graphs(case: dict[str, str]) -> bool:
    """False where compiled layers would have many graphs, which take many seconds: for two
    reasons at once."""
    if case.get("recomputed") != "compiled layers":
        return True
    return sum(case[axis] not in one for axis, one in _ONE_GRAPH.items() if axis in case) <= 1


def pairs() -> list[tuple[tuple[str, str], tuple[str, str]]]:
    """Every two (axis, level) of two axes that are held."""
    return [
        ((one, a), (other, b))
        for one, other in combinations(AXES, 2)
        for a, b in product(AXES[one], AXES[other])
        if cell(a, b) is None
    ]


def pairs_of(case: dict[str, str]) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    """The pairs that a case holds, as `pairs` has them."""
    yield from combinations(case.items(), 2)


@cache
def cases() -> tuple[dict[str, str], ...]:
    """Cases that hold every pair; one level of every axis, in the order of AXES."""
    left = dict.fromkeys(pairs())
    found = []
    while left:
        chosen = dict(next(iter(left)))
        for axis, levels in AXES.items():
            if axis in chosen:
                continue
            new = {
                level: sum(
                    tuple(sorted([(axis, level), held], key=lambda x: [*AXES].index(x[0]))) in left
                    for held in chosen.items()
                )
                for level in levels
                if goes(with_it := {**chosen, axis: level}) and _has_few_graphs(with_it)
            }
            chosen[axis] = max(new, key=new.__getitem__)
        case = {axis: chosen[axis] for axis in AXES}
        found.append(case)
        for pair in pairs_of(case):
            left.pop(pair, None)
    return tuple(found)


@cache
def quick_cases() -> tuple[dict[str, str], ...]:
    """Cases that run every time: each level stands with each kind of way, and each way with one
    level of each other axis at least; compiled layers, which take seconds, with one forward of
    attention."""
    kinds = {way: kind for kind, ways in KINDS.items() for way in ways}
    drawn = [
        case
        for case in cases()
        if case["recomputed"] != "compiled layers" or case["layers"] == "attention"
    ]

    def shown(case: dict[str, str]) -> set[tuple[str, str]]:
        kind, way, *levels = kinds[case["way"]], *case.values()
        return {(kind, level) for level in levels} | {(way, axis) for axis in list(AXES)[1:]}

    left = {pair for case in drawn for pair in shown(case)}
    left -= {(kind, "compiled layers") for kind in KINDS if kind != "at once"}
    found = []
    while left:
        found.append(max(drawn, key=lambda case: len(left & shown(case))))
        left -= shown(found[-1])
    return tuple(found)


def axis_of(level: str) -> str:
    """The axis that has a level."""
    return next(axis for axis, levels in AXES.items() if level in levels)


def refused_cases() -> list[tuple[dict[str, str], Refused]]:
    """A case of each refused pair, all else plain but what these need."""
    found = []
    for pair, of in CELLS.items():
        if isinstance(of, Refused):
            case = {axis: levels[0] for axis, levels in AXES.items()}
            case |= {axis_of(level): level for level in pair}
            if case["returned"] == "router loss" or case["scored"] == "routes":
                case["layers"] = "experts"
            found.append((case, of))
    return found


def label(case: dict[str, str]) -> str:
    """The name of a case: its levels that are not plain, the way first."""
    return " + ".join(
        [case["way"], *(b for a, b in case.items() if b != AXES[a][0] and a != "way")]
    )
