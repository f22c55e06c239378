"""Tree-structured shared-prefix attention for training LLM agents."""

from prefixtree.errors import ForestError, UnsupportedError
from prefixtree.forest import PrefixForest
from prefixtree.kernels.attention import explain, tree_attention
from prefixtree.packing.layout import Edges, PackedForest, pack
from prefixtree.packing.mask import BlockTables, MaskStats, TileShape, TreeMask
from prefixtree.packing.micro_batches import MicroBatch, MicroBatchPlan, plan_micro_batches

__version__ = "0.1.0"
__all__ = [
    "BlockTables",
    "Edges",
    "ForestError",
    "MaskStats",
    "MicroBatch",
    "MicroBatchPlan",
    "PackedForest",
    "PrefixForest",
    "TileShape",
    "TreeMask",
    "UnsupportedError",
    "explain",
    "pack",
    "plan_micro_batches",
    "tree_attention",
]
