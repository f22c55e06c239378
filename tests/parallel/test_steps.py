"""The ledger of steps: what they export, where it waits, and attention over it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixtree import PackedForest, PrefixForest, UnsupportedError, pack, tree_attention
from prefixtree.parallel import ledger as module
from prefixtree.parallel.attention import part_attention
from prefixtree.parallel.ledger import Ledger
from prefixtree.planning import schedule
from prefixtree.planning.costs import ImportCost
from prefixtree.planning.division import Division
from prefixtree.planning.part_states import KEYS
from prefixtree.planning.steps import Steps, plan_steps
from tests.support.part_exchange import attend_whole, random_values
from tests.support.strategies import forests, random_forest

# one layer, whose imported tokens count next to nothing
COST = ImportCost(layers=1, kv_heads=1, head_dim=4, value_dim=4, element_bytes=4, token_bytes=1e6)
LAYER = "layer"
RUNS = (schedule.FORWARD, schedule.KEEP, schedule.BACKWARD)


def some_steps(forest: PrefixForest, size: int) -> Steps:
    """Steps of about `size` own tokens."""
    return plan_steps(pack(forest), size, import_cost=COST)


def ledger_of(steps: Steps, trains: bool = True, **options: Any) -> Ledger:
    """Its schedule ends with a dummy, so that all steps run forward without a graph."""
    events = schedule.steps(len(steps) + 1, trains)
    return Ledger(Division(steps), events, parks=True, **options)


def place(ledger: Ledger, kind: str, step: int) -> int:
    return ledger.schedule.index((kind, step))


@given(forests(), st.integers(2, 9))
def test_exports_are_what_steps_import(forest: PrefixForest, size: int) -> None:
    steps = some_steps(forest, size)
    exports = list(ledger_of(steps).exports(KEYS))
    for step in steps:
        imported = [export for export in exports if step.index in export.readers]
        exporters = [steps[export.exporter] for export in imported]
        tokens = [
            exporter.own_tokens[export.rows.rows]
            for exporter, export in zip(exporters, imported, strict=True)
        ]
        assert np.concatenate([[], *tokens]).tolist() == step.imported_tokens.tolist()
        # the imported rows stand before the own ones
        assert step.tokens.tolist() == [*step.imported_tokens, *step.own_tokens]
        exported = [export.rows.rows for export in exports if export.exporter == step.index]
        assert np.concatenate([[], *exported]).tolist() == step.exported_rows.tolist()
    assert all(
        export.readers == tuple(range(export.exporter + 1, export.readers[-1] + 1))
        for export in exports
    )


# ---- where rows wait -----------------------------------------------------------------------------


class Places:
    """Tells the host from the device on a machine that has one memory for both.

    In the place of the copies: what is copied to the host is another tensor, and known.
    """

    def __init__(self) -> None:
        self.on_host: set[int] = set()
        self.kept: list[torch.Tensor] = []
        self.copies = {"host": 0, "device": 0}

    def _copied(self, pair: Any, to: str) -> Any:
        copies = tuple(x.clone() for x in pair)
        # kept, so that no number is given to another tensor
        self.kept += copies
        self.copies[to] += sum(x.nbytes for x in copies)
        return copies

    def to_host(self, pair: Any) -> Any:
        if id(pair[0]) in self.on_host:
            return pair
        copies = self._copied(pair, "host")
        self.on_host |= {id(x) for x in copies}
        return copies

    def to_device(self, pair: Any, device: torch.device) -> Any:
        return self._copied(pair, "device") if id(pair[0]) in self.on_host else pair

    def bytes(self, ledger: Ledger) -> tuple[int, int]:
        """Bytes of the ledger on the device and on the host."""
        found = [0, 0]
        for export in ledger.exports(KEYS):
            for pair in (*export.values.values(), *export.gradients.values()):
                for x in pair:
                    found[id(x) in self.on_host] += x.nbytes
        return found[0], found[1]


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> Places:
    """A ledger's host and device, told apart."""
    places = Places()
    monkeypatch.setattr(module, "to_host", places.to_host)
    monkeypatch.setattr(module, "to_device", places.to_device)
    return places


def attend(
    steps: Steps,
    ledger: Ledger,
    qkv: Any,
    dout: torch.Tensor,
    places: Places | None = None,
    lost: int | None = None,
    **options: Any,
) -> tuple[list[torch.Tensor], list[list[tuple[int, int]]]]:
    """out, dq, dk, dv [T, ...] of all steps.

    Also bytes on the device and the host: behind each forward, and before and behind each backward.
    """
    results = [torch.full_like(x, torch.nan) for x in (dout, *qkv)]
    seen: list[list[tuple[int, int]]] = [[], [], []]
    for part in steps:
        with ledger.running(place(ledger, schedule.FORWARD, part.index)) as exchanges:
            out = part_attention(*map(part.own, qkv), part, exchanges(LAYER), **options)
            if places:
                seen[0].append(places.bytes(ledger))
        results[0][part.own_tokens] = out
    for part in reversed(list(steps)):
        leaves = [part.own(x).requires_grad_() for x in qkv]
        with ledger.running(place(ledger, schedule.KEEP, part.index)) as exchanges:
            if part.index == lost:
                for export in ledger.exports(KEYS).of_exporter[lost]:
                    export.gradients.clear()
            if places:
                seen[1].append(places.bytes(ledger))
            out = part_attention(*leaves, part, exchanges(LAYER), **options)
        gradients = torch.autograd.grad(out, leaves, part.own(dout))
        if places:
            seen[2].append(places.bytes(ledger))
        ledger.end_backward(place(ledger, schedule.BACKWARD, part.index))
        for result, gradient in zip(results[1:], gradients, strict=True):
            result[part.own_tokens] = gradient
    return results, seen


def worst(got: Any, expected: Any) -> float:
    """Largest difference; NaN counts as infinite."""
    pairs = zip(got, expected, strict=True)
    return max(float((a - b).abs().nan_to_num(torch.inf).max()) for a, b in pairs)


@given(forests(), st.integers(2, 9), st.booleans())
def test_what_waits_beside_each_step(forest: PrefixForest, size: int, parks: bool) -> None:
    """Event by event: rows from their exporter on, gradients until the exporter's backward."""
    steps = some_steps(forest, size)
    events = schedule.steps(len(steps), trains=True)
    ledger = Ledger(Division(steps), events, parks=parks)
    expected = np.zeros((len(steps), 2), np.int64)
    for at, (kind, step) in enumerate(events):
        before, behind = events[: at + 1], events[at:]
        if kind not in (schedule.KEEP, schedule.BACKWARD):
            continue
        waiting = [0, 0]
        for export in ledger.exports(KEYS):
            exported = any(event.at == export.exporter for event in before)
            read = any(e.at in export.readers and e.kind in RUNS for e in behind)
            if parks and exported and read:
                # of those that have run without a graph, the host has them until one has a graph
                first = events.index((schedule.KEEP, max(export.readers)))
                last = max(
                    (
                        i
                        for i, e in enumerate(events)
                        if e == (schedule.FORWARD, max(export.readers))
                    ),
                    default=first,
                )
                read = not last < at < first
            began = any((schedule.BACKWARD, reader) in before for reader in export.readers)
            ended = (schedule.BACKWARD, export.exporter) in events[:at]
            waiting[0] += len(export.tokens) * (exported and read)
            waiting[1] += len(export.tokens) * (began and not ended)
        expected[step] = np.maximum(expected[step], waiting)
    assert ledger.most_waiting(KEYS).tolist() == expected.tolist()


@settings(max_examples=40)
@given(forests(max_nodes=8), st.integers(0, 99), st.integers(2, 9), st.booleans(), st.booleans())
def test_attention_over_the_ledger_is_that_of_the_whole(
    forest, seed, size, window, on_host
) -> None:
    steps = some_steps(forest, size)
    options = {"window": 3, "softcap": 2.0} if window else {}
    *qkv, dout = random_values(steps.packed.num_tokens, seed)
    got, _ = attend(steps, ledger_of(steps, on_host=on_host), qkv, dout, **options)
    assert worst(got, attend_whole(steps.packed, qkv, dout, **options)) < 1e-12


def test_the_check_turns_red_where_returned_gradients_are_lost() -> None:
    rng = np.random.default_rng(0)
    checked = 0
    for seed in range(20):
        steps = some_steps(random_forest(rng, 8, 8), 9)
        *qkv, dout = random_values(steps.packed.num_tokens, seed)
        expected = attend_whole(steps.packed, qkv, dout)
        for exporter in range(len(steps)):
            if len(steps[exporter].exported_rows):
                got, _ = attend(steps, ledger_of(steps), qkv, dout, lost=exporter)
                assert worst(got[:2], expected[:2]) < 1e-12
                assert worst(got[2:], expected[2:]) > 1e-6
                checked += 1
    assert checked > 10


def test_gradients_are_added_in_float32() -> None:
    """The sum over many importers is as exact as in one launch; rounded in between it is not."""
    steps = plan_steps(comb(40), 11, import_cost=COST)
    assert len(steps) > 30
    *qkv, dout = (x.bfloat16() for x in random_values(steps.packed.num_tokens))
    exported = np.concatenate([part.own_tokens[part.exported_rows] for part in steps])
    exact = attend_whole(steps.packed, [x.double() for x in qkv], dout.double())

    def error(results: Any) -> float:
        pairs = zip(results[2:], exact[2:], strict=True)
        return sum(float((a[exported].double() - b[exported]).abs().mean()) for a, b in pairs)

    leaves = [x.clone().requires_grad_() for x in qkv]
    out = tree_attention(*leaves, steps.packed.mask)
    one_launch = error([out, *torch.autograd.grad(out, leaves, dout)])
    assert error(attend(steps, ledger_of(steps), qkv, dout)[0]) <= 1.05 * one_launch
    # the check can fail
    rounded = ledger_of(steps)
    rounded.park = lambda pair: tuple(x.bfloat16().to(x.dtype) for x in pair)
    assert error(attend(steps, rounded, qkv, dout)[0]) > 1.2 * one_launch


def comb(teeth: int = 9, spine: int = 3, tooth: int = 4) -> PackedForest:
    """A path with a branch at every so many tokens."""
    trunk = np.arange(teeth * spine)
    rng = np.random.default_rng(0)
    branches = [
        np.concatenate([trunk[: spine * (i + 1)], 1000 + rng.integers(0, 900, tooth)])
        for i in range(teeth)
    ]
    return pack(PrefixForest.from_sequences([trunk, *branches]))


@pytest.mark.parametrize("on_host", [False, True])
def test_memory_is_that_of_the_formula(places: Places, on_host: bool) -> None:
    steps = plan_steps(comb(), 11, import_cost=COST)
    assert len(steps) > 5 and max(steps.stats.imported_tokens) > 10
    *qkv, dout = (x.float() for x in random_values(steps.packed.num_tokens))
    ledger = ledger_of(steps, on_host=on_host)
    results, (forwards, before, backwards) = attend(steps, ledger, qkv, dout, places)
    assert worst(results, attend_whole(steps.packed, qkv, dout)) < 1e-4
    row, gradient, stats = COST.row_bytes, COST.gradient_row_bytes, steps.stats
    everything = zip(stats.imported_tokens, stats.own_exported_tokens, strict=True)
    for (imported, exported), forward, start, backward in zip(
        everything, forwards, reversed(before), reversed(backwards), strict=True
    ):
        if on_host:
            assert forward[0] == start[0] == backward[0] == 0
            continue
        assert forward[0] == (imported + exported) * row
        # later steps import all that this one imports, so all have returned their gradients
        alone = replace(stats, imported_tokens=(imported,), own_exported_tokens=(exported,))
        assert start[0] == alone.held_bytes(COST) or not exported
        # what it exports is added, and free, once its backward has run
        assert backward[0] == imported * (row + gradient)
    most = max(device for device, _ in (*forwards, *before, *backwards))
    assert 0.9 * stats.held_bytes(COST) < most <= stats.held_bytes(COST) or on_host
    # an exported row is copied to the host once, and back once
    assert max(host for _, host in forwards) <= stats.exported_bytes
    if not on_host:
        assert places.copies == {"host": stats.exported_bytes, "device": stats.exported_bytes}
    # nothing is left
    assert ledger.held_bytes() == (0, 0)


def test_without_a_backward_only_the_path_is_kept(places: Places) -> None:
    steps = plan_steps(comb(), 11, import_cost=COST)
    *qkv, _ = (x.float() for x in random_values(steps.packed.num_tokens))
    ledger = ledger_of(steps, trains=False)
    for part in steps:
        with ledger.running(part.index) as exchanges:
            part_attention(*map(part.own, qkv), part, exchanges(LAYER))
            rows = part.num_imported + len(part.exported_rows)
            assert places.bytes(ledger) == (rows * COST.row_bytes, 0)
    assert ledger.held_bytes() == (0, 0) and not places.kept


# ---- what goes wrong is seen ---------------------------------------------------------------------


def test_a_module_that_attends_twice_is_refused() -> None:
    ledger = ledger_of(plan_steps(comb(), 11, import_cost=COST))
    with ledger.running(0) as exchanges:
        exchanges(LAYER)
        with pytest.raises(UnsupportedError, match="str attends twice in one forward"):
            exchanges(LAYER)
    # recomputation asks again
    with ledger.running(place(ledger, schedule.KEEP, 0)) as exchanges:
        exchanges(LAYER)
        exchanges(LAYER)


def test_gradients_that_no_backward_takes_are_missed() -> None:
    steps = plan_steps(comb(), 11, import_cost=COST)
    *qkv, dout = random_values(steps.packed.num_tokens)
    ledger = ledger_of(steps)
    for part in steps:
        with ledger.running(part.index) as exchanges:
            part_attention(*map(part.own, qkv), part, exchanges(LAYER))
    last = steps[len(steps) - 1]
    with ledger.running(place(ledger, schedule.KEEP, last.index)) as exchanges:
        leaves = [last.own(x).requires_grad_() for x in qkv]
        out = part_attention(*leaves, last, exchanges(LAYER))
    out.backward(last.own(dout))
    ledger.end_backward(place(ledger, schedule.BACKWARD, last.index))
    with pytest.raises(RuntimeError, match="of step 0 did not reach the attention of 1 layers"):
        ledger.end_backward(place(ledger, schedule.BACKWARD, 0))
