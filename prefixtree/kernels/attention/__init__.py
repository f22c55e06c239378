"""Tree attention on arrays: `tree_attention`, and `explain`, which names the backend of a call."""

from prefixtree.kernels.attention.api import explain, tree_attention

__all__ = ["explain", "tree_attention"]
