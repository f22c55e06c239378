"""The convolution's Triton kernels: in the interpreter, natively where there is a GPU."""

from __future__ import annotations

import pytest
import torch

from prefixtree import UnsupportedError
from prefixtree.kernels.recurrence import conv_triton, tree_conv
from prefixtree.packing import segments
from tests.conftest import Poison
from tests.support.full import mostly
from tests.support.hooks import limit
from tests.support.recurrence_cases import (
    FORESTS,
    OPERATORS,
    Operator,
    along_the_tree,
    cotangents_for,
    forest_of,
    one_by_one,
    relative,
)
from tests.support.strategies import mask_of

CONVOLUTIONS = [op for op in OPERATORS if op.name.startswith("conv")]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def errors(op: Operator, name: str) -> float:
    """The worst relative error of out and the gradients against each sequence alone, float64."""
    forest = forest_of(name)
    leaves, cotangents = op.random(forest.num_tokens), cotangents_for(op, forest)
    alone = one_by_one(op, forest, leaves, cotangents)
    single = [x.detach().float().to(DEVICE).requires_grad_() for x in leaves]
    ours = along_the_tree(op, forest, single, [c.to(DEVICE) for c in cotangents], "triton")
    return max(
        relative(a.cpu(), b)
        for mine, theirs in zip(ours, alone, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    )


@pytest.mark.parametrize("name", mostly(FORESTS, ["caterpillar", "ends inside runs", "duplicates"]))
@pytest.mark.parametrize("op", CONVOLUTIONS, ids=lambda op: op.name)
def test_each_sequence_alone(op: Operator, name: str, poison: Poison) -> None:
    assert errors(op, name) < 1e-6
    assert poison.tensors


def test_many_runs_and_blocks_of_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    small = conv_triton.Config(columns=4, warps=1)
    monkeypatch.setattr(conv_triton, "FORWARD", small)
    monkeypatch.setattr(conv_triton, "BACKWARD", small)
    limit(monkeypatch, "most parts of a convolution", 3)
    monkeypatch.setattr(segments, "RUN", 5)
    assert errors(CONVOLUTIONS[0], "duplicates") < 1e-6


def test_what_segments_below_read_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of the branch tokens is what this gradient is made of."""

    class Nothing:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            return lambda *_, **__: None

    monkeypatch.setattr(conv_triton, "conv_backward_branches", Nothing())
    assert errors(CONVOLUTIONS[0], "star") > 1e-2


def test_calls_it_cannot_serve() -> None:
    mask = mask_of(forest_of("chain")).to(DEVICE)
    x = torch.zeros(150, 5, device=DEVICE)
    with pytest.raises(UnsupportedError, match="at most 4 taps, and there are 5"):
        tree_conv(x, torch.zeros(5, 5, device=DEVICE), None, mask, backend="triton")
    with pytest.raises(UnsupportedError, match="float32, and x is torch"):
        weight = torch.zeros(5, 3, device=DEVICE)
        tree_conv(x.double(), weight, None, mask, backend="triton")
