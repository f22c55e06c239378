"""Cases of several axes in which every pair of levels stands: they find what two levels break
together, as the product does, and are hardly more than the pairs of the two longest axes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations, product
from typing import Any


def pairwise(
    *axes: Iterable[Any], fits: Callable[[Any, Any], bool] = lambda a, b: True
) -> list[tuple[Any, ...]]:
    """Cases, one level of every axis each, the same in every run.

    A case begins with the first pair that no case has yet. Each further axis takes the level that
    brings the most new pairs, the first of equals.

    Args:
        fits: whether two levels of two axes, in the order of the axes, stand together; pairs that
            do not stand in no case. An axis must have a level that fits whatever the others are.
    """
    levels = [tuple(axis) for axis in axes]
    # levels by their place: equal values and values without a hash are levels too
    both = list(combinations(range(len(levels)), 2))
    left = {
        ((i, a), (j, b)): None
        for i, j in both
        for a, b in product(range(len(levels[i])), range(len(levels[j])))
        if fits(levels[i][a], levels[j][b])
    }

    def pair(axis: int, level: int, other: int, at: int) -> tuple[tuple[int, int], tuple[int, int]]:
        return ((axis, level), (other, at)) if axis < other else ((other, at), (axis, level))

    def goes(axis: int, level: int, chosen: dict[int, int]) -> bool:
        found = (pair(axis, level, other, at) for other, at in chosen.items())
        return all(fits(levels[i][a], levels[j][b]) for (i, a), (j, b) in found)

    cases = []
    while left:
        chosen: dict[int, int] = dict(next(iter(left)))
        for axis in range(len(levels)):
            if axis in chosen:
                continue
            new = {
                level: sum(pair(axis, level, *held) in left for held in chosen.items())
                for level in range(len(levels[axis]))
                if goes(axis, level, chosen)
            }
            if not new:
                named = [levels[i][a] for i, a in sorted(chosen.items())]
                raise ValueError(f"no level of {levels[axis]} fits {named}")
            chosen[axis] = max(new, key=lambda level: new[level])
        case = [chosen[axis] for axis in range(len(levels))]
        cases.append(tuple(levels[axis][level] for axis, level in enumerate(case)))
        for i, j in both:
            left.pop(((i, case[i]), (j, case[j])), None)
    return cases
