"""The recipes of docs/losses.md in the ways a model runs, beside each sequence alone: in float64,
in steps by the Triton kernels, on the ranks of a group, and with FSDP2 shards of student and
teacher. Red where the gradient of one copy of an edge stands for the sum over all.
One forward in float32 is in tests/examples/test_losses.py."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.full import mostly
from tests.support.recipes import ALONE, FUSED, ON_RANKS, QUICK, compared
from tests.support.spawn import run_ranks
from tests.support.triton_tiles import DEVICE

# of values and of gradients by their norm
LIMITS = {"float64": (1e-12, 1e-11)}
BY_KERNELS = pytest.param(
    "fused",
    marks=pytest.mark.skipif(
        DEVICE != "cpu",
        reason="these models are on the CPU, where Triton's kernels run in its interpreter alone",
    ),
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks("tests.support.recipes", tmp_path_factory.mktemp("recipes"))


def check(way: str, found: Any) -> None:
    assert isinstance(found, dict), found
    print(way, found)
    values, gradient = LIMITS.get(way, (2e-5, 2e-5))
    assert tuple(found["exact"]) == (FUSED if way == "fused" else tuple(ALONE))
    for name, (of_values, of_gradient) in found["exact"].items():
        assert of_values < values and of_gradient < gradient, name
    for name, (of_values, of_gradient) in found["red"].items():
        assert of_values < values and of_gradient > 0.1, name


# numpy warns of dead lanes in the interpreter
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("way", ["float64", BY_KERNELS])
def test_alone(way: str) -> None:
    check(way, compared(way))


@pytest.mark.parametrize("way", mostly(ON_RANKS, QUICK))
def test_on_two_ranks(way: str, ranks: list[Any]) -> None:
    for found in ranks:
        check(way, found[way])
