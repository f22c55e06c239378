"""Schedules: the order in which the parts of a forest run through a model, as plain data.

A part runs forward without a graph, or with a graph that is kept until its backward. Between them
the rows of a micro-batch (scores or values) go to the caller, whose backward brings their
gradients. The run, the ledger of exports and the planner of memory all read the same list.

The parts of a schedule are numbered as `Steps` are. `DUMMY` and numbers from the number of parts on
stand for dummies: runs of a rank that has fewer parts than others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from prefixtree.planning.trunks import Span

#: A part runs forward without a graph, forward with a graph, or backward.
FORWARD, KEEP, BACKWARD = "forward", "keep", "backward"
#: The rows of a micro-batch go to the caller; their gradients have come.
GIVE, TAKE = "give", "take"
#: The part of a micro-batch without tokens.
DUMMY = -1


class Event(NamedTuple):
    """One event: FORWARD, KEEP or BACKWARD at a part, or GIVE or TAKE at a micro-batch."""

    kind: str
    at: int


Schedule = list[Event]


def steps(count: int, trains: bool) -> Schedule:
    """Makes the schedule of at least one step, whose scores are given at once."""
    # forwards run first to last, backwards last to first, each after a second forward; the last
    # step runs forward once
    if not trains:
        return [*(Event(FORWARD, step) for step in range(count)), Event(GIVE, 0)]
    last = count - 1
    events = [Event(FORWARD, step) for step in range(last)]
    events += [Event(KEEP, last), Event(GIVE, 0), Event(TAKE, 0), Event(BACKWARD, last)]
    for step in reversed(range(last)):
        events += [Event(KEEP, step), Event(BACKWARD, step)]
    return events


def kept(spans: Sequence[Span], count: int, trains: bool, again: bool = False) -> Schedule:
    """Makes the schedule of kept trunks and of `count` micro-batches, those without a part empty.

    spans are in the order of forwards; with `again`, trunks keep no graph and run forward a second
    time.
    """
    # trunks begin before the first micro-batch that reads them, in the order of their numbers, and
    # end after the last one, in the reverse order
    starting: list[list[int]] = [[] for _ in range(count)]
    only: list[list[int]] = [[] for _ in range(count)]
    ending: list[list[int]] = [[] for _ in range(count)]
    for part, span in enumerate(spans):
        if span.is_trunk:
            starting[span.first].append(part)
            ending[span.last].insert(0, part)
        else:
            only[span.first].append(part)
    for micro_batch in range(1 + max((span.last for span in spans), default=-1), count):
        only[micro_batch].append(DUMMY)
    first = KEEP if trains and not again else FORWARD
    events = []
    for micro_batch in range(count):
        events += [Event(first, part) for part in starting[micro_batch]]
        events += [Event(KEEP if trains else FORWARD, part) for part in only[micro_batch]]
        events += [Event(GIVE, micro_batch)]
        if trains:
            events += [
                Event(TAKE, micro_batch),
                *(Event(BACKWARD, part) for part in only[micro_batch]),
            ]
            for part in ending[micro_batch]:
                events += [Event(KEEP, part)] * again + [Event(BACKWARD, part)]
    return events


class Life(NamedTuple):
    """The time in which rows that a part exports are read, in places of a schedule."""

    # the last run that reads them
    last: int
    # the last forward without a graph and the first run with one that read them, where others run
    # between the two
    pause: tuple[int, int] | None


class Lives:
    """The lives of rows that parts export; `first`, int64 [parts], are the first runs."""

    # parts are those without dummies, which each run; a part reads them whenever it runs, also in
    # its backward, as layers may be recomputed

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
        """The life of rows that some parts read."""
        these = list(readers)
        behind, until = int(self._forward[these].max()), int(self._graph[these].min())
        waits = behind >= 0 and behind + 1 < until < self._never
        return Life(int(self._last[these].max()), (behind, until) if waits else None)


def graphs_beside(schedule: Schedule) -> dict[int, list[frozenset[int]]]:
    """Finds the other parts whose graphs are held, for each of a part's runs with a graph."""
    held: set[int] = set()
    held_beside: dict[int, list[frozenset[int]]] = {}
    for kind, part in schedule:
        if kind in (KEEP, BACKWARD):
            held_beside.setdefault(part, []).append(frozenset(held - {part}))
        if kind == KEEP:
            held.add(part)
        elif kind == BACKWARD:
            held.remove(part)
    return held_beside
