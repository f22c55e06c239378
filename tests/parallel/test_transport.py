"""The exchanges of cells, whose ranks are threads, against sums over the whole forest."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixtree import PrefixForest, pack
from prefixtree.parallel import transport
from prefixtree.parallel.ledger import Ledger
from prefixtree.planning import schedule
from prefixtree.planning.division import Division
from prefixtree.planning.part_states import KEYS
from prefixtree.planning.parts import Parts
from tests.support.strategies import drawn_division


class Mailbox:
    """In the place of a process group, whose ranks are threads."""

    def __init__(self, ranks: int) -> None:
        self.barrier, self.sent = Barrier(ranks, timeout=5), [list[torch.Tensor]()] * ranks

    def of(self, rank: int) -> Any:
        return SimpleNamespace(mailbox=self, rank=rank)


def start_all_to_all(
    rows: torch.Tensor, sent: list[int], received: list[int], group: Any
) -> tuple[torch.Tensor, Any]:
    box, rank = group.mailbox, group.rank
    box.sent[rank] = list(rows.split(sent))
    box.barrier.wait()
    got = [of_rank[rank].clone() for of_rank in box.sent]
    box.barrier.wait()
    assert [len(x) for x in got] == received
    return torch.cat(got), SimpleNamespace(wait=lambda: None)


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "start_all_to_all", start_all_to_all)


def on_ranks(division: Division, run: Callable[[int, Any], Any]) -> list[Any]:
    box = Mailbox(division.ranks)
    with ThreadPoolExecutor(division.ranks) as pool:
        return [*pool.map(lambda rank: run(rank, box.of(rank)), range(division.ranks))]


def joined(division: Division, slot: int, rank: int, kind: int) -> np.ndarray:
    """The packed tokens of the rows that a cell has."""
    own = division.cell(slot, rank).own_tokens
    return np.sort(np.concatenate([own, division.tokens_read(kind, slot, rank)]))


def run_all(
    division: Division, kind: int, values: torch.Tensor, weights: torch.Tensor
) -> list[tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]]:
    """Per rank, what each of its cells imports, and the gradients of its own rows, by slot.

    Args:
        values: [T, 2], the rows. weights: [cells, T, 2], the gradient of a row in a cell.
    """
    slots = range(len(division))
    events = schedule.steps(len(slots), trains=True)

    def run(rank: int, group: Any) -> Any:
        several = division.ranks > 1
        ledger = Ledger(division, events, parks=True, rank=rank, group=group if several else None)
        rows, gradients, exchanges = {}, {}, {}
        for at, (what, slot) in enumerate(events):
            part = division.cell(slot, rank) if what not in ("give", "take") else None
            if what in (schedule.FORWARD, schedule.KEEP):
                with ledger.running(at) as of_cell:
                    exchanges[slot] = of_cell.exchange(kind, ("layer", 1), in_place=False)
                    (rows[slot],) = exchanges[slot].import_rows(values[part.own_tokens])
            elif what == schedule.BACKWARD:
                tokens = joined(division, slot, rank, kind)
                cell = slot * division.ranks + rank
                gradient = weights[cell, tokens]
                given = gradient if exchanges[slot].reads else weights[cell, part.own_tokens]
                (gradients[slot],) = exchanges[slot].give_back(given)
                ledger.end_backward(at)
        assert ledger.held_bytes() == (0, 0)
        return rows, gradients

    return on_ranks(division, run)


@settings(max_examples=60)
@given(st.data(), st.sampled_from([KEYS, 2, 4]), st.sampled_from([torch.float32, torch.bfloat16]))
def test_rows_reach_their_readers_and_gradients_their_owners(
    data: st.DataObject, kind: int, dtype: torch.dtype
) -> None:
    division = drawn_division(data.draw)
    count, cells = division.packed.num_tokens, len(division.parts)
    values = torch.arange(2 * count).view(count, 2).to(dtype)
    # small integers: sums are exact in any order
    weights = torch.randint(-4, 5, (cells, count, 2), generator=torch.Generator().manual_seed(0))
    weights = weights.to(dtype)
    found = run_all(division, kind, values, weights)
    expected = torch.zeros(count, 2)
    for cell in range(cells):
        tokens = joined(division, *divmod(cell, division.ranks), kind)
        expected.index_add_(0, torch.from_numpy(tokens), weights[cell, tokens].float())
    for rank, (rows, gradients) in enumerate(found):
        for slot in range(len(division)):
            own = division.cell(slot, rank).own_tokens
            tokens = joined(division, slot, rank, kind)
            reads = len(rows[slot]) == len(tokens)
            assert rows[slot].tolist() == values[tokens if reads else own].tolist()
            assert reads or not len(division.tokens_read(kind, slot, rank))
            assert gradients[slot].tolist() == expected.to(dtype)[own].tolist()


def test_ranks_are_summed_in_float32() -> None:
    """Each rounded sum of two numbers would be another."""
    packed = pack(PrefixForest.from_parents([-1, 0, 0, 0], [1, 1, 1, 1]))
    division = Division(Parts(packed, [0, 1, 2, 3], 4), ranks=4)
    weights = torch.zeros(4, 4, 2, dtype=torch.bfloat16)
    weights[0, 0], weights[1:, 0] = 256, 0.75
    found = run_all(division, 2, torch.zeros(4, 2, dtype=torch.bfloat16), weights)
    # 256.75 is 256 in bfloat16, and 258.25 is 258
    assert found[0][1][0].tolist() == [[258, 258]]
