"""What test_distributed.py starts on every rank: both trainers, one after the other, and on
rank 0 a line of JSON with how far they are apart."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from prefixtree.integrations.trl import PrefixTreeGRPOTrainer
from tests.integrations.trl.runs import SameOrder, moved, train, worst_metric, worst_parameter


def main(folder: Path) -> None:
    arguments = {
        "optim": "sgd",
        "learning_rate": 0.3,
        "max_steps": 4,
        # 2 ranks x 2 micro-batches of 4: every rank has groups of its own
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "ddp_find_unused_parameters": False,
        "shuffle_dataset": False,
        "output_dir": str(folder / f"out{os.environ['RANK']}"),
    }
    ours = train(PrefixTreeGRPOTrainer, folder, **arguments)
    theirs = train(SameOrder, folder, **arguments)
    assert ours.accelerator.num_processes == dist.get_world_size() == 2
    result = {
        "parameters": worst_parameter(ours, theirs)[0],
        "moved": moved(theirs, folder),
        "ratio": [
            log["prefixtree/replication_ratio"] for log in ours.state.log_history if "loss" in log
        ],
    }
    if dist.get_rank() == 0:
        # metrics are gathered, and logged on one rank
        result["metrics"] = worst_metric(ours, theirs)[0]
        print("RESULT " + json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
