"""One rank of a case, as torchrun starts it (`tests.support.spawn`)."""

from __future__ import annotations

from functools import partialmethod
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist

from prefixtree.planning.micro_batches import MicroBatchPlan
from tests.benchmarks.support import case_named

# as if gradients were added up, not averaged
SUMMED = partialmethod(MicroBatchPlan.loss_weights, rank_reduction="sum")


def on_rank(rank: int, folder: Path, case: str, arguments: list[str], is_right: bool) -> int:
    """The case's exit code; unless it `is_right`, its planned side has wrong weights."""
    weights = MicroBatchPlan.loss_weights if is_right else SUMMED
    with (
        # the group is there, and is needed behind it
        patch.object(dist, "init_process_group"),
        patch.object(dist, "destroy_process_group"),
        patch.object(MicroBatchPlan, "loss_weights", weights),
    ):
        return case_named(case).main(arguments)
