"""Schedules: in what order the parts of a forest run through a model, as plain data.

A part runs forward without a graph, or with one that is kept until its backward. Between them the
rows of a micro-batch (scores or values) go to the caller, whose backward brings their gradients.
Who runs a schedule, who holds what a part exports, and who plans memory for it all read the same
list.

The parts of a schedule are numbered as `Steps` are. Numbers from the number of parts on, and
`DUMMY`, stand for dummies: runs of a rank that has fewer parts than others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from prefixtree.planning.trunks import Span

#: A part runs forward without a graph, forward with a graph, or backward.
FORWARD, KEEP, BACKWARD = "forward", "keep", "backward"
#: The rows of a micro-batch go to the caller; their gradients are there.
GIVE, TAKE = "give", "take"
#: The part of a micro-batch without tokens.
DUMMY = -1


class Event(NamedTuple):
    """One thing that happens.

    Attributes:
        kind: FORWARD, KEEP, BACKWARD, GIVE or TAKE.
        at: the part of the first three, the micro-batch of the others.
    """

    kind: str
    at: int


Schedule = list[Event]


def steps(count: int, trains: bool) -> Schedule:
    """The schedule of steps, whose scores are given at once: their forwards first to last, and
    their backwards last to first, each behind a second forward. The last step runs once.

    Args:
        count: of the steps, at least one.
        trains: whether there are backwards.
    """
    if not trains:
        return [*(Event(FORWARD, step) for step in range(count)), Event(GIVE, 0)]
    last = count - 1
    found = [Event(FORWARD, step) for step in range(last)]
    found += [Event(KEEP, last), Event(GIVE, 0), Event(TAKE, 0), Event(BACKWARD, last)]
    for step in reversed(range(last)):
        found += [Event(KEEP, step), Event(BACKWARD, step)]
    return found


def kept(spans: Sequence[Span], count: int, trains: bool, again: bool = False) -> Schedule:
    """The schedule of kept trunks and their micro-batches.

    Trunks begin before the first micro-batch that reads them, in the order of their numbers, and
    end behind the last one, in the reverse order.

    Args:
        spans: of the parts, in the order of forwards.
        count: of the micro-batches; those that no part lives in are without tokens.
        trains: whether there are backwards.
        again: whether trunks keep no graph and run forward a second time.
    """
    starting: list[list[int]] = [[] for _ in range(count)]
    own: list[list[int]] = [[] for _ in range(count)]
    ending: list[list[int]] = [[] for _ in range(count)]
    for part, span in enumerate(spans):
        if span.is_trunk:
            starting[span.first].append(part)
            ending[span.last].insert(0, part)
        else:
            own[span.first].append(part)
    for at in range(1 + max((span.last for span in spans), default=-1), count):
        own[at].append(DUMMY)
    first = KEEP if trains and not again else FORWARD
    found = []
    for at in range(count):
        found += [Event(first, part) for part in starting[at]]
        found += [Event(KEEP if trains else FORWARD, part) for part in own[at]]
        found += [Event(GIVE, at)]
        if trains:
            found += [Event(TAKE, at), *(Event(BACKWARD, part) for part in own[at])]
            for part in ending[at]:
                found += [Event(KEEP, part)] * again + [Event(BACKWARD, part)]
    return found


class Life(NamedTuple):
    """When rows that a part exports are read, in places of a schedule.

    Attributes:
        last: the last run that reads them.
        pause: the last forward without a graph and the first run with one that read them, where
            others run between the two.
    """

    last: int
    pause: tuple[int, int] | None


class Lives:
    """The lives of rows that parts export. A part reads them whenever it runs: also in its
    backward, as layers may be recomputed.

    Args:
        schedule: in what order parts run.
        parts: how many of them are no dummies; each runs at least once.

    Attributes:
        first: int64 [parts], the first run of each part.
    """

    def __init__(self, schedule: Schedule, parts: int) -> None:
        self._never = len(schedule)
        self.first, self._last = np.full(parts, self._never), np.full(parts, -1)
        # the last forward without a graph, and the first run with one
        self._forward, self._graph = np.full(parts, -1), np.full(parts, self._never)
        for place, (kind, part) in enumerate(schedule):
            if kind in (GIVE, TAKE) or not 0 <= part < parts:
                continue
            self.first[part] = min(self.first[part], place)
            self._last[part] = place
            if kind == FORWARD:
                self._forward[part] = place
            else:
                self._graph[part] = min(self._graph[part], place)

    def of(self, readers: Sequence[int]) -> Life:
        """That of rows which some parts read."""
        these = list(readers)
        behind, until = int(self._forward[these].max()), int(self._graph[these].min())
        waits = behind >= 0 and behind + 1 < until < self._never
        return Life(int(self._last[these].max()), (behind, until) if waits else None)


def graphs_beside(schedule: Schedule) -> dict[int, list[frozenset[int]]]:
    """Finds what is held while a part runs.

    Returns:
        Per part, for each of its runs that has a graph: the other parts whose graphs are held.
    """
    held: set[int] = set()
    found: dict[int, list[frozenset[int]]] = {}
    for kind, part in schedule:
        if kind in (KEEP, BACKWARD):
            found.setdefault(part, []).append(frozenset(held - {part}))
        if kind == KEEP:
            held.add(part)
        elif kind == BACKWARD:
            held.remove(part)
    return found
