"""Tree-structured shared-prefix attention for training LLM agents."""

from prefixtree.errors import ForestError, UnsupportedError
from prefixtree.forest import PrefixForest
from prefixtree.kernels.attention import tree_attention
from prefixtree.packing.layout import Edges, PackedForest, pack
from prefixtree.packing.mask import BlockTables, MaskStats, TileShape, TreeMask

__version__ = "0.1.0"
__all__ = [
    "BlockTables",
    "Edges",
    "ForestError",
    "MaskStats",
    "PackedForest",
    "PrefixForest",
    "TileShape",
    "TreeMask",
    "UnsupportedError",
    "pack",
    "tree_attention",
]
