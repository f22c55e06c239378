"""verl's workers as Ray actors on a CPU."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.engine_workers import ActorRolloutRefWorker

from tests.integrations.verl.cpu_platform import register_engines
from tests.integrations.verl.runs import parameters


def _join_group() -> None:
    """Before verl would ask for two backends of one device."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    register_engines()


class CpuActorWorker(ActorRolloutRefWorker):
    """verl's worker of actor and reference, as its trainers make them, which have rollouts too."""

    def __init__(self, config: Any) -> None:
        _join_group()
        super().__init__(config, "actor")
        self.role, self._is_ref = "actor_ref", True

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def engine_name(self) -> str:
        """Which engine runs."""
        return type(self.actor.engine).__name__

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def parameter_sums(self) -> dict[str, float]:
        """A number a parameter of the actor, the same on every rank."""
        sums = parameters(self.actor).items()
        return {name: float(p.double().norm()) for name, p in sums}
