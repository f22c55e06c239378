"""The bytes of living tensors, as a dispatch mode counts them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch._C import DispatchKey, _SetExcludeDispatchKeyGuard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from prefixtree.recompute.recorder import counting

# CPU's autograd keys
_AUTOGRAD = (DispatchKey.AutogradFunctionality, DispatchKey.AutogradOther)


class LiveBytes(TorchDispatchMode):
    """Counts storages' bytes while held: `bytes` are alive now, `most` were the most so far."""

    # compiled code runs uncompiled while it counts; open around a forward and its backward, it
    # stands for an allocator on devices that have none

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.bytes = self.most = self._peak = 0
        self._known: Any = weakref.WeakSet(tensor.untyped_storage() for tensor in known)

    def __enter__(self) -> Any:
        counting.append(self)
        return super().__enter__()

    def __exit__(self, *failure: Any) -> None:
        counting.remove(self)
        super().__exit__(*failure)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # kernels of recurrences differentiate internally
        with ExitStack() as stack:
            for key in _AUTOGRAD if func.namespace == "prefixtree" else ():
                stack.enter_context(_SetExcludeDispatchKeyGuard(key, False))
            result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor):
                self._count(value.untyped_storage())
        return result

    def restart(self) -> int:
        """The most bytes since the last call."""
        peak, self._peak = self._peak, self.bytes
        return peak

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        self.bytes += size
        self._peak, self.most = max(self._peak, self.bytes), max(self.most, self.bytes)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.bytes -= size
