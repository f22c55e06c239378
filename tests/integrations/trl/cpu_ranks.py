"""Ranks on a CPU that accelerate takes for GPUs, so that it shards models as it does there.

accelerate reads ACCELERATE_USE_FSDP and a trainer's `fsdp` on accelerators only. On a CPU it wraps
the model in DDP and says nothing, so a test of FSDP must look at the class of the wrapper too.

Run a script behind this module, in place of `torchrun SCRIPT` or `accelerate launch SCRIPT`:

    torchrun --nproc-per-node=2 -m tests.integrations.trl.cpu_ranks SCRIPT [ARGUMENTS]
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from accelerate.state import PartialState
from accelerate.utils import DistributedType


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


if __name__ == "__main__":
    os.environ["ACCELERATE_USE_CPU"] = "true"
    sys.argv = sys.argv[1:]
    with fsdp_on_a_cpu():
        runpy.run_path(sys.argv[0], run_name="__main__")
