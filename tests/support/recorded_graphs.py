"""A stand-in for CUDA graphs on a CPU: what is replayed must be what was captured.

A capture notes every operator of a step, its numbers, and the address of every tensor that was
there before the step. A replay runs the step again and compares. So a step that reads a tensor that
has moved, or does what Python decides anew, is seen. An operator that reads a tensor on the host is
seen too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from prefixtree.sampling.forward import StepGraphs

aten = torch.ops.aten
# whose results, or their shapes, the host waits for
HOST = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten.repeat_interleave,
    aten.bincount,
    aten.equal,
    aten.is_nonzero,
    aten._unique2,
    aten.unique_consecutive,
    aten.lift_fresh,
    aten.item,
}


class Watch(TorchDispatchMode):
    """The operators of a step, as a graph would keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self.host: set[str] = set()
        self._made: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tree_leaves((args, kwargs))
        is_mask = func.overloadpacket is aten.index and any(
            x is not None and x.dtype == torch.bool for x in args[1]
        )
        if func.overloadpacket in HOST or is_mask:
            self.host.add(str(func))
        self.calls.append((str(func), [self._fact(x) for x in given]))
        out = func(*args, **kwargs)
        for x in tree_leaves(out):
            # what an operator only gives back is no new memory
            if isinstance(x, torch.Tensor) and not any(
                isinstance(y, torch.Tensor) and _at(y) == _at(x) for y in given
            ):
                # kept, so that no other tensor of the step gets its address
                self._made[_at(x)] = x.untyped_storage()
        return out

    def _fact(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return repr(x)
        where = "made here" if _at(x) in self._made else (_at(x), x.data_ptr())
        return where, x.shape, x.stride(), x.dtype


def _at(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata if x.numel() == 0 else x.untyped_storage().data_ptr()


def watched(step: Callable[[], None]) -> Watch:
    """Runs a step under watch; transformers asks for a capture where it would read positions."""
    with Watch() as watch, patch("transformers.utils.import_utils.is_cuda_stream_capturing") as f:
        f.return_value = True
        step()
    return watch


class RecordedGraphs(StepGraphs):
    """StepGraphs without CUDA.

    Attributes:
        replays: how many there were, over all steps.
        made: every one of these, in order.
    """

    made: ClassVar[list[RecordedGraphs]] = []
    replays = 0

    def __init__(self, device: torch.device, wanted: bool = True) -> None:
        self.num_captured, self.reason = 0, None if wanted else "graphs=False"
        if wanted:
            self.made.append(self)

    def _beside(self, step: Callable[[], None]) -> None:
        step()

    def _waits(self, step: Callable[[], None]) -> set[str]:
        return watched(step).host

    def _capture(self, step: Callable[[], None]) -> Callable[[], None]:
        captured: list[Any] = []

        def replay() -> None:
            self.replays += 1
            watch = watched(step)
            assert not watch.host
            captured.append(watch.calls)
            assert captured[0] == captured[-1], "it changed"
            del captured[1:]

        return replay
