"""Layers that carry a state, along the tree: convolution, delta rule, Mamba-2."""

from prefixtree.kernels.recurrence.api import tree_conv, tree_delta_rule, tree_ssd
from prefixtree.kernels.recurrence.backends import explain_recurrence
from prefixtree.packing.state_borders import StateBorders

__all__ = ["StateBorders", "explain_recurrence", "tree_conv", "tree_delta_rule", "tree_ssd"]
