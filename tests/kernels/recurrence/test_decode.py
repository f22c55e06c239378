"""A decode step of recurrent layers: the outputs of whole sequences, token by token from slots; by
torch's operations, and by the Triton kernels in the interpreter (natively where there is a GPU)."""

from __future__ import annotations

import pytest
import torch

from prefixtree.kernels.recurrence import decode
from prefixtree.kernels.recurrence.protocol import RowSlots
from tests.support.recurrence_cases import OPERATORS, Operator, chain, relative

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BY_NAME = pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.name)
# (rows that the rows of a step came from, rows that are live) of six steps; the last row stands
# behind the batch
_STEPS = [
    ([0, 1, 2], [1, 1, 0]),
    ([0, 1, 2], [1, 1, 0]),
    # row 0 branches into three, row 1 into two
    ([0, 0, 0, 1, 1, 2], [1, 1, 1, 1, 1, 0]),
    ([0, 1, 2, 3, 4, 5], [1, 1, 0, 1, 1, 0]),
    # rows that stopped go on from where they were
    ([0, 1, 2, 2, 4, 5], [1, 0, 1, 1, 1, 0]),
    ([0, 1, 2, 3, 4, 5], [1, 1, 1, 1, 1, 0]),
]


def worst(
    op: Operator, dtype: torch.dtype, *, share: bool = False, moves: bool = False
) -> tuple[float, torch.Tensor]:
    """The worst relative error of the rows' outputs against each path alone, and the spare slot.

    Args:
        share: rows that branched write the slot that they read.
        moves: rows that stopped write too.
    """
    leaves = [x.detach().to(DEVICE, dtype) for x in op.random(40, 1)]
    pool = torch.zeros(30, *op.state, device=DEVICE, dtype=dtype)
    paths: list[list[int]] = [[], [], []]
    slots, fresh, token, error = [0, 0, 0], 1, 0, 0.0
    for origins, live in _STEPS:
        paths, slots = [list(paths[i]) for i in origins], [slots[i] for i in origins]
        alone = [slot > 0 and slots.count(slot) == 1 for slot in slots]
        targets = list(slots)
        for row, stands_alone in enumerate(alone):
            if live[row] and not stands_alone and not (share and slots[row]):
                targets[row], fresh = fresh, fresh + 1
        rows = RowSlots(
            torch.tensor(slots, device=DEVICE),
            torch.tensor(targets, device=DEVICE),
            torch.tensor([is_live or moves for is_live in live], device=DEVICE).bool(),
        )
        new = list(range(token, token + len(paths)))
        token += len(paths)
        inputs = [x[new] if i < op.per_token else x for i, x in enumerate(leaves)]
        out = op.step(inputs, pool, rows)
        assert out.dtype == dtype
        for row, is_live in enumerate(live):
            if not is_live:
                continue
            paths[row].append(new[row])
            slots[row] = targets[row]
            mine = [x.double().cpu() for x in leaves]
            mine = [x[paths[row]] if i < op.per_token else x for i, x in enumerate(mine)]
            want = op.run(chain(len(paths[row])), mine, "reference")[-1]
            error = max(error, relative(out[row].cpu(), want))
    return error, pool[0]


@pytest.fixture
def in_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(decode, "in_one_kernel", lambda x: True)


@BY_NAME
def test_steps_are_whole_sequences(op: Operator) -> None:
    error, spare = worst(op, torch.float64)
    assert error < 1e-13 and not spare.any()


@BY_NAME
def test_kernels_are_whole_sequences(op: Operator, in_kernels: None, poison: object) -> None:
    error, spare = worst(op, torch.float32)
    assert error < 3e-6 and not spare.any()


def test_kernels_take_states_in_blocks(in_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from prefixtree.kernels.recurrence import decode_kernels

    monkeypatch.setattr(decode_kernels, "STATE_NUMBERS", 16)
    monkeypatch.setattr(decode_kernels, "COLUMNS", 2)
    for op in (OPERATORS[0], OPERATORS[5]):
        assert worst(op, torch.float32)[0] < 3e-6


def test_kernels_read_rows_of_longer_ones(in_kernels: None) -> None:
    """As layers cut query, key and value out of one tensor."""
    op = OPERATORS[3]
    query, key, value, g, beta = (x.detach().to(DEVICE, torch.float32) for x in op.random(4, 2))
    together = torch.cat([x.flatten(1) for x in (query, key, value, g)], 1)
    cut = together.split([12, 12, 20, 4], 1)
    views = [x.unflatten(1, y.shape[1:]) for x, y in zip(cut, (query, key, value, g), strict=True)]
    rows = RowSlots(torch.zeros(4).long(), torch.arange(4), torch.ones(4).bool())
    rows = RowSlots(*(x.to(DEVICE) for x in rows))
    pools = torch.zeros(2, 5, *op.state, device=DEVICE)
    one = op.step([query, key, value, g, beta], pools[0], rows)
    two = op.step([*views, beta], pools[1], rows)
    assert not views[0].is_contiguous() and one.any()
    torch.testing.assert_close(one, two, atol=0, rtol=0)
    torch.testing.assert_close(pools[0], pools[1], atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_at_the_ends_alone(dtype: torch.dtype, in_kernels: None) -> None:
    """States are float32 whatever the inputs are."""
    op = OPERATORS[3]
    leaves = [x.detach().to(DEVICE, dtype) for x in op.random(3, 2)]
    rows = RowSlots(torch.zeros(3).long(), torch.arange(3) + 1, torch.ones(3).bool())
    rows = RowSlots(*(x.to(DEVICE) for x in rows))
    pools = torch.zeros(2, 5, *op.state, device=DEVICE)
    half = op.step(leaves, pools[0], rows)
    full = op.step([x.float() for x in leaves], pools[1], rows)
    # the interpreter cuts bfloat16 off
    assert half.dtype == dtype and torch.equal(pools[0], pools[1])
    torch.testing.assert_close(half.float(), full, atol=1e-6, rtol=2 * torch.finfo(dtype).eps)


@BY_NAME
def test_rows_that_write_the_slot_that_others_read_show(op: Operator) -> None:
    assert op.state[0] == 0 or worst(op, torch.float64, share=True)[0] > 1e-2


@BY_NAME
def test_states_of_stopped_rows_that_move_show(op: Operator) -> None:
    assert op.state[0] == 0 or worst(op, torch.float64, moves=True)[0] > 1e-2
