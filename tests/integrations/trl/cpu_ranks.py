"""Processes on a CPU that accelerate takes for processes with GPUs, so that it shards their models.

accelerate reads ACCELERATE_USE_FSDP and a trainer's `fsdp` on accelerators only. On a CPU it wraps
the model in DDP and says nothing, so a test of FSDP must look at the class of the wrapper too.

Run a script behind this module, in place of `accelerate launch SCRIPT`:

    accelerate launch ... -m tests.integrations.trl.cpu_ranks SCRIPT [ARGUMENTS]
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule

ROOT = Path(__file__).parents[3]


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


def start(arguments: list[str]) -> list[str]:
    """Runs a launcher, a module and its arguments; the lines that all processes printed."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "ACCELERATE_USE_CPU": "true",
        },
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout.splitlines()


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    with fsdp_on_a_cpu():
        runpy.run_path(sys.argv[0], run_name="__main__")
    # FSDP2 makes a class for every class that it shards
    print("SHARDED", *(kind.__name__ for kind in FSDPModule.__subclasses__()), flush=True)
