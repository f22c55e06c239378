"""Cases for the tests of hybrid models: a forest of long nodes, and its inputs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from packaging import version
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

import prefixtree as pt
from prefixtree.models import families
from tests.support.float64 import Float64
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


def logprobs_alone(model: Any, sequences: Sequence[Any]) -> list[torch.Tensor]:
    """Of each sequence in a forward of its own, without prefixtree."""
    found = []
    for tokens in sequences:
        ids = torch.as_tensor(tokens)
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        found.append(logprobs_of(logits[:-1], ids[1:]))
    return found


def worst(
    logprobs: Sequence[torch.Tensor], model: Any, expected: Sequence[torch.Tensor], other: Any
) -> tuple[float, float]:
    """The largest difference of a log-probability, and of a parameter's gradient by its norm."""
    pairs = zip(logprobs, expected, strict=True)
    largest, gradient = max(float((p - q).detach().abs().max()) for p, q in pairs), 0.0
    for (name, p), (_, q) in zip(other.named_parameters(), model.named_parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None and float(p.grad.norm()) > 1e-10:
            gradient = max(gradient, float((p.grad - q.grad).norm() / p.grad.norm()))
    print(f"{model.config.model_type}: float64 log p {largest:.1e}, gradient {gradient:.1e}")
    return largest, gradient


def checkpointed_in_float64(model: nn.Module) -> None:
    # torch leaves Float64 in a backward
    again = functools.partial(
        checkpoint, use_reentrant=False, context_fn=lambda: (nullcontext(), Float64())
    )
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.gradient_checkpointing, module._gradient_checkpointing_func = True, again


def packed_inputs(model: Any) -> dict[str, Any]:
    inputs = ragged_packed().model_inputs()
    rows = families.family_of(model.config).position_rows
    return (
        inputs | {"position_ids": inputs["position_ids"].expand(rows, 1, -1)}
        if rows > 1
        else inputs
    )


def in_float64(family: str, implementation: str = "prefixtree", **changes: Any) -> Any:
    model = build(family, implementation, **changes).double()
    # grouped products know no float64
    model.set_experts_implementation("eager")
    return model
