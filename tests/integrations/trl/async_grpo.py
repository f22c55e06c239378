"""AsyncGRPO wherever TRL has it: `trl.experimental.async_grpo`, from 1.18 on `trl` itself.

The other names are read off the module of the trainer, which imports or defines all of them.
"""

from __future__ import annotations

import sys

try:
    from trl import AsyncGRPOConfig, AsyncGRPOTrainer
except ImportError:
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

trainer_module = sys.modules[AsyncGRPOTrainer.__module__]
packing = sys.modules[trainer_module.register_tree_attention.__module__]
RolloutSample, TreeRow = trainer_module.RolloutSample, trainer_module.TreeRow
TREE_ATTENTION = trainer_module.TREE_ATTENTION
register_tree_attention = trainer_module.register_tree_attention
tree_attention = packing.tree_attention

__all__ = [
    "TREE_ATTENTION",
    "AsyncGRPOConfig",
    "AsyncGRPOTrainer",
    "RolloutSample",
    "TreeRow",
    "packing",
    "register_tree_attention",
    "trainer_module",
    "tree_attention",
]
