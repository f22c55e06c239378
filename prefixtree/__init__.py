"""Tree-structured shared-prefix attention for training LLM agents.

transformers is imported by the first use of `sequence_logprobs`, `SequenceScores` or `prepare`, not
before.
"""

from typing import TYPE_CHECKING, Any

from prefixtree.errors import ForestError, InputError, UnsupportedError
from prefixtree.forest import PrefixForest
from prefixtree.integrations.registration import register_when_imported as _register
from prefixtree.kernels.attention import explain, tree_attention
from prefixtree.packing.block_tables import BlockTables, MaskStats, TileShape
from prefixtree.packing.cost_model import CostModel
from prefixtree.packing.layout import Edges, PackedForest, pack
from prefixtree.packing.mask import TreeMask
from prefixtree.packing.micro_batches import (
    MicroBatch,
    MicroBatchPlan,
    PlanStats,
    plan_micro_batches,
)

if TYPE_CHECKING:
    from prefixtree.integrations.transformers import SequenceScores, prepare, sequence_logprobs

__version__ = "0.2.0"
__all__ = [
    "BlockTables",
    "CostModel",
    "Edges",
    "ForestError",
    "InputError",
    "MaskStats",
    "MicroBatch",
    "MicroBatchPlan",
    "PackedForest",
    "PlanStats",
    "PrefixForest",
    "SequenceScores",
    "TileShape",
    "TreeMask",
    "UnsupportedError",
    "explain",
    "pack",
    "plan_micro_batches",
    "prepare",
    "sequence_logprobs",
    "tree_attention",
]


def __getattr__(name: str) -> Any:
    if name in ("SequenceScores", "prepare", "sequence_logprobs"):
        from prefixtree.integrations import transformers as adapter

        return getattr(adapter, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_register()
