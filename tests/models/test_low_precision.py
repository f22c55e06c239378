"""Linear layers of low precision: those that treat every token alone run, others are refused.

torchao is not installed. Stand-ins have the names that its layers and tensors are known by.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from prefixtree import UnsupportedError
from prefixtree.models import low_precision
from prefixtree.scoring.logprobs import sequence_logprobs
from tests.support.models import (
    assert_same,
    build,
    ragged_objective,
    ragged_packed,
    run_packed,
    run_replicated,
)


class Int8Weight(torch.Tensor):
    """As torchao's tensors: integers and scales, which `linear` reads."""

    act_quant_kwargs: Any = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is nn.functional.linear:
                x, weight = args[:2]
                return func(
                    x, weight.data.as_subclass(torch.Tensor).mul(16).round() / 16, *args[2:]
                )
            return func(*args, **(kwargs or {}))


class _Rounded(nn.Linear):
    """Rounds its input: with one scale for all tokens, or with one per token."""

    dim: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax() if self.dim is None else x.abs().amax(self.dim, keepdim=True)
        x = (x / scale * 16).round() * scale / 16
        return super().forward(x)


class _RoundedByRow(_Rounded):
    dim = -1


class Float8Linear(_Rounded):
    """As torchao's: its configuration says how inputs are scaled."""


def with_layer(change: Any, implementation: str = "prefixtree") -> Any:
    model = build("llama", implementation)
    change(model.model.layers[1].mlp.up_proj)
    return model


def of_class(kind: type, **attributes: Any) -> Any:
    def change(linear: nn.Linear) -> None:
        linear.__class__ = kind
        vars(linear).update(attributes)

    return change


def of_weight(options: Any = None) -> Any:
    def change(linear: nn.Linear) -> None:
        weight = linear.weight.detach().as_subclass(Int8Weight)
        weight.act_quant_kwargs = options
        linear._parameters["weight"] = weight

    return change


def recipe(granularity: str, scaling_type: str = "DYNAMIC") -> Any:
    names = SimpleNamespace(name=scaling_type), SimpleNamespace(name=granularity)
    cast = SimpleNamespace(scaling_type=names[0], scaling_granularity=names[1])
    return SimpleNamespace(cast_config_input=cast)


def per(granularity: str) -> Any:
    return SimpleNamespace(granularity=type(granularity, (), {})())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (of_class(Float8Linear, config=recipe("TENSORWISE")), "one scale for all tokens"),
        (of_weight(per("PerTensor")), "one scale for all tokens"),
        # by no name
        (of_class(_Rounded), "another output when other tokens stand beside it"),
    ],
)
def test_a_scale_for_all_tokens_is_refused(change: Any, message: str) -> None:
    model = with_layer(change)
    with pytest.raises(UnsupportedError, match=rf"layers\.1\.mlp\.up_proj .*{message}.*rowwise"):
        sequence_logprobs(model, ragged_packed())


@pytest.mark.parametrize(
    "change",
    [
        of_class(_RoundedByRow),
        of_class(_RoundedByRow, config=recipe("AXISWISE")),
        of_weight(),
        of_weight(per("PerRow")),
    ],
)
def test_what_treats_every_token_alone_runs(change: Any) -> None:
    model, objective = with_layer(change), ragged_objective()
    packed = run_packed(model, ragged_packed(), objective)
    assert_same(packed, run_replicated(with_layer(change, "eager"), objective))


def test_a_layer_is_tried_once() -> None:
    model = with_layer(of_class(_RoundedByRow))
    layer, calls = model.model.layers[1].mlp.up_proj, []
    layer.forward = lambda x: calls.append(x.shape[1]) or _RoundedByRow.forward(layer, x)
    for _ in range(2):
        low_precision.check_low_precision("up_proj", layer)
    assert calls == [low_precision._ROWS] * 2
