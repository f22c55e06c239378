"""Plans of kept trunks and their micro-batches, against all choices tried one by one."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixtree.planning.costs import import_cost_of
from prefixtree.planning.trunks import Span
from prefixtree.recompute.image_work import ImageWork
from prefixtree.recompute.layers import MODES
from prefixtree.recompute.memory import EncoderMemory
from prefixtree.recompute.plan import PartWork, scoring_bytes
from prefixtree.recompute.trunk_modes import plan_kept
from tests.recompute.test_recompute import memory_of

# a trunk above two others, of which one imports from both, and their micro-batches
_NESTED = [
    (Span(0, 3, True), 30, 0, 30),
    (Span(0, 1, True), 9, 30, 8),
    (Span(0, 0, False), 4, 39, 0),
    (Span(1, 1, False), 7, 38, 0),
    (Span(2, 3, True), 11, 20, 11),
    (Span(2, 2, False), 3, 31, 0),
    (Span(3, 3, False), 5, 31, 0),
]
_CASES = {
    "one": [
        (Span(0, 1, True), 30, 0, 25),
        (Span(0, 0, False), 9, 25, 0),
        (Span(1, 1, False), 12, 25, 0),
    ],
    "nested": _NESTED,
    # the first has its backward while the second is held
    "overlapping": [
        (Span(0, 1, True), 12, 0, 12),
        (Span(0, 0, False), 5, 10, 0),
        (Span(1, 2, True), 40, 5, 40),
        (Span(1, 1, False), 2, 20, 0),
        (Span(2, 2, False), 3, 30, 0),
    ],
    "none": [(Span(0, 0, False), 9, 0, 0), (Span(1, 1, False), 30, 0, 0)],
    "a trunk of one micro-batch": [(Span(0, 0, True), 30, 0, 30), (Span(0, 0, False), 2, 30, 0)],
}
_UNITS = st.sampled_from([1, 1 << 10, 1 << 20, 1 << 26])
_BYTES = st.tuples(st.integers(1, 50), st.integers(1, 90))


def works_of(case: str) -> tuple[list[PartWork], list[Span]]:
    works = [
        PartWork((np.array([2]), np.array([own])), imported, own // 2, False, exported)
        for _, own, imported, exported in _CASES[case]
    ]
    return works, [span for span, *_ in _CASES[case]]


class ByDefinition:
    """Bytes at every moment, added up one by one."""

    def __init__(self, memory: Any, works: list[PartWork], spans: list[Span]) -> None:
        self.memory, self.works, self.spans = memory, works, spans
        cost = memory.cost
        self.row = cost.kv_heads * (cost.head_dim + cost.value_dim) * cost.element_bytes
        self.gradient = self.row * 4 // cost.element_bytes
        self.rows = [self.row * bool(layer.per_pair) for layer in cost.layers]

    def part(self, part: int, modes: tuple[str, ...]) -> tuple[float, float]:
        """The peak of a part by itself, and what its graph holds."""
        memory, work = self.memory, self.works[part]
        tokens, cost = work.num_tokens, memory.cost
        held = most = memory.before * tokens
        for at, mode in enumerate(modes):
            layer, rows = memory.layers[mode][at], self.rows[at] * work.imported
            held += layer.held[0] * tokens + layer.held[1] + rows * (mode == "nothing")
            working = layer.working[0] * tokens + layer.working[1] + rows * 4 / cost.element_bytes
            most = max(most, held + working + rows * (mode != "nothing"))
        most = max(most, held + scoring_bytes(memory, work))
        edges = 2 * work.scored * cost.hidden * cost.element_bytes
        return most, held + memory.after * tokens + edges

    def exported(self, part: int, own_turn: bool = False) -> float:
        count = sum(layer.per_pair > 0 for layer in self.memory.cost.layers)
        both = max(self.row, self.gradient) if own_turn else self.row + self.gradient
        return self.works[part].exported * count * both

    def peaks(self, modes: list[tuple[str, ...]], again: bool) -> list[float]:
        """Of each part, beside what else is held while it runs: turn after turn, as
        `kept_trunks` runs them."""
        alive: list[int] = []
        found = [0.0] * len(self.works)

        def run(part: int) -> None:
            beside = sum(
                self.exported(t) + (0 if again else self.part(t, modes[t])[1]) for t in alive
            )
            own = self.exported(part, own_turn=True) if self.spans[part].is_trunk else 0
            found[part] = max(found[part], self.part(part, modes[part])[0] + own + beside)

        for turn in range(max(span.last for span in self.spans) + 1):
            for part, span in enumerate(self.spans):
                if span.first == turn and span.is_trunk:
                    run(part)
                    alive.append(part)
            for part, span in enumerate(self.spans):
                if span.first == turn and not span.is_trunk:
                    run(part)
            for part in reversed(range(len(self.spans))):
                if self.spans[part].is_trunk and self.spans[part].last == turn:
                    alive.remove(part)
                    run(part)
        return found

    def cost(self, part: int, modes: tuple[str, ...], forward: bool = False) -> float:
        """Multiply-adds that run again."""
        work, cost = self.works[part], self.memory.cost
        tokens = work.num_tokens
        pairs = sum(
            position + i + 1
            for position, length in zip(*work.runs, strict=True)
            for i in range(length)
        )
        total = sum(
            ((mode != "nothing") + forward) * layer.weights * tokens
            + ((mode == "all") + forward) * layer.per_pair * pairs
            for mode, layer in zip(modes, cost.layers, strict=True)
        )
        outside = cost.outside_weights * tokens + cost.lm_head_weights * work.scored
        return float(total + forward * outside)

    def best(self, available: float) -> float:
        """The least cost of any choice that fits; infinite where none does."""
        count = len(self.memory.cost.layers)
        plans = [
            tuple(MODES[0] if i < a else MODES[1] if i < b else MODES[2] for i in range(count))
            for a, b in itertools.combinations_with_replacement(range(count + 1), 2)
        ]
        least = np.inf
        for of_trunks, again in itertools.product(plans, (False, True)):
            total = 0.0
            for part, span in enumerate(self.spans):
                own = [of_trunks] if span.is_trunk and not again else plans
                costs = [
                    self.cost(part, plan, forward=span.is_trunk and again)
                    for plan in own
                    if self._alone(part, plan, of_trunks, again) <= available
                ]
                total += min(costs, default=np.inf)
            least = min(least, total)
        return least

    def _alone(self, part: int, plan: Any, of_trunks: Any, again: bool) -> float:
        modes = [of_trunks] * len(self.works)
        modes[part] = plan
        return self.peaks(modes, again)[part]


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(list(_CASES)),
    st.lists(st.lists(_BYTES, min_size=3, max_size=3), min_size=1, max_size=3),
    st.integers(1, 40),
    st.floats(0, 1),
    _UNITS,
)
def test_the_plan_recomputes_least_of_those_that_fit(case, layers, per_pair, share, unit):
    memory = memory_of(layers, per_pair, unit)
    works, spans = works_of(case)
    by_definition = ByDefinition(memory, works, spans)
    count = len(layers)
    most = max(by_definition.peaks([("nothing",) * count] * len(works), again=False))
    least = max(by_definition.peaks([("all",) * count] * len(works), again=True))
    available = least + share * (most - least) + 1
    expected = by_definition.best(available)
    if not np.isfinite(expected):
        with pytest.raises(torch.OutOfMemoryError, match="beside what trunks export"):
            plan_kept(memory, works, spans, available)
        return
    plan = plan_kept(memory, works, spans, available)
    modes = [each.modes for each in plan.of_part]
    cost = sum(
        by_definition.cost(part, each, forward=plan.runs_again and spans[part].is_trunk)
        for part, each in enumerate(modes)
    )
    assert cost == pytest.approx(expected)
    peaks = by_definition.peaks(modes, plan.runs_again)
    assert [each.peak_bytes for each in plan.of_part] == pytest.approx(peaks, abs=1)
    assert plan.peak_bytes <= available + 1
    if not plan.runs_again:
        assert len({modes[t] for t, span in enumerate(spans) if span.is_trunk}) <= 1


def test_trunks_give_way_to_micro_batches():
    """A byte of a trunk is missing in each micro-batch beside it."""
    memory = memory_of([[(1, 1), (3, 1), (30, 1)]] * 4, 1, 1 << 20)
    spans = [Span(0, 5, True), *(Span(at, at, False) for at in range(6))]
    runs = np.array([0]), np.array([20])
    works = [PartWork(runs, 0, 1, False, 20), *[PartWork(runs, 20, 20, False)] * 6]
    most = plan_kept(memory, works, spans, 1 << 40)
    assert not most.runs_again and all(set(p.modes) == {"nothing"} for p in most.of_part)
    less = plan_kept(memory, works, spans, 0.9 * most.peak_bytes)
    assert less.runs_again or "nothing" not in less.of_part[0].modes[:1]
    assert all(set(p.modes) == {"nothing"} for p in less.of_part[1:])
    again = plan_kept(memory, works, spans, 1 << 40, runs_again=True)
    assert again.runs_again and all(set(p.modes) == {"nothing"} for p in again.of_part)


def test_a_trunk_whose_backward_runs_beside_another():
    memory = memory_of([[(5, 1)] * 3] * 2, 1, 1 << 20)
    works, spans = works_of("overlapping")
    plan = plan_kept(memory, works, spans, 1 << 50)
    peaks = ByDefinition(memory, works, spans).peaks([p.modes for p in plan.of_part], False)
    assert [p.peak_bytes for p in plan.of_part] == pytest.approx(peaks, abs=1)
    alone = plan_kept(memory, works[:2], spans[:2], 1 << 50)
    assert plan.of_part[0].peak_bytes > alone.of_part[0].peak_bytes


def test_trunks_that_run_again_pay_for_an_encoder_that_keeps_nothing():
    """A frozen vision encoder, which their forward runs again; its backward runs nothing again."""
    memory = memory_of([[(1, 8), (3, 6), (9, 2)]] * 3, 3, 1 << 26)
    spans = [Span(0, 5, True), *(Span(at, at, False) for at in range(6))]
    trunk, own = ((np.array([2]), np.array([tokens])) for tokens in (30, 28))
    images = ImageWork({0: 4096, 1: 4096}, 2048, 0)
    works = [
        PartWork(trunk, 0, 15, False, 2, images=images),
        *[PartWork(own, 2, 14, False)] * 6,
    ]
    frozen = EncoderMemory(
        10.0, 0.0, 2, torch.bfloat16, 0, products=4e8, pairs=64.0, may_keep=False
    )
    most = plan_kept(memory, works, spans, 1 << 60, encoder=frozen)
    assert most.of_part[0].kept == 0
    again = []
    for encoder in (frozen, replace(frozen, products=0.0, pairs=0.0)):
        rooms = [share * most.peak_bytes for share in (0.26, 0.28, 0.31, 0.33)]
        plans = [plan_kept(memory, works, spans, room, encoder=encoder) for room in rooms]
        again.append([plan.runs_again for plan in plans])
    assert not any(again[0]) and all(again[1])


def test_rows_on_the_host():
    """They count as those of two layers."""
    memory = memory_of([[(1, 1)] * 3] * 4, 1, 1)
    cost = import_cost_of(memory.cost)
    works, spans = works_of("one")
    plan = plan_kept(memory, works, spans, 1 << 40)
    on_host = plan_kept(memory, works, spans, 1 << 40, on_host=True)
    saved = works[0].exported * 2 * (cost.row_bytes + cost.gradient_row_bytes)
    assert plan.of_part[1].peak_bytes - on_host.of_part[1].peak_bytes == saved
