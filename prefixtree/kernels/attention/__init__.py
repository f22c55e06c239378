"""Attention over a packed forest: `tree_attention`, and `explain`, which names the backend."""

from prefixtree.kernels.attention.api import explain, tree_attention

__all__ = ["explain", "tree_attention"]
