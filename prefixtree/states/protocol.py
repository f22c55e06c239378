"""`KeepsStates`: where the states of a recurrent layer's call come from and go to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from prefixtree.kernels.recurrence import tree_conv, tree_delta_rule, tree_ssd
from prefixtree.packing.mask import TreeMask


class KeepsStates(Protocol):
    """Takes states from beyond a call and hands them on.

    Those of a divided forest (`parallel.states`), or of a growing forest
    (`sampling.forest_cache`): with a tree mask its forward is the prefill, without one it is of the
    rows' new tokens.
    """

    def conv(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None,
    ) -> torch.Tensor:
        """As `tree_conv`, x [T, D]."""
        ...

    def delta_rule(self, *tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        """As `tree_delta_rule`."""
        ...

    def ssd(self, *tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        """As `tree_ssd`."""
        ...


class WholeForest:
    """States pass within the call alone: a `KeepsStates`."""

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
