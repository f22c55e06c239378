"""`KeepsStates`: the source and the target of the states of a recurrent layer's call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from prefixtree.kernels.recurrence import tree_conv, tree_delta_rule, tree_ssd
from prefixtree.packing.mask import TreeMask


class KeepsStates(Protocol):
    """Takes states from beyond a call and hands them on: a divided forest, or a growing one.

    With a tree mask a growing forest's forward is the prefill, without one it is of new tokens.
    """

    def conv(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None,
    ) -> torch.Tensor:
        """Computes `tree_conv`, x [T, D]."""
        ...

    def delta_rule(self, *tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        """Computes `tree_delta_rule`."""
        ...

    def ssd(self, *tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        """Computes `tree_ssd`."""
        ...


class WholeForest:
    """A `KeepsStates` whose states pass only within the call."""

    def __init__(self, mask: TreeMask) -> None:
        self._mask = mask

    def conv(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None,
    ) -> torch.Tensor:
        return tree_conv(x, weight, bias, self._mask, activation)

    def delta_rule(self, *tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        rule: Callable[..., torch.Tensor] = tree_delta_rule
        return rule(*tensors, self._mask, **options)

    def ssd(self, *tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        rule: Callable[..., torch.Tensor] = tree_ssd
        return rule(*tensors, self._mask, **options)
