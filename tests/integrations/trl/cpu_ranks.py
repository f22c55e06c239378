"""Processes on a CPU that accelerate takes for processes with GPUs, so that it shards their models.

accelerate reads ACCELERATE_USE_FSDP and a trainer's `fsdp` on accelerators only. On a CPU it wraps
the model in DDP and says nothing, so a test of FSDP must look at the class of the wrapper too.
"""

from __future__ import annotations

import runpy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule


@contextmanager
def fsdp_on_a_cpu() -> Iterator[None]:
    """accelerate takes groups on CPUs for groups of GPUs; devices stay `cpu`.

    For trainers with FSDP alone: accelerate gives DDP the number of a GPU.
    """
    before = PartialState.set_device

    def set_device(self: PartialState) -> None:
        before(self)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.set_device = set_device
    try:
        yield
    finally:
        PartialState.set_device = before


def on_rank(rank: int, folder: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Runs the `main` of a script with its arguments: which classes were sharded, and what the
    trainer that it returns logged."""
    script, *options = arguments
    with fsdp_on_a_cpu():
        trainer = runpy.run_path(script)["main"](options)
    # FSDP2 makes a class for every class that it shards
    sharded = [kind.__name__ for kind in FSDPModule.__subclasses__()]
    return {"sharded": sharded, "logs": trainer.state.log_history}
