"""A trainer's batch on the host and back, the vote to keep trunks, and the metrics of packing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import prefixtree as pt
from prefixtree.errors import ForestError
from prefixtree.integrations.core.batch import Batch, on_host
from prefixtree.integrations.core.trunks import all_keep, planned
from prefixtree.integrations.core.work import Work
from prefixtree.planning.costs import ImportCost

PROMPT = 3
IDS = torch.tensor([[0, 1, 2, 3, 4, 0], [1, 1, 2, 5, 0, 0], [0, 0, 7, 8, 9, 10]])
MASK = torch.tensor([[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]])
CPU = torch.device("cpu")


def padded(ids: torch.Tensor = IDS, mask: torch.Tensor = MASK) -> Batch:
    rows, kept = on_host((ids, mask))
    return Batch.padded(rows, kept, np.broadcast_to(np.arange(6) >= PROMPT, rows.shape), CPU)


def test_the_host_gets_all_tensors_by_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    cpu = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: copied.append(x.numel()) or cpu(x))
    given = IDS, MASK.bool(), torch.arange(4), torch.tensor(5)
    found = on_host(given)
    assert copied == [18 + 18 + 4 + 1]
    for array, tensor in zip(found, given, strict=True):
        assert array.dtype == np.int64 and np.array_equal(array, tensor.numpy())


def test_padded_rows_and_back() -> None:
    """A score stands where its token stands; its gradient comes from there."""
    batch = padded()
    assert [row.tolist() for row in batch.tokens] == [[1, 2, 3, 4], [1, 1, 2, 5], [7, 8, 9, 10]]
    assert batch.masks is not None
    assert [m.tolist() for m in batch.masks] == [[0, 0, 1, 1], [0, 0, 0, 1], [0, 1, 1, 1]]
    values = [torch.arange(1.0, 4.0) + 10 * row for row in range(3)]
    values[1].requires_grad_(True)
    found = batch.spread(values)
    assert found.tolist() == [
        [0, 0, 1, 2, 3, 0],
        [0, 11, 12, 13, 0, 0],
        [0, 0, 0, 21, 22, 23],
    ]
    (found * torch.arange(18.0).view(3, 6)).sum().backward()
    assert values[1].grad is not None and values[1].grad.tolist() == [7, 8, 9]
    two = batch.spread([torch.ones(3, 2)] * 3)
    assert two.shape == (3, 6, 2) and torch.equal(two[..., 0] != 0, found.detach() != 0)


@pytest.mark.parametrize(("start", "end"), [(0, 2), (1, 3), (2, 5)])
def test_some_rows_are_as_if_they_came_alone(start: int, end: int) -> None:
    part, alone = padded().rows(start, end), padded(IDS[start:end], MASK[start:end])
    assert part.equals(alone) and len(part) == len(alone)
    values = [torch.rand(3) for _ in range(len(part))]
    assert torch.equal(part.spread(values), alone.spread(values))
    assert part.masks is not None and alone.masks is not None
    assert all(map(np.array_equal, part.masks, alone.masks))


def test_what_is_equal() -> None:
    batch, pixels = padded(), torch.rand(4, 2)
    assert batch.equals(padded())
    # padding has no token
    assert batch.equals(padded(torch.where(MASK == 1, IDS, 9)))
    assert not batch.equals(padded(IDS + (IDS == 5)))
    two = batch.rows(0, 2)
    assert not two.equals(padded(IDS[:2].roll(1, 1), MASK[:2].roll(1, 1)))
    assert not batch.equals(two)
    shown = batch.rows(0, 3, (pixels, None))
    assert shown.equals(batch.rows(0, 3, (pixels.clone(), None)))
    assert not shown.equals(batch) and not shown.equals(batch.rows(0, 3, (pixels + 1, None)))


def test_rows_without_tokens_or_with_a_hole() -> None:
    empty, hole = MASK.clone(), MASK.clone()
    empty[1], hole[0, 2] = 0, 0
    with pytest.raises(ForestError, match="row 1 of attention_mask has no token; drop the row"):
        padded(mask=empty)
    with pytest.raises(ForestError, match="row 0 of attention_mask has a hole"):
        padded(mask=hole)


def test_jagged_rows_and_back() -> None:
    """A score stands at the token before its own."""
    tokens = [np.arange(4), np.arange(1), np.arange(3)]
    masks = [np.arange(len(t)) > 0 for t in tokens]
    batch = Batch.jagged(tokens, masks, CPU)
    values = [torch.tensor([1.0, 2.0, 3.0]), torch.zeros(0), torch.tensor([4.0, 5.0])]
    assert batch.spread(values).tolist() == [[1, 2, 3, 0, 0, 4, 5, 0]]
    part = batch.take([2, 0])
    assert part.spread([values[2], values[0]]).tolist() == [[4, 5, 0, 1, 2, 3, 0]]
    assert part.masks is not None and part.masks[0].tolist() == [False, True, True]
    assert Batch.jagged(tokens, None, CPU).take([1]).masks is None


def test_the_forest_has_the_routes_of_rows() -> None:
    tokens = [np.array([1, 2, 3]), np.array([1, 2, 4])]
    batch = Batch.jagged(tokens, None, CPU)
    batch.routes = [np.zeros((3, 1, 1), np.int64), np.ones((3, 1, 1), np.int64)]
    assert batch.forest.num_tokens == 6 and batch.packed.device == CPU
    assert Batch.jagged(tokens, None, CPU).forest.num_tokens == 4


# ---- trunks and metrics --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mine", "others", "expected"),
    [
        ((True, 3), [(True, 0)], True),
        ((True, 3), [(True, -3)], False),
        ((True, 9), [(False, 0)], False),
        ((False, 0), [(True, 9)], False),
        # no trees can be cut
        ((True, None), [(True, 0)], True),
        ((True, None), [(False, 0)], False),
    ],
)
def test_ranks_keep_trunks_together(
    mine: tuple[bool, int | None], others: list[tuple[bool, int]], expected: bool
) -> None:
    def total(numbers: list[int]) -> list[int]:
        return [sum(x) for x in zip(numbers, *((not p, s) for p, s in others), strict=True)]

    assert all_keep(*mine, total) is expected


def test_a_plan_that_does_not_fit_is_none() -> None:
    forest = pt.PrefixForest.from_sequences([[1, 2, 3, 4], [1, 2, 3, 5]])
    cost = ImportCost(token_bytes=1e9)
    assert planned(forest, 8, cost) is not None
    assert planned(forest, 1, ImportCost(token_bytes=1.0)) is None


def test_work_is_added_and_named() -> None:
    forest = pt.PrefixForest.from_sequences([[1, 2, *range(10, 60)], [1, 3, *range(10, 60)]])
    masks = [np.zeros(52, bool)] * 2
    whole = Work.of(forest, masks) + Work.of(forest, None, packed=50) + Work()
    assert (whole.replicated, whole.packed, whole.to_win) == (208, 153, 50)
    # those of verl, which alone reads them
    assert whole.squares == 0
    assert Work.of(forest).to_win is None and (Work() + Work.of(forest)).to_win is None
    assert whole.metrics("ratio") == {
        "prefixtree/ratio": 208 / 153,
        "prefixtree/tokens_computed": 153.0,
        "prefixtree/tokens_saved": 55.0,
        "prefixtree/tokens_to_win": 50.0,
    }
    assert not whole.shares_nothing
    assert Work(1004, 1000).shares_nothing and not Work(1006, 1000).shares_nothing
