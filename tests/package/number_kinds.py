"""Values for arguments that are numbers: right ones and wrong ones."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

NAN, INF = float("nan"), float("inf")
SEQUENCES = [[3, 4, 5], [3, 4, 6]]


class Kind(NamedTuple):
    """Values that an argument takes, and values that it refuses by its name."""

    right: list[Any]
    wrong: list[Any]


def trained(value: Any) -> torch.Tensor:
    """A tensor that asks for a gradient."""
    return torch.tensor(value, dtype=torch.float32, requires_grad=True)


def hidden(values: Any) -> Any:
    """A masked array of which everything is hidden."""
    return np.ma.array(values, mask=np.ones_like(values))


def two(first: Any, second: Any = None) -> list[Any]:
    """One entry per sequence."""
    return [first, first if second is None else second]


# ---- one number ----------------------------------------------------------------------------------

_NONE = ["4", b"4", [], {4: 4}, 1j, True, np.True_, torch.tensor(True), NAN, np.array([1, 1])]
_NONE += [trained(1.0), hidden(1), hidden(1.0), torch.tensor([1, 1]), object]
_FOUR = [4, np.int64(4), np.uint8(4), torch.tensor(4), np.array(4)]
_SHARES = [0.5, np.float32(1), torch.tensor(1.0), torch.tensor(1.0, dtype=torch.bfloat16), 1]
COUNT = Kind(_FOUR, [*_NONE, 0, -1, 0.5, 4.0, INF])
FROM_0 = Kind([0, *_FOUR], [*_NONE, -1, 0.5, 4.0, INF])
INTEGER = Kind(_FOUR, [*_NONE, 0.5, 4.0, INF])
INDEX = Kind([0, np.int64(1), torch.tensor(1)], [*_NONE, 2, 0.5, 1.0, INF])
REAL = Kind([-1, 0, *_FOUR, *_SHARES], [*_NONE, INF])
ANY_REAL = Kind([-1, NAN, INF, True, *_SHARES], ["1", [], 1j, trained(1.0), hidden(1), np.ones(2)])
POSITIVE = Kind([*_FOUR, *_SHARES], [*_NONE, 0, -1, INF])
AT_LEAST_0 = Kind([0, *_FOUR, *_SHARES], [*_NONE, -1, INF])
SHARE = Kind(_SHARES, [*_NONE, -2, 1.5, INF])
COSTS = Kind([0.5, 4, (0.5,)], [*_NONE, ("1",), (NAN,), (-1,), (0.5, 0.5), None])
TENSOR = Kind([], [5, "a", [1.0], np.ones(2)])

# ---- numbers per sequence and token --------------------------------------------------------------

_NO_LIST = [5, 0.5, "11", b"11", {0: 1, 1: 1}, True]
_MASK = [0, 1, 1]
MASKS = Kind(
    [
        two(_MASK),
        tuple(two(tuple(_MASK))),
        two([False, True, True]),
        two([0.0, 1.0, 1.0]),
        np.array(two(_MASK), np.float32),
        two(np.array(_MASK, bool), np.array(_MASK, np.uint8)),
        torch.tensor(two(_MASK)),
        two(torch.tensor(_MASK, dtype=torch.bool), torch.tensor(_MASK, dtype=torch.bfloat16)),
        two(torch.tensor(_MASK).bool()),
        two(np.ma.array(_MASK)),
        two(_MASK, torch.tensor(_MASK)),
    ],
    [
        *_NO_LIST,
        *(two(x) for x in (1, [_MASK], "011", ["0", "1", "1"], [None, 1, 1], [NAN, 1, 1])),
        *(two(x) for x in ([0, 0.5, 1], [0, 2, 1], [-100, 1, 1], [0, 1j, 1], [[1], 1, 1])),
        *(two(torch.tensor(x)) for x in ([NAN, 1, 1], [0, 0.5, 1], [0, 2, 1], [0, 1j, 1])),
        *(two(_MASK, x) for x in ([1], torch.tensor([0, 0.5, 1]), trained(_MASK), hidden(_MASK))),
        two(hidden(_MASK)),
        hidden(two(_MASK)),
        two(trained(_MASK)),
        [_MASK],
        [],
    ],
)
VALUES = Kind(
    [two([1.0, 2.0, 3.0]), np.ones((2, 3)), torch.ones(2, 3), two([True, False, True])],
    [
        *(*_NO_LIST, None, [[1.0] * 3], two("abc"), two(1.0), two([1.0]), two([[1], 2, 3])),
        *(two(x) for x in (["a"] * 3, [None] * 3, hidden([1.0] * 3), trained([1.0] * 3))),
    ],
)
_SETS = [[3], [4], [5, 6]]
SETS = Kind(
    [
        two(_SETS),
        two(None),
        two([(), torch.tensor([4]), np.array([6, 5])]),
        two({"token_ids": [4, 6, 5], "offsets": torch.tensor([0, 0, 1, 3])}),
        two({"ids": np.array([4, 6, 5]), "counts": [0, 1, 2]}),
    ],
    [
        *(*_NO_LIST, [_SETS], [], two([[3]] * 2), two([[3], [4], [7]]), two([[3], [4], [5, 6, 5]])),
        *(two([[], [], [5, 6, x]]) for x in (-1, 0.5, "4", None, True, 1j)),
        *(two(x) for x in ("ab", hidden([4, 5, 6]), trained([4.0]), {"token_ids": [4]})),
        *(two({"ids": [4, 5, 6], "counts": x}) for x in ([0, 1, 1], [4, -2, 1], [3], "ab")),
        *(two({"ids": [4, 5, 6], "offsets": x}) for x in ([0, 1, 2, 2], [0, 2, 1, 3], [1, 3], [])),
    ],
)
TAKEN = Kind([[1, 2], ["a", None], torch.ones(2, 3)], [*_NO_LIST, None, [1], [1, 2, 3], []])
NUMBERS = Kind(
    [1, 0.5, [1, 0.5], (1.0, 1.0), np.ones(2), torch.ones(2), two(torch.tensor(1.0))],
    [
        *("1", None, True, NAN, 0, -1, INF, 1j, object, trained(1.0), {0: 1, 1: 1}),
        *([x, 1] for x in (None, NAN, 1j, 0, [1])),
        *(["1", "1"], [True, True], hidden([1.0, 1.0]), trained([1.0, 1.0]), two(trained(1.0))),
        *([1], [[1, 1]]),
    ],
)
_OTHERS = ["a", 0.5, None, True, NAN, 1j]
TOKENS = Kind(
    [SEQUENCES, tuple(map(np.array, SEQUENCES)), [torch.tensor(s) for s in SEQUENCES]],
    [
        *(5, "ab", None, [], SEQUENCES[0]),
        *(two([x]) for x in (*_OTHERS, -1, [3])),
        *(two(x) for x in ([], hidden([3]), trained([3.0]))),
    ],
)
LABELS = Kind(
    [["a", "b"], [0, 0], np.array([0, 0]), torch.tensor([0, 0]), two(torch.tensor(0)), two((1, 2))],
    [5, "ab", {0, 1}, {0: 1, 1: 2}, [0], [0, 1, 2], two([1]), [NAN, 0], hidden([0, 1]), object],
)
ROLLOUTS = Kind(LABELS.right, [*LABELS.wrong, [0, -1], [0, 0.5], [None, 0], [True, 0], np.ones(2)])
_TURN = [-1, 0, 1]
_TURNS = two(_TURN, [-1, 0, 2])
TURNS = Kind(
    [_TURNS, tuple(_TURNS), np.array(_TURNS), torch.tensor(_TURNS), two(*map(np.array, _TURNS))],
    [
        # one turn, two tokens in its place
        two(_TURN),
        *(*_NO_LIST, [0], two(_TURN[1:]), two(0), two([_TURN]), two([0.0] * 3), two([NAN] * 3)),
        *(two([True] * 3), two("001"), two([-1] * 3), two(hidden(_TURN)), two(trained([0.0] * 3))),
    ],
)
_ROUTE = [[[0, 1]]] * 3
ROUTES = Kind(
    [two(np.array(_ROUTE)), two(torch.tensor(_ROUTE))],
    [
        *(5, "ab", [], {0: 1}),
        *(two([[[x, 1]]] * 3) for x in _OTHERS),
        *(two(x) for x in ("ab", hidden(_ROUTE), trained(_ROUTE), _ROUTE[0])),
    ],
)
_TABLE = [*([[x] * 3] * 2 for x in ("a", 0.5, None, NAN, 1j)), [[3], [3, 4]], [3, 4, 5], 5, "a"]
_TABLE += [hidden(SEQUENCES), trained(SEQUENCES)]
PADDED = Kind([SEQUENCES, torch.tensor(SEQUENCES)], [*_TABLE, [[-1] * 3] * 2, [[True] * 3] * 2])
PADDING = Kind(
    [[[1] * 3] * 2, np.ones((2, 3), bool), torch.ones(2, 3)],
    [*_TABLE, [[2] * 3] * 2],
)

# ---- integers in a row ---------------------------------------------------------------------------

_ROW = ["0", {0: 0}, object, hidden([0]), trained([0.0]), torch.tensor([True]), [[0]], [0, True]]
_ROW += [[x] for x in _OTHERS]
FLAT = Kind([[0], [[0]], torch.tensor([0])], [x for x in _ROW if str(x) != "[[0]]"])
INTEGERS = Kind([[0], (0,), np.array([0], np.uint8), torch.tensor([0])], [*_ROW, 0])
PARENTS = Kind([[-1], torch.tensor([-1])], [*_ROW, -1])
ENDS = Kind([[1], np.array([1]), torch.tensor([1])], [*_ROW, 1])
OWNERS = Kind([[0] * 4, torch.tensor([0, 0, 1, 1])], [*_ROW, 0])
INDICES = Kind([[0], (0,), range(1), np.array([0]), torch.tensor([0])], [*_ROW, 0, {0}])
ROWS = Kind([[0], {0}, range(1), torch.tensor([0])], _ROW)
STOP = Kind([[], [3], {3}, np.array([3])], [5, None, "3", [-1], *([x] for x in _OTHERS)])
RANGES = Kind(
    [[(0, 2)], [[0, 1], (1, 2)], np.array([[0, 2]]), ((torch.tensor(0), np.int64(2)),), []],
    [5, "ab", [5], ["ab"], [(0, 1, 2)], {0: 1}, *([(x, 1)] for x in _OTHERS)],
)
LIMITS = Kind(
    [(0, 1), [0.0, INF], (np.float32(0), 1)],
    [5, "01", (0,), (1, 0), {0: 1, 1: 2}, (NAN, 1), *((x, 1) for x in ("0", None, 1j, True))],
)
COUNTS = Kind(
    [1, np.int64(1), [1, 1], (1, 1), np.array([1, 1]), torch.tensor([1, 1]), {0: 1}],
    [
        *("11", -1, [-1, 1], [1], {"0": 1}, trained(1.0), object, *_OTHERS),
        *([x, 1] for x in _OTHERS),
        *({0: x} for x in _OTHERS),
    ],
)
REPLIES = Kind(
    [{}, {0: [3]}, {np.int64(0): np.array([3])}, {1: torch.tensor([3])}],
    [5, "ab", [[3]], {0: 3}, {0: "ab"}, {0: [-1]}, {0.5: [3]}, *({0: [x]} for x in _OTHERS)],
)

# ---- tensors -------------------------------------------------------------------------------------

CUMULATIVE = Kind(
    [torch.tensor([0, 4]), torch.tensor([0, 4], dtype=torch.int32)],
    [
        *([0, 4], 5, "a", np.array([0, 4]), torch.tensor([0.0, 4.0])),
        *(torch.tensor([[0, 4]]), torch.tensor([False, True])),
    ],
)
IDS = Kind(
    [torch.tensor([3, 4, 5, 6]), torch.tensor([3, 4, 5, 6], dtype=torch.int32)],
    [
        *([3, 4, 5, 6], 5, None, "a", torch.ones(4), torch.ones(4).bool(), torch.ones(4) * 1j),
        *(torch.tensor([3]), torch.ones(1, 4).long(), trained([1.0] * 4)),
    ],
)
_GRIDS = [[1, 2, 2], np.array([1, 2, 2], np.int32), torch.tensor([1, 2, 2])]
_NO_GRIDS = [*([x, 2, 2] for x in ("1", 1.5, 1.0, None, 1j)), [True] * 3, hidden([1, 2, 2])]
_NO_GRIDS += ["a", trained([1.0, 2.0, 2.0])]
GRID = Kind(_GRIDS, _NO_GRIDS)
GRIDS = Kind([[x] for x in _GRIDS], [*([x] for x in _NO_GRIDS), 5, [[1, 2]]])
PIXELS = Kind(
    [np.ones((4, 3)), torch.ones(4, 3)],
    ["a", [["a"] * 3] * 4, [[None] * 3] * 4, hidden(np.ones((4, 3)))],
)
SECONDS = Kind(
    [[0.5], np.array([0.5]), torch.tensor([0.5])],
    ["1", [1, 2], *([x] for x in ("1", None, NAN, INF, 1j, True)), hidden([0.5]), trained([0.5])],
)
