"""The order in which ranks with forwards and backwards of other numbers run together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixtree.parallel.agreement import BACKWARD, FORWARD, common_order


def brackets(runs: list[int]) -> str:
    """An order in which every forward meets its backward: a stack that goes up and down."""
    order, open_ = "", 0
    for run in runs:
        up = min(run, 3)
        order += FORWARD * up
        open_ += up
        down = min(open_, run // 2)
        order += BACKWARD * down
        open_ -= down
    return order + BACKWARD * open_


orders = st.lists(st.integers(0, 7), max_size=6).map(brackets)


@given(st.lists(orders, min_size=1, max_size=4))
def test_every_rank_can_run_the_common_order(of_ranks: list[str]) -> None:
    common = common_order(of_ranks)
    for own in of_ranks:
        place, dummies = 0, 0
        for kind in common:
            if own[place : place + 1] == kind:
                place += 1
            else:
                # a dummy's backward has a graph
                dummies += 1 if kind == FORWARD else -1
                assert dummies >= 0
        assert place == len(own) and dummies == 0
    assert common.count(FORWARD) == common.count(BACKWARD)


@given(st.lists(st.lists(st.integers(0, 2), max_size=4), min_size=1, max_size=4))
def test_ranks_whose_trunks_run_forward_twice(turns: list[list[int]]) -> None:
    """Forwards without a graph, a micro-batch, and trunks again."""
    of_ranks = ["".join("F" * n + "FB" + "FB" * n for n in of_rank) for of_rank in turns]
    common = common_order(of_ranks)
    for own in of_ranks:
        place, dummies = 0, 0
        for kind in common:
            if own[place : place + 1] == kind:
                place += 1
            else:
                dummies += 1 if kind == FORWARD else -1
                assert dummies >= 0
        assert place == len(own)


@given(st.lists(orders, min_size=4, max_size=4))
def test_ranks_of_a_mesh_agree_dimension_after_dimension(of_ranks: list[str]) -> None:
    a, b, c, d = of_ranks
    both = common_order([common_order([a, b]), common_order([c, d])])
    for own in of_ranks:
        assert common_order([own, both]) == both


@pytest.mark.parametrize(
    ("of_ranks", "common"),
    [
        (["FBFB", "FBFB"], "FBFB"),
        (["FFBFBB", "FBFB"], "FFBFBB"),
        (["FFFBBB", ""], "FFFBBB"),
        (["FF", "FFF"], "FFF"),
        ([""], ""),
    ],
)
def test_orders(of_ranks: list[str], common: str) -> None:
    assert common_order(of_ranks) == common
