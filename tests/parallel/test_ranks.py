"""Agreement of ranks, and where gathered rows stand; test_in_groups.py has real ranks."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefixtree.parallel.agreement import digest
from prefixtree.parallel.ranks import arrival


@given(st.lists(st.integers(0, 3), max_size=20))
def test_rows_are_found_where_they_arrive(owner: list[int]) -> None:
    row, counts = arrival(np.array(owner, np.int64), 4)
    arrived = [item for rank in range(4) for item in range(len(owner)) if owner[item] == rank]
    assert [arrived[at] for at in row] == list(range(len(owner)))
    assert counts == [owner.count(rank) for rank in range(4)]


def test_digests_tell_values_apart() -> None:
    numbers = np.arange(6, dtype=np.int32)
    values = [
        (numbers,),
        (numbers[::-1],),
        (numbers.astype(np.int64),),
        (numbers.reshape(2, 3),),
        (numbers[:3], numbers[3:]),
        (numbers[:0],),
        (),
        (None,),
        ("a", "b"),
        ("ab",),
        (torch.bfloat16,),
    ]
    found = {digest(*each) for each in values}
    assert len(found) == len(values)
    assert digest(numbers.copy(), "a") == digest(numbers, "a")
    # as ranks exchange them
    assert all(-(2**63) <= number < 2**63 for number in found)
