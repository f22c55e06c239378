"""Schedules: every run in its place, whatever the plan, and what is held beside it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixtree import ForestError, PrefixForest
from prefixtree.parallel.agreement import order_of
from prefixtree.planning import schedule
from prefixtree.planning.division import Division
from prefixtree.planning.part_states import KEYS
from prefixtree.planning.schedule import BACKWARD, FORWARD, GIVE, KEEP, TAKE, Event
from prefixtree.planning.trunks import Span, Trunks, plan_trunks
from tests.support.step_ranks import LIGHT
from tests.support.strategies import forests

RUNS = (FORWARD, KEEP, BACKWARD)


@st.composite
def plans(draw: st.DrawFn) -> Trunks:
    """Trunks of micro-batches that are found, or given in any order."""
    forest: PrefixForest = draw(forests(max_nodes=12))
    count = draw(st.integers(0, 4))
    batches = None
    if count:
        size = forest.num_sequences
        of = draw(st.lists(st.integers(0, count - 1), min_size=size, max_size=size))
        chosen = np.unique(of, return_inverse=True)[1]
        batches = [np.flatnonzero(chosen == at) for at in range(chosen.max() + 1)]
    while True:
        try:
            return plan_trunks(forest, draw(st.integers(6, 40)), LIGHT, batches)
        except ForestError:
            continue


def readers(trunks: Trunks) -> dict[int, set[int]]:
    """Per part, those that import from it: token by token."""
    steps = trunks.on(torch.device("cpu"))
    found: dict[int, set[int]] = {part: set() for part in range(len(steps))}
    for part in steps:
        for token in part.imported_tokens.tolist():
            found[int(steps.owner[token])].add(part.index)
    return found


def check_runs(events: schedule.Schedule, trains: bool, runs_of: Any) -> None:
    """Each part runs as `runs_of` says, and what has a graph runs backward once."""
    by_part: dict[int, list[str]] = {}
    for kind, at in events:
        if kind in RUNS:
            by_part.setdefault(at, []).append(kind)
    for part, kinds in by_part.items():
        if part != schedule.DUMMY:
            assert kinds == runs_of(part)
    assert trains or not any(kind in (KEEP, BACKWARD, TAKE) for kind, _ in events)


@settings(max_examples=100, deadline=None)
@given(plans(), st.booleans(), st.booleans(), st.integers(0, 2))
def test_kept_trunks(trunks: Trunks, trains: bool, again: bool, more: int) -> None:
    spans, count = trunks.spans, len(trunks.sequences) + more
    events = schedule.kept(spans, count, trains, again)

    def runs_of(part: int) -> list[str]:
        if not trains:
            return [FORWARD]
        return [FORWARD] * (again and spans[part].is_trunk) + [KEEP, BACKWARD]

    check_runs(events, trains, runs_of)
    assert {at for kind, at in events if kind in RUNS} - {schedule.DUMMY} == {*range(len(spans))}
    # micro-batches one after another, each with its gradients before the next
    turns = [event for event in events if event.kind in (GIVE, TAKE)]
    assert turns == [Event(k, at) for at in range(count) for k in ([GIVE, TAKE][: 1 + trains])]
    # one of a rank without tokens runs a dummy within its turn
    dummies = [i for i, e in enumerate(events) if e == (KEEP if trains else FORWARD, -1)]
    assert len(dummies) == more
    for i, at in zip(dummies, range(count - more, count), strict=True):
        turn = [(GIVE, at), (TAKE, at), (BACKWARD, schedule.DUMMY)] if trains else [(GIVE, at)]
        assert events[i + 1 : i + 1 + len(turn)] == turn
    if not trains:
        return
    place = {event: i for i, event in enumerate(events)}
    for part, importers in readers(trunks).items():
        for importer in importers:
            # whose rows are there before it runs, and whose gradients are there behind it
            assert events.index((FORWARD if again else KEEP, part)) < events.index(
                (FORWARD if again and spans[importer].is_trunk else KEEP, importer)
            )
            assert place[BACKWARD, importer] < place[BACKWARD, part]
    for part, span in enumerate(spans):
        # what a micro-batch gets was computed, and comes back before its backward
        assert (
            events.index((FORWARD if again and span.is_trunk else KEEP, part))
            < place[GIVE, span.first]
        )
        assert place[TAKE, span.last] < place[BACKWARD, part]


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_steps(count: int, trains: bool) -> None:
    events = schedule.steps(count, trains)

    def runs_of(step: int) -> list[str]:
        if not trains:
            return [FORWARD]
        return [FORWARD] * (step < count - 1) + [KEEP, BACKWARD]

    check_runs(events, trains, runs_of)
    first = [at for kind, at in events[: events.index((GIVE, 0))]]
    assert first == [*range(count)]
    backwards = [at for kind, at in events if kind == BACKWARD]
    assert backwards == [*reversed(range(count))] * trains
    assert order_of(events) == "F" * count + ("B" + "FB" * (count - 1)) * trains
    # one graph at a time
    assert all(each == [frozenset()] * 2 for each in schedule.graphs_beside(events).values())


@settings(max_examples=100, deadline=None)
@given(plans(), st.booleans())
def test_graphs_held_beside_a_part(trunks: Trunks, again: bool) -> None:
    """Of trunks from their forward to their backward, looked up event by event."""
    events = schedule.kept(trunks.spans, len(trunks.sequences), True, again)
    found = schedule.graphs_beside(events)
    for part, (forward, backward) in found.items():
        for kind, held in ((KEEP, forward), (BACKWARD, backward)):
            now = events.index((kind, part))
            counts = {
                other: Counter(k for k, at in events[:now] if at == other)
                for other in found
                if other != part
            }
            assert held == {o for o, seen in counts.items() if seen[KEEP] > seen[BACKWARD]}
            # micro-batches let go of theirs at once
            assert all(trunks.spans[other].is_trunk for other in held) and not (again and held)


def test_a_trunk_above_another() -> None:
    spans = [Span(0, 1, True), Span(0, 0, False), Span(1, 1, True), Span(1, 1, False)]
    order = [(k, at) for k, at in schedule.kept(spans, 2, True, again=True) if k in RUNS]
    assert order == [
        (FORWARD, 0),
        *((KEEP, 1), (BACKWARD, 1)),
        *((FORWARD, 2), (KEEP, 3), (BACKWARD, 3)),
        *((KEEP, 2), (BACKWARD, 2), (KEEP, 0), (BACKWARD, 0)),
    ]
    assert order_of(schedule.kept(spans, 3, True)) == "FFBFFBBBFB"


# ---- when what parts export is read --------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(plans(), st.booleans(), st.booleans(), st.booleans())
def test_lives(trunks: Trunks, in_steps: bool, trains: bool, again: bool) -> None:
    """Of kept trunks and of their parts as if they were steps, run by run."""
    parts = trunks.on(torch.device("cpu"))
    if in_steps:
        events = schedule.steps(len(parts) + again, trains)
    else:
        events = schedule.kept(trunks.spans, len(trunks.sequences), trains, again)
    lives = schedule.Lives(events, len(parts))
    runs = [i for i, (kind, _) in enumerate(events) if kind in RUNS]
    for exporter, importers, _ in Division(parts).exports(KEYS, 0):
        life = lives.of(importers)
        reads = [i for i in runs if events[i].at in importers]
        own = [i for i in runs if events[i].at == exporter]
        # exported once, before anybody reads; freed when the exporter takes what came back
        assert lives.first[exporter] == own[0] < reads[0] and life.last == reads[-1]
        assert not trains or life.last < own[-1]
        without = [i for i in reads if events[i].kind == FORWARD]
        others = [i for i in reads if i not in without]
        waits = without and others and set(runs) & set(range(without[-1] + 1, others[0]))
        assert life.pause == ((without[-1], others[0]) if waits else None)
        if in_steps and trains:
            # a stack: nobody reads within the pause
            behind, until = life.pause or (life.last, life.last)
            assert not set(reads) & set(range(behind + 1, until))
