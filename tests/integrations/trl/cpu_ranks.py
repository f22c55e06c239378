"""Processes on a CPU that accelerate takes for processes with GPUs, so that it shards their models.

accelerate reads ACCELERATE_USE_FSDP and a trainer's `fsdp` on accelerators only. On a CPU it wraps
the model in DDP and says nothing, so a test of FSDP must look at the class of the wrapper too.

Run a script behind this module, in place of `accelerate launch SCRIPT`:

    accelerate launch ... -m tests.integrations.trl.cpu_ranks SCRIPT [ARGUMENTS]
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager

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


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    with fsdp_on_a_cpu():
        runpy.run_path(sys.argv[0], run_name="__main__")
    # FSDP2 makes a class for every class that it shards
    print("SHARDED", *(kind.__name__ for kind in FSDPModule.__subclasses__()), flush=True)
    # a thread of gloo that still runs at the end of Python aborts the process
    PartialState().destroy_process_group()
