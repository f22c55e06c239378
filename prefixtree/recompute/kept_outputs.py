"""Outputs of some operators that a checkpoint keeps, for every time that it runs again.

torch's own contexts (`create_selective_checkpoint_contexts`) hand an output out once, so a second
backward of one graph ends in an error. They also count all operators. The counts of two runs
differ where autocast has kept the cast of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import DispatchKey, _SetExcludeDispatchKeyGuard
from torch.utils._python_dispatch import TorchDispatchMode

from prefixtree.errors import UnsupportedError


class KeptOutputs:
    """The outputs of some operators in one checkpoint; each operator returns a tuple or a list."""

    def __init__(self, operators: Sequence[Any]) -> None:
        self.operators = frozenset(operators)
        # per call: its outputs, and their versions
        self.calls: list[tuple[Sequence[Any], list[int]]] = []

    def contexts(self) -> tuple[TorchDispatchMode, TorchDispatchMode]:
        """Makes the contexts of the first run and of each later run."""
        return _Keeping(self), _Taking(self)


class _Mode(TorchDispatchMode):
    def __init__(self, kept: KeptOutputs) -> None:
        super().__init__()
        self.kept, self.at = kept, 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether compiled parts run as they are: they do, as in torch's contexts."""
        return True


class _Keeping(_Mode):
    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if func in self.kept.operators:
            self.kept.calls.append((_detached(outputs), _versions(outputs)))
        return outputs


class _Taking(_Mode):
    def __enter__(self) -> Any:
        self.at = 0
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func not in self.kept.operators:
            return func(*args, **(kwargs or {}))
        outputs, versions = self.kept.calls[self.at]
        self.at += 1
        if _versions(outputs) != versions:
            raise UnsupportedError(
                f"a layer wrote in place to an output of {func}, which "
                'recompute="all_but_attention" keeps for the backward: make it write to a copy'
            )
        return _detached(outputs)


def _detached(outputs: Sequence[Any]) -> Sequence[Any]:
    """Detaches outputs, with their memory and versions; autograd writes into what is returned."""
    # below autograd, a view would otherwise count versions of its own
    with _SetExcludeDispatchKeyGuard(DispatchKey.ADInplaceOrView, False):
        made = [x.detach() if isinstance(x, torch.Tensor) else x for x in outputs]
    return made if isinstance(outputs, list) else tuple(made)


def _versions(outputs: Sequence[Any]) -> list[int]:
    return [x._version for x in outputs if isinstance(x, torch.Tensor)]
