"""Cases for the tests of hybrid models: a forest of long nodes, and its inputs."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from packaging import version
from torch.overrides import TorchFunctionMode

import prefixtree as pt
from prefixtree.models import families
from tests.support.hybrid_configs import OLDEST_WITH_STATES
from tests.support.models import TRANSFORMERS, build, ragged_packed

SERVED = version.parse(OLDEST_WITH_STATES) <= TRANSFORMERS
needs_states = pytest.mark.skipif(not SERVED, reason=f"needs transformers {OLDEST_WITH_STATES}")
FEW = ["qwen3_5", "nemotron_h"]


@cache
def long_sequences() -> list[np.ndarray]:
    """Four levels, nodes longer than a chunk of 64, endings inside, one-token nodes, a repeat."""
    rng = np.random.default_rng(0)

    def run(length: int) -> np.ndarray:
        return rng.integers(3, 97, length)

    a, b, c, d, x, y = run(70), run(5), run(1), run(83), run(9), run(2)
    paths = [
        *([a, b, c, run(6)], [a, b, c, run(1)], [a, b, d, run(3)], [a, b, d, run(66)]),
        *([a, run(2)], [a, b], [a], [a, b, d], [a, b, d]),
        *([x, y, run(4)], [x, y, run(7)], [x, run(1)], [run(5)]),
    ]
    return [np.concatenate(path) for path in paths]


@cache
def long_packed() -> pt.PackedForest:
    return pt.pack(pt.PrefixForest.from_sequences(long_sequences()))


def logprobs_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, target[:, None])[:, 0]


def packed_inputs(model: Any) -> dict[str, Any]:
    inputs = ragged_packed().model_inputs()
    rows = families.family_of(model.config).position_rows
    return (
        inputs | {"position_ids": inputs["position_ids"].expand(rows, 1, -1)}
        if rows > 1
        else inputs
    )


class Float64(TorchFunctionMode):
    """A cast to float32 in a float64 run stays float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()

        def swap(x: Any) -> Any:
            return torch.float64 if x is torch.float32 else x

        return func(*map(swap, args), **{k: swap(v) for k, v in (kwargs or {}).items()})


def in_float64(family: str, implementation: str = "prefixtree", **changes: Any) -> Any:
    model = build(family, implementation, **changes).double()
    # grouped products know no float64
    model.set_experts_implementation("eager")
    return model
