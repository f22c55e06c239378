"""Forests divided among slots and ranks: what cells read and export, token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixtree import ForestError, PrefixForest, pack
from prefixtree.planning.division import Division
from prefixtree.planning.part_states import KEYS, STATES
from prefixtree.planning.parts import Parts
from tests.support.strategies import drawn_division


def tokens_above(division: Division, token: int) -> list[int]:
    """Nearest first."""
    found, predictor = [], division.packed.mask.host.predictor
    while (token := int(predictor[token])) >= 0:
        found.append(token)
    return found


def read_by(division: Division, kind: int, cell: int) -> set[int]:
    """The tokens of other cells that a cell reads, by definition."""
    owner = division.parts.owner
    found = set()
    for token in np.flatnonzero(owner == cell).tolist():
        above = tokens_above(division, token)
        if kind == STATES:
            above = above[:1]
        elif kind != KEYS:
            # those of a convolution over the token's own cell begin where another's token is above
            begins = bool(above) and owner[above[0]] != cell
            above = above[: kind - 1] if begins else []
        found.update(at for at in above if owner[at] != cell)
    return found


@settings(max_examples=150)
@given(st.data(), st.sampled_from([KEYS, STATES, 2, 4]))
def test_cells_read_and_export(data: st.DataObject, kind: int) -> None:
    division = drawn_division(data.draw)
    owner, ranks, cells = division.parts.owner, division.ranks, range(len(division.parts))
    read = [read_by(division, kind, cell) for cell in cells]
    for cell in cells:
        slot, rank = divmod(cell, ranks)
        assert division.tokens_read(kind, slot, rank).tolist() == sorted(read[cell])
        assert division.cell(slot, rank).index == cell
    for slot in range(len(division)):
        these = [(cell, t) for cell in cells if cell // ranks == slot for t in read[cell]]
        assert division.travels(kind, slot) == any((owner[t] - cell) % ranks for cell, t in these)
        assert division.ranks_of(slot).tolist() == (owner[owner // ranks == slot] % ranks).tolist()
    for rank in range(ranks):
        expected: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for token in np.flatnonzero(owner % ranks == rank).tolist():
            slots = sorted({cell // ranks for cell in cells if token in read[cell]})
            later = tuple(slot for slot in slots if slot > owner[token] // ranks)
            if later:
                expected.setdefault((int(owner[token]) // ranks, later), []).append(token)
        exports = division.exports(kind, rank)
        assert {(slot, by): tokens.tolist() for slot, by, tokens in exports} == expected
        assert len(exports) == len(expected)
        firsts = [(slot, tokens[0]) for slot, _, tokens in exports]
        assert firsts == sorted(firsts)
        for slot, _, tokens in exports if kind == STATES else ():
            assert set(tokens.tolist()) <= set(division.states(slot, rank).left.tolist())
    if kind == KEYS:
        assert division.in_time.parts.owner.tolist() == (owner // ranks).tolist()


def test_a_token_before_the_one_above_it_is_refused() -> None:
    packed = pack(PrefixForest.from_parents([-1, 0], [2, 3]))
    with pytest.raises(ForestError, match="slot 0 reads packed token 0 of slot 1, which comes"):
        Division(Parts(packed, [2, 2, 1, 0, 0], 4), ranks=2)
    # with other ranks of its slot a token may stand anywhere
    assert len(Division(Parts(packed, [1, 0, 1, 2, 3], 4), ranks=2)) == 2
