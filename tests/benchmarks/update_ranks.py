"""One rank of test_update.py's red run: `torchrun .. update_ranks.py ROLLOUTS OUT`.

Every rank weighs the planned side's losses as if its gradients were added up, not averaged.
"""

from __future__ import annotations

import sys
from functools import partialmethod

from prefixtree.planning.micro_batches import MicroBatchPlan

if __name__ == "__main__":
    from benchmarks.cases import update

    wrong = partialmethod(MicroBatchPlan.loss_weights, rank_reduction="sum")
    MicroBatchPlan.loss_weights = wrong
    rollouts, out = sys.argv[1:]
    tiny = "--fsdp --device cpu --dtype float32 --scale 0.4 --repeats 1 --rollouts"
    sys.exit(update.main([*tiny.split(), rollouts, "--out", out]))
